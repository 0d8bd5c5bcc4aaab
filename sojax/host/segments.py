"""The arrays that the kernels take, segment by segment.

Each array is one-dimensional and contiguous, and may start at any byte. Those
that are written (`_inout` and `_out`) must not overlap any other of the same
operation. A segment does not own its arrays. n is their length; it may be 0.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Segment:
  """The arrays of one flat run of parameters.

  Attributes:
    p_inout: master weights, float32 [n]. Or the high halves of split masters,
      ml_dtypes.bfloat16 [n]: at the same time the working weights, rounded
      as `weight_out` is.
    mu_inout: first moments, float32 [n].
    nu_inout: second moments, float32 [n].
    grad: gradients, float32, float16 or ml_dtypes.bfloat16 [n].
    weight_out: None, or where the new weights are also written: float32,
      bfloat16 (nearest to the master, ties away from zero; NaN is 0x7fc0) or
      float16 (nearest, ties to even; past the largest infinite; NaN is 0x7e00)
      [n]. A 16-bit type is that of the gradients, or these are float32. None
      for split masters.
    p_low_inout: None, or the remainders of split masters, int16 [n]: a master
      is the float32 with the bits (p_inout << 16) + p_low_inout.
    sum: None, or sums of earlier gradients, float32 [n]; `grad` is added to
      them first, in float32. Neither is changed.
    sumsq_out: None, or where the sums of squares of the gradients go (with
      `sum` added, before grad_scale), float64 [ceil(n / CHUNK_ELEMS)]: see
      `AccumulateSegment`.
  """

  p_inout: np.ndarray
  mu_inout: np.ndarray
  nu_inout: np.ndarray
  grad: np.ndarray
  weight_out: np.ndarray | None = None
  p_low_inout: np.ndarray | None = None
  sum: np.ndarray | None = None
  sumsq_out: np.ndarray | None = None

  def fields(self):
    """Returns the arrays in the order that the extension takes them in."""
    return (
      self.p_inout,
      self.p_low_inout,
      self.mu_inout,
      self.nu_inout,
      self.grad,
      self.weight_out,
      self.sum,
      self.sumsq_out,
    )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AccumulateSegment:
  """The arrays of one flat run of gradients that are added up.

  Attributes:
    sum_inout: the sums, float32 [n].
    grad: what is added, float32, float16 or ml_dtypes.bfloat16 [n].
    sumsq_out: None, or where the sums of squares of the new sums are written,
      float64 [ceil(n / CHUNK_ELEMS)]: one for each CHUNK_ELEMS elements,
      counted from the start of the segment; the last chunk may be short. It is
      finite exactly if all elements of the chunk are.
  """

  sum_inout: np.ndarray
  grad: np.ndarray
  sumsq_out: np.ndarray | None = None

  def fields(self):
    """Returns the arrays in the order that the extension takes them in."""
    return self.sum_inout, self.grad, self.sumsq_out


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NormSegment:
  """One flat run of gradients whose squares are added up.

  Attributes:
    grad: gradients, float32, float16 or ml_dtypes.bfloat16 [n].
    sumsq_out: the sums of squares, as of an `AccumulateSegment`.
    sum: None, or sums of earlier gradients that `grad` is added to, float32
      [n].
  """

  grad: np.ndarray
  sumsq_out: np.ndarray
  sum: np.ndarray | None = None

  def fields(self):
    """Returns the arrays in the order that the extension takes them in."""
    return self.grad, self.sum, self.sumsq_out


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NarrowSegment:
  """One flat run of masters that are rounded to working weights.

  Attributes:
    p: master weights, float32 [n].
    weight_out: float32, float16 or ml_dtypes.bfloat16 [n], rounded as
      `Segment.weight_out` is.
  """

  p: np.ndarray
  weight_out: np.ndarray

  def fields(self):
    """Returns the arrays in the order that the extension takes them in."""
    return self.p, self.weight_out
