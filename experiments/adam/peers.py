"""The other implementations of AdamW, used as their documentation advises.

Each is there twice. By its plain name it works as its users have it, on memory
that its library allocates: torch.empty and torch.zeros_like, or what jax takes.
"_shared_memory" is torch or DeepSpeed on the very arrays that sojax works on.
XLA can donate only memory of its own: "optax_huge_pages" is another set of
masters and moments, put into huge pages after they are allocated, and reads
the shared gradients. All parameters are one tensor.
"""

import ctypes
import dataclasses
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
from experiments.adam.pairing import Contender, State, nothing
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

  @property
  def torch_isa(self) -> str:
    """What torch's kernels use."""
    return self.torch.backends.cpu.get_cpu_capability()

  def contenders(self, arrays: Arrays, setting: Setting) -> list[Contender]:
    """Returns what takes gradients of this type, in both kinds of memory.

    For float32 "deepspeed" and "torch_fused". For bfloat16 "three_pass": both
    want gradients in the type of the masters, so they are widened first, and
    the new masters are narrowed to weights in a third pass, by torch.
    """
    own, shared = self._own_tensors(arrays), self._shared_tensors(arrays)

    def load() -> None:
      for to, source in zip(own.all(), shared.all(), strict=True):
        to.copy_(source)

    kinds = ((own, "", load), (shared, "_shared_memory", nothing))
    return [
      Contender(name=name + suffix, run=run, state=state, before=before)
      for tensors, suffix, before in kinds
      for name, run, state in self._steps(tensors, setting)
    ]

  def _steps(self, tensors: "_Tensors", setting: Setting):
    """Returns names, steps, and what gives the state, for some tensors."""
    deepspeed = self._deepspeed(tensors)
    if not setting.half:
      fused = self._fused(tensors)
      return [
        ("deepspeed", deepspeed.step, tensors.state),
        ("torch_fused", fused.step, tensors.state),
      ]

    def run() -> None:
      tensors.grad.copy_(tensors.grad16)
      deepspeed.step()
      tensors.weight.copy_(tensors.p)

    def state() -> State:
      weight = tensors.weight.float().numpy()
      return *tensors.state()[:3], weight

    return [("three_pass", run, state)]

  def _deepspeed(self, tensors: "_Tensors"):
    param = self._param(tensors)
    optimizer = self._adam.DeepSpeedCPUAdam(
      [param], adamw_mode=True, **_OPTIONS
    )
    optimizer.state[param] = {"step": COUNT, **tensors.moments()}
    return optimizer

  def _fused(self, tensors: "_Tensors"):
    param = self._param(tensors)
    optimizer = self.torch.optim.AdamW([param], fused=True, **_OPTIONS)
    count = self.torch.tensor(float(COUNT))
    optimizer.state[param] = {"step": count, **tensors.moments()}
    return optimizer

  def _param(self, tensors: "_Tensors"):
    param = self.torch.nn.Parameter(tensors.p)
    param.grad = tensors.grad
    return param

  def _own_tensors(self, arrays: Arrays) -> "_Tensors":
    """Allocates as modules, backward and the optimizers do."""
    n, torch = arrays.num_params, self.torch
    p = torch.empty(n)
    return _Tensors(
      p=p,
      mu=torch.zeros_like(p),
      nu=torch.zeros_like(p),
      grad=torch.empty(n),
      grad16=torch.empty(n, dtype=torch.bfloat16),
      weight=torch.empty(n, dtype=torch.bfloat16),
    )

  def _shared_tensors(self, arrays: Arrays) -> "_Tensors":
    def bfloat16(array: np.ndarray):
      bits = self.torch.from_numpy(array.view(np.int16))
      return bits.view(self.torch.bfloat16)

    view = self.torch.from_numpy
    return _Tensors(
      p=view(arrays.p),
      mu=view(arrays.mu),
      nu=view(arrays.nu),
      grad=view(arrays.grad),
      grad16=bfloat16(arrays.grad16),
      weight=bfloat16(arrays.weight),
    )


@dataclasses.dataclass(frozen=True)
class _Tensors:
  """What a step reads and writes, as torch's tensors [n]."""

  p: Any
  mu: Any
  nu: Any
  grad: Any
  grad16: Any
  weight: Any

  def all(self) -> tuple[Any, ...]:
    return self.p, self.mu, self.nu, self.grad, self.grad16, self.weight

  def moments(self) -> dict[str, Any]:
    return {"exp_avg": self.mu, "exp_avg_sq": self.nu}

  def state(self) -> State:
    return self.p.numpy(), self.mu.numpy(), self.nu.numpy(), None


class Optax:
  """optax.adamw in one jit that is given the memory of its state.

  Attributes:
    huge_page_share: which part of its state is in huge pages.
  """

  def __init__(self, arrays: Arrays, setting: Setting, *, huge_pages: bool):
    """Copies the state of the arrays and compiles the step.

    Args:
      arrays: what is copied.
      setting: which gradients are read.
      huge_pages: whether the state is moved into huge pages, and the arrays'
        own gradients are read. Otherwise all is where jax puts it.

    Raises:
      RuntimeError: if shared gradients would be copied at each step.
    """
    self._arrays, self._setting = arrays, setting
    self._huge_pages = huge_pages
    optimizer = optax.adamw(
      HYPER.learning_rate,
      b1=HYPER.b1,
      b2=HYPER.b2,
      eps=HYPER.eps,
      weight_decay=HYPER.weight_decay,
    )
    self._state = _optax_state(optimizer, arrays, setting)
    state = self._ranges()
    if huge_pages:
      for start, num_bytes in state:
        _into_huge_pages(start, num_bytes)
    self.huge_page_share = huge_page_share(state)
    self._grad = self._shared_grad() if huge_pages else self._own_grad()
    self._step = _optax_step(optimizer)
    self._compiled = self._step.lower(self._state, self._grad).compile()

  def contender(self) -> Contender:
    """Returns it, as "optax" or "optax_huge_pages"."""
    if self._huge_pages:
      return Contender(name="optax_huge_pages", run=self._run, state=self._read)
    return Contender(
      name="optax", run=self._run, state=self._read, before=self._load_grad
    )

  def check_in_place(self) -> None:
    """Raises RuntimeError if a step has moved the state elsewhere."""
    before = set(self._ranges())
    self._run()
    if set(self._ranges()) != before:
      raise RuntimeError("optax's state moved in memory: donation failed")

  def _shared_grad(self) -> jax.Array:
    array = self._setting.grad(self._arrays)
    grad = jax.device_put(array)
    if grad.unsafe_buffer_pointer() != array.ctypes.data:
      raise RuntimeError("jax copied the gradients; optax would read old ones")
    return grad

  def _own_grad(self) -> jax.Array:
    return jnp.array(self._setting.grad(self._arrays), copy=True)

  def _load_grad(self) -> None:
    self._grad.delete()  # before there is another
    self._grad = jax.block_until_ready(self._own_grad())

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
