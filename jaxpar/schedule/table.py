"""Pipeline schedules as data: which task each device runs at which tick.

A model cut into `stages` runs on `devices` positions of the pipeline axis, `chunks`
stages on each: stage s lies on device s % devices, as chunk s // devices. An activation
so always moves to the next device of a ring, and a gradient to the one before.

A cell of the table holds what one device does in one tick, in order. A *classic* table
has one task in a cell at most; it suits devices that run programs of their own. A
*wave* table has a forward and a backward in one cell. One program on all devices needs
that: there every device waits for the slowest, so a tick in which some run forward and
some backward costs both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from jaxpar.errors import PlanError


class Kind(StrEnum):
    """What a task computes, in the order in which a cell runs its tasks."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the stage's input and, if no `WEIGHT` task does it, its weights."""
    WEIGHT = "W"
    """Gradients of the weights alone; what zero-bubble schedules put off."""


@dataclass(frozen=True, slots=True)
class Task:
    """One pass of one microbatch through one stage; its text is "2F0".

    Attributes:
        kind: Forward, backward or weight gradients.
        microbatch: From 0.
        stage: From 0, counted along the model over all devices and chunks.
    """

    kind: Kind
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Cell = tuple[Task, ...]
"""What one device does in one tick, in order."""


class Place(NamedTuple):
    """A task and where it stands in the table."""

    tick: int
    device: int
    task: Task


@dataclass(frozen=True)
class Schedule:
    """A table of ticks. `check` says whether its order of tasks makes sense.

    Attributes:
        name: For readers, on one line.
        devices: Positions along the pipeline axis.
        chunks: Stages on each device.
        microbatches: Parts of the batch that pass one after another.
        ticks: Per tick, per device, its cell.

    Raises:
        PlanError: on a task that does not belong to its device, or is out of range.
    """

    name: str
    devices: int
    chunks: int
    microbatches: int
    ticks: tuple[tuple[Cell, ...], ...]

    def __post_init__(self):
        if not self.name.isprintable() or self.name.strip() != self.name:
            raise PlanError(f"schedule name {self.name!r} is not one plain line")
        require_positive(
            devices=self.devices, chunks=self.chunks, microbatches=self.microbatches
        )
        for tick, cells in enumerate(self.ticks):
            if len(cells) != self.devices:
                raise PlanError(
                    f"tick {tick}: {len(cells)} cells for {self.devices} devices"
                )
        for tick, device, task in self.places():
            wrong = self.misfit(device, task)
            if wrong:
                raise PlanError(
                    f"tick {tick}, device {device}: {wrong}",
                    hint=f"stage s lies on device s % {self.devices}",
                )

    def misfit(self, device: int, task: Task) -> str | None:
        """What is wrong with a task on this device, whatever the tick; or None."""
        stage, mb = task.stage, task.microbatch
        if not 0 <= stage < self.stages:
            return f"task {task} is of stage {stage}; there are {self.stages}"
        if not 0 <= mb < self.microbatches:
            return f"task {task} is of microbatch {mb}; there are {self.microbatches}"
        if stage % self.devices != device:
            return f"task {task} belongs to device {stage % self.devices}"
        return None

    @property
    def stages(self) -> int:
        """Stages of the whole model: devices times chunks."""
        return self.devices * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are tasks of their own."""
        return any(place.task.kind is Kind.WEIGHT for place in self.places())

    def places(self) -> Iterator[Place]:
        """Every task with its tick and device, tick by tick."""
        for tick, cells in enumerate(self.ticks):
            for device, cell in enumerate(cells):
                for task in cell:
                    yield Place(tick, device, task)

    def needs(self, task: Task) -> tuple[Task, ...]:
        """The tasks whose results a task reads.

        Those of another stage have to come over a link first.
        """
        mb, stage = task.microbatch, task.stage
        if task.kind is Kind.FORWARD:
            return (Task(Kind.FORWARD, mb, stage - 1),) if stage else ()
        if task.kind is Kind.WEIGHT:
            return (Task(Kind.BACKWARD, mb, stage),)
        own = Task(Kind.FORWARD, mb, stage)
        if stage == self.stages - 1:
            return (own,)
        return own, Task(Kind.BACKWARD, mb, stage + 1)

    def receiver(self, task: Task) -> Task | None:
        """The task of a neighbouring stage that reads this one's result, if any."""
        step = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: 0}[task.kind]
        stage = task.stage + step
        if not step or not 0 <= stage < self.stages:
            return None
        return Task(task.kind, task.microbatch, stage)


def require_positive(**sizes: int) -> None:
    """Raises a PlanError that names the sizes below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise PlanError(f"{name} is {size}; a schedule has at least one")
