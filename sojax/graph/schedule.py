"""Turns a layout and a plan into the graph of one step.

    Forward(stage) -> ... -> Backward(stage) -> GradOut(bucket) --.
                                  |                               v
                                  `--> Validate ------------> HostUpdate(bucket)
                                          |                       v
                                          `-> DeviceUpdate    WeightIn(bucket)
                                                   `-> next Forward(stage) <-'

If the host adds up the micro-batches, each one's gradients go out, and the host
is one or two of them behind at most (k, `Plan.num_grads_on_host`):

    Backward(stage, m) -> GradOut(bucket, m) -> HostAccumulate(bucket, m)
                              Backward(stage, m + k) <-'       |
                    after the last: Validate, HostUpdate <-----'

Where Backward itself delivers its gradients to the host, GradOut begins when
Backward does, not after it.

The last stage has no Forward of its own: its Backward computes the loss and its
gradients at once. The input of a stage that offloads leaves while its Forward
runs, and comes back while the Backward of the stage after it runs:

    Forward(i-1) -> ActivationOut(i) -> Forward(i+1)
                         `-> ActivationIn(i) -> Backward(i)
             Backward(i+2) ---^
"""

import dataclasses
from collections.abc import Iterable, Sequence

from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.plan.buckets import Bucket, Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan, WireDtypes


def schedule(
  layout: Layout,
  plan: Plan,
  config: TrainConfig,
  stage_input_bytes: Sequence[int],
) -> StepGraph:
  """Returns the step graph of a plan.

  Args:
    layout: the model cut into buckets.
    plan: how the step is carried out.
    config: what is trained; gives the number of micro-batches.
    stage_input_bytes: bytes of each stage's input for one micro-batch.

  Returns:
    The tasks of one step in schedule order, with their dependencies.

  Raises:
    ValueError: if the plan's activations are those of another number of stages.
  """
  builder = _Builder(layout, plan, config, stage_input_bytes)
  if plan.weights == "flow":
    builder.add_flowing_compute()
  else:
    builder.add_stationary_compute()
  builder.add_updates()
  builder.add_edges_to_next_step()
  return StepGraph(tuple(builder.tasks))


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
  """One program that computes with a stage's weights."""

  kind: TaskKind
  stage: int
  micro: int


class _Builder:
  """Adds tasks in schedule order."""

  def __init__(
    self,
    layout: Layout,
    plan: Plan,
    config: TrainConfig,
    stage_input_bytes: Sequence[int],
  ):
    self.tasks: list[Task] = []
    self._layout = layout
    self._plan = plan
    self._config = config
    self._wire = WireDtypes.of(plan, config)
    self._input_bytes = stage_input_bytes
    policies = plan.activations_by_stage(layout.model.num_stages)
    self._offloading = {
      stage for stage, policy in enumerate(policies) if policy == "offload"
    }
    self._uses: list[int] = []
    self._fetches: list[list[int]] = []
    self._grads: dict[int, int] = {}
    self._on_host: dict[int, int] = {}
    self._num_on_host = plan.num_grads_on_host(
      layout.model.num_stages, config.accumulation
    )
    transport = plan.transport(layout.model.num_stages)
    self._delivers_itself = transport != "dma"
    self._delivered_by: dict[int, int] = {}
    self._accumulates: dict[tuple[int, int], list[int]] = {}
    self._host_updates: dict[int, int] = {}
    self._arrivals: dict[int, int] = {}
    self._inputs_out: dict[int, int] = {}
    self._inputs_in: dict[int, int] = {}

  def add_stationary_compute(self) -> None:
    for use in self._uses_in_order():
      self._add_use(use, arrivals=())

  def add_flowing_compute(self) -> None:
    """Adds every use and, ahead of it, the transfers of its weights.

    At most `flow_window` uses have their weights on the device: the transfers
    of use u wait for the end of use u - flow_window. They are scheduled after
    use u - flow_window + 1, so that the device has work while they wait.
    """
    uses = list(self._uses_in_order())
    window = min(self._plan.flow_window, len(uses))
    for use in uses[:window]:
      self._add_fetch(use, frees=())
    for place, use in enumerate(uses):
      self._add_use(use, arrivals=self._fetches[place])
      ahead = place + window - 1
      if window <= ahead < len(uses):
        self._add_fetch(uses[ahead], frees=(self._uses[ahead - window],))

  def add_updates(self) -> None:
    last_micro = self._config.accumulation - 1
    added_up = [
      index
      for (_, micro), indices in self._accumulates.items()
      for index in indices
      if micro == last_micro
    ]
    validate = self._add(
      TaskKind.VALIDATE, Lane.DEVICE, deps=(*self._grads.values(), *added_up)
    )
    trained = [b for b in self._layout.buckets if b.trained]
    for bucket in trained:
      if bucket.on_device:
        deps = (self._grads[bucket.stage], validate)
        self._arrivals[bucket.index] = self._add(
          TaskKind.DEVICE_UPDATE, Lane.DEVICE, bucket=bucket, deps=deps
        )
        continue
      deps = (self._on_host[bucket.index], validate)
      update = self._add(
        TaskKind.HOST_UPDATE, Lane.HOST, bucket=bucket, deps=deps
      )
      self._host_updates[bucket.index] = update
      if self._plan.weights == "stationary":
        self._arrivals[bucket.index] = self._add(
          TaskKind.WEIGHT_IN,
          Lane.H2D,
          bucket=bucket,
          deps=(update,),
          bytes=bucket.size * self._wire.weight_bytes,
        )

  def add_edges_to_next_step(self) -> None:
    """Adds what the first uses of weights wait for in the previous step."""
    (validate,) = (t.index for t in self.tasks if t.kind is TaskKind.VALIDATE)
    self._carry(self._uses[0], [validate])
    self._carry(validate, [validate])
    for use in self._uses:
      stage = self.tasks[use].stage
      assert stage is not None
      buckets = self._layout.used_by(stage)
      arrivals = [self._arrivals.get(bucket.index) for bucket in buckets]
      self._carry(use, arrivals)
    for out, backward in self._delivered_by.items():
      self._carry(out, self.tasks[backward].prev_deps)
    window = min(self._plan.flow_window, len(self._uses))
    for place, fetches in enumerate(self._fetches):
      for fetch in fetches:
        bucket = self.tasks[fetch].bucket
        assert bucket is not None
        self._carry(fetch, [self._host_updates.get(bucket)])
        if place < window:
          self._carry(fetch, [self._uses[place - window]])

  def _carry(self, task: int, edges: Iterable[int | None]) -> None:
    known = tuple(edge for edge in edges if edge is not None)
    before = self.tasks[task].prev_deps
    self.tasks[task] = dataclasses.replace(
      self.tasks[task], prev_deps=before + known
    )

  def _uses_in_order(self) -> Iterable[_Use]:
    last = self._layout.model.num_stages - 1
    for micro in range(self._config.accumulation):
      for stage in range(last):
        yield _Use(TaskKind.FORWARD, stage, micro)
      for stage in reversed(range(last + 1)):
        yield _Use(TaskKind.BACKWARD, stage, micro)

  def _add_use(self, use: _Use, arrivals: Sequence[int]) -> None:
    deps = (*self._uses[-1:], *arrivals, *self._inputs_before(use))
    index = self._add(
      use.kind,
      Lane.DEVICE,
      stage=use.stage,
      micro=use.micro,
      deps=(*deps, *self._sums_before(use)),
    )
    self._uses.append(index)
    if use.kind is TaskKind.BACKWARD:
      self._grads[use.stage] = index
      self._send_gradients(use)
    self._move_inputs(use)

  def _send_gradients(self, use: _Use) -> None:
    """Adds what becomes of a backward's gradients on the host.

    Those of one micro-batch reach the host lane, which is serial, before those
    of the next; and all sums of a step before its updates. So a step's updates
    have read the sums when the next step begins them anew.
    """
    last_micro = use.micro == self._config.accumulation - 1
    on_host = self._plan.accumulate == "host"
    if not last_micro and not on_host:
      return
    backward = self._uses[-1]
    begins_with = self.tasks[backward].deps
    for bucket in self._layout.of_stage(use.stage):
      if not bucket.trained or bucket.on_device:
        continue
      index = self._add(
        TaskKind.GRAD_OUT,
        Lane.D2H,
        bucket=bucket,
        micro=use.micro,
        deps=begins_with if self._delivers_itself else (backward,),
        bytes=bucket.size * self._wire.grad_bytes,
      )
      if self._delivers_itself:
        self._delivered_by[index] = backward
      if on_host:
        index = self._add(
          TaskKind.HOST_ACCUMULATE,
          Lane.HOST,
          bucket=bucket,
          micro=use.micro,
          deps=(index,),
        )
        self._accumulates.setdefault((use.stage, use.micro), []).append(index)
      self._on_host[bucket.index] = index

  def _sums_before(self, use: _Use) -> Sequence[int]:
    """Returns the sums that give their place on the host to a backward."""
    if use.kind is not TaskKind.BACKWARD:
      return ()
    return self._accumulates.get((use.stage, use.micro - self._num_on_host), ())

  def _inputs_before(self, use: _Use) -> Iterable[int]:
    """Returns which moves of stage inputs a use waits for.

    Backward waits for its own input. Forward waits until that of the stage
    before it has left, so that in forward the device has three of them at most:
    what Forward of the stage before still reads, the input, and the output.
    """
    if use.kind is TaskKind.BACKWARD and use.stage in self._offloading:
      yield self._inputs_in[use.stage]
    if use.kind is TaskKind.FORWARD and use.stage - 1 in self._offloading:
      yield self._inputs_out[use.stage - 1]

  def _move_inputs(self, use: _Use) -> None:
    """Adds the moves of stage inputs that are scheduled after a use.

    Forward's output leaves if the next stage offloads its input. What the next
    use, a Backward, needs comes in while this one runs, after the end of the
    one before: two such inputs are on the device at most.
    """
    if use.kind is TaskKind.FORWARD and use.stage + 1 in self._offloading:
      stage = use.stage + 1
      self._inputs_out[stage] = self._add(
        TaskKind.ACTIVATION_OUT,
        Lane.D2H,
        stage=stage,
        micro=use.micro,
        deps=self._uses[-1:],
        bytes=self._input_bytes[stage],
      )
    if use.kind is TaskKind.BACKWARD and use.stage - 1 in self._offloading:
      stage = use.stage - 1
      self._inputs_in[stage] = self._add(
        TaskKind.ACTIVATION_IN,
        Lane.H2D,
        stage=stage,
        micro=use.micro,
        deps=(self._inputs_out[stage], self._uses[-2]),
        bytes=self._input_bytes[stage],
      )

  def _add_fetch(self, use: _Use, frees: Sequence[int]) -> None:
    self._fetches.append(
      [
        self._add(
          TaskKind.WEIGHT_IN,
          Lane.H2D,
          stage=use.stage,
          bucket=bucket,
          micro=use.micro,
          deps=frees,
          bytes=bucket.size * self._wire.weight_bytes,
        )
        for bucket in self._layout.used_by(use.stage)
      ]
    )

  def _add(
    self,
    kind: TaskKind,
    lane: Lane,
    *,
    stage: int | None = None,
    bucket: Bucket | None = None,
    micro: int = 0,
    deps: Iterable[int] = (),
    bytes: int = 0,
  ) -> int:
    index = len(self.tasks)
    if bucket is not None and stage is None:
      stage = bucket.stage
    self.tasks.append(
      Task(
        index=index,
        kind=kind,
        lane=lane,
        stage=stage,
        bucket=None if bucket is None else bucket.index,
        micro=micro,
        deps=tuple(deps),
        bytes=bytes,
      )
    )
    return index
