"""What a schedule costs: its time, who waits, and what has to be kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.errors import PlanError
from jaxpar.schedule.check import check
from jaxpar.schedule.stash import Stash, stash
from jaxpar.schedule.table import Kind, Place, Schedule, Task

Seconds = float | Sequence[float]
"""Of every stage alike, or of each."""


@dataclass(frozen=True)
class Timed:
    """When a task ran."""

    task: Task
    device: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """A schedule that has run.

    Attributes:
        total_s: From the first task's start to the last one's end.
        busy_s: Per device, time in which it computed.
        timeline: Every task, in the order of the table.
        stash: Most stage inputs held at once.
        critical_path: Tasks that the total is the sum of, with the transfers between
            them: to shorten any other task changes nothing.
    """

    total_s: float
    busy_s: tuple[float, ...]
    timeline: tuple[Timed, ...]
    stash: Stash
    critical_path: tuple[Task, ...]

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which they wait, 0 to 1."""
        whole = self.total_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0

    @property
    def overhead(self) -> float:
        """Time waited over time computed: (p-1)/m for 1F1B with equal stages."""
        busy = sum(self.busy_s)
        return self.total_s * len(self.busy_s) / busy - 1 if busy else 0.0


@dataclass(frozen=True)
class _Times:
    """Seconds of every task and transfer."""

    of_kind: dict[Kind, tuple[float, ...]]
    transfer: tuple[float, ...]

    def task_s(self, task: Task) -> float:
        return self.of_kind[task.kind][task.stage]

    def transfer_s(self, source: Task, target: Task) -> float:
        """Zero within a stage."""
        if source.stage == target.stage:
            return 0.0
        return self.transfer[min(source.stage, target.stage)]


def simulate(
    schedule: Schedule,
    forward_s: Seconds,
    backward_s: Seconds,
    weight_s: Seconds | None = None,
    transfer_s: Seconds = 0.0,
    *,
    lockstep: bool = False,
) -> Simulation:
    """Runs a schedule on a clock.

    A device runs its tasks in the order of the table, each as soon as its inputs have
    arrived; transfers take time but keep no device busy. In lockstep, all devices run
    one program: each waits, slot by slot, for the slowest, and a tick that sends
    anything ends with a transfer.

    Args:
        schedule: Checked before it runs.
        forward_s: Of one microbatch through one stage.
        backward_s: The same back, weight gradients included.
        weight_s: The part of it that weight gradients take; needed where they are
            tasks of their own, and only then used.
        transfer_s: From a stage to the next, activation or gradient; one number, or
            one per boundary. Free if there is one device.
        lockstep: Whether the devices run one program.

    Raises:
        PlanError: as `check` does; on times that are negative or not one per stage.
    """
    check(schedule)
    times = _times(schedule, forward_s, backward_s, weight_s, transfer_s)
    run = _lockstep if lockstep else _free
    timeline, path, total_s = run(schedule, times)
    busy = [0.0] * schedule.devices
    for timed in timeline:
        busy[timed.device] += times.task_s(timed.task)
    return Simulation(total_s, tuple(busy), timeline, stash(schedule), path)


_Run = tuple[tuple[Timed, ...], tuple[Task, ...], float]
"""Timeline, critical path and total seconds."""


def _free(schedule: Schedule, times: _Times) -> _Run:
    """Every task starts when its device is free and its inputs are there."""
    done: dict[Task, Timed] = {}
    cause: dict[Task, Task | None] = {}
    last: list[Timed | None] = [None] * schedule.devices
    for _, device, task in schedule.places():
        before = last[device]
        start, why = (before.end_s, before.task) if before else (0.0, None)
        for need in schedule.needs(task):
            arrives = done[need].end_s + times.transfer_s(need, task)
            if arrives > start:
                start, why = arrives, need
        timed = Timed(task, device, start, start + times.task_s(task))
        last[device] = done[task] = timed
        cause[task] = why
    end = max(done.values(), key=lambda timed: timed.end_s)
    path: list[Task] = []
    task: Task | None = end.task
    while task is not None:
        path.append(task)
        task = cause[task]
    return tuple(done.values()), tuple(reversed(path)), end.end_s


def _lockstep(schedule: Schedule, times: _Times) -> _Run:
    """Every kind of task in a tick takes as long as the slowest of them."""
    timeline: list[Timed] = []
    path: list[Task] = []
    now = 0.0
    for tick, cells in enumerate(schedule.ticks):
        places = [Place(tick, d, task) for d, cell in enumerate(cells) for task in cell]
        for kind in Kind:
            slot = [place for place in places if place.task.kind is kind]
            for _, device, task in slot:
                timeline.append(Timed(task, device, now, now + times.task_s(task)))
            if slot:
                slowest = max((p.task for p in slot), key=times.task_s)
                path.append(slowest)
                now += times.task_s(slowest)
        sent = [(p.task, schedule.receiver(p.task)) for p in places]
        now += max((times.transfer_s(a, b) for a, b in sent if b), default=0.0)
    return tuple(timeline), tuple(path), now


def _times(
    schedule: Schedule,
    forward_s: Seconds,
    backward_s: Seconds,
    weight_s: Seconds | None,
    transfer_s: Seconds,
) -> _Times:
    stages = schedule.stages
    forward = _each("forward_s", forward_s, stages)
    backward = _each("backward_s", backward_s, stages)
    weight = (0.0,) * stages
    if schedule.splits_backward:
        if weight_s is None:
            raise PlanError(
                f"{schedule.name} has weight gradients as tasks of their own, and "
                "weight_s is not given",
                hint="give the part of backward_s that they take",
            )
        weight = _each("weight_s", weight_s, stages)
        backward = tuple(b - w for b, w in zip(backward, weight, strict=True))
        backward = _each("backward_s - weight_s", backward, stages)
    transfer = _each("transfer_s", transfer_s, stages - 1)
    if schedule.devices == 1:
        transfer = (0.0,) * (stages - 1)
    kinds = zip(Kind, (forward, backward, weight), strict=True)
    return _Times(dict(kinds), transfer)


def _each(name: str, seconds: Seconds, count: int) -> tuple[float, ...]:
    if isinstance(seconds, int | float):
        values = (float(seconds),) * count
    else:
        values = tuple(map(float, seconds))
    if len(values) != count:
        raise PlanError(f"{name} has {len(values)} numbers, for {count}")
    for n, value in enumerate(values):
        if not 0 <= value < math.inf:
            raise PlanError(f"{name}[{n}] is {value}; it must be finite and >= 0")
    return values
