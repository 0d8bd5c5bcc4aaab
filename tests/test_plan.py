"""Plan and TrainConfig: every wrong switch is refused by name."""

import pytest

from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan, WireDtypes


@pytest.mark.parametrize(
  ("switches", "message"),
  [
    ({"weights": "streamed"}, "weights='streamed' is not one of"),
    ({"bucket_bytes": 1}, "bucket_bytes=1 is below 65536"),
    ({"bucket_bytes": 1e6}, "bucket_bytes=1000000.0 must be an integer"),
    ({"device_buckets": -1}, "device_buckets=-1 is below 0"),
    ({"device_buckets": True}, "device_buckets=True must be an integer"),
    ({"flow_window": 1}, "flow_window=1 is below 2"),
    ({"ring_slots": 0}, "ring_slots=0 is below 1"),
    ({"pool_threads": 0}, "pool_threads=0 is below 1"),
    ({"accumulate": "gpu"}, "accumulate='gpu' is not one of"),
    ({"speculation": "record3"}, "'record3' is not there yet; use one of"),
    ({"speculation": "often"}, "speculation='often' is not one of"),
    ({"weights": "flow", "device_buckets": 1}, "device_buckets=1 keeps"),
    ({"activations": "drop"}, "activations='drop' is not one of"),
    ({"activations": ("keep", "drop")}, "activations='drop' is not one of"),
    ({"activations": ["keep"]}, r"activations=\['keep'\] must be one of"),
    ({"activations": None}, "activations=None must be one of"),
    ({"bucket_size": 1}, "unknown plan switch 'bucket_size'; known:"),
  ],
)
def test_a_wrong_switch_is_refused(switches, message):
  with pytest.raises(ValueError, match=message):
    Plan.of(switches)


def test_activations_are_those_of_the_stages_that_have_a_choice():
  for policy in ("recompute", "keep", "offload"):
    first = "keep" if policy == "keep" else "recompute"
    all_alike = Plan(activations=policy).activations_by_stage(4)
    assert all_alike == (first, policy, policy, "recompute")
    each = Plan(activations=("keep", policy, "offload"))
    assert each.activations_by_stage(3) == ("keep", policy, "recompute")
    with pytest.raises(ValueError, match="names 3 stages, but the model has 4"):
      each.activations_by_stage(4)


@pytest.mark.parametrize("accumulation", [1, 2, 9])
def test_only_sums_on_the_host_of_one_stage_have_two_gradients_there(
  accumulation,
):
  host, device = Plan(accumulate="host"), Plan()
  for num_stages in (1, 2, 3):
    two = num_stages == 1 and accumulation > 1
    assert host.num_grads_on_host(num_stages, accumulation) == 1 + two
    assert device.num_grads_on_host(num_stages, accumulation) == 1


def test_auto_is_weight_stationary_and_all_on_the_host():
  plan = Plan.of("auto")
  assert plan == Plan()
  assert (plan.weights, plan.device_buckets) == ("stationary", 0)
  with pytest.raises(ValueError, match="plan='fast' is unknown"):
    Plan.of("fast")


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"micro_batch": 0}, "micro_batch=0"),
    ({"seq_len": 2.0}, "seq_len=2.0"),
    ({"accumulation": 0}, "accumulation=0"),
    ({"precision": "fp8"}, "precision='fp8' is not one of"),
    ({"clip_norm": 0.0}, "clip_norm=0.0 must be positive"),
    ({"clip_norm": -1.0}, "clip_norm=-1.0 must be positive"),
    ({"clip_norm": float("nan")}, "clip_norm=nan must be positive"),
    ({"clip_norm": float("inf")}, "clip_norm=inf must be positive"),
  ],
)
def test_a_wrong_config_is_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    TrainConfig(**({"micro_batch": 1, "seq_len": 8} | fields))


@pytest.mark.parametrize(
  ("precision", "grad_cast", "weight_cast", "grad_bytes", "weight_bytes"),
  [
    ("fp32", "host", "host", 4, 4),
    ("fp32", "device", "device", 4, 4),
    ("bf16", "host", "host", 2, 2),
    ("bf16", "device", "host", 4, 2),
    ("bf16", "host", "device", 2, 4),
  ],
)
def test_the_side_that_casts_decides_what_crosses(
  precision, grad_cast, weight_cast, grad_bytes, weight_bytes
):
  config = TrainConfig(micro_batch=1, seq_len=8, precision=precision)
  plan = Plan(grad_cast=grad_cast, weight_cast=weight_cast)
  wire = WireDtypes.of(plan, config)
  assert (wire.grad_bytes, wire.weight_bytes) == (grad_bytes, weight_bytes)
