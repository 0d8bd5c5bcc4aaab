"""Builds the C++ sources for tests, with flags of their own."""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import sysconfig

import jax
import pybind11

ROOT = pathlib.Path(__file__).parents[1]
CPU_OPS = ROOT / "cpu_ops"
CXX = (sysconfig.get_config_var("CXX") or "c++").split()[0]
COMPILE_ARGS = json.loads((CPU_OPS / "compile_args.json").read_text())
# By machine, then by file.
ISA_ARGS = json.loads((CPU_OPS / "isa_args.json").read_text())
_CUDA_SOURCE = "gradient_out_cuda.cc"
_EXTENSION_ARGS = [
  *("-fPIC", "-pthread"),
  *("-isystem", pybind11.get_include()),
  *("-isystem", sysconfig.get_path("include")),
  *("-isystem", jax.ffi.include_dir()),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objects:
  """Sources and what they are compiled to.

  Attributes:
    sources: the directory of the sources.
    directory: that of the objects.
    names: the sources, by their paths from `sources`.
    compiler: the C++ compiler.
    args: its arguments for all sources.
    machine: whose ISA_ARGS the sources get besides.
  """

  sources: pathlib.Path
  directory: pathlib.Path
  names: list[str]
  compiler: str
  args: list[str]
  machine: str

  def compile(self, names, args=None) -> None:
    """Compiles some of the sources, maybe with other arguments.

    Raises:
      RuntimeError: with the compiler's words if it fails.
    """
    self.directory.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      # Those of an instruction set take the longest.
      order = sorted(names, key=lambda x: not x.startswith("kernels_"))
      list(pool.map(lambda name: self._compile(name, args), order))

  def object(self, name: str) -> pathlib.Path:
    """Returns where the object of a source is."""
    return self.directory / (pathlib.Path(name).name + ".o")

  def link(self, target: pathlib.Path, *args: str) -> None:
    """Links all objects."""
    run(self.compiler, *args, *map(self.object, self.names), "-o", target)

  def names_with(self, file: str) -> list[str]:
    """Returns the sources that a file is part of."""
    found = []
    for name in self.names:
      rule = run(*self._command(name, self.args), "-MM", self.sources / name)
      if any(pathlib.Path(x).name == file for x in rule.split()):
        found.append(name)
    return found

  def _command(self, name, args):
    return self.compiler, *args, *ISA_ARGS[self.machine].get(name, ())

  def _compile(self, name, args):
    command = self._command(name, self.args if args is None else args)
    run(*command, "-c", self.sources / name, "-o", self.object(name))


def run(*command, timeout_s: float = 1200, **kwargs) -> str:
  """Runs a command and returns its output.

  Args:
    *command: its words.
    timeout_s: how long it may take.
    **kwargs: of subprocess.run.

  Raises:
    RuntimeError: with the output if it fails.
  """
  result = subprocess.run(
    [str(x) for x in command],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=timeout_s,
    **kwargs,
  )
  if result.returncode != 0:
    words = " ".join(map(str, command))
    raise RuntimeError(
      f"{words}\n{result.stdout}failed: exit {result.returncode}"
    )
  return result.stdout


def copy_package(directory: pathlib.Path) -> pathlib.Path:
  """Copies sojax, without an extension, and tests.

  Returns:
    Where the extension belongs.
  """
  for name in ("sojax", "tests"):
    shutil.copytree(
      ROOT / name,
      directory / name,
      ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
  shutil.copy(ROOT / "pyproject.toml", directory)
  suffix = sysconfig.get_config_var("EXT_SUFFIX")
  return directory / "sojax" / f"_cpu_ops{suffix}"


def extension_objects(sources, directory, args) -> Objects:
  """Returns the objects of the extension for this machine.

  Args:
    sources: the directory of the sources.
    directory: for the objects.
    args: of the compiler, besides those that all files get.
  """
  machine = platform.machine()
  left_out = {x for names in ISA_ARGS.values() for x in names}
  left_out -= set(ISA_ARGS[machine])
  left_out.add(_CUDA_SOURCE)
  return Objects(
    sources=sources,
    directory=directory,
    names=sorted({x.name for x in sources.glob("*.cc")} - left_out),
    compiler=CXX,
    args=[*COMPILE_ARGS["all"], *_EXTENSION_ARGS, *args],
    machine=machine,
  )


def run_pytest(
  package: pathlib.Path, *args: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
  """Runs tests of a package that `copy_package` made; at most half an hour.

  Raises:
    subprocess.TimeoutExpired: if they take longer.
  """
  command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short"]
  return subprocess.run(
    [*command, *args],
    cwd=package,
    env={**os.environ, "PYTHONPATH": str(package), **(env or {})},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=1800,
  )
