"""The AdamW benchmark: its arithmetic by hand, its checks, and a tiny run."""

import dataclasses
import json
import os

import ml_dtypes
import numpy as np
import pytest
from absl.testing import flagsaver

from experiments import adam_bench
from experiments.adam import arrays as memory
from experiments.adam import ours, pairing, peers, settings
from experiments.adam.agreement import check_agreement
from experiments.adam.arrays import Arrays
from experiments.adam.pairing import Contender
from experiments.adam.stream import Stream
from sojax.host.kernels import Pool
from sojax.reference.adamw import round_to_bfloat16
from sojax.reference.record import join_float32

every_setting = pytest.mark.parametrize(
  "setting", settings.SETTINGS, ids=lambda s: s.name
)


@pytest.fixture(scope="module")
def pool():
  with Pool(2) as pool:
    yield pool


@pytest.fixture(scope="module")
def stream():
  return Stream()


@pytest.fixture
def arrays(pool):
  return Arrays(224, pool)  # whole blocks of the stream


def test_summary_is_of_pairs_and_of_the_fastest_stream():
  pairs = {
    # The last has the smallest median time, but not the smallest ratio.
    "stream_ordinary_0": [(2.0, 2.0), (4.0, 4.0), (4.0, 4.0)],
    "stream_ordinary_1024": [(3.0, 4.0), (6.0, 8.0), (1.0, 8.0)],
    "stream_nontemporal_0": [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)],
    "changing_stream_ordinary_0": [(2.0, 1.0), (4.0, 2.0), (8.0, 4.0)],
    # Ratios 1.5, 0.5, 2: not the ratio 3/4 of the medians.
    "deepspeed": [(3.0, 2.0), (2.0, 4.0), (8.0, 4.0)],
    "record3": [(2.0, 1.0), (3.0, 1.0), (4.0, 1.0)],
  }
  summary = adam_bench.summarise(pairs)
  assert summary["ratios"] == {
    "stream_over_ours": {"median": 0.75, "quartiles": [0.4375, 0.75]},
    "changing_stream_over_ours": {"median": 2.0, "quartiles": [2.0, 2.0]},
    "deepspeed_over_ours": {"median": 1.5, "quartiles": [1.0, 1.75]},
    "record3_over_step": {"median": 3.0, "quartiles": [2.5, 3.5]},
  }
  assert summary["stream"] == "stream_ordinary_1024"
  assert set(summary["streams"]) == set(pairs) - {"deepspeed", "record3"}
  assert summary["median_s"] == {
    "step": 2.0,
    "stream_ordinary_0": 4.0,
    "stream_ordinary_1024": 3.0,
    "stream_nontemporal_0": 1.0,
    "changing_stream_ordinary_0": 4.0,
    "deepspeed": 3.0,
    "record3": 3.0,
  }
  # Of seven 1, three 2, six 4 and two 8, at places 1.7, 3.4, ... 15.3.
  assert summary["step_deciles_s"] == pytest.approx(
    [1, 1, 1, 1.8, 2, 4, 4, 4, 5.2]
  )
  assert summary["pairs"] == 3


def test_top_level_ratios_are_the_less_favourable():
  def setting(**medians):
    return {"ratios": {key: {"median": m} for key, m in medians.items()}}

  worse = adam_bench.less_favourable(
    {
      "fp32": setting(
        stream_over_ours=0.9, record3_over_step=1.1, deepspeed_over_ours=1.2
      ),
      "bf16": setting(
        stream_over_ours=0.95, record3_over_step=1.2, split_over_copy=0.9
      ),
    }
  )
  assert worse == {
    "stream_over_ours": 0.9,
    "record3_over_step": 1.2,
    "deepspeed_over_ours": 1.2,
    "split_over_copy": 0.9,
  }


def test_bounds_cover_every_ratio_once():
  keys = list(adam_bench._KEYS.values())
  assert sorted([*adam_bench._AT_LEAST, *adam_bench._AT_MOST]) == sorted(keys)
  assert adam_bench.is_within("stream_over_ours", 0.93)
  assert not adam_bench.is_within("stream_over_ours", 0.92)
  assert adam_bench.is_within("split_over_copy", 1.0)
  assert not adam_bench.is_within("split_over_copy", 1.01)


def test_pairs_are_adjacent_complete_and_in_changing_order(monkeypatch):
  monkeypatch.setattr(pairing, "_SETTLE_S", 0.0)
  seconds = {"base": 1.0, "a": 2.0, "b": 4.0, "c": 8.0}
  now, calls, rounds = [0.0], [], []
  monkeypatch.setattr("time.perf_counter", lambda: now[0])

  def spend(amount):
    now[0] += amount

  def contender(name):
    def run():
      calls.append(name)
      spend(seconds[name])

    return Contender(
      name=name,
      run=run,
      state=lambda: None,
      before=lambda: spend(100.0),
      after=lambda: spend(1000.0),
    )

  pairs = pairing.measure(
    contender("base"),
    [contender(name) for name in "abc"],
    20,
    num_warm_up=3,
    between_rounds=lambda: rounds.append(len(calls)),
  )
  assert pairs == {name: [(seconds[name], 1.0)] * 20 for name in "abc"}
  assert rounds == list(range(0, 23 * 6, 6)) and len(calls) == 23 * 6
  couples = [tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)]
  assert all(
    ("base" in couple) != (couple[0] == couple[1]) for couple in couples
  )
  orders = {tuple(calls[i : i + 6]) for i in range(0, len(calls), 6)}
  assert len(orders) > 10
  first = [couple[0] == "base" for couple in couples]
  assert 10 < sum(first) < len(first) - 10


@every_setting
def test_all_contenders_without_peers_agree(arrays, pool, stream, setting):
  contenders = [
    ours.step(arrays, setting, pool),
    *ours.variants(arrays, setting, pool),
    *stream.contenders(arrays, setting, 2),
    *(o.contender() for o in adam_bench._optax(arrays, setting)),
  ]
  names = [contender.name for contender in contenders]
  check_agreement(contenders, arrays, setting)
  assert len(set(names)) == len(names)


@every_setting
def test_a_contender_that_does_something_else_is_found(arrays, pool, setting):
  step = ours.step(arrays, setting, pool)

  def check(**changes):
    arrays.reset()
    changed = dataclasses.replace(step, **changes)
    check_agreement([step, changed], arrays, setting)

  def twice():
    step.run()
    step.run()

  def undecayed():
    decay = settings.HYPER.learning_rate * settings.HYPER.weight_decay
    start = arrays.p.copy()
    step.run()
    arrays.p[:] += np.float32(decay) * start

  def unwritten():
    before = arrays.weight.copy()
    step.run()
    arrays.weight[:] = before

  check()
  with pytest.raises(RuntimeError, match=r"idle left p"):
    check(name="idle", run=pairing.nothing)
  with pytest.raises(RuntimeError, match=r"twice left p"):
    check(name="twice", run=twice)
  with pytest.raises(RuntimeError, match=r"undecayed left p"):
    check(name="undecayed", run=undecayed)
  with pytest.raises(RuntimeError, match=r"writer left p"):
    check(name="writer", steps=False)
  if setting.half:
    with pytest.raises(RuntimeError, match="unwritten wrote weights"):
      check(name="unwritten", run=unwritten)


@every_setting
def test_streams_write_whole_blocks_and_change_a_bit_or_none(
  pool, stream, setting
):
  arrays = Arrays((1 << 17) + 100, pool)
  num_streamed = arrays.num_params // 32 * 32
  bits = arrays.p.view(np.uint32)
  high = (bits >> 16).astype(np.uint16)
  contenders = stream.contenders(arrays, setting, 3)
  assert len(contenders) == (24 if setting.half else 16)
  for contender in contenders:
    before = [x.copy() for x in (arrays.p, arrays.mu, arrays.nu)]
    arrays.weight.fill(0)
    contender.run()
    for x, y in zip(before, (arrays.p, arrays.mu, arrays.nu), strict=True):
      expected = x.view(np.uint32)
      expected[:num_streamed] ^= contender.name.startswith("changing")
      np.testing.assert_array_equal(expected, y.view(np.uint32))
    weight = arrays.weight.view(np.uint16)
    if setting.half:
      np.testing.assert_array_equal(weight[:num_streamed], high[:num_streamed])
      assert not weight[num_streamed:].any()
    else:
      assert not weight.any()


def test_a_missing_compiler_is_named(monkeypatch):
  monkeypatch.setenv("CXX", "no-such-compiler")
  with pytest.raises(RuntimeError, match="no-such-compiler was not found"):
    Stream()


def test_gradients_are_refreshed_and_rounded(pool):
  arrays = Arrays(1 << 21, pool)
  first = arrays.grad.copy()
  arrays.refresh_grads(1)
  assert np.mean(arrays.grad == first) < 1e-3
  assert 0.009 < float(np.std(arrays.grad)) < 0.011
  np.testing.assert_array_equal(
    arrays.grad16.view(np.uint16),
    round_to_bfloat16(arrays.grad).view(np.uint16),
  )
  arrays.refresh_grads(0)
  np.testing.assert_array_equal(arrays.grad, first)


def test_split_masters_start_as_the_masters(arrays):
  assert arrays.p.any() and arrays.p_high.dtype == ml_dtypes.bfloat16
  joined = join_float32(arrays.p_high, arrays.p_low)
  np.testing.assert_array_equal(
    joined.view(np.uint32), arrays.p.view(np.uint32)
  )


def test_a_full_record_is_an_error(arrays, pool, monkeypatch):
  monkeypatch.setattr(
    arrays.records[3], "escapes", arrays.records[3].escapes[:0]
  )
  arrays.nu.fill(np.nan)
  contenders = ours.variants(arrays, settings.FP32, pool)
  record3 = next(c for c in contenders if c.name == "record3")
  record3.run()
  with pytest.raises(RuntimeError, match="3 bytes per parameter was full"):
    record3.after()


def test_huge_pages_are_counted_around_the_ranges(monkeypatch):
  smaps = "".join(
    f"{start:x}-{start + 0x1000:x} rw-p 0 00:00 0\nSize:  4 kB\n"
    f"Rss:  {rss} kB\nAnonHugePages:  {huge} kB\nVmFlags: rd wr\n"
    for start, rss, huge in [
      (0x1000, 8, 8),
      (0x2000, 16, 4),
      (0x3000, 4, 2),
      (0x4000, 64, 64),
    ]
  )
  monkeypatch.setattr("pathlib.Path.read_text", lambda self: smaps)
  monkeypatch.setattr("pathlib.Path.exists", lambda self: True)
  assert memory.huge_page_share([(0x2800, 0x1000)]) == (4 + 2) / (16 + 4)
  assert memory.huge_page_share([(0x1000, 1), (0x4FFF, 1)]) == 1.0


def test_the_policy_of_huge_pages_is_the_one_in_brackets(monkeypatch):
  monkeypatch.setattr("pathlib.Path.exists", lambda self: True)
  monkeypatch.setattr(
    "pathlib.Path.read_text", lambda self: "always [madvise] never\n"
  )
  assert memory.huge_page_policy() == "madvise"
  monkeypatch.setattr("pathlib.Path.exists", lambda self: False)
  assert memory.huge_page_policy() is None


@every_setting
def test_both_optaxes_read_the_gradients_of_the_round(arrays, setting):
  own, huge = (o.contender() for o in adam_bench._optax(arrays, setting))
  assert (own.name, huge.name) == ("optax", "optax_huge_pages")
  for contender in (own, huge):
    contender.run()
  np.testing.assert_array_equal(own.state()[1], huge.state()[1])
  arrays.refresh_grads(7)
  for contender in (own, huge):
    contender.before()
    contender.run()
  np.testing.assert_array_equal(own.state()[1], huge.state()[1])


def test_missing_peers_are_named_with_what_installs_them(monkeypatch):
  monkeypatch.setattr(peers, "_PACKAGES", ("numpy", "no-such-a", "no-such-b"))
  with pytest.raises(
    RuntimeError, match="no-such-a, no-such-b missing .*make bench-adam"
  ):
    peers.TorchPeers(2)


def test_script_writes_ratios_of_all_but_the_missing_peers(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(pairing, "_SETTLE_S", 0.0)
  path = tmp_path / "new" / "adam.json"
  with flagsaver.flagsaver():
    adam_bench.flags.FLAGS(
      ["adam_bench", f"--json={path}", "--params=3200", "--pairs=2"]
      + ["--nopeers"]
    )
    adam_bench.main(["adam_bench"])
  result = json.loads(path.read_text())
  needs_peers = {
    "deepspeed_over_ours",
    "torch_fused_over_ours",
    "three_pass_over_ours",
    "deepspeed_shared_memory_over_ours",
    "torch_fused_shared_memory_over_ours",
    "three_pass_shared_memory_over_ours",
  }
  keys = set(adam_bench._KEYS.values()) - needs_peers
  assert set(result["ratios"]) == keys
  assert all(value > 0 for value in result["ratios"].values())
  assert set(result["settings"]["bf16"]["ratios"]) == keys
  assert set(result["settings"]["fp32"]["ratios"]) == keys - {"split_over_copy"}
  for setting in result["settings"].values():
    assert setting["pairs"] == 2
    assert setting["stream"] in setting["streams"]
    assert set(setting["escapes_per_value"]) == {"record2", "record3"}
  assert not result["cache"]["is_cold"]
  assert result["config"]["params"] == 3200
  assert {"commit", "machine", "sweep", "huge_page_share"} < set(result)
  counts = adam_bench.thread_counts(len(os.sched_getaffinity(0)))
  swept = [(row["setting"], row["threads"]) for row in result["sweep"]]
  assert swept == [(x, n) for x in ("fp32", "bf16") for n in counts]
  for row in result["sweep"]:
    assert row["gigabytes_per_s"] * row["step_s"] == pytest.approx(
      28 * 3200 / 1e9
    )
  assert result["transparent_hugepage"] in {"always", "madvise", "never", None}
  shown = capsys.readouterr().out
  assert "| 1 | fp32 | " in shown and "| 1 | bf16 | " in shown
  assert "| split_over_copy | bf16 | " in shown
  assert "| split_over_copy | fp32 | " not in shown
  assert "Not cache-cold" in shown
