"""What collectives carry: the account against the compiled programs."""

import collections
import re

import numpy as np
import pytest

from sojax.programs.manual import Program
from tests.test_one_stage import Plain
from tests.training import ROWS, batches, on_ranks, ragged, trainer

_HLO_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "u16": 2, "s32": 4, "u32": 4}
_COLLECTIVE = re.compile(
  r"= (.*?) (all-gather|reduce-scatter|all-reduce|all-to-all|"
  r"collective-permute)(?:-start)?\("
)


def collectives(hlo, num_devices):
  """Returns bytes of the whole arrays of a program's collectives, by kind."""
  found = collections.Counter()
  for line in hlo.splitlines():
    match = _COLLECTIVE.search(line)
    if match is None:
      continue
    results, kind = match.groups()
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", results):
      elems = np.prod([int(d) for d in dims.split(",") if d], dtype=int)
      num_bytes = int(elems) * _HLO_BYTES[dtype]
      found[kind.replace("-", "_")] += num_bytes * (
        num_devices if kind == "reduce-scatter" else 1
      )
  return found


@pytest.fixture
def total(monkeypatch):
  """Counts the collectives of all programs that are called.

  Every call counts what its compiled program holds.
  """
  total = collections.Counter()
  compiled = {}
  call = Program.__call__

  def counting(program, *args):
    if program not in compiled:
      hlo = program.lower(*args).compile().as_text()
      compiled[program] = collectives(hlo, program._placement.num_devices)
    total.update(compiled[program])
    return call(program, *args)

  monkeypatch.setattr(Program, "__call__", counting)
  return total


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
  ("make", "plan"),
  [
    (ragged, {"bucket_bytes": 1 << 16}),
    (ragged, {"weights": "flow", "activations": "offload"}),
    (ragged, {"weight_cast": "device", "grad_cast": "device"}),
    (Plain, {}),
  ],
)
def test_compiled_collectives_carry_what_the_account_says(
  total, make, plan, accumulation, precision
):
  changes = dict(model=make(), precision=precision, accumulation=accumulation)
  data = batches(1, rows=ROWS * accumulation)[0]["tokens"] % 251
  with on_ranks(8, plan, **changes) as ours:
    ours.step({"tokens": data})
    ours.drain()
    assert total == ours.account.network


def test_one_device_has_no_collectives(total):
  with trainer(accumulation=2) as ours:
    ours.step(batches(1, rows=8)[0])
    ours.drain()
    assert not total and not any(ours.account.network.values())
