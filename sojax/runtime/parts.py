"""What carries out the tasks of a step, put together for one trainer."""

from collections.abc import Mapping, Sequence

from sojax.cluster.mesh import Placement
from sojax.graph.graph import TaskKind
from sojax.host.kernels import Pool, cpu_info
from sojax.host.sums import GradientSums
from sojax.plan.buckets import Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan
from sojax.programs.keep import KeepPrograms
from sojax.programs.split_model import SplitModel
from sojax.programs.stages import StagePrograms
from sojax.runtime.activations import Activations
from sojax.runtime.callback_out import CallbackOut
from sojax.runtime.compute import Compute
from sojax.runtime.executor import Action
from sojax.runtime.gradients_out import DmaOut, GradientsOut
from sojax.runtime.state import TrainState
from sojax.runtime.updates import DeviceUpdates, HostSums, HostUpdates
from sojax.runtime.validation import Validation
from sojax.runtime.weights_in import make_weights


class Parts:
  """The state, the weights, and whatever else the tasks of a step work on.

  Attributes:
    state: masters, moments, counters and other state.
    weights: the working weights, loaded.
    gradients_out: the way of gradients to the host.
    compute: forward, backward and evaluation.
  """

  def __init__(
    self,
    split: SplitModel,
    layout: Layout,
    plan: Plan,
    config: TrainConfig,
    programs: Sequence[StagePrograms],
    keep_programs: Mapping[int, KeepPrograms],
    placement: Placement,
  ):
    """Takes the memory that the plan's account names, and starts the pool.

    Raises:
      ValueError: if the way of gradients to the host is not one for as many
        devices, or a schedule gives no finite number.
    """
    self._layout = layout
    self._plan = plan
    self._config = config
    self._placement = placement
    self.gradients_out = _make_gradients_out(layout, plan, config, placement)
    self._pool = Pool(plan.pool_threads or cpu_info().cores)
    self.state = TrainState(split, layout, config.active_loss_scale, placement)
    self.weights = make_weights(split, layout, plan, config, placement)
    self.weights.load(self.state.masters())
    self.compute = Compute(
      split, layout, programs, keep_programs, self.weights, self.gradients_out
    )

  def actions(self) -> dict[TaskKind, Action]:
    """Returns how each kind of task is issued."""
    layout, config, placement = self._layout, self._config, self._placement
    sums = GradientSums(layout) if self._plan.accumulate == "host" else None
    validation = Validation(
      self.state, layout.model.groups, config, sums, placement
    )
    host = HostUpdates(layout, self.state, self.weights, self._pool)
    device = DeviceUpdates(
      layout, self.state, self.weights, config.working_dtype, placement
    )
    activations = Activations(placement)
    actions: dict[TaskKind, Action] = {
      TaskKind.FORWARD: self.compute.forward,
      TaskKind.BACKWARD: self.compute.backward,
      TaskKind.GRAD_OUT: self.gradients_out.grad_out,
      TaskKind.VALIDATE: validation.validate,
      TaskKind.HOST_UPDATE: host.host_update,
      TaskKind.DEVICE_UPDATE: device.device_update,
      TaskKind.WEIGHT_IN: self.weights.weight_in,
      TaskKind.ACTIVATION_OUT: activations.activation_out,
      TaskKind.ACTIVATION_IN: activations.activation_in,
    }
    if sums is not None:
      summing = HostSums(layout, sums, self._pool)
      actions[TaskKind.HOST_ACCUMULATE] = summing.host_accumulate
    return actions

  def close(self) -> None:
    """Ends the threads of the pool; may be called again. No step may run."""
    self.gradients_out.close()
    self._pool.close()


def _make_gradients_out(
  layout: Layout, plan: Plan, config: TrainConfig, placement: Placement
) -> GradientsOut:
  if plan.transport(layout.model.num_stages) == "dma":
    return DmaOut(placement, of_micro_batches=plan.accumulate == "host")
  return CallbackOut(layout, plan, config, placement)
