"""Residency: which working weights stay on the device and which flow in."""

import dataclasses

from sojax.plan.buckets import Bucket, Layout
from sojax.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class Residency:
  """Where the working weights of each bucket are: where its stage has its own.

  Attributes:
    layout: the model cut into buckets.
    by_stage: one of `sojax.plan.plan.WEIGHTS` for each stage.
    split: whether masters are split, so that each host bucket has a copy.
  """

  layout: Layout
  by_stage: tuple[str, ...]
  split: bool

  @classmethod
  def of(cls, layout: Layout, plan: Plan) -> "Residency":
    """Returns that of a plan.

    Raises:
      ValueError: if the plan names another number of stages, or a bucket that
        flows would keep its masters on the device.
    """
    by_stage = plan.weights_by_stage(layout.model.num_stages)
    found = cls(layout, by_stage, plan.master == "split")
    found._check_device_buckets(plan)
    return found

  def flows(self, bucket: Bucket) -> bool:
    """Says whether a bucket's weights are streamed in when they are needed."""
    return self.by_stage[bucket.stage] != "stationary"

  def is_copied(self, bucket: Bucket) -> bool:
    """Says whether a bucket's weights have a place in the working copy."""
    return not bucket.on_device and (self.split or self.flows(bucket))

  def flowing_to(self, stage: int) -> tuple[Bucket, ...]:
    """Returns the buckets that flow among those that a stage computes with."""
    return tuple(b for b in self.layout.used_by(stage) if self.flows(b))

  def stay(self, stage: int) -> bool:
    """Says whether what flowed in for a forward stays for its backward.

    The last stage has no forward of its own.
    """
    is_last = stage == self.layout.model.num_stages - 1
    return self.by_stage[stage] == "flow_once" and not is_last

  def fetched_for(self, stage: int, *, backward: bool) -> tuple[Bucket, ...]:
    """Returns the buckets that are streamed in for a use of a stage."""
    if backward and self.stay(stage):
      return ()
    return self.flowing_to(stage)

  def _check_device_buckets(self, plan: Plan) -> None:
    trained = [b for b in self.layout.buckets if b.trained]
    allowed = 0
    for bucket in reversed(trained):
      if self.flows(bucket):
        break
      allowed += 1
    count = sum(bucket.on_device for bucket in trained)
    if count > allowed:
      stage = trained[-1 - allowed].stage
      given = f"device_buckets={count}"
      remedy = f"lower device_buckets to {allowed}"
      if plan.host_ratio is not None:
        given = f"host_ratio={plan.host_ratio}"
        remedy = f"raise host_ratio until at most {allowed} are there"
      raise ValueError(
        f"{given} would keep masters of stage {stage}"
        f" ({self.layout.model.stage_names[stage]!r}) on the device, but its"
        f" weights are {self.by_stage[stage]!r}; make them 'stationary', or"
        f" {remedy}"
      )
