"""How far simulated steps have come, and who waits for what in them."""

from collections.abc import Sequence

from sojax.graph.graph import StepGraph, waits_for_end

_RELATIVE = 1e-9


class Edges:
  """What waits for each task, in the same step or in the next one.

  Attributes:
    waits: how many tasks each task waits for.
    on_end: who waits for a task's end before it can start.
    on_end_issue: who waits for its end before it can be issued.
    on_issue: who waits for its issue before it can be issued.
  """

  def __init__(self, graph: StepGraph, deps: Sequence[tuple[int, ...]]):
    self.waits = [len(of_task) for of_task in deps]
    self.on_end: list[list[int]] = [[] for _ in deps]
    self.on_end_issue: list[list[int]] = [[] for _ in deps]
    self.on_issue: list[list[int]] = [[] for _ in deps]
    for task, of_task in zip(graph.tasks, deps, strict=True):
      for dep in of_task:
        self.on_end[dep].append(task.index)
        ended = waits_for_end(task, graph.tasks[dep])
        first = self.on_end_issue if ended else self.on_issue
        first[dep].append(task.index)


class StepProgress:
  """The times of one step, and how many tasks each task still waits for."""

  def __init__(self, waits: list[int]):
    self.issue_waits = waits
    self.start_waits = [*waits]
    self.is_issued = [False] * len(waits)
    self.issued_s = [0.0] * len(waits)
    self.starts_s = [0.0] * len(waits)
    self.ends_s = [0.0] * len(waits)
    self.num_left = len(waits)
    self.is_validated = False
    self.late: set[int] = set()

  def repeats(self, before: "StepProgress") -> bool:
    """Says whether all times are those of a step before, and one shift."""
    shift_s = max(self.ends_s) - max(before.ends_s)
    pairs = (
      (self.ends_s, before.ends_s),
      (self.starts_s, before.starts_s),
      (self.issued_s, before.issued_s),
    )
    return all(
      abs(ours_s - theirs_s - shift_s) <= _RELATIVE * shift_s
      for ours, theirs in pairs
      for ours_s, theirs_s in zip(ours, theirs, strict=True)
    )
