"""Compares the bits of the kernels between all instruction sets.

    python cpu_ops/tests/compare_isas.py --build-dir=build/isa

Builds checksums.cc and the C++ tests for this machine and, where a cross
compiler and an emulator of aarch64 are found, for that one; runs them with
every instruction set and SVE length that there is; prints a table of checksums.
Exits with 1 if a build or a test fails, or two checksums of one operation
differ. What could not be run is said, and is no failure.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import platform
import shutil
import subprocess
import sys

_CPU_OPS = pathlib.Path(__file__).resolve().parents[1]
_ISA_ARGS = json.loads((_CPU_OPS / "isa_args.json").read_text())
_COMPILE_ARGS = [
  *json.loads((_CPU_OPS / "compile_args.json").read_text())["all"],
  "-O3",
  "-pthread",
]
_SOURCES = [
  "dispatch.cc",
  "extents.cc",
  "kernels_scalar.cc",
  "pool.cc",
  "rollback.cc",
  "segments.cc",
  "update.cc",
]
_TESTS = ["kernels_test", "pool_test"]
_PROGRAMS = ["checksums", *_TESTS]

# The lengths that have an instance, one that has not, and one past them all, in
# units of 128 bits; then a CPU without SVE.
_EMULATED_CPUS = [
  *(f"max,sve-max-vq={vq}" for vq in (1, 2, 4, 3, 16)),
  "neoverse-n1",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """A kind of machine that programs are built for and run on.

  Attributes:
    machine: its name in isa_args.json.
    compiler: the C++ compiler for it.
    link_args: what the linker needs beyond the objects.
    runs: for each CPU its name and the words before a program's.
  """

  machine: str
  compiler: str
  link_args: tuple[str, ...]
  runs: dict[str, tuple[str, ...]]


def _first_of(*commands: str) -> str | None:
  return next(filter(None, map(shutil.which, commands)), None)


def _targets(skipped: list[str]) -> list[Target]:
  """Returns what can be built and run here; adds to `skipped` what cannot."""
  targets = []
  native = platform.machine()
  compiler = _first_of("g++", "c++")
  if native not in _ISA_ARGS:
    skipped.append(f"{native}: there are no kernels for this machine")
  elif compiler is None:
    skipped.append(f"{native}: no g++ or c++")
  else:
    targets.append(
      Target(
        machine=native, compiler=compiler, link_args=(), runs={"this CPU": ()}
      )
    )
  cross = _first_of("aarch64-linux-gnu-g++")
  if native == "aarch64":
    cross = compiler
  emulator = _first_of("qemu-aarch64", "qemu-aarch64-static")
  missing = [
    name
    for name, command in (
      ("aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)", cross),
      ("qemu-aarch64 (Debian: qemu-user)", emulator),
    )
    if command is None
  ]
  if missing:
    skipped.append(f"SVE and NEON, emulated: no {', no '.join(missing)}")
  else:
    runs = {cpu: (emulator, "-cpu", cpu) for cpu in _EMULATED_CPUS}
    targets.append(
      Target(
        machine="aarch64", compiler=cross, link_args=("-static",), runs=runs
      )
    )
  if native != "x86_64":
    skipped.append("avx512 and avx2: this is no x86-64 machine")
  return targets


def _run(*command: str | pathlib.Path) -> str:
  """Runs a command; ends the program with its output if it fails."""
  result = subprocess.run(
    list(map(str, command)),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=1200,
  )
  if result.returncode != 0:
    words = " ".join(map(str, command))
    sys.exit(f"{words}\n{result.stdout}failed: exit {result.returncode}")
  return result.stdout


def _build(target: Target, directory: pathlib.Path) -> dict[str, pathlib.Path]:
  """Compiles the kernels and links the programs; returns their paths."""
  directory.mkdir(parents=True, exist_ok=True)

  def compile_source(source: str, *args: str) -> pathlib.Path:
    obj = directory / (pathlib.Path(source).stem + ".o")
    _run(
      target.compiler, *_COMPILE_ARGS, *args, "-c", _CPU_OPS / source, "-o", obj
    )
    return obj

  isa_args = _ISA_ARGS[target.machine]
  # Those of an instruction set take the longest, and two cores are common.
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    objects = list(
      pool.map(
        lambda source: compile_source(source, *isa_args.get(source, [])),
        (*isa_args, *_SOURCES),
      )
    )
  programs = {}
  for name in _PROGRAMS:
    programs[name] = directory / name
    main = compile_source(f"tests/{name}.cc")
    _run(
      target.compiler,
      "-pthread",
      *target.link_args,
      *objects,
      main,
      "-o",
      programs[name],
    )
  return programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
  """What one instruction set of one CPU computed.

  Attributes:
    machine: name of the machine.
    isa: the instruction set, for SVE with the bits of its registers.
    cpu: name of the CPU.
    checksums: by operation.
  """

  machine: str
  isa: str
  cpu: str
  checksums: dict[str, str]


def _columns(target: Target, program: pathlib.Path) -> list[Column]:
  """Runs `checksums` on every CPU of the target and reads what it prints."""
  columns = []
  for cpu, words in target.runs.items():
    by_isa: dict[str, dict[str, str]] = {}
    for line in _run(*words, program).splitlines():
      operation, isa, bits, checksum = line.split()
      name = f"{isa}{bits}" if isa == "sve" else isa
      by_isa.setdefault(name, {})[operation] = checksum
    columns += [
      Column(machine=target.machine, isa=isa, cpu=cpu, checksums=checksums)
      for isa, checksums in by_isa.items()
    ]
  return columns


def _operations(columns: list[Column]) -> list[str]:
  return list(dict.fromkeys(op for x in columns for op in x.checksums))


def _print_table(columns: list[Column]) -> None:
  """Prints the checksums of each instruction set, shortened.

  One that several CPUs of a machine have is shown once.
  """
  shown: dict[tuple[str, str], list[Column]] = {}
  for column in columns:
    shown.setdefault((column.machine, column.isa), []).append(column)
  operations = _operations(columns)
  width = max(map(len, operations))
  print(f"\n{'':{width}}  " + " ".join(f"{isa:8}" for _, isa in shown))
  for operation in operations:
    cells = (x[0].checksums.get(operation, "-")[:8] for x in shown.values())
    print(f"{operation:{width}}  " + " ".join(f"{x:8}" for x in cells))
  print("\nThe columns, and the CPUs that computed them:")
  for (machine, isa), same in shown.items():
    print(f"  {isa:8} {machine}: {'; '.join(x.cpu for x in same)}")


def _differences(columns: list[Column]) -> list[str]:
  """Describes each operation whose checksums are not all the same."""
  lines = []
  for operation in _operations(columns):
    by_checksum: dict[str, list[Column]] = {}
    for column in columns:
      checksum = column.checksums.get(operation, "missing")
      by_checksum.setdefault(checksum, []).append(column)
    if len(by_checksum) > 1:
      lines.append(
        f"DIFFERENT BITS: {operation}: "
        + "; ".join(
          checksum + " " + ", ".join(f"{x.isa} ({x.cpu})" for x in group)
          for checksum, group in by_checksum.items()
        )
      )
  return lines


def main() -> None:
  """Builds, runs, prints and compares."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--build-dir", type=pathlib.Path, required=True)
  build_dir = parser.parse_args().build_dir
  skipped: list[str] = []
  built = []
  columns: list[Column] = []
  for i, target in enumerate(_targets(skipped)):
    programs = _build(target, build_dir / f"{target.machine}-{i}")
    built.append((target, programs))
    columns += _columns(target, programs["checksums"])
  if not columns:
    sys.exit("\n".join(["nothing could be run", *skipped]))
  _print_table(columns)
  if differences := _differences(columns):
    sys.exit("\n".join(differences))
  print(
    f"{len(_operations(columns))} operations have the same bits in"
    f" {len(columns)} runs of an instruction set on a CPU"
  )
  for target, programs in built:
    for cpu, words in target.runs.items():
      for test in _TESTS:
        _run(*words, programs[test])
      print(f"the C++ tests pass: {target.machine}, {cpu}", flush=True)
  for line in skipped:
    print(f"SKIPPED: {line}")


if __name__ == "__main__":
  main()
