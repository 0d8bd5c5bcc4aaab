"""The faults that tests have to notice stand where the code is now."""

import json
import pathlib

import pytest

from tests import faults, python_mutations

_ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(
  "fault", python_mutations.MUTATIONS, ids=lambda fault: fault.name
)
def test_a_fault_of_python_has_one_place(fault):
  text = (_ROOT / "sojax" / fault.file).read_text()
  assert text.count(fault.old) == 1
  assert fault.new != fault.old


@pytest.mark.parametrize(
  "fault", faults.MUTATIONS, ids=lambda fault: fault.name
)
def test_a_fault_of_the_kernels_has_one_place(fault):
  if fault.file == faults.FLAG:
    flags = json.loads((_ROOT / "cpu_ops/compile_args.json").read_text())
    assert fault.old in str(flags)
    return
  text = (_ROOT / "cpu_ops" / fault.file).read_text()
  assert text.count(fault.old) == 1
