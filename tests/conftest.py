"""Settings of every test: devices, strictness, seeds.

XLA reads its environment once, when JAX starts, so the variables are set
before anything imports jax.
"""

import os

_NUM_DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "")
  + f" --xla_force_host_platform_device_count={_NUM_DEVICES}"
)
# Collectives of emulated devices wait for each other on a pool of this many
# threads; with as few as there are cores they can wait for ever.
os.environ["PJRT_NPROC"] = "64"

import gc  # noqa: E402
import random  # noqa: E402

import hypothesis  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from sojax import array_store  # noqa: E402
from sojax.host.arena import Arena  # noqa: E402
from sojax.runtime import parts  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
  "fixed", derandomize=True, deadline=None, database=None
)
hypothesis.settings.load_profile("fixed")


def pytest_configure(config):
  """Lets tests, and later runs, share what XLA has compiled.

  Most of the suite's time would go there. What the tests start as processes of
  their own does not see it.
  """
  cache = config.cache.mkdir("xla")
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def _fixed_seeds():
  """Seeds the global generators, whatever ran before."""
  random.seed(0)
  np.random.seed(0)


@pytest.fixture
def no_garbage():
  """Frees what earlier tests left, for a test that counts live arrays."""
  gc.collect()


@pytest.fixture
def arenas(monkeypatch):
  """Collects the arenas that trainers make."""
  made = []

  class CollectedArena(Arena):
    def __init__(self, *args, **kwargs):
      super().__init__(*args, **kwargs)
      made.append(self)

  monkeypatch.setattr(parts, "Arena", CollectedArena)
  return made


@pytest.fixture
def small_items(monkeypatch):
  """Cuts checkpoints into many parts and items."""
  monkeypatch.setattr(array_store, "ITEM_BYTES", 256)
