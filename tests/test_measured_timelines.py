"""What is drawn from simulated timelines is drawn from measured ones, too."""

import pytest

from sojax.graph.critical_path import LIMITS, critical_path
from sojax.graph.memory import Space, memory_over_time
from tests.training import batches, trainer

PLANS = {
  "plain": {"bucket_bytes": 1 << 16},
  "ahead": {
    "bucket_bytes": 1 << 16,
    "speculation": "record3",
    "speculate": "always",
  },
  "flow": {"weights": "flow", "activations": "offload"},
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_measured_step_has_a_critical_path_and_a_memory(plan):
  with trainer(PLANS[plan]) as ours:
    for batch in batches(5):
      ours.step(batch)
    ours.drain()
    setup, recorded, account = ours._setup, ours.timeline(), ours.account
  path = critical_path(setup.graph, recorded, 2, 3)
  edges = [edge for p in path.segments for edge in (p.start_s, p.end_s)]
  assert (edges[0], edges[-1]) == path.window
  assert edges[1:-1:2] == edges[2::2]
  window_s = path.window[1] - path.window[0]
  assert sum(path.seconds().values()) == pytest.approx(window_s)
  assert path.limit in LIMITS
  memory = memory_over_time(
    recorded, setup.graph, setup.workload, setup.plan, setup.config
  )
  for (space, name), level in memory.levels.items():
    part = account.device if space is Space.DEVICE else account.host
    assert 0 < level.peak <= part[name]
    assert level.bytes[-1] == 0
