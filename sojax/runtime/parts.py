"""What carries out the tasks of a step, put together for one trainer."""

from collections.abc import Mapping, Sequence

from sojax.cluster.mesh import Placement
from sojax.graph.graph import TaskKind
from sojax.host.kernels import Pool, cpu_info
from sojax.plan.buckets import Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan, WireDtypes
from sojax.programs.keep import KeepPrograms
from sojax.programs.split_model import SplitModel
from sojax.programs.stages import StagePrograms
from sojax.runtime.activations import Activations
from sojax.runtime.callback_out import CallbackOut
from sojax.runtime.compute import Compute
from sojax.runtime.executor import Action
from sojax.runtime.gradients_out import DmaOut, GradientsOut
from sojax.runtime.state import TrainState
from sojax.runtime.updates import DeviceUpdates, HostUpdates
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
    """Takes the memory that the plan's account names, and starts the pool."""
    self._layout = layout
    self._config = config
    self._placement = placement
    self._pool = Pool(plan.pool_threads or cpu_info().cores)
    self.state = TrainState(split, layout, config.active_loss_scale, placement)
    self.weights = make_weights(split, layout, plan, config, placement)
    self.weights.load(self.state.masters())
    self.gradients_out = _make_gradients_out(layout, plan, config, placement)
    self.compute = Compute(
      split, layout, programs, keep_programs, self.weights, self.gradients_out
    )

  def actions(self) -> dict[TaskKind, Action]:
    """Returns how each kind of task is issued."""
    layout, config, placement = self._layout, self._config, self._placement
    validation = Validation(self.state, layout.model.groups, config, placement)
    host = HostUpdates(layout, self.state, self.weights, self._pool)
    device = DeviceUpdates(
      layout, self.state, self.weights, config.working_dtype, placement
    )
    activations = Activations(placement)
    return {
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

  def close(self) -> None:
    """Ends the threads of the pool; may be called again. No step may run."""
    self.gradients_out.close()
    self._pool.close()


def _make_gradients_out(
  layout: Layout, plan: Plan, config: TrainConfig, placement: Placement
) -> GradientsOut:
  transport = plan.transport(layout.model.num_stages)
  if transport == "dma":
    return DmaOut(placement)
  grad_dtype = WireDtypes.of(plan, config).grad
  return CallbackOut(layout, transport, grad_dtype, placement)
