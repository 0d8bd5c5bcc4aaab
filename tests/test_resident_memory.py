"""The account against the memory that real runs have in RAM.

The device is the host, so that all of it is there. An account is what there is
at most: some of what it adds up is not there at the same time.
"""

import pytest

from sojax.array_store import ITEM_BYTES
from tests.memory_process import call

_AHEAD = {"speculate": "always", "escape_bytes_per_param": 1}
_PLANS = {
  "waits": {},
  "record2": _AHEAD | {"speculation": "record2"},
  "record3": _AHEAD | {"speculation": "record3"},
  "pingpong": _AHEAD | {"speculation": "pingpong"},
  "device buckets": {"device_buckets": 8},
  "flow, split": {"weights": "flow", "master": "split", "grad_window": 2},
}
_NOISE_BYTES = 16 << 20
"""Of a process's peaks, as XLA's programs come and go."""


@pytest.mark.slow
@pytest.mark.parametrize("name", _PLANS)
def test_peaks_are_within_a_tenth_of_the_account(name):
  """In a step, in two at once, in a spike that all updates ran ahead of and
  whose escapes fill their room, and in a save."""
  told = call(_PLANS[name])
  for when in ("normal", "spike", "two"):
    assert 0.9 * told["account"] <= told[when], when
    assert told[when] <= told["account"] + _NOISE_BYTES, when
  # No gradients are there then, but items that are written.
  saving = told["account"] - told["gradients"] + 2 * ITEM_BYTES
  assert 0.9 * saving <= told["save"] <= saving + _NOISE_BYTES
  assert told["clipped"]
  if "speculation" in _PLANS[name]:
    assert told["speculated"] == told["num_buckets"]
  if name in ("record2", "record3"):
    assert 4 * told["escapes"] > 0.6 * told["num_params"]
