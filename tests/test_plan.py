"""Plan and TrainConfig: every wrong switch is refused by name."""

import dataclasses
import json

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
    ({"host_ratio": 1.1}, r"host_ratio=1.1 must lie in \[0, 1\]"),
    ({"host_ratio": -1}, r"host_ratio=-1 must lie in \[0, 1\]"),
    ({"host_ratio": float("nan")}, r"host_ratio=nan must lie in \[0, 1\]"),
    ({"host_ratio": float("inf")}, r"host_ratio=inf must lie in \[0, 1\]"),
    ({"host_ratio": True}, r"host_ratio=True must be a number in \[0, 1\]"),
    ({"host_ratio": "0.8"}, "host_ratio='0.8' must be a number"),
    ({"host_ratio": [0.8]}, r"host_ratio=\[0.8\] must be a number"),
    (
      {"host_ratio": 0.8, "device_buckets": 4},
      "host_ratio=0.8 says .* so does device_buckets=4; give one of them",
    ),
    ({"flow_window": 1}, "flow_window=1 is below 2"),
    ({"ring_slots": 0}, "ring_slots=0 is below 1"),
    ({"pool_threads": 0}, "pool_threads=0 is below 1"),
    ({"pool_cores": 3}, "pool_cores=3 must be a tuple"),
    ({"pool_cores": {0, 1}}, r"pool_cores=\{0, 1\} must be a tuple"),
    ({"pool_cores": []}, r"pool_cores=\(\) must be a tuple"),
    ({"pool_cores": ()}, r"pool_cores=\(\) must be a tuple"),
    ({"pool_cores": (0, -1)}, r"pool_cores=\(0, -1\) holds -1; name cores"),
    ({"pool_cores": (0, True)}, "holds True; name cores"),
    ({"pool_cores": (0, 1.0)}, "holds 1.0; name cores"),
    ({"pool_cores": (2, 1, 2)}, r"pool_cores=\(2, 1, 2\) must be different"),
    (
      {"pool_cores": (0, 1), "pool_threads": 3},
      r"\(0, 1\) names 2 cores for pool_threads=3; name one for each",
    ),
    ({"numa_node": -1}, "numa_node=-1 is below 0"),
    ({"numa_node": "0"}, "numa_node='0' must be an integer"),
    ({"accumulate": "gpu"}, "accumulate='gpu' is not one of"),
    ({"grad_cast": "nobody"}, "grad_cast='nobody' is not one of"),
    (
      {"grad_cast": "host_separate", "speculation": "record3"},
      "speculation='record3'; use 'wait', or grad_cast='host'",
    ),
    (
      {"weight_cast": "host_separate", "speculation": "pingpong"},
      "speculation='pingpong'; use 'wait', or weight_cast='host'",
    ),
    (
      {"grad_cast": "host_separate", "accumulate": "host"},
      "use accumulate='device', or grad_cast='host'",
    ),
    (
      {"master": "split", "weight_cast": "host_separate"},
      "'host_separate' must be 'host'",
    ),
    (
      {"park": "device", "speculation": "record3"},
      "use 'wait', or park='host'",
    ),
    ({"park": "device", "gradients_out": "callback"}, "use 'dma', or park"),
    ({"park": "device", "accumulate": "host"}, "use 'device', or park='host'"),
    ({"master": "split", "weight_cast": "device"}, "'device' must be 'host'"),
    ({"master": "split", "speculation": "pingpong"}, "use master='fp32'"),
    ({"speculate": "maybe"}, "speculate='maybe' is not one of"),
    ({"max_record_bytes": -1}, "max_record_bytes=-1 is below 0"),
    ({"escape_bytes_per_param": 13}, r"=13 must lie in \[0, 12\]"),
    ({"escape_bytes_per_param": "1"}, "='1' must be a number"),
    ({"speculation": "often"}, "speculation='often' is not one of"),
    ({"weights": "flow", "device_buckets": 1}, "device_buckets=1 keeps"),
    ({"activations": "drop"}, "activations='drop' is not one of"),
    ({"activations": ("keep", "drop")}, "activations='drop' is not one of"),
    ({"activations": ["keep", "drop"]}, "activations='drop' is not one of"),
    ({"activations": {"keep"}}, r"activations=\{'keep'\} must be one of"),
    ({"weights": ("flow", "twice")}, "weights='twice' is not one of"),
    ({"weights": ["flow", 1]}, "weights=1 is not one of"),
    ({"weights": {"flow"}}, r"weights=\{'flow'\} must be one of"),
    (
      {"weights": "flow_once", "device_buckets": 1},
      "which weights='flow_once'",
    ),
    ({"activations": None}, "activations=None must be one of"),
    ({"bucket_size": 1}, "unknown plan switch 'bucket_size'; known:"),
  ],
)
def test_a_wrong_switch_is_refused(switches, message):
  with pytest.raises(ValueError, match=message):
    Plan.of(switches)


def test_a_plan_written_as_json_names_the_same_switches():
  plan = Plan(
    pool_cores=(4, 2),
    activations=("keep", "offload", "recompute"),
    weights=("flow", "stationary", "flow_once"),
  )
  switches = json.loads(json.dumps(dataclasses.asdict(plan)))
  assert isinstance(switches["pool_cores"], list)
  assert Plan.of(switches) == plan
  hash(Plan.of(switches))


@pytest.mark.parametrize(
  ("switch", "value"),
  [("pool_cores", [0, 1]), ("activations", ["keep"]), ("weights", ["flow"])],
)
def test_a_plan_itself_takes_no_list(switch, value):
  with pytest.raises(ValueError, match=rf"{switch}=\['?\w.*must be"):
    Plan(**{switch: value})


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


def test_threads_and_their_cores_may_be_named_together():
  plan = Plan(pool_cores=(4, 2), pool_threads=2, numa_node=0)
  assert (plan.pool_cores, plan.pool_threads) == ((4, 2), 2)


def test_the_default_is_weight_stationary_and_all_on_the_host():
  plan = Plan.of({})
  assert plan == Plan()
  assert (plan.weights, plan.device_buckets) == ("stationary", 0)
  with pytest.raises(ValueError, match="plan='fast' is neither a Plan nor"):
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
    ("fp32", "host_separate", "host_separate", 4, 4),
    ("bf16", "host_separate", "device", 2, 4),
    ("fp16", "device", "host_separate", 4, 2),
  ],
)
def test_the_side_that_casts_decides_what_crosses(
  precision, grad_cast, weight_cast, grad_bytes, weight_bytes
):
  config = TrainConfig(micro_batch=1, seq_len=8, precision=precision)
  plan = Plan(grad_cast=grad_cast, weight_cast=weight_cast)
  wire = WireDtypes.of(plan, config)
  assert (wire.grad_bytes, wire.weight_bytes) == (grad_bytes, weight_bytes)


def test_weights_are_those_that_the_plan_names_for_each_stage():
  assert Plan().weights_by_stage(2) == ("stationary", "stationary")
  assert Plan(weights="flow_once").weights_by_stage(3) == ("flow_once",) * 3
  mix = ("stationary", "flow")
  assert Plan(weights=mix, device_buckets=1).weights_by_stage(2) == mix
  with pytest.raises(ValueError, match="weights names 2 stages, but the model"):
    Plan(weights=mix).weights_by_stage(3)
  switches = ("stationary", ("stationary",), "flow", mix, ("flow_once",))
  assert [Plan(weights=w).flows for w in switches] == [False] * 2 + [True] * 3
