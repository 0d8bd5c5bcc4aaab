"""Builds the extension `sojax._cpu_ops` from cpu_ops/."""

import json
import os
import pathlib
import sys
import sysconfig

import jax
import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_SOURCE_DIR = pathlib.Path("cpu_ops")
_ARGS = json.loads((_SOURCE_DIR / "compile_args.json").read_text())
_COMPILE_ARGS = [
  *_ARGS["all"],
  "-O3",
  # Of so many inlined instances, debug information would be 50 MB.
  "-g0",
  *_ARGS["warnings"],
]
# For each machine, the files with instructions that not every CPU of its kind
# has, and their flags; dispatch.cc decides at run time whether they are called.
_ISA_ARGS = json.loads((_SOURCE_DIR / "isa_args.json").read_text())
# That of the Python which is built for, which may not be this machine's.
_MACHINE = sysconfig.get_platform().rpartition("-")[2]
if _MACHINE not in _ISA_ARGS:
  sys.exit(f"sojax has kernels for {', '.join(_ISA_ARGS)}, not for {_MACHINE}")
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
  left_out = {name for machine in _ISA_ARGS.values() for name in machine}
  left_out -= set(_ISA_ARGS[_MACHINE])
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
      isa_args = _ISA_ARGS[_MACHINE].get(pathlib.Path(src).name, [])
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
      depends=[
        str(path)
        for pattern in ("*.h", "*.json")
        for path in sorted(_SOURCE_DIR.glob(pattern))
      ],
      define_macros=[("SOJAX_WITH_CUDA", "1")] if _CUDA is not None else [],
      extra_compile_args=[*_COMPILE_ARGS, *_system_include_args(_CUDA)],
      extra_link_args=["-pthread"],
      language="c++",
    )
  ],
  cmdclass={"build_ext": BuildExt},
)
