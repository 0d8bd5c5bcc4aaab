"""What the tests of checkpoints share: a stand-in state of NumPy arrays."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

# Bits that arithmetic or a conversion would change: quiet and signalling NaNs
# with payloads, -0, subnormals, infinities.
ODD_BITS = np.array(
  [
    0x7FC00001,
    0xFFC12345,
    0x7F800001,
    0xFFA00000,
    0x80000000,
    0x00000001,
    0x807FFFFF,
    0x7F800000,
    0xFF800000,
  ],
  np.uint32,
)
SHAPES = {
  "embed.table": (37, 8),
  "block_0.norm.scale": (8,),
  "block_0.frozen": (5, 3),
  "block_0.empty": (0, 4),
  "head.bias": (),
  "head.zeros": (6,),
}


@dataclass(frozen=True)
class FakeLeaf:
  name: str
  shape: tuple[int, ...]
  trained: bool = True

  @property
  def size(self) -> int:
    return int(np.prod(self.shape, dtype=int))


class FakeState:
  """Holds every array flat in memory; the oracle and the thing restored."""

  def __init__(self, seed, *, num_steps=10, shapes=None):
    rng = np.random.default_rng(seed)
    self.leaves = tuple(
      FakeLeaf(name, shape, trained="frozen" not in name)
      for name, shape in (shapes or SHAPES).items()
    )
    self.arrays = {}
    for index, leaf in enumerate(self.leaves):
      for kind in ("master", "mu", "nu") if leaf.trained else ("master",):
        bits = rng.integers(0, 2**32, leaf.size, dtype=np.uint32)
        bits[: len(ODD_BITS)] = ODD_BITS[: leaf.size]
        if "zeros" in leaf.name:
          bits[:] = 0
        self.arrays[index, kind] = bits.view(np.float32)
    self.scalar_values = {"num_steps": num_steps, "count": seed, "scale": 0.1}
    self.other_arrays = {
      "dropout.key": rng.integers(0, 2**32, (2, 2), dtype=np.uint32),
      "dropout.count": np.array(seed, np.int64),
      "norm.mean": np.asfortranarray(rng.normal(size=(3, 5))),
      "norm.low": rng.normal(size=7).astype(ml_dtypes.bfloat16),
      "flags": np.array([True, False, True]),
      "none": np.zeros((0, 2), np.float16),
    }

  def read(self, leaf_index, kind, start, stop):
    return self.arrays[leaf_index, kind][start:stop].copy()

  def write(self, leaf_index, kind, start, values):
    assert values.dtype == np.float32
    self.arrays[leaf_index, kind][start : start + len(values)] = values

  def scalars(self):
    return dict(self.scalar_values)

  def load_scalars(self, scalars):
    self.scalar_values = dict(scalars)

  def other_state(self):
    # order="K" keeps norm.mean in Fortran order.
    return {name: a.copy(order="K") for name, a in self.other_arrays.items()}

  def load_other_state(self, other):
    self.other_arrays = dict(other)

  def snapshot(self):
    """Returns every byte and every scalar, comparable with ==."""
    arrays = {key: array.tobytes() for key, array in self.arrays.items()}
    other = {
      name: (array.shape, array.dtype.name, array.tobytes())
      for name, array in self.other_arrays.items()
    }
    scalars = {
      name: (type(value), value) for name, value in self.scalar_values.items()
    }
    return arrays, other, scalars


def files_of(path):
  return sorted(file for file in path.rglob("*") if file.is_file())
