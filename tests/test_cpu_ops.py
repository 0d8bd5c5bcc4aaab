"""Builds and runs the C++ tests, plain and with sanitizers."""

import json
import pathlib
import platform
import subprocess
import sysconfig

import jax
import pytest

_CPU_OPS = pathlib.Path(__file__).parents[1] / "cpu_ops"
_CXX = (sysconfig.get_config_var("CXX") or "c++").split()[0]
_ARGS = [
  "-std=c++17",
  "-O1",
  "-pthread",
  "-ffp-contract=off",
  "-Wall",
  "-Wextra",
  "-Wconversion",
  "-Werror",
  "-isystem",
  jax.ffi.include_dir(),
]
_ISA_ARGS = json.loads((_CPU_OPS / "isa_args.json").read_text())
_KERNELS = [
  "dispatch.cc",
  "extents.cc",
  "kernels_scalar.cc",
  "pool.cc",
  "rollback.cc",
  "segments.cc",
  "update.cc",
  *_ISA_ARGS[platform.machine()],
]
# What is built together, and the test programs made of it. The sink's is linked
# without Python: what programs call takes no GIL.
_GROUPS = {
  "kernels": (_KERNELS, ["kernels_test", "pool_test"]),
  "sink": (["gradient_sink.cc", "gradient_out_cpu.cc"], ["gradient_sink_test"]),
}


def _run(*command):
  result = subprocess.run(
    [str(x) for x in command],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=600,
  )
  assert result.returncode == 0, result.stdout


def _has_sanitizer(args, directory):
  source = directory / "empty.cc"
  source.write_text("int main() { return 0; }\n")
  program = directory / "empty"
  try:
    _run(_CXX, *args, source, "-o", program)
    _run(program)
  except AssertionError:
    return False
  return True


@pytest.mark.parametrize(
  "sanitizer",
  [
    "none",
    pytest.param("address,undefined", marks=pytest.mark.slow),
    pytest.param("thread", marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize("group", _GROUPS)
def test_the_cpp_tests_pass(group, sanitizer, tmp_path):
  args = list(_ARGS)
  if sanitizer != "none":
    args += ["-g1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    if not _has_sanitizer(args, tmp_path):
      pytest.skip(f"{_CXX} has no -fsanitize={sanitizer} here")
  sources, programs = _GROUPS[group]
  objects = [_compile(source, args, tmp_path) for source in sources]
  for program in programs:
    main = _compile(f"tests/{program}.cc", args, tmp_path)
    _run(_CXX, *args, *objects, main, "-o", tmp_path / program)
    _run(tmp_path / program)


def _compile(source, args, directory):
  target = directory / (pathlib.Path(source).stem + ".o")
  isa_args = _ISA_ARGS[platform.machine()].get(source, [])
  _run(_CXX, *args, *isa_args, "-c", _CPU_OPS / source, "-o", target)
  return target
