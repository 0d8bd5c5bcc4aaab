"""Batches; the oracle is a window of the tokens, taken with a plain loop."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sojax.data import tokens as tokens_lib

# Each token is its position, so that a row shows where it was taken.
_POSITIONS = np.arange(1000)


def test_encode_and_decode_are_inverse():
  every_byte = bytes(range(256))
  encoded = tokens_lib.encode(every_byte)
  assert encoded.dtype == np.uint8
  np.testing.assert_array_equal(encoded, np.arange(256))
  assert tokens_lib.decode(encoded) == every_byte
  assert tokens_lib.decode(encoded.astype(np.int32)) == every_byte
  assert tokens_lib.decode(np.array([], np.int32)) == b""


@pytest.mark.parametrize("token", [-1, 256])
def test_decode_refuses_what_is_no_byte(token):
  with pytest.raises(ValueError, match=f"{token}"):
    tokens_lib.decode(np.array([65, token]))


def test_sampler_gives_windows_of_the_tokens():
  sampler = tokens_lib.BatchSampler(tokens=_POSITIONS, num_rows=5, seq_len=7)
  batch = sampler.batch(3)
  assert set(batch) == {"tokens"}
  assert batch["tokens"].dtype == np.int32
  assert batch["tokens"].shape == (5, 8)
  for row in batch["tokens"]:
    np.testing.assert_array_equal(row, np.arange(row[0], row[0] + 8))


def test_batch_depends_on_seed_and_step_alone():
  def sampler(seed):
    return tokens_lib.BatchSampler(
      tokens=_POSITIONS, num_rows=4, seq_len=6, seed=seed
    )

  in_order = [sampler(1).batch(step)["tokens"] for step in range(10)]
  one_sampler = sampler(1)
  for step in reversed(range(10)):
    batch = one_sampler.batch(step)["tokens"]
    np.testing.assert_array_equal(batch, in_order[step])
  # 12 draws of 4 starts out of 994: equal ones are next to impossible.
  others = [sampler(2).batch(0)["tokens"], sampler(0).batch(1)["tokens"]]
  drawn = {batch[:, 0].tobytes() for batch in in_order + others}
  assert len(drawn) == 12


def test_sampler_reaches_the_first_and_the_last_window():
  sampler = tokens_lib.BatchSampler(tokens=np.arange(10), num_rows=8, seq_len=6)
  starts = {
    int(row[0]) for step in range(20) for row in sampler.batch(step)["tokens"]
  }
  assert starts == {0, 1, 2, 3}


def test_tokens_of_one_window_give_that_window():
  sampler = tokens_lib.BatchSampler(tokens=np.arange(7), num_rows=2, seq_len=6)
  expected = np.tile(np.arange(7), (2, 1))
  np.testing.assert_array_equal(sampler.batch(0)["tokens"], expected)


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    (dict(num_rows=0), "num_rows=0"),
    (dict(seq_len=0), "seq_len=0"),
    (dict(seed=-1), "seed=-1"),
    (dict(seq_len=1000), r"1000 tokens .* 1001"),
  ],
)
def test_sampler_refuses_what_makes_no_batch(changed, message):
  arguments = dict(tokens=_POSITIONS, num_rows=1, seq_len=1, seed=0) | changed
  with pytest.raises(ValueError, match=message):
    tokens_lib.BatchSampler(**arguments)


@hypothesis.given(
  num_tokens=st.integers(2, 60),
  num_rows=st.integers(1, 4),
  seq_len=st.integers(1, 9),
)
def test_validation_predicts_every_token_but_the_first_once(
  num_tokens, num_rows, seq_len
):
  tokens = np.arange(100, 100 + num_tokens)
  predicted = []
  for batch in tokens_lib.validation_batches(
    tokens, num_rows=num_rows, seq_len=seq_len
  ):
    rows, mask = batch["tokens"], batch["loss_mask"]
    assert rows.shape == (num_rows, seq_len + 1) and rows.dtype == np.int32
    assert mask.shape == (num_rows, seq_len) and mask.dtype == np.float32
    assert set(np.unique(mask)) <= {0.0, 1.0} and mask.any()
    inputs, targets = rows[:, :-1], rows[:, 1:]
    np.testing.assert_array_equal((targets - inputs)[mask == 1.0], 1)
    predicted += targets[mask == 1.0].tolist()
  assert predicted == tokens[1:].tolist()


def test_validation_stops_after_max_batches():
  def batches(max_batches):
    return list(
      tokens_lib.validation_batches(
        _POSITIONS, num_rows=2, seq_len=10, max_batches=max_batches
      )
    )

  every = batches(None)
  assert len(every) == 50
  for num_batches in (0, 1, 50, 51):
    some = batches(num_batches)
    assert len(some) == min(num_batches, 50)
    for one, other in zip(some, every, strict=False):
      np.testing.assert_array_equal(one["tokens"], other["tokens"])
      np.testing.assert_array_equal(one["loss_mask"], other["loss_mask"])


def test_validation_of_too_few_tokens_is_refused():
  with pytest.raises(ValueError, match="1 validation tokens"):
    list(tokens_lib.validation_batches(np.arange(1), num_rows=1, seq_len=1))
  with pytest.raises(ValueError, match="num_rows=0"):
    list(tokens_lib.validation_batches(np.arange(9), num_rows=0, seq_len=1))
