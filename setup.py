"""Builds the extension `sojax._cpu_ops` from cpu_ops/."""

import json
import pathlib
import sys
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
# For each machine, the files with instructions that not every CPU of its kind
# has, and their flags; dispatch.cc decides at run time whether they are called.
_ISA_ARGS = json.loads((_SOURCE_DIR / "isa_args.json").read_text())
# That of the Python which is built for, which may not be this machine's.
_MACHINE = sysconfig.get_platform().rpartition("-")[2]
if _MACHINE not in _ISA_ARGS:
  sys.exit(f"sojax has kernels for {', '.join(_ISA_ARGS)}, not for {_MACHINE}")


def _sources() -> list[str]:
  elsewhere = {
    name for machine in _ISA_ARGS.values() for name in machine
  } - set(_ISA_ARGS[_MACHINE])
  return [
    str(path)
    for path in sorted(_SOURCE_DIR.glob("*.cc"))
    if path.name not in elsewhere
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


def _system_include_args() -> list[str]:
  """Names headers that are not held to our warnings."""
  paths = (pybind11.get_include(), sysconfig.get_path("include"))
  return [arg for path in paths for arg in ("-isystem", path)]


setup(
  ext_modules=[
    Extension(
      "sojax._cpu_ops",
      sources=_sources(),
      depends=[
        str(path)
        for pattern in ("*.h", "*.json")
        for path in sorted(_SOURCE_DIR.glob(pattern))
      ],
      extra_compile_args=[*_COMPILE_ARGS, *_system_include_args()],
      extra_link_args=["-pthread"],
      language="c++",
    )
  ],
  cmdclass={"build_ext": BuildExt},
)
