"""Plays the tasks of one step: computation in order, and collectives beside it.

A device computes one operator after the other. Each class of links (every ICI axis,
NVLink, the network) carries one collective after the other, in the order in which
they are started; one over several classes takes all of them for its whole time.
Computation waits for a collective only where its result is needed. For a given order
every start is a maximum of sums of durations, so that no task ends later if another
one takes less time (max-plus algebra; Baccelli et al. 1992).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from jaxpar.plan_parts import TaskPlan

COMPUTE = "compute"


@dataclass(frozen=True)
class Span:
    """One run of a task.

    Attributes:
        task: What ran.
        stream: "compute", or the class of links.
        start_s: From the beginning of the step.
        end_s: From the beginning of the step.
    """

    task: TaskPlan
    stream: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One step on one device.

    Attributes:
        step_s: Until the last task ends.
        compute_s: Computation and update.
        communication_s: Per axes, as "data" or "data+fsdp": of all collectives.
        exposed_s: Per axes: what computation waited for them.
        spans: Every run of every task, in the order in which they were started.
    """

    step_s: float
    compute_s: float
    communication_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    spans: tuple[Span, ...] = field(repr=False)


def play(tasks: Sequence[TaskPlan], *, overlap: bool = True) -> Timeline:
    """Plays a step.

    Args:
        tasks: In the order of computation: what has the same `block` in a row is run
            `rounds` times before what follows.
        overlap: Whether collectives run beside computation; if not, the step takes
            the sum of all tasks.
    """
    player = _Player(overlap)
    rounds = list(_rounds(tasks))
    early: dict[int, list[tuple[int, TaskPlan]]] = defaultdict(list)
    if overlap:
        for number, found in enumerate(rounds):
            for task in found:
                if task.when == "before":
                    early[max(0, number - task.slack)].append((number, task))
    for number, found in enumerate(rounds):
        if found[0].phase == "update":
            player.finish_all()
        for needed, task in early[number]:
            player.start(task, needed)
        for task in found:
            player.run(task, number)
        player.finish(number)
    return player.timeline()


def _rounds(tasks: Sequence[TaskPlan]) -> Iterator[list[TaskPlan]]:
    for _, found in groupby(tasks, key=lambda task: (task.phase, task.block)):
        block = list(found)
        for _ in range(block[0].rounds):
            yield block


@dataclass
class _Pending:
    """A collective on its way, and the last round that may end before it does."""

    task: TaskPlan
    end_s: float
    until: float


class _Player:
    def __init__(self, overlap: bool):
        self.overlap = overlap
        self.now_s = 0.0
        self.free_s: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self.sums: dict[str, float] = defaultdict(float)
        self.exposed: dict[str, float] = defaultdict(float)
        self.compute_s = 0.0
        self.fetched: dict[tuple[int, int], float] = {}
        self.pending: list[_Pending] = []

    def run(self, task: TaskPlan, number: int) -> None:
        """What happens where a task stands in the order of computation."""
        if not task.axes:
            self._compute(task)
        elif not self.overlap or task.when == "here":
            self._wait(task, self._send(task))
        elif task.when == "before":
            self._wait(task, self.fetched.pop((number, id(task))))
        else:
            until = float("inf") if task.slack else number
            self.pending.append(_Pending(task, self._send(task), until))

    def start(self, task: TaskPlan, number: int) -> None:
        """Starts what a later round needs."""
        self.fetched[number, id(task)] = self._send(task)

    def finish(self, number: int) -> None:
        """Waits for what must not outlast a round."""
        for found in self.pending:
            if found.until <= number:
                self._wait(found.task, found.end_s)
        self.pending = [found for found in self.pending if found.until > number]

    def timeline(self) -> Timeline:
        """All that ran; waits for what is still on its way."""
        self.finish_all()
        return Timeline(
            self.now_s,
            self.compute_s,
            dict(self.sums),
            {axes: self.exposed[axes] for axes in self.sums},
            tuple(self.spans),
        )

    def finish_all(self) -> None:
        """Waits for every collective."""
        for found in self.pending:
            self._wait(found.task, found.end_s)
        self.pending = []

    def _compute(self, task: TaskPlan) -> None:
        start, self.now_s = self.now_s, self.now_s + task.seconds
        self.compute_s += task.seconds
        self.spans.append(Span(task, COMPUTE, start, self.now_s))

    def _send(self, task: TaskPlan) -> float:
        """Puts a collective on its links; when it ends."""
        start = max(self.now_s, *(self.free_s[stream] for stream in task.streams))
        end = start + task.seconds
        for stream in task.streams:
            self.free_s[stream] = end
            self.spans.append(Span(task, stream, start, end))
        self.sums["+".join(task.axes)] += task.seconds
        return end

    def _wait(self, task: TaskPlan, end_s: float) -> None:
        waited = max(0.0, end_s - self.now_s)
        self.exposed["+".join(task.axes)] += waited
        self.now_s += waited
