"""Breaks the kernels in one way after the other and sees the tests fail.

    python -m tests.mutations            # all, with two cores half an hour
    python -m tests.mutations NAME...    # some
    python -m tests.mutations --list

Each mutation is a line of cpu_ops/ changed, or a compiler flag. The extension
is built from a copy; tests/ run against it. What no test notices is an error.
"""

import dataclasses
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile

import jax
import pybind11

_ROOT = pathlib.Path(__file__).parents[1]
_CXX = (sysconfig.get_config_var("CXX") or "c++").split()[0]
_CONTRACTION_OFF = "-ffp-contract=off"
_ARGS = [
  "-std=c++17",
  "-O2",
  _CONTRACTION_OFF,
  "-fno-math-errno",
  "-fPIC",
  "-fvisibility=hidden",
  "-pthread",
  "-isystem",
  pybind11.get_include(),
  "-isystem",
  sysconfig.get_path("include"),
  "-isystem",
  jax.ffi.include_dir(),
]
_MACHINES = json.loads((_ROOT / "cpu_ops" / "isa_args.json").read_text())
_ISA_ARGS = _MACHINES[platform.machine()]
_ROLLBACK = ("tests/test_rollback.py", "tests/test_record.py")
_FUSED = ("tests/test_kernel_fused.py",)
_QUEUE = ("tests/test_kernel_queue.py",)
_FLAG = ""


@dataclasses.dataclass(frozen=True)
class Mutation:
  """One fault and the tests that have to notice it.

  Attributes:
    name: what to call it.
    file: of cpu_ops/; _FLAG if a compiler flag changes.
    old: what stands there, once.
    new: what stands there instead.
    tests: arguments of pytest.
  """

  name: str
  file: str
  old: str
  new: str
  tests: tuple[str, ...] = _ROLLBACK


MUTATIONS = [
  # Those that any record of this kind has to be safe from.
  Mutation(
    "byte-limit-off-by-one",
    "codes-inl.h",
    "kLimit = 127;",
    "kLimit = 128;",
  ),
  Mutation(
    "nibble-limit-off-by-one", "codes-inl.h", "kLimit = 7;", "kLimit = 8;"
  ),
  Mutation(
    "escape-limit-of-the-record-only",
    "record-inl.h",
    "code < -limit || code > limit",
    "code < -limit || code > limit + 1",
  ),
  Mutation(
    "escapes-in-another-order",
    "record-inl.h",
    "for (std::size_t array = 0; array < 3; ++array) {",
    "for (std::size_t array = 2; array < 3; --array) {",
  ),
  Mutation(
    "flush-to-zero-on-x86",
    "fp_mode.h",
    "kDefaultFpMode = 0x1f80;",
    "kDefaultFpMode = 0x9fc0;",
  ),
  Mutation("contraction", _FLAG, _CONTRACTION_OFF, "-ffp-contract=fast"),
  # Others of the record and of what takes it back.
  Mutation(
    "nothing-gates-nu",
    "record-inl.h",
    "V::IsBeyond(nu_code, Group::Nu::kLimit)",
    "V::IsBeyond(mu_code, Group::Nu::kLimit)",
  ),
  Mutation(
    "codes-past-the-end",
    "record-inl.h",
    "if (lane >= count) {",
    "if (lane > count) {",
  ),
  Mutation(
    "estimates-keep-nan",
    "vec_scalar.h",
    "return x < limit ? x : limit;",
    "return x > limit ? limit : x;",
  ),
  Mutation(
    "undo-scales-as-the-redo",
    "undo-inl.h",
    "const F g = pass.taken.ScaledGrad(grad);",
    "const F g = pass.again.ScaledGrad(grad);",
  ),
  Mutation(
    "undo-forgets-p-escapes",
    "undo-inl.h",
    "V::IsEqual(p_code, -Group::P::kLimit - 1)",
    "V::IsEqual(p_code, -Group::P::kLimit - 2)",
  ),
  Mutation(
    "undo-stores-split-masters-as-a-step",
    "elems-inl.h",
    "StoreBits<V>(b, i, p);",
    "StoreBits<V>(b, i, V::QuietNan(p));",
  ),
  Mutation(
    "nibbles-swapped-on-avx2",
    "vec_avx2.h",
    "BytesOfNibbles(a), _mm256_slli_epi64(BytesOfNibbles(b), 32)",
    "BytesOfNibbles(b), _mm256_slli_epi64(BytesOfNibbles(a), 32)",
  ),
  Mutation(
    "a-full-record-overruns",
    "rollback.cc",
    "count > record_.capacity - start",
    "count > record_.capacity - start + 1",
  ),
  Mutation(
    "chunks-left-out-stay-stepped",
    "rollback.cc",
    "  functions.undo[form_index](",
    "  if (count == SIZE_MAX) functions.undo[form_index](",
  ),
  Mutation(
    "redo-leaves-out",
    "rollback.cc",
    "StepChunk(kernels, new_params, segment, chunk);",
    "StepChunk(kernels, params, segment, chunk);",
  ),
  # Fused operations.
  Mutation(
    "squares-of-scaled-gradients",
    "adam-inl.h",
    "    squares.Add(j, grad);",
    "    squares.Add(j, formulas.ScaledGrad(grad));",
    _FUSED,
  ),
  Mutation(
    "squares-in-the-wrong-lane",
    "adam-inl.h",
    "UpdateVector<kStream>(formulas, b, squares, j++, i);",
    "UpdateVector<kStream>(formulas, b, squares, j, i);",
    _FUSED,
  ),
  Mutation(
    "split-nan-becomes-infinite",
    "elems-inl.h",
    "StoreBits<V>(b, i, V::QuietNan(p), count...);",
    "StoreBits<V>(b, i, p, count...);",
    _FUSED,
  ),
  # The queue.
  Mutation(
    "jobs-that-share-arrays-overlap",
    "pool.cc",
    "return Conflict(earlier->extents_, job->extents_);",
    "return false;",
    _QUEUE,
  ),
  Mutation(
    "errors-are-dropped",
    "pool.cc",
    "if (!error_) error_ = std::current_exception();",
    "if (error_) error_ = std::current_exception();",
    _QUEUE,
  ),
  Mutation(
    "closing-drops-the-queue",
    "pool.cc",
    "if (job == nullptr) {",
    "if (closing_) return;\n    if (job == nullptr) {",
    _QUEUE,
  ),
]


class Build:
  """A copy of the package whose extension can be built anew."""

  def __init__(self, directory: pathlib.Path):
    self._sources = directory / "cpu_ops"
    self._objects = directory / "objects"
    self._saved = directory / "saved"
    self._package = directory / "package"
    shutil.copytree(_ROOT / "cpu_ops", self._sources)
    self._objects.mkdir()
    for name in ("sojax", "tests"):
      shutil.copytree(
        _ROOT / name,
        self._package / name,
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
      )
    shutil.copy(_ROOT / "pyproject.toml", self._package)

  def compile(self, sources, swap=("", "")) -> None:
    """Compiles sources, one flag swapped for another, and links all."""
    args = [swap[1] if x == swap[0] else x for x in _ARGS]
    jobs = [
      subprocess.Popen(
        [
          *(_CXX, *args, *_ISA_ARGS.get(name, ()), "-c"),
          *(self._sources / name, "-o", self._object(name)),
        ]
      )
      for name in sources
    ]
    if any([job.wait() for job in jobs]):
      raise RuntimeError("the mutation does not compile")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    objects = [self._object(name) for name in self.all_sources()]
    target = self._package / "sojax" / f"_cpu_ops{suffix}"
    subprocess.run(
      [_CXX, "-shared", "-pthread", *objects, "-o", target], check=True
    )

  def save(self) -> None:
    """Keeps sources and objects as they are."""
    shutil.copytree(self._sources, self._saved)
    shutil.copytree(self._objects, self._saved, dirs_exist_ok=True)

  def restore(self, file: str, sources) -> None:
    """Brings a file back, and the objects of sources that were saved."""
    if file != _FLAG:
      shutil.copy(self._saved / file, self._sources)
    for name in sources:
      shutil.copy(self._saved / self._object(name).name, self._objects)

  def all_sources(self) -> list[str]:
    """Returns the names of the files that are compiled."""
    left_out = {x for sources in _MACHINES.values() for x in sources}
    left_out -= set(_ISA_ARGS)
    left_out.add("gradient_out_cuda.cc")
    return sorted({x.name for x in self._sources.glob("*.cc")} - left_out)

  def sources_of(self, file: str) -> list[str]:
    """Returns the sources that a file is part of."""
    if file == _FLAG:
      return [x for x in self.all_sources() if x.startswith("kernels_")]
    found = []
    for name in self.all_sources():
      command = [_CXX, *_ARGS, *_ISA_ARGS.get(name, ()), "-MM"]
      rule = subprocess.run(
        [*command, self._sources / name],
        check=True,
        capture_output=True,
        text=True,
      ).stdout
      if any(pathlib.Path(x).name == file for x in rule.split()):
        found.append(name)
    return found

  def replace(self, file: str, old: str, new: str) -> None:
    """Replaces what stands in a file exactly once."""
    path = self._sources / file
    text = path.read_text()
    if text.count(old) != 1:
      raise RuntimeError(f"{file} has {text.count(old)} times: {old}")
    path.write_text(text.replace(old, new))

  def test(self, tests) -> subprocess.CompletedProcess:
    """Runs tests against the extension, up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header"]
    return subprocess.run(
      [*command, "--tb=no", *tests],
      cwd=self._package,
      env={**os.environ, "PYTHONPATH": str(self._package)},
      capture_output=True,
      text=True,
      timeout=1800,
    )

  def _object(self, name: str) -> pathlib.Path:
    return self._objects / (name + ".o")


def is_caught(build: Build, mutation: Mutation) -> bool:
  """Builds a mutation, runs its tests, and takes it back."""
  sources = build.sources_of(mutation.file)
  if mutation.file == _FLAG:
    build.compile(sources, (mutation.old, mutation.new))
  else:
    build.replace(mutation.file, mutation.old, mutation.new)
    build.compile(sources)
  try:
    result = build.test(mutation.tests)
    lines = [x for x in result.stdout.splitlines() if x.startswith("FAILED")]
    print("  ", lines[0] if lines else f"exit status {result.returncode}")
  except subprocess.TimeoutExpired:
    print("   hangs")
    return True
  finally:
    build.restore(mutation.file, sources)
  # Below 0: ended by a signal.
  return result.returncode == 1 or result.returncode < 0


def main(names: list[str]) -> int:
  """Returns the number of mutations that no test noticed."""
  if names == ["--list"]:
    print(*(x.name for x in MUTATIONS), sep="\n")
    return 0
  chosen = [x for x in MUTATIONS if not names or x.name in names]
  missed = []
  with tempfile.TemporaryDirectory(prefix="sojax-mutations-") as directory:
    build = Build(pathlib.Path(directory))
    build.compile(build.all_sources())
    build.save()
    for tests in dict.fromkeys(x.tests for x in chosen):
      result = build.test(tests)
      if result.returncode != 0:
        print(result.stdout)
        raise RuntimeError("the tests fail without a mutation")
    for mutation in chosen:
      print(mutation.name, flush=True)
      if not is_caught(build, mutation):
        missed.append(mutation.name)
  print(f"{len(chosen) - len(missed)} of {len(chosen)} were noticed")
  if missed:
    print("not noticed:", *missed)
  return len(missed)


if __name__ == "__main__":
  sys.exit(min(main(sys.argv[1:]), 1))
