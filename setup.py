"""Builds the extension `sojax._cpu_ops` from cpu_ops/."""

import os
import pathlib
import platform
import sysconfig

import jax
import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_SOURCE_DIR = pathlib.Path("cpu_ops")
_COMPILE_ARGS = [
  "-std=c++17",
  "-O3",
  # Every product and sum is rounded where the source says so.
  "-ffp-contract=off",
  "-fno-math-errno",
  "-fvisibility=hidden",
  "-Wall",
  "-Wextra",
  "-Wconversion",
  "-Werror",
]
# Only these files may hold instructions that not every CPU has; dispatch.cc
# decides at run time whether they are called. Off x86 they are not built.
_X86_ARGS = {
  "kernels_avx2.cc": ["-mavx2", "-mfma", "-mf16c"],
  "kernels_avx512.cc": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
# Needs nothing of CUDA but its headers, and is left out where there are none.
_CUDA_SOURCE = "gradient_out_cuda.cc"


def _cuda_include() -> pathlib.Path | None:
  """Finds cuda.h: a toolkit's, or that of NVIDIA's packages for pip."""
  toolkits = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
  candidates = [pathlib.Path(path) / "include" for path in toolkits if path]
  site = pathlib.Path(sysconfig.get_path("platlib"))
  candidates += sorted(site.glob("nvidia/*/include"))
  found = [path for path in candidates if (path / "cuda.h").is_file()]
  return found[0] if found else None


def _sources(with_cuda: bool) -> list[str]:
  is_x86 = platform.machine().lower() in ("x86_64", "amd64")
  left_out = set() if is_x86 else set(_X86_ARGS)
  if not with_cuda:
    left_out.add(_CUDA_SOURCE)
  return [
    str(path)
    for path in sorted(_SOURCE_DIR.glob("*.cc"))
    if path.name not in left_out
  ]


class BuildExt(build_ext):
  """Compiles each file with the flags of its own instruction set."""

  def build_extensions(self):
    """Adds a file's own flags to those that all files get."""
    compile_file = self.compiler._compile

    def compile_with_isa(obj, src, ext, cc_args, extra_postargs, pp_opts):
      isa_args = _X86_ARGS.get(pathlib.Path(src).name, [])
      compile_file(
        obj, src, ext, cc_args, [*extra_postargs, *isa_args], pp_opts
      )

    self.compiler._compile = compile_with_isa
    super().build_extensions()


def _system_include_args(cuda: pathlib.Path | None) -> list[str]:
  """Names headers that are not held to our warnings."""
  paths = [
    pybind11.get_include(),
    sysconfig.get_path("include"),
    jax.ffi.include_dir(),
  ]
  if cuda is not None:
    paths.append(str(cuda))
  return [arg for path in paths for arg in ("-isystem", path)]


_CUDA = _cuda_include()

setup(
  ext_modules=[
    Extension(
      "sojax._cpu_ops",
      sources=_sources(with_cuda=_CUDA is not None),
      depends=[str(path) for path in sorted(_SOURCE_DIR.glob("*.h"))],
      define_macros=[("SOJAX_WITH_CUDA", "1")] if _CUDA is not None else [],
      extra_compile_args=[*_COMPILE_ARGS, *_system_include_args(_CUDA)],
      extra_link_args=["-pthread"],
      language="c++",
    )
  ],
  cmdclass={"build_ext": BuildExt},
)
