"""Breaks the kernels in one way after the other and sees the tests fail.

    python -m tests.mutations            # all, with two cores an hour
    python -m tests.mutations NAME...    # some
    python -m tests.mutations --list

Each mutation is a line of cpu_ops/ changed, or a compiler flag. What it does is
looked for on every instruction set whose machine code it changes. On those of
this CPU the Python tests have to fail, one run for each. On Arm's, under an
emulator, a checksum of what operations write has to change; it is the one of
`make test-isa`, which no set may have alone. A table shows what was noticed.
What no test notices is an error.
"""

import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

from sojax.host.kernels import cpu_info
from tests.extension import (
  COMPILE_ARGS,
  CPU_OPS,
  Objects,
  copy_package,
  extension_objects,
  run,
  run_pytest,
)
from tests.faults import FLAG, MUTATIONS, Mutation

_NOTICED, _MISSED, _SAME_CODE = "noticed", "MISSED", "-"
# Whatever is not of one instruction set.
_ANY = "any"
_CROSS_CXX = "aarch64-linux-gnu-g++"
_EMULATOR = "qemu-aarch64"
# The CPU of the emulator that each file's kernels run on.
_EMULATED_CPUS = {
  "kernels_sve128.cc": "max,sve-max-vq=1",
  "kernels_sve256.cc": "max,sve-max-vq=2",
  "kernels_sve512.cc": "max,sve-max-vq=4",
  "kernels_neon.cc": "neoverse-n1",
  "kernels_scalar.cc": "neoverse-n1",
}
_CHECKSUM_SOURCES = ["dispatch.cc", *_EMULATED_CPUS, "tests/checksums.cc"]


def _set_of(source: str) -> str:
  """Returns which instruction set a source is of: "avx2", "sve128", _ANY."""
  name = pathlib.Path(source).stem
  return name.removeprefix("kernels_") if name.startswith("kernels_") else _ANY


def _asked_for(isa: str) -> str:
  """Returns the name that the kernels know: SVE's has no length."""
  return "sve" if isa.startswith("sve") else isa


class Target:
  """Objects that mutations are compiled into, and a way to test them."""

  def __init__(self, objects: Objects):
    self.objects = objects
    self._saved = objects.directory.with_name(objects.directory.name + "-saved")

  def build(self) -> None:
    """Compiles all, without a mutation, and keeps it."""
    self.objects.compile(self.objects.names)
    shutil.copytree(self.objects.directory, self._saved)
    self.link()

  def mutate(self, mutation: Mutation) -> set[str]:
    """Compiles a mutation; returns the instruction sets whose code changed."""
    args = self.objects.args
    if mutation.file == FLAG:
      args = [mutation.new if x == mutation.old else x for x in args]
      names = [x for x in self.objects.names if _set_of(x) != _ANY]
    else:
      names = self.objects.names_with(mutation.file)
    self.objects.compile(names, args)
    changed = {_set_of(x) for x in names if self._has_changed(x)}
    if changed:
      self.link()
    return changed

  def restore(self) -> None:
    """Brings the objects back."""
    shutil.copytree(self._saved, self.objects.directory, dirs_exist_ok=True)

  def link(self) -> None:
    """Makes what is tested out of the objects."""
    raise NotImplementedError

  def isas(self) -> list[str]:
    """Returns the instruction sets that can be tested."""
    raise NotImplementedError

  def notices(self, mutation: Mutation, isa: str) -> bool:
    """Tests an instruction set, or all if it is _ANY."""
    raise NotImplementedError

  def _has_changed(self, name: str) -> bool:
    built = self.objects.object(name)
    return built.read_bytes() != (self._saved / built.name).read_bytes()


class Extension(Target):
  """The extension for this machine, by the Python tests."""

  def __init__(self, sources: pathlib.Path, directory: pathlib.Path):
    self._package = directory / "package"
    self._library = copy_package(self._package)
    super().__init__(extension_objects(sources, directory / "objects", ["-O2"]))

  def link(self) -> None:
    """Links the extension."""
    self.objects.link(self._library, "-shared", "-pthread")

  def isas(self) -> list[str]:
    """Returns those of this CPU."""
    info = cpu_info()
    return [f"sve{info.vector_bits}" if x == "sve" else x for x in info.isas]

  def check(self, tests: tuple[str, ...]) -> None:
    """Raises RuntimeError unless tests pass."""
    result = run_pytest(self._package, "-x", *tests)
    if result.returncode != 0:
      raise RuntimeError("no mutation, but the tests fail\n" + result.stdout)

  def notices(self, mutation: Mutation, isa: str) -> bool:
    """Runs the tests up to the first that fails."""
    # As the parameters of a test stand in its name.
    name = _asked_for(isa)
    chosen = () if isa == _ANY else ("-k", f"[{name} or -{name}")
    try:
      result = run_pytest(self._package, "-x", *chosen, *mutation.tests)
    except subprocess.TimeoutExpired:
      print(f"  {isa}: hangs", flush=True)
      return True
    lines = [x for x in result.stdout.splitlines() if x.startswith("FAILED")]
    lines.append(f"exit status {result.returncode}")
    print(f"  {isa}: {lines[0]}", flush=True)
    # Below 0: ended by a signal. Others: no test ran.
    return result.returncode == 1 or result.returncode < 0


class Checksums(Target):
  """The program of checksums for aarch64, in an emulator."""

  def __init__(self, sources: pathlib.Path, directory: pathlib.Path):
    self._program = directory / "checksums"
    # With -O1 GCC contracts nothing.
    args = [*COMPILE_ARGS["all"], "-O2", "-pthread"]
    super().__init__(
      Objects(
        sources=sources,
        directory=directory / "objects",
        names=_CHECKSUM_SOURCES,
        compiler=_CROSS_CXX,
        args=args,
        machine="aarch64",
      )
    )
    self._expected: dict[str, str] = {}

  def link(self) -> None:
    """Links the program."""
    self.objects.link(self._program, "-static", "-pthread")

  def isas(self) -> list[str]:
    """Returns those that there are kernels for."""
    return [_set_of(x) for x in _EMULATED_CPUS]

  def learn(self) -> None:
    """Keeps the checksums; those of all instruction sets have to be equal."""
    self._expected = {isa: self._checksums(isa) for isa in self.isas()}
    if len(set(self._expected.values())) != 1:
      raise RuntimeError("no mutation, but the checksums differ")

  def notices(self, mutation: Mutation, isa: str) -> bool:
    """Compares checksums, operation by operation."""
    if isa == _ANY:
      return False
    try:
      actual = self._checksums(isa)
    except RuntimeError as error:
      print(f"  {isa}: {str(error).splitlines()[-1]}", flush=True)
      return True
    lines = zip(
      actual.splitlines(), self._expected[isa].splitlines(), strict=True
    )
    differ = [x.split()[0] for x, y in lines if x != y]
    first = f", the first {differ[0]}" if differ else ""
    print(f"  {isa}: {len(differ)} checksums differ{first}", flush=True)
    return bool(differ)

  def _checksums(self, isa: str) -> str:
    """Runs the program for one instruction set: "operation checksum" lines."""
    cpu = _EMULATED_CPUS[f"kernels_{isa}.cc"]
    output = run(_EMULATOR, "-cpu", cpu, self._program, _asked_for(isa))
    words = [line.split() for line in output.splitlines()]
    return "\n".join(f"{x[0]} {x[-1]}" for x in words)


def _replace(path: pathlib.Path, old: str, new: str) -> None:
  """Replaces what stands in a file exactly once."""
  text = path.read_text()
  if text.count(old) != 1:
    raise RuntimeError(f"{path.name} has {text.count(old)} times: {old}")
  path.write_text(text.replace(old, new))


def outcomes(
  mutation: Mutation, sources: pathlib.Path, targets: list[Target]
) -> dict[str, str]:
  """Builds a mutation, tests it on all targets, and takes it back.

  Returns:
    What came out, by machine and instruction set.
  """
  if mutation.file != FLAG:
    _replace(sources / mutation.file, mutation.old, mutation.new)
  found = {}
  for target in targets:
    changed = target.mutate(mutation)
    # What is shared by all instruction sets is tested once.
    isas = [x for x in target.isas() if x in changed]
    if changed == {_ANY} and isinstance(target, Extension):
      isas = [_ANY]
    for isa in isas:
      noticed = target.notices(mutation, isa)
      found[f"{target.objects.machine} {isa}"] = (
        _NOTICED if noticed else _MISSED
      )
    target.restore()
  if mutation.file != FLAG:
    shutil.copy(CPU_OPS / mutation.file, sources)
  return found


def _print_table(rows: dict[str, dict[str, str]], columns: list[str]) -> None:
  width = max(map(len, rows))
  for name, row in {"": {x: x.split()[1] for x in columns}, **rows}.items():
    cells = (f"{row.get(x, _SAME_CODE):8}" for x in columns)
    print(f"{name:{width}}  " + " ".join(cells).rstrip())
  print(f"{_SAME_CODE}: the mutation does not change the machine code")


def _targets(sources, directory) -> list[Target]:
  """Returns what can be tested here; says what cannot."""
  targets: list[Target] = [Extension(sources, directory / platform.machine())]
  missing = [x for x in (_CROSS_CXX, _EMULATOR) if shutil.which(x) is None]
  if platform.machine() != "aarch64":
    if missing:
      print(f"SKIPPED: aarch64, for want of {' and '.join(missing)}")
    else:
      targets.append(Checksums(sources, directory / "aarch64"))
  return targets


def main(names: list[str]) -> int:
  """Returns the number of mutations that no test noticed."""
  if names == ["--list"]:
    print(*(x.name for x in MUTATIONS), sep="\n")
    return 0
  chosen = [x for x in MUTATIONS if not names or x.name in names]
  with tempfile.TemporaryDirectory(prefix="sojax-mutations-") as directory:
    sources = pathlib.Path(directory) / "cpu_ops"
    shutil.copytree(CPU_OPS, sources)
    targets = _targets(sources, pathlib.Path(directory))
    for target in targets:
      target.build()
      if isinstance(target, Extension):
        for tests in dict.fromkeys(x.tests for x in chosen):
          target.check(tests)
      elif isinstance(target, Checksums):
        target.learn()
    rows = {}
    for mutation in chosen:
      print(mutation.name, flush=True)
      rows[mutation.name] = outcomes(mutation, sources, targets)
  columns = [
    f"{target.objects.machine} {isa}"
    for target in targets
    for isa in (*target.isas(), *((_ANY,) if target is targets[0] else ()))
  ]
  _print_table(rows, columns)
  missed = [
    name for name, row in rows.items() if not row or _MISSED in row.values()
  ]
  print(f"{len(chosen) - len(missed)} of {len(chosen)} were noticed")
  if missed:
    print("not noticed everywhere:", *missed)
  return len(missed)


if __name__ == "__main__":
  sys.exit(min(main(sys.argv[1:]), 1))
