"""The other implementations of AdamW, used as their documentation advises.

torch and DeepSpeed work on the very arrays that sojax works on, as one tensor
of all parameters. XLA can donate only memory of its own, so optax has a second
set of masters and moments, put into huge pages after they are allocated.
"""

import ctypes
import importlib
import mmap
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.adam.arrays import Arrays, huge_page_share
from experiments.adam.pairing import Contender, State
from experiments.adam.settings import COUNT, HYPER, Setting

_PACKAGES = ("torch", "deepspeed", "ninja")
_INSTALL = "make bench-adam"
_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_OPTIONS = {
  "lr": HYPER.learning_rate,
  "betas": (HYPER.b1, HYPER.b2),
  "eps": HYPER.eps,
  "weight_decay": HYPER.weight_decay,
}


def versions() -> dict[str, str | None]:
  """Returns the versions of the packages that sojax does not need itself."""
  return {name: _version(name) for name in _PACKAGES}


def check_installed() -> None:
  """Raises RuntimeError, with what to do about it, if peers are missing."""
  missing = [name for name, version in versions().items() if version is None]
  if missing:
    raise RuntimeError(
      f"{', '.join(missing)} missing from {sys.prefix}; `{_INSTALL}` installs"
      " all peers into .venv-bench and runs this with its Python. --nopeers"
      " does without them"
    )


class TorchPeers:
  """torch's fused AdamW and DeepSpeed's cpu_adam.

  Attributes:
    torch: the module.
    deepspeed_isa: what DeepSpeed's kernel was compiled for.
  """

  def __init__(self, num_threads: int):
    """Imports both and compiles DeepSpeed's kernel if that was not done yet.

    The kernel is kept in the virtual environment.

    Args:
      num_threads: of their kernels.

    Raises:
      RuntimeError: if a package is missing, or the kernel does not compile.
    """
    check_installed()
    prefix = Path(sys.prefix)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(prefix / "extensions"))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # ninja is looked for there.
    os.environ["PATH"] = f"{prefix / 'bin'}{os.pathsep}{os.environ['PATH']}"
    self.torch: Any = importlib.import_module("torch")
    self.torch.set_num_threads(num_threads)
    builder = importlib.import_module("deepspeed.ops.op_builder")
    self.deepspeed_isa = builder.CPUAdamBuilder().simd_width()
    self._adam: Any = importlib.import_module("deepspeed.ops.adam")

  def contenders(self, arrays: Arrays, setting: Setting) -> list[Contender]:
    """Returns what takes gradients of this type.

    For float32 "deepspeed" and "torch_fused". For bfloat16 "three_pass": both
    want gradients in the type of the masters, so they are widened first, and
    the new masters are narrowed to weights in a third pass, by torch.
    """
    deepspeed = self._deepspeed(arrays)
    if setting.half:
      return [self._three_pass(arrays, deepspeed)]

    def state() -> State:
      return arrays.p, arrays.mu, arrays.nu, None

    return [
      Contender(name="deepspeed", run=deepspeed.step, state=state),
      Contender(name="torch_fused", run=self._fused(arrays).step, state=state),
    ]

  def _three_pass(self, arrays: Arrays, deepspeed) -> Contender:
    grad = self._tensor(arrays.grad)
    grad16, weight = map(self._tensor16, (arrays.grad16, arrays.weight))
    p = self._tensor(arrays.p)

    def run() -> None:
      grad.copy_(grad16)
      deepspeed.step()
      weight.copy_(p)

    def state() -> State:
      return arrays.p, arrays.mu, arrays.nu, arrays.weight

    return Contender(name="three_pass", run=run, state=state)

  def _deepspeed(self, arrays: Arrays):
    param = self._param(arrays)
    optimizer = self._adam.DeepSpeedCPUAdam(
      [param], adamw_mode=True, **_OPTIONS
    )
    optimizer.state[param] = {"step": COUNT, **self._moments(arrays)}
    return optimizer

  def _fused(self, arrays: Arrays):
    param = self._param(arrays)
    optimizer = self.torch.optim.AdamW([param], fused=True, **_OPTIONS)
    count = self.torch.tensor(float(COUNT))
    optimizer.state[param] = {"step": count, **self._moments(arrays)}
    return optimizer

  def _param(self, arrays: Arrays):
    param = self.torch.nn.Parameter(self._tensor(arrays.p))
    param.grad = self._tensor(arrays.grad)
    return param

  def _moments(self, arrays: Arrays):
    return {
      "exp_avg": self._tensor(arrays.mu),
      "exp_avg_sq": self._tensor(arrays.nu),
    }

  def _tensor(self, array: np.ndarray):
    return self.torch.from_numpy(array)

  def _tensor16(self, array: np.ndarray):
    bits = self.torch.from_numpy(array.view(np.int16))
    return bits.view(self.torch.bfloat16)


class Optax:
  """optax.adamw in one jit that is given the memory of its state.

  Attributes:
    huge_page_share: which part of its state is in huge pages.
  """

  def __init__(self, arrays: Arrays, setting: Setting):
    """Copies the state of the arrays and compiles the step.

    Raises:
      RuntimeError: if the gradients would be copied at each step, or the
        step does not work in place.
    """
    self._arrays, self._setting = arrays, setting
    optimizer = optax.adamw(
      HYPER.learning_rate,
      b1=HYPER.b1,
      b2=HYPER.b2,
      eps=HYPER.eps,
      weight_decay=HYPER.weight_decay,
    )
    self._state = _optax_state(optimizer, arrays, setting)
    before = self._ranges()
    for start, num_bytes in before:
      _into_huge_pages(start, num_bytes)
    self.huge_page_share = huge_page_share(before)
    self._grad = jax.device_put(setting.grad(arrays))
    if self._grad.unsafe_buffer_pointer() != setting.grad(arrays).ctypes.data:
      raise RuntimeError("jax copied the gradients; optax would read old ones")
    self._step = _optax_step(optimizer)
    self._compiled = self._step.lower(self._state, self._grad).compile()

  def contender(self) -> Contender:
    """Returns it, as "optax"."""
    return Contender(name="optax", run=self._run, state=self._read)

  def check_in_place(self) -> None:
    """Raises RuntimeError if a step has moved the state elsewhere."""
    before = set(self._ranges())
    self._run()
    if set(self._ranges()) != before:
      raise RuntimeError("optax's state moved in memory: donation failed")

  def _run(self) -> None:
    self._state = jax.block_until_ready(self._compiled(self._state, self._grad))

  def _read(self) -> State:
    p, opt_state, weight = self._state
    get = optax.tree_utils.tree_get
    mu, nu = get(opt_state, "mu"), get(opt_state, "nu")
    weight = None if weight is None else np.array(weight)
    return np.array(p), np.array(mu), np.array(nu), weight

  def _ranges(self) -> list[tuple[int, int]]:
    leaves = [x for x in jax.tree.leaves(self._state) if x.size > 1]
    return [(x.unsafe_buffer_pointer(), x.nbytes) for x in leaves]


def _optax_state(
  optimizer: optax.GradientTransformation, arrays: Arrays, setting: Setting
):
  """Returns copies of the masters, the moments and the weights, if any."""
  p, mu, nu = (
    jnp.array(x, copy=True) for x in (arrays.p, arrays.mu, arrays.nu)
  )
  shape = jax.eval_shape(optimizer.init, p)
  opt_state = optax.tree_utils.tree_set(
    shape, mu=mu, nu=nu, count=jnp.int32(COUNT)
  )
  weight = setting.weight(arrays)
  return p, opt_state, None if weight is None else jnp.array(weight, copy=True)


def _optax_step(optimizer: optax.GradientTransformation):
  """Returns the step as a jit that works in place."""

  def step(state, grad):
    p, opt_state, weight = state
    grad = grad.astype(p.dtype)
    updates, opt_state = optimizer.update(grad, opt_state, p)
    p = optax.apply_updates(p, updates)
    weight = None if weight is None else p.astype(weight.dtype)
    return p, opt_state, weight

  # The old weights are not read, but the new ones are to lie where they lay.
  return jax.jit(step, donate_argnums=0, keep_unused=True)


def _into_huge_pages(start: int, num_bytes: int) -> None:
  """Moves memory that was not allocated so into huge pages, if possible."""
  first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
  last = (start + num_bytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
  if last <= first or not hasattr(mmap, "MADV_HUGEPAGE"):
    return
  libc = ctypes.CDLL(None)
  for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE):
    libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def _version(name: str) -> str | None:
  try:
    return metadata.version(name)
  except metadata.PackageNotFoundError:
    return None
