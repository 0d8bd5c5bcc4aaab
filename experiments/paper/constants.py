"""The constants of the predictions of the paper, each with its source.

None is taken from the paper's ablation. The machine's are those of
sojax/plan/machines.py.
"""

import dataclasses

from experiments.paper.published import ADAM_S
from sojax.plan.hardware import HardwareProfile
from sojax.plan.machines import machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
  """What predictions depend on beyond the machine's profile.

  Attributes:
    efficiency: factor of the profile's share of the peak.
    deepspeed_s_per_param: seconds of DeepSpeed's CPU Adam a parameter.
    grace_s_per_param: of GraceAdam.
    torch_s_per_param: of PyTorch's.
    cast_bytes_per_s: of a cast on the host in a pass of its own; None takes the
      profile's.
    group_elems: parameters of a bucket of SuperOffload as published.
    between_nodes: bytes/s that a device sends to other nodes.
  """

  efficiency: float
  deepspeed_s_per_param: float
  grace_s_per_param: float
  torch_s_per_param: float
  cast_bytes_per_s: float | None
  group_elems: float
  between_nodes: float

  def machine(self, num_ranks: int) -> HardwareProfile:
    """Returns the device and host of each of some GH200s.

    Up to four are one node; the nodes of more are joined by network cards.
    """
    profile = machine("gh200")
    changed = dataclasses.replace(
      profile, efficiency=profile.efficiency.scaled(self.efficiency)
    )
    if num_ranks > RANKS_OF_NODE:
      changed = dataclasses.replace(
        changed, network_bandwidth=self.between_nodes
      )
    return changed

  def changed(
    self, what: str, factor: float
  ) -> tuple["Constants", HardwareProfile]:
    """Returns one GH200 of which one figure is another; see `SENSITIVITY`."""
    profile = self.machine(1)
    if what == "efficiency":
      curve = profile.efficiency.scaled(factor)
      return self, dataclasses.replace(profile, efficiency=curve)
    if what == "link":
      links = {
        name: getattr(profile, name).scaled(factor) for name in ("d2h", "h2d")
      }
      return self, dataclasses.replace(profile, **links)
    if what == "dispatch":
      dispatch_s = factor * profile.dispatch_s
      return self, dataclasses.replace(profile, dispatch_s=dispatch_s)
    assert what == "host", what
    slower = dataclasses.replace(
      self, grace_s_per_param=self.grace_s_per_param / factor
    )
    rates = {x: rate.scaled(factor) for x, rate in profile.host_rates.items()}
    bandwidth = factor * profile.host_bandwidth
    return slower, dataclasses.replace(
      profile, host_rates=rates, host_bandwidth=bandwidth
    )


PREDICTION = Constants(
  efficiency=1.0,
  deepspeed_s_per_param=ADAM_S["DeepSpeed"][8e9] / 8e9,
  grace_s_per_param=ADAM_S["GraceAdam"][8e9] / 8e9,
  torch_s_per_param=ADAM_S["PyTorch"][8e9] / 8e9,
  cast_bytes_per_s=None,
  group_elems=6e8,
  between_nodes=25e9,
)

ONE_DOMAIN = dataclasses.replace(
  PREDICTION, between_nodes=machine("gh200").network_bandwidth
)
"""The same where NVLink joins all devices, as in a GH200 NVL32."""

RANKS_OF_NODE = 4

SOURCES = {
  "efficiency": "the profile's own, see its sources",
  "deepspeed_s_per_param": "the paper's table of Adam latencies, 8e9",
  "grace_s_per_param": "the paper's table of Adam latencies, 8e9",
  "torch_s_per_param": "the paper's table of Adam latencies, 8e9",
  "cast_bytes_per_s": (
    "assumption: the rate of an Adam step in the profile, 413 GB/s; a separate"
    " cast of PyTorch's may be slower, and nothing published was found"
  ),
  "group_elems": "the artifact: sub-groups of 6e8 elements",
  "machine": "sojax/plan/machines.py, gh200-96",
  "RANKS_OF_NODE": "assumption: nodes of four GH200, as they are usual",
  "between_nodes": "see network_bandwidth of sojax/plan/machines.py, gh200-96",
}

ATTENTION_SHARES = (0.35, 0.6, 0.75)
"""Shares of the peak that attention's kernels may reach in long sequences: of
FlashAttention-2 and of FlashAttention-3's forward on an H100 (arXiv 2407.08608:
35 and 75 %), and between the two, since backward is slower."""

SENSITIVITY: dict[str, tuple[float, ...]] = {
  "efficiency": (0.6, 0.8, 1.0, 1.3),
  "host": (0.5, 0.75, 1.0, 1.15),
  "link": (0.33, 0.66, 1.0, 1.2),
  "dispatch": (0.1, 0.5, 1.0, 2.0),
}
"""Factors of the profile's figures that "what sojax adds" is given over: of the
efficiency; of the host's bandwidth and all its rates, and the seconds of the
published Adam with them; of both directions of the link; of dispatch_s."""
