"""Builds and runs the C++ tests, plain and with sanitizers; and Python's.

`make test-sanitize` is what has a sanitizer. It fails if the compiler lacks
one, or if a fault goes unseen.
"""

import os
import platform
import sys

import jax
import pytest

from tests.extension import (
  COMPILE_ARGS,
  CPU_OPS,
  CXX,
  ISA_ARGS,
  Objects,
  copy_package,
  extension_objects,
  run,
  run_pytest,
)

_ARGS = [
  *COMPILE_ARGS["all"],
  *COMPILE_ARGS["warnings"],
  *("-O1", "-pthread", "-isystem", jax.ffi.include_dir()),
]
_KERNELS = [
  "dispatch.cc",
  "extents.cc",
  "kernels_scalar.cc",
  "pool.cc",
  "rollback.cc",
  "segments.cc",
  "update.cc",
  *ISA_ARGS[platform.machine()],
]
_SANITIZED = [pytest.mark.slow, pytest.mark.sanitizer]
# What is built together, and the test programs made of it. The sink's is linked
# without Python: what programs call takes no GIL.
_GROUPS = {
  "kernels": (_KERNELS, ["kernels_test", "pool_test"]),
  "sink": (["gradient_sink.cc", "gradient_out_cpu.cc"], ["gradient_sink_test"]),
}
# A fault that each sanitizer has to see.
_FAULTS = {
  "address": "int main(int n, char**) { int x[2] = {}; return (x + n)[1]; }",
  "undefined": "int main(int n, char**) { return 0x7fffffff + n; }",
  "thread": """
    #include <thread>
    int x = 0;
    int main() {
      std::thread other([] { ++x; });
      ++x;
      other.join();
    }""",
}
_PYTHON_TESTS = [
  "tests/test_kernels.py",
  "tests/test_kernel_arguments.py",
  "tests/test_kernel_calls.py",
  "tests/test_kernel_fused.py",
  "tests/test_kernel_queue.py",
  "tests/test_kernel_sums.py",
  "tests/test_kernel_threads.py",
  "tests/test_record.py",
  "tests/test_rollback.py",
  "tests/test_sink.py",
]
# Overruns a block of the heap, after saying which extension was imported.
_PYTHON_FAULT = """
import ctypes
from sojax import _cpu_ops
print(_cpu_ops.__file__, flush=True)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset(ctypes.c_void_p(libc.malloc(8)), 0, 9)
"""


def _sanitizer_args(sanitizer):
  return ["-g1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]


def _check_sanitizer(sanitizer, directory):
  """Fails unless the faults are seen; says what the compiler lacks."""
  for name in sanitizer.split(","):
    source = directory / "fault.cc"
    source.write_text(_FAULTS[name] + "\n")
    program = directory / "fault"
    args = ["-std=c++17", "-pthread", *_sanitizer_args(sanitizer)]
    run(CXX, *args, source, "-o", program)
    with pytest.raises(RuntimeError, match="Sanitizer|runtime error"):
      run(program)


@pytest.mark.parametrize(
  ("group", "sanitizer"),
  [
    pytest.param("kernels", "none", marks=pytest.mark.slow),
    ("sink", "none"),
    *(
      pytest.param(group, sanitizer, marks=_SANITIZED)
      for group in _GROUPS
      for sanitizer in ("address,undefined", "thread")
    ),
  ],
)
def test_the_cpp_tests_pass(group, sanitizer, tmp_path):
  args = list(_ARGS)
  if sanitizer != "none":
    _check_sanitizer(sanitizer, tmp_path)
    args += _sanitizer_args(sanitizer)
  sources, programs = _GROUPS[group]
  for program in programs:
    objects = Objects(
      sources=CPU_OPS,
      directory=tmp_path,
      names=[*sources, f"tests/{program}.cc"],
      compiler=CXX,
      args=args,
      machine=platform.machine(),
    )
    missing = [x for x in objects.names if not objects.object(x).exists()]
    objects.compile(missing)
    objects.link(tmp_path / program, *args)
    run(tmp_path / program)


def _sanitized_python():
  """The environment of a Python that loads sanitized extensions."""
  names = ["libasan.so", "libubsan.so"]
  # Without it ASan finds no exceptions to intercept when Python starts.
  names.append("libstdc++.so")
  paths = [run(CXX, f"-print-file-name={name}").strip() for name in names]
  return {
    **os.environ,
    "LD_PRELOAD": " ".join(paths),
    # Python and jax leave much of their memory to the end of the process.
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # Objects in blocks of their own, so that ASan sees their ends.
    "PYTHONMALLOC": "malloc",
  }


@pytest.mark.slow
@pytest.mark.sanitizer
def test_the_python_tests_of_the_kernels_pass_with_sanitizers(tmp_path):
  sanitizer = "address,undefined"
  _check_sanitizer(sanitizer, tmp_path)
  args = ["-O1", *_sanitizer_args(sanitizer)]
  objects = extension_objects(CPU_OPS, tmp_path / "objects", args)
  objects.compile(objects.names)
  package = tmp_path / "package"
  extension = copy_package(package)
  objects.link(extension, "-shared", *objects.args)
  env = _sanitized_python()
  fault = [sys.executable, "-c", _PYTHON_FAULT]
  with pytest.raises(
    RuntimeError, match=rf"{extension}\n(.|\n)*heap-buffer-overflow"
  ):
    run(*fault, cwd=package, env=env)
  # Of what a fault prints pytest must not capture anything: it dies of it.
  args = ["--capture=sys", "-m", "not slow"]
  result = run_pytest(package, *args, *_PYTHON_TESTS, env=env)
  assert result.returncode == 0, result.stdout
