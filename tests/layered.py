"""Models of layers, with or without stages, whose backward can be watched."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from sojax.host.sink import GradientSink
from sojax.models.stage import Stage
from tests.training import VOCAB_SIZE


class Layer(nnx.Module):
  """A residual layer; something may happen where its gradient passes."""

  def __init__(self, dim, rngs, on_backward=None):
    self.linear = nnx.Linear(dim, dim, rngs=rngs)
    self.on_backward = on_backward

  def __call__(self, x):
    if self.on_backward is not None:
      x = _noticing(self.on_backward)(x)
    return x + nnx.gelu(self.linear(x))


@functools.cache
def _noticing(on_backward):
  """Is the identity; its backward calls a function on the host."""

  @jax.custom_vjp
  def identity(x):
    return x

  def call(gradient):
    on_backward()
    return gradient

  def backward(_, gradient):
    shape = jax.ShapeDtypeStruct(gradient.shape, gradient.dtype)
    return (jax.pure_callback(call, shape, gradient),)

  identity.defvjp(lambda x: (x, None), backward)
  return identity


@jax.custom_vjp
def fails_if(wanted, x):
  """Is x; its backward fails in XLA, without Python, where it is wanted."""
  return x


def _failing_backward(wanted, gradient):
  def fail(gradient):
    no_route = jnp.zeros((1,), jnp.int32)
    GradientSink.send(gradient, no_route, 0)
    return gradient

  return None, jax.lax.cond(wanted, fail, lambda x: x, gradient)


fails_if.defvjp(lambda wanted, x: (x, wanted), _failing_backward)


class Embed(nnx.Module):
  """An embedding whose backward may fail for batches with one token."""

  def __init__(self, dim, rngs, bad_token):
    self.table = nnx.Embed(VOCAB_SIZE, dim, rngs=rngs)
    self.bad_token = bad_token

  def __call__(self, tokens):
    x = self.table(tokens)
    if self.bad_token is None:
      return x
    return fails_if(jnp.any(tokens == self.bad_token), x)


class Head(nnx.Module):
  def __init__(self, dim, rngs):
    self.linear = nnx.Linear(dim, VOCAB_SIZE, rngs=rngs)

  def __call__(self, x):
    return self.linear(x)


class Whole(nnx.Module):
  """A model without stages: an embedding, layers, a head."""

  def __init__(self, *, dim=32, num_layers=4, on_backward=None, bad_token=None):
    rngs = nnx.Rngs(0)
    layers = [Layer(dim, rngs, on_backward)]
    layers += [Layer(dim, rngs) for _ in range(num_layers - 1)]
    self.layers = nnx.List(
      [Embed(dim, rngs, bad_token), *layers, Head(dim, rngs)]
    )

  def __call__(self, tokens):
    x = tokens
    for layer in self.layers:
      x = layer(x)
    return x


class Staged(Whole):
  """The same, layer by layer."""

  def stages(self):
    return [
      Stage(name=str(i), module=layer) for i, layer in enumerate(self.layers)
    ]
