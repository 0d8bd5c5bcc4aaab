"""Counting jaxprs: shapes of which the figures can be worked by hand."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sojax.programs.count import count_bytes, count_flops, read_arguments


def array(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def flops(function, *arguments):
  return count_flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def num_bytes(function, *arguments):
  return count_bytes(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_a_product_of_matrices_takes_two_for_each_multiplication():
  assert flops(jnp.matmul, array(3, 5), array(5, 7)) == 2 * 3 * 5 * 7


def test_a_batched_product_counts_its_batch():
  ours = functools.partial(jnp.einsum, "bij,bjk->bik")
  assert flops(ours, array(11, 3, 5), array(11, 5, 7)) == 11 * 2 * 3 * 5 * 7


def test_a_convolution_counts_its_kernel_for_each_output():
  def ours(x, kernel):
    return lax.conv_general_dilated(
      x,
      kernel,
      (1,),
      "VALID",
      dimension_numbers=("NWC", "WIO", "NWC"),
      feature_group_count=2,
    )

  # 10 - 3 + 1 = 8 places; each of 6 features sees 3 places of 2 channels.
  assert flops(ours, array(1, 10, 4), array(3, 2, 6)) == 2 * 8 * 6 * 3 * 2


def test_gradients_count_what_they_compute():
  def ours(w, x):
    return jnp.sum(jnp.square(x @ w))

  once = 2 * 3 * 5 * 7
  both = jax.grad(ours, argnums=(0, 1))
  assert flops(both, array(5, 7), array(3, 5)) == 3 * once
  assert flops(jax.grad(ours), array(5, 7), array(3, 5)) == 2 * once


def test_what_no_result_needs_is_not_counted():
  def ours(x):
    _ = x @ x
    return x + 1

  assert flops(ours, array(5, 5)) == 0


def test_a_scan_counts_for_each_time_and_nests():
  def inner(x):
    return lax.scan(lambda c, _: (c @ c, None), x, None, length=3)[0]

  def ours(x):
    return lax.scan(lambda c, _: (inner(c), None), x, None, length=4)[0]

  assert flops(ours, array(5, 5)) == 4 * 3 * 250


def test_a_loop_to_a_scans_index_counts_its_exact_number_of_times():
  def ours(x):
    def body(carry, i):
      return lax.fori_loop(0, i, lambda _, c: c @ c, carry), None

    return lax.scan(body, x, jnp.arange(6))[0]

  assert flops(ours, array(5, 5)) == (0 + 1 + 2 + 3 + 4 + 5) * 250


def test_a_loop_outside_of_scans_counts_once_and_moves_nothing():
  def ours(x, n):
    return lax.fori_loop(0, n, lambda _, c: c @ c, x)

  assert flops(ours, array(5, 5), array(dtype=jnp.int32)) == 250
  moved = num_bytes(ours, array(5, 5), array(dtype=jnp.int32))
  assert moved == 4 * 25  # the result


def test_a_cond_counts_its_largest_branch():
  def ours(x, flag):
    return lax.cond(flag, lambda x: x @ x @ x, lambda x: x @ x, x)

  assert flops(ours, array(5, 5), array(dtype=jnp.bool_)) == 500


def test_jit_remat_and_custom_derivatives_are_looked_into():
  @jax.custom_vjp
  def square(x):
    return x @ x

  square.defvjp(lambda x: (x @ x, x), lambda x, dy: (dy @ x + x @ dy,))
  assert flops(jax.jit(square), array(5, 5)) == 250
  both = jax.value_and_grad(lambda x: jnp.sum(square(x)))
  assert flops(both, array(5, 5)) == 3 * 250
  again = jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: x @ x)(x)))
  assert flops(again, array(5, 5)) == 2 * 250

  @jax.custom_jvp
  def cube(x):
    return x @ x @ x

  cube.defjvp(lambda x, dx: (cube(*x), dx[0]))
  assert flops(cube, array(5, 5)) == 500


def test_bytes_are_those_of_operands_and_results_by_dtype():
  ours = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
  a, b = array(3, 5, dtype=jnp.bfloat16), array(5, 7, dtype=jnp.bfloat16)
  assert num_bytes(ours, a, b) == 2 * 15 + 2 * 35 + 4 * 21


def test_bytes_of_other_results_are_written_once():
  assert num_bytes(lambda x: jnp.exp(x) + 1, array(3, 5)) == 4 * 15


def test_a_gather_reads_what_it_returns_and_a_scatter_writes_all():
  tokens = array(4, dtype=jnp.int32)
  gathered = num_bytes(lambda t, i: t[i], array(100, 8), tokens)
  assert gathered < 3 * 4 * 4 * 8  # never the table
  grad = jax.grad(lambda t, i: jnp.sum(t[i] * 2))
  scattered = num_bytes(grad, array(100, 8), tokens)
  assert 4 * 100 * 8 < scattered < 4 * 100 * 8 + 5 * 4 * 4 * 8


def test_read_arguments_are_those_that_results_depend_on():
  jaxpr = jax.make_jaxpr(lambda a, b, c: (a @ c, b @ b)[0])(
    *[array(5, 5)] * 3
  ).jaxpr
  assert read_arguments(jaxpr, 3) == {0, 2}
  assert read_arguments(jaxpr, 2) == {0}
