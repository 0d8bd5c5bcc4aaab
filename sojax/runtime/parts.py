"""What carries out the tasks of a step, put together for one trainer."""

import functools

from sojax.graph.graph import TaskKind
from sojax.host.arena import Arena
from sojax.host.kernels import Pool, cpu_info
from sojax.host.numa import check_node
from sojax.host.sums import GradientSums
from sojax.host.wire import WorkingCopy
from sojax.plan.plan import Plan, WireDtypes
from sojax.plan.residency import Residency
from sojax.runtime.activations import Activations
from sojax.runtime.callback_out import CallbackOut
from sojax.runtime.compute import Compute
from sojax.runtime.executor import Action
from sojax.runtime.gradients_out import DmaOut, GradientsOut
from sojax.runtime.setup import Setup
from sojax.runtime.state import TrainState, check_values
from sojax.runtime.step import Step
from sojax.runtime.updates import DeviceUpdates, HostSums, HostUpdates
from sojax.runtime.validation import Validation, scalars_of_groups
from sojax.runtime.weights_in import Weights


class Parts:
  """The state, the weights, and whatever else the tasks of a step work on.

  Attributes:
    state: masters, moments, counters and other state.
    weights: the working weights, loaded.
    gradients_out: the way of gradients to the host.
    compute: forward, backward and evaluation.
  """

  def __init__(self, setup: Setup):
    """Takes the memory that the plan's account names, and starts the pool.

    Args:
      setup: the model, and the way it is trained.

    Raises:
      ValueError: if a parameter has no value that can be trained, a schedule
        gives no finite number, or this machine has not the plan's cores or NUMA
        node; nothing has been taken then.
      OSError: if the operating system does not grant memory, or the node.
    """
    plan, layout = setup.plan, setup.layout
    check_values(setup)
    scalars_of_groups(layout.model.groups, 0)
    if plan.numa_node is not None:
      check_node(plan.numa_node)
    self._setup = setup
    self._pool = make_pool(plan)
    self.gradients_out = _make_gradients_out(setup)
    # Pages come into RAM here, by the threads that will use them.
    make_arena = functools.partial(
      Arena, numa_node=plan.numa_node, pool=self._pool
    )
    working_copy = WorkingCopy(
      filter(Residency.of(layout, plan).is_copied, layout.buckets),
      WireDtypes.of(plan, setup.config).weight,
      setup.placement,
    )
    self.state = TrainState(setup, make_arena, working_copy)
    self.weights = Weights(setup, working_copy)
    self.weights.load(self.state.masters)
    self.compute = Compute(setup, self.weights, self.gradients_out)
    self._sums = None
    if plan.accumulate == "host":
      self._sums = GradientSums(layout, make_arena)
    self._validation = Validation(setup, self.state, self._sums)
    self._host_updates = HostUpdates(
      self.state.host,
      self.weights,
      self._pool,
      unclipped=self._validation.unclipped,
    )

  def actions(self) -> dict[TaskKind, Action]:
    """Returns how each kind of task is issued."""
    device = DeviceUpdates(self._setup, self.state, self.weights)
    activations = Activations(self._setup.placement)
    actions: dict[TaskKind, Action] = {
      TaskKind.HOST_SCALARS: self._validation.host_scalars,
      TaskKind.FORWARD: self.compute.forward,
      TaskKind.BACKWARD: self.compute.backward,
      TaskKind.GRAD_OUT: self.gradients_out.grad_out,
      TaskKind.VALIDATE: self._validation.validate,
      TaskKind.HOST_UPDATE: self._host_updates.host_update,
      TaskKind.HOST_SETTLE: self._host_updates.host_settle,
      TaskKind.DEVICE_UPDATE: device.device_update,
      TaskKind.WEIGHT_IN: self.weights.weight_in,
      TaskKind.WEIGHT_RESEND: self.weights.weight_in,
      TaskKind.ACTIVATION_OUT: activations.activation_out,
      TaskKind.ACTIVATION_IN: activations.activation_in,
    }
    if self._sums is not None:
      summing = HostSums(
        self._setup.layout,
        self._sums,
        self._pool,
        num_micro_batches=self._setup.config.accumulation,
      )
      actions[TaskKind.HOST_ACCUMULATE] = summing.host_accumulate
    return actions

  def take_back(self, step: Step) -> None:
    """Takes a step that failed before its validation out of the state.

    Nothing of it may run any more. Its buffers for weights are free again, and
    the weights those before it.
    """
    self._host_updates.take_back(step)
    if step.speculation.ran:
      self.weights.load(self.state.masters)

  def take_over_state(self) -> None:
    """Goes on from a state that has been replaced; no step may run."""
    self._host_updates.forget()
    self._validation.forget_skips()
    self.weights.load(self.state.masters)

  def close(self) -> None:
    """Ends the threads of the pool; may be called again. No step may run."""
    self.gradients_out.close()
    self._pool.close()


def make_pool(plan: Plan) -> Pool:
  """Starts the threads that a plan asks for.

  Raises:
    ValueError: if this machine has not the plan's cores.
  """
  cores = plan.pool_cores
  num_cores = cpu_info().cores if cores is None else len(cores)
  return Pool(plan.pool_threads or num_cores, cores=cores)


def _make_gradients_out(setup: Setup) -> GradientsOut:
  plan, layout, placement = setup.plan, setup.layout, setup.placement
  if plan.transport(layout.model.num_stages) == "dma":
    return DmaOut(placement, of_micro_batches=plan.accumulate == "host")
  return CallbackOut(layout, plan, setup.config, placement)
