"""Builds the extension `sojax._cpu_ops` from cpu_ops/."""

import pathlib
import platform
import sysconfig

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_SOURCE_DIR = pathlib.Path("cpu_ops")
_COMPILE_ARGS = [
  "-std=c++17",
  "-O3",
  # Of so many inlined instances, debug information would be 50 MB.
  "-g0",
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


def _sources() -> list[str]:
  is_x86 = platform.machine().lower() in ("x86_64", "amd64")
  return [
    str(path)
    for path in sorted(_SOURCE_DIR.glob("*.cc"))
    if is_x86 or path.name not in _X86_ARGS
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


def _system_include_args() -> list[str]:
  """Names headers that are not held to our warnings."""
  paths = (pybind11.get_include(), sysconfig.get_path("include"))
  return [arg for path in paths for arg in ("-isystem", path)]


setup(
  ext_modules=[
    Extension(
      "sojax._cpu_ops",
      sources=_sources(),
      depends=[str(path) for path in sorted(_SOURCE_DIR.glob("*.h"))],
      extra_compile_args=[*_COMPILE_ARGS, *_system_include_args()],
      extra_link_args=["-pthread"],
      language="c++",
    )
  ],
  cmdclass={"build_ext": BuildExt},
)
