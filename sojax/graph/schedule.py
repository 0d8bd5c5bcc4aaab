"""Turns a layout and a plan into the graph of one step.

    Forward(stage) -> ... -> Backward(stage) -> GradOut(bucket) --.
                                  |                               v
                                  `--> Validate ------------> HostUpdate(bucket)
                                          |                       v
                                          `-> DeviceUpdate    WeightIn(bucket)
                                                   `-> next Forward(stage) <-'

What needs Validate follows it in the order in which the next step needs its
weights. A bucket whose update can be taken back does not wait for it: it is
updated as soon as its gradients are there, and settled afterwards. That commits
the update, or takes it back, perhaps to take it again with the clip scale, or
is the update, if speculation had ended before its turn; then the new weights
are sent again:

    GradOut(bucket) -> HostUpdate(bucket) -> WeightIn(bucket) -----.
                            v                                      v
         Validate -> HostSettle(bucket) -> WeightResend(bucket) -> next Forward

Gradients that are parked on the device leave it in that order, too, a few of
them ahead of the updates: `Plan.ring_slots` buckets have a place on the host.

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

Weights that flow come in ahead of their use, from the host's copy of them, once
an earlier use has made room; see `sojax.graph.flow`:

    use that is flow_window before -> WeightIn(bucket) -> Forward or Backward
             the step before's HostUpdate(bucket) ---^
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from sojax.graph.flow import Fetch, Use, plan_fetches, uses_of_step
from sojax.graph.graph import Lane, StepGraph, Task, TaskKind
from sojax.plan.buckets import Bucket, Layout
from sojax.plan.config import TrainConfig
from sojax.plan.plan import Plan, WireDtypes
from sojax.plan.records import speculating_buckets
from sojax.plan.residency import Residency


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
    ValueError: if the plan's weights or activations are those of another number
      of stages, or weights of device buckets flow.
  """
  builder = _Builder(layout, plan, config, stage_input_bytes)
  builder.add_scalars()
  builder.add_compute()
  builder.add_updates()
  builder.add_edges_to_next_step()
  return StepGraph(tuple(builder.tasks))


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
    self._residency = Residency.of(layout, plan)
    self._input_bytes = stage_input_bytes
    policies = plan.activations_by_stage(layout.model.num_stages)
    self._offloading = {
      stage for stage, policy in enumerate(policies) if policy == "offload"
    }
    self._scalars = -1
    self._uses: list[int] = []
    self._fetches: list[tuple[Fetch, list[int]]] = []
    self._grads: dict[int, int] = {}
    self._on_host: dict[int, int] = {}
    self._num_on_host = plan.num_grads_on_host(
      layout.model.num_stages, config.accumulation
    )
    transport = plan.transport(layout.model.num_stages)
    self._delivers_itself = transport != "dma"
    self._delivered_by: dict[int, int] = {}
    self._leaving: list[list[int]] = []
    self._accumulates: dict[tuple[int, int], list[int]] = {}
    self._speculating = {
      bucket.index for bucket in speculating_buckets(layout, plan)
    }
    self._updates: dict[int, int] = {}
    self._arrivals: dict[int, tuple[int, ...]] = {}
    self._inputs_out: dict[int, int] = {}
    self._inputs_in: dict[int, int] = {}

  def add_scalars(self) -> None:
    """Adds the evaluation of the schedules, which needs the count.

    On the host lane it comes before all updates of the step.
    """
    self._scalars = self._add(TaskKind.HOST_SCALARS, Lane.HOST)

  def add_compute(self) -> None:
    """Adds every use and, ahead of it, the transfers of weights that flow."""
    num_stages = self._layout.model.num_stages
    uses = [*uses_of_step(num_stages, self._config.accumulation)]
    fetches = collections.deque(
      plan_fetches(uses, self._residency, self._plan.flow_window)
    )
    arriving: dict[int, list[int]] = {}
    for place, use in enumerate(uses):
      while fetches and fetches[0].before <= place:
        fetch = fetches.popleft()
        arriving[fetch.use] = self._add_fetch(fetch, uses[fetch.use])
      self._add_use(use, arrivals=arriving.get(place, ()))

  def add_updates(self) -> None:
    """Adds Validate and what waits for it.

    The next Forward needs the weights first that backward has finished last.
    """
    last_micro = self._config.accumulation - 1
    added_up = [
      index
      for (_, micro), indices in self._accumulates.items()
      for index in indices
      if micro == last_micro
    ]
    validate = self._add(
      TaskKind.VALIDATE,
      Lane.DEVICE,
      deps=(*self._grads.values(), *added_up, self._scalars),
    )
    for bucket in reversed(self._layout.buckets):
      if bucket.on_device:
        update = self._add(
          TaskKind.DEVICE_UPDATE,
          Lane.DEVICE,
          bucket=bucket,
          deps=(self._grads[bucket.stage], validate),
        )
        self._arrivals[bucket.index] = (update,)
    on_host = [*reversed(self._layout.updated_by_host)]
    if self._plan.park == "device":
      self._update_parked(on_host, validate)
      return
    for bucket in on_host:
      if bucket.index in self._speculating:
        self._settle(bucket, validate)
      else:
        self._update(bucket, (self._on_host[bucket.index], validate))

  def _update_parked(self, buckets: Sequence[Bucket], validate: int) -> None:
    """Adds updates, and gradients that leave a few buckets ahead of them."""
    window = self._plan.ring_slots
    last_micro = self._config.accumulation - 1
    for bucket in buckets[:window]:
      self._send_bucket(bucket, (self._grads[bucket.stage],), micro=last_micro)
    for place, bucket in enumerate(buckets):
      self._update(bucket, (self._on_host[bucket.index], validate))
      freed_by = self._updates[bucket.index]
      for ahead in buckets[place + window : place + window + 1]:
        deps = (self._grads[ahead.stage], freed_by)
        self._send_bucket(ahead, deps, micro=last_micro)

  def _update(self, bucket: Bucket, deps: Sequence[int]) -> None:
    """Adds a bucket's update, and the way of its new weights."""
    update = self._add(
      TaskKind.HOST_UPDATE, Lane.HOST, bucket=bucket, deps=deps
    )
    self._updates[bucket.index] = update
    if not self._residency.flows(bucket):
      arrival = self._add(
        TaskKind.WEIGHT_IN,
        Lane.H2D,
        bucket=bucket,
        deps=(update,),
        bytes=bucket.size * self._wire.weight_bytes,
      )
      self._arrivals[bucket.index] = (arrival,)

  def _settle(self, bucket: Bucket, validate: int) -> None:
    """Adds what becomes of an update that ran ahead of Validate.

    It needs no edge to the next step's update: on the host lane it comes first.
    """
    deps = [self._updates[bucket.index], validate]
    flows = self._residency.flows(bucket)
    if self._residency.is_copied(bucket) and not flows:
      deps += self._arrivals[bucket.index]  # it is sent from in place
    settle = self._add(
      TaskKind.HOST_SETTLE, Lane.HOST, bucket=bucket, deps=deps
    )
    self._updates[bucket.index] = settle
    if not flows:
      resend = self._add(
        TaskKind.WEIGHT_RESEND, Lane.H2D, bucket=bucket, deps=(settle,)
      )
      # Mostly nothing is sent again: then what was sent before has to arrive.
      self._arrivals[bucket.index] += (resend,)

  def add_edges_to_next_step(self) -> None:
    """Adds what the first uses of weights wait for in the previous step."""
    (validate,) = (t.index for t in self.tasks if t.kind is TaskKind.VALIDATE)
    self._carry(self._uses[0], [validate])
    self._carry(validate, [validate])
    self._carry(self._scalars, [validate])
    for use in self._uses:
      stage = self.tasks[use].stage
      assert stage is not None
      buckets = self._layout.used_by(stage)
      for bucket in buckets:
        self._carry(use, self._arrivals.get(bucket.index, ()))
    for out, backward in self._delivered_by.items():
      self._carry(out, self.tasks[backward].prev_deps)
    for fetch, transfers in self._fetches:
      for bucket, transfer in zip(fetch.buckets, transfers, strict=True):
        self._carry(transfer, [self._updates.get(bucket.index)])
        if fetch.frees < 0:
          self._carry(transfer, [self._uses[fetch.frees]])

  def _carry(self, task: int, edges: Iterable[int | None]) -> None:
    known = tuple(edge for edge in edges if edge is not None)
    before = self.tasks[task].prev_deps
    self.tasks[task] = dataclasses.replace(
      self.tasks[task], prev_deps=before + known
    )

  def _add_use(self, use: Use, arrivals: Sequence[int]) -> None:
    deps = (*self._uses[-1:], *arrivals, *self._inputs_before(use))
    index = self._add(
      use.kind,
      Lane.DEVICE,
      stage=use.stage,
      micro=use.micro,
      deps=(*deps, *self._sums_before(use), *self._room_for_gradients(use)),
    )
    self._uses.append(index)
    if use.kind is TaskKind.BACKWARD:
      self._grads[use.stage] = index
      self._send_gradients(use)
    self._move_inputs(use)

  def _send_gradients(self, use: Use) -> None:
    """Adds what becomes of a backward's gradients on the host.

    Those of one micro-batch reach the host lane, which is serial, before those
    of the next; and all sums of a step before its updates. So a step's updates
    have read the sums when the next step begins them anew.
    """
    last_micro = use.micro == self._config.accumulation - 1
    on_host = self._plan.accumulate == "host"
    if (not last_micro and not on_host) or self._plan.park == "device":
      return
    backward = self._uses[-1]
    begins_with = self.tasks[backward].deps
    leaving: list[int] = []
    self._leaving.append(leaving)
    for bucket in self._layout.of_stage(use.stage):
      if not bucket.host_updates:
        continue
      deps = begins_with if self._delivers_itself else (backward,)
      index = self._send_bucket(bucket, deps, micro=use.micro)
      leaving.append(index)
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
      if last_micro and bucket.index in self._speculating:
        # Its end tells the norm so far, which may be the end of speculation.
        ended = () if self._delivers_itself or on_host else (backward,)
        self._update(bucket, (index, *ended))

  def _send_bucket(
    self, bucket: Bucket, deps: Sequence[int], *, micro: int
  ) -> int:
    index = self._add(
      TaskKind.GRAD_OUT,
      Lane.D2H,
      bucket=bucket,
      micro=micro,
      deps=deps,
      bytes=bucket.size * self._wire.grad_bytes,
    )
    self._on_host[bucket.index] = index
    return index

  def _sums_before(self, use: Use) -> Sequence[int]:
    """Returns the sums that give their place on the host to a backward."""
    if use.kind is not TaskKind.BACKWARD:
      return ()
    return self._accumulates.get((use.stage, use.micro - self._num_on_host), ())

  def _room_for_gradients(self, use: Use) -> Sequence[int]:
    """Returns the transfers that must have ended before a backward.

    The gradients of `grad_window` backwards are on the device at once. If they
    are delivered while backward runs they take up none of it.
    """
    window = self._plan.grad_window
    if use.kind is not TaskKind.BACKWARD or window is None:
      return ()
    if self._delivers_itself or len(self._leaving) < window:
      return ()
    return self._leaving[-window]

  def _inputs_before(self, use: Use) -> Iterable[int]:
    """Returns which moves of stage inputs a use waits for.

    Backward waits for its own input. Forward waits until that of the stage
    before it has left, so that in forward the device has three of them at most:
    what Forward of the stage before still reads, the input, and the output.
    """
    if use.kind is TaskKind.BACKWARD and use.stage in self._offloading:
      yield self._inputs_in[use.stage]
    if use.kind is TaskKind.FORWARD and use.stage - 1 in self._offloading:
      yield self._inputs_out[use.stage - 1]

  def _move_inputs(self, use: Use) -> None:
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

  def _add_fetch(self, fetch: Fetch, use: Use) -> list[int]:
    transfers = [
      self._add(
        TaskKind.WEIGHT_IN,
        Lane.H2D,
        stage=use.stage,
        bucket=bucket,
        micro=use.micro,
        deps=() if fetch.frees < 0 else (self._uses[fetch.frees],),
        bytes=bucket.size * self._wire.weight_bytes,
      )
      for bucket in fetch.buckets
    ]
    self._fetches.append((fetch, transfers))
    return transfers

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
