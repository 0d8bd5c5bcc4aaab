"""Training with plain `jax.jit` and optax: an oracle, and a pace to keep.

Nothing is offloaded and nothing overlaps. The model's stages are run one after
another in a single program; parameters are a dict by name, so that optimizer
masks see names and shapes.
"""

import functools
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from sojax.models.loss import Loss, loss_function
from sojax.models.stage import stages_of
from sojax.plan.config import TrainConfig

Variant = Literal["one_jit", "two_jits"]
Params = dict[str, jax.Array]


class StagedModel:
  """The stages of a model as one pure function of named parameters.

  Args:
    model: what to train; it is only read.
    loss: a loss of what the model returns, as the Trainer takes it.

  Attributes:
    params: its parameters, float32 copies, by "stage.path.to.leaf". A tied one
      is there once, under the name that its earliest stage gives it.
    other: all other state (keys and counts of dropout, ...) by stage, copies.
  """

  def __init__(self, model: nnx.Module, loss: Loss | None = None):
    self._loss = loss
    self.params: Params = {}
    self.other: list[nnx.State] = []
    self._graphdefs = []
    self._names: list[list[str]] = []
    self._treedefs = []
    owners: dict[int, str] = {}
    for stage in stages_of(model):
      graphdef, params, other = nnx.split(stage.module, nnx.Param, ...)
      names = []
      for path, param in nnx.to_flat_state(params):
        name = ".".join((stage.name, *map(str, path)))
        names.append(owners.setdefault(id(param), name))
        if names[-1] == name:
          self.params[name] = jnp.array(param[...], jnp.float32, copy=True)
      self.other.append(jax.tree.map(jnp.copy, other))
      self._graphdefs.append(graphdef)
      self._names.append(names)
      self._treedefs.append(jax.tree.structure(params))

  def loss_sum(
    self,
    params: Params,
    other: list[nnx.State],
    tokens: jax.Array,
    mask: jax.Array,
    *,
    remat: bool,
  ) -> tuple[jax.Array, list[nnx.State]]:
    """Runs all stages.

    Args:
      params: like the attribute, in the dtype to compute in.
      other: like the attribute.
      tokens: int32 [B, T + 1].
      mask: float32 [B, T].
      remat: whether backward recomputes the inside of each block instead of
        keeping it; the first and last stage keep theirs.

    Returns:
      The sum of mask times loss, a float32 scalar, and the new other state.
    """
    x = tokens[:, :-1]
    new_other = []
    last = len(self._names) - 1
    for i, names in enumerate(self._names):
      leaves = [params[name] for name in names]
      targets = (tokens[:, 1:], mask) if i == last else None
      run = functools.partial(self._run, i)
      if remat and 0 < i < last:
        run = jax.checkpoint(run)
      x, state = run(leaves, other[i], x, targets)
      new_other.append(state)
    return x, new_other

  def _run(self, i, leaves, other, x, targets):
    """Runs one stage; the last one to its loss."""
    params = jax.tree.unflatten(self._treedefs[i], leaves)
    # A copy: without, the module's counts are those of `other`.
    module = nnx.merge(self._graphdefs[i], params, other, copy=True)
    if targets is None:
      y = module(x)
    else:
      y = loss_function(module, self._loss)(x, *targets)
    return y, nnx.split(module, nnx.Param, ...)[2]


class Loop:
  """Trains a model by jit and optax alone.

  The loss of a step is the sum over its unmasked tokens divided by their number
  in the whole batch.

  Args:
    model: what to train; it is copied.
    optimizer: any optax transformation of a dict of float32 arrays by name. It
      sees gradients after clipping.
    config: batch, precision and clipping, as the Trainer takes them.
    variant: "one_jit" computes gradients, rematerialising each block, and
      updates in one program; "two_jits" keeps all activations and updates in a
      second program. Both donate all that they replace.
    loss: a loss of what the model returns, as the Trainer takes it.

  Attributes:
    params: the float32 parameters by name. Replaced, and the old ones deleted,
      by each step.
    opt_state: optax's state.
    other: state that is not trained, by stage.
  """

  def __init__(
    self,
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    *,
    variant: Variant = "two_jits",
    loss: Loss | None = None,
  ):
    if variant not in ("one_jit", "two_jits"):
      raise ValueError(f"variant={variant!r} is not one of one_jit, two_jits")
    self.config = config
    self.variant = variant
    self._staged = StagedModel(model, loss)
    self._optimizer = optimizer
    if config.clip_norm is not None:
      clip = optax.clip_by_global_norm(config.clip_norm)
      self._optimizer = optax.chain(clip, optimizer)
    self.params = self._staged.params
    self.other = self._staged.other
    self.opt_state = self._optimizer.init(self.params)
    self._jit_step = jax.jit(self._step, donate_argnums=(0, 1, 2))
    self._jit_gradients = jax.jit(self._gradients)
    self._jit_update = jax.jit(self._update, donate_argnums=(0, 1))

  def step(self, batch: Mapping[str, np.ndarray]) -> jax.Array:
    """Trains on a batch and returns its loss, without waiting for it.

    Args:
      batch: "tokens", int32 [accumulation * micro_batch, seq_len + 1], and
        optionally "loss_mask", [accumulation * micro_batch, seq_len].
    """
    tokens, mask = self._arrays(batch)
    if self.variant == "one_jit":
      self.params, self.opt_state, self.other, loss = self._jit_step(
        self.params, self.opt_state, self.other, tokens, mask
      )
      return loss
    loss, grads, self.other = self._jit_gradients(
      self.params, self.other, tokens, mask
    )
    self.params, self.opt_state = self._jit_update(
      self.params, self.opt_state, grads
    )
    return loss

  def loss_and_grads(
    self,
    batch: Mapping[str, np.ndarray],
    params: Mapping[str, Any] | None = None,
    other: list[nnx.State] | None = None,
  ) -> tuple[jax.Array, Params]:
    """Computes a step's loss and gradients and changes nothing.

    Args:
      batch: as in `step`.
      params: float32 arrays by name to compute at; copied before the call
        returns. None takes the loop's own.
      other: state that is not trained; None takes the loop's own.

    Returns:
      The loss and, by name, its float32 gradients, unclipped. With bf16 they
      are those of bfloat16 products, to which XLA may leave more bits.
    """
    if params is None:
      params = self.params
    else:
      params = {name: jnp.asarray(np.array(x)) for name, x in params.items()}
    loss, grads, _ = self._jit_gradients(
      params, self.other if other is None else other, *self._arrays(batch)
    )
    return loss, grads

  def _arrays(self, batch):
    """Returns tokens and mask of a batch, the mask float32."""
    tokens = batch["tokens"]
    shape = (
      self.config.accumulation * self.config.micro_batch,
      self.config.seq_len,
    )
    if tokens.shape != (shape[0], shape[1] + 1):
      raise ValueError(
        f"tokens has shape {tokens.shape} but the config asks for"
        f" {(shape[0], shape[1] + 1)}"
      )
    mask = batch.get("loss_mask")
    if mask is None:
      mask = np.ones(shape)
    return tokens, np.asarray(mask, np.float32)

  def _gradients(self, params, other, tokens, mask, *, remat=False):
    """Returns the loss, float32 gradients and the new other state."""
    if self.config.precision == "bf16":
      params = jax.tree.map(to_bfloat16, params)
    # A batch without a single unmasked token has a loss of 0.
    num_tokens = jnp.maximum(mask.sum(), 1.0)

    def mean_loss(params, other, tokens, mask):
      loss, other = self._staged.loss_sum(
        params, other, tokens, mask, remat=remat
      )
      return loss / num_tokens, other

    def micro_batch(carry, rows):
      loss, grads, other = carry
      (more_loss, other), more = jax.value_and_grad(mean_loss, has_aux=True)(
        params, other, *rows
      )
      more = jax.tree.map(lambda g: g.astype(jnp.float32), more)
      if grads is not None:
        more = jax.tree.map(jnp.add, grads, more)
      return (loss + more_loss, more, other), None

    num = self.config.accumulation
    if num == 1:
      return micro_batch((0.0, None, other), (tokens, mask))[0]
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    rows = (tokens, mask)
    rows = jax.tree.map(lambda x: x.reshape(num, -1, x.shape[-1]), rows)
    init = (jnp.float32(0.0), zeros, other)
    return jax.lax.scan(micro_batch, init, rows)[0]

  def _update(self, params, opt_state, grads):
    """Returns new parameters and optimizer state."""
    updates, opt_state = self._optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def _step(self, params, opt_state, other, tokens, mask):
    """Returns new parameters, optimizer state, other state and the loss."""
    loss, grads, other = self._gradients(
      params, other, tokens, mask, remat=True
    )
    params, opt_state = self._update(params, opt_state, grads)
    return params, opt_state, other, loss


def to_bfloat16(x: jax.Array) -> jax.Array:
  """Rounds float32 to the nearest bfloat16, ties away from zero.

  Any NaN becomes 0x7fc0.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  rounded = ((bits + jnp.uint32(0x8000)) >> 16).astype(jnp.uint16)
  rounded = jnp.where(jnp.isnan(x), jnp.uint16(0x7FC0), rounded)
  return jax.lax.bitcast_convert_type(rounded, jnp.bfloat16)
