"""Long sequences, divided over devices as in DeepSpeed-Ulysses: by formulas.

Plans have no seq axis yet, so that no step graph is simulated here. Each of P
devices holds 1/P of a sequence's positions, and of its attention 1/P of the
heads (Jacobs et al., arXiv 2309.14509); parameters, gradients and optimizer
states are sharded over the same devices.
"""

import dataclasses
from typing import Any

from experiments.flops import train_flops_per_token
from experiments.paper.constants import Constants
from experiments.paper.scale import train_config, workload
from sojax.models import presets
from sojax.plan.hardware import HardwareProfile
from sojax.planner.problem import Problem

_STEP_TOKENS = 1 << 12
"""Lengths are multiples of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """What is on the device while a long sequence is trained.

  Attributes:
    name: what it is called.
    state_bytes: of each parameter, sharded: weights, gradients, masters and
      moments.
    offloads_inputs: whether the stages' inputs wait in the host's memory.
  """

  name: str
  state_bytes: int
  offloads_inputs: bool


METHODS = (
  Method(name="Ulysses", state_bytes=16, offloads_inputs=False),
  Method(name="offloaded optimizer", state_bytes=2, offloads_inputs=False),
  Method(name="offloaded inputs, too", state_bytes=2, offloads_inputs=True),
)


def device_bytes(
  method: Method, name: str, num_tokens: int, num_ranks: int
) -> float:
  """Returns the bytes of a device.

  Sharded states; the inputs of all stages, or of three (plan/account.py); what
  one block's backward keeps, and once more while heads are exchanged: a block's
  queries, keys, values and output; gathered weights of two blocks and their
  gradients in float32; logits of 2048 positions, float32 and twice.
  """
  shape = presets.gpt(name)
  D, L = shape.hidden_dim, shape.num_layers
  config = train_config(1, 1024)
  kept = workload(name, config, 1).stages[1].kept_bytes / config.seq_len
  tokens = num_tokens / num_ranks
  inputs = 3 if method.offloads_inputs else L + 1
  return (
    method.state_bytes * presets.num_params(shape) / num_ranks
    + tokens * (2 * D * inputs + kept + 4 * 2 * D)
    + 12 * D**2 * (2 * 2 + 6)
    + 2 * 4 * 2048 * shape.vocab_size
  )


def longest(
  method: Method, name: str, num_ranks: int, machine: HardwareProfile
) -> int:
  """Returns the longest sequence that fits the devices, and the hosts."""
  shape = presets.gpt(name)
  config = train_config(1, 1024)
  work = workload(name, config, 1)
  available = Problem(
    workload=work, config=config, profile=machine
  ).available_bytes
  low, high = 0, 1 << 14  # in steps
  while high - low > 1:
    middle = (low + high) // 2
    tokens = middle * _STEP_TOKENS
    on_device = device_bytes(method, name, tokens, num_ranks)
    on_host = (16 - method.state_bytes) * presets.num_params(shape)
    if method.offloads_inputs:
      on_host += 2 * shape.hidden_dim * shape.num_layers * tokens
    fits = (
      on_device <= available["device"]
      and on_host / num_ranks <= available["host"]
    )
    low, high = (middle, high) if fits else (low, middle)
  return low * _STEP_TOKENS


def step_s(
  method: Method,
  name: str,
  num_tokens: int,
  num_ranks: int,
  constants: Constants,
  attention_share: float,
) -> float:
  """Returns seconds of a step of one sequence.

  The device computes: a forward and its recomputation, two forwards' worth for
  the gradients of linear layers, and two and a half for attention's, which is
  causal. What the host does for it is hidden if it is shorter: the update of
  all parameters, and both moves of the inputs. Exchanges of heads, of which
  there are four in each of forward, recomputation and backward, and of weights
  are not hidden.

  Args:
    method: what is offloaded.
    name: the model.
    num_tokens: of the sequence.
    num_ranks: devices.
    constants: the machine's.
    attention_share: of the peak that attention's kernels reach.
  """
  shape = presets.gpt(name)
  machine = constants.machine(num_ranks)
  peak = machine.device_flops["float16"]
  D, L = shape.hidden_dim, shape.num_layers
  tokens = num_tokens / num_ranks
  linear = 2 * tokens * (12 * L * D**2)
  head = 6 * tokens * shape.vocab_size * D
  attention = 4 * tokens * num_tokens * D * L / 2
  computed_s = (4 * linear + head) / (peak * machine.efficiency.at(1e12)) + (
    4.5 * attention / (peak * attention_share)
  )
  passing = (num_ranks - 1) / num_ranks
  exchanged = 3 * 4 * L * 2 * D * tokens * passing
  gathered = (3 * 2 + 4) * presets.num_params(shape) * passing
  network_s = (exchanged + gathered) / machine.network_bandwidth
  host_s = 0.0
  if method.state_bytes < 16:
    params = presets.num_params(shape) / num_ranks
    host_s = constants.grace_s_per_param * params
  link_s = 0.0
  if method.offloads_inputs:
    inputs = 2 * D * L * tokens
    link_s = inputs / machine.d2h.at(inputs) + inputs / machine.h2d.at(inputs)
  return max(computed_s + network_s, host_s, link_s)


def sequence_rows(
  name: str, constants: Constants, attention_share: float
) -> list[dict[str, Any]]:
  """Returns the longest sequences on 4 and 8 devices, and their MFU.

  MFU counts attention in full, as the throughput does elsewhere, and once more
  halved for its mask.
  """
  rows = []
  for num_ranks in (4, 8):
    machine = constants.machine(num_ranks)
    for method in METHODS:
      tokens = longest(method, name, num_ranks, machine)
      seconds = step_s(
        method, name, tokens, num_ranks, constants, attention_share
      )
      shape = presets.gpt(name)
      whole = train_flops_per_token(shape, tokens)
      masked = whole - 6 * shape.num_layers * tokens * shape.hidden_dim
      at_peak_s = tokens / num_ranks / machine.device_flops["float16"]
      rows.append(
        {
          "method": method.name,
          "ranks": num_ranks,
          "tokens": tokens,
          "step_s": seconds,
          "mfu": whole * at_peak_s / seconds,
          "mfu_masked": masked * at_peak_s / seconds,
        }
      )
  return rows
