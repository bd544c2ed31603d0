"""Wave tables: forwards run down the devices, backwards run up, both in one tick.

The m-th microbatch enters chunk c of device 0 at a position q(m, c) that its group
gives. Forward: device d at tick q(m, c) + d. Backward: the same wave mirrored, chunks
and devices reversed, from a first tick on. Every tick so belongs to one of three runs:
forward alone, both, backward alone, and the whole takes as long as 1F1B takes on
devices that do not wait for each other: (m + (p-1)/v)(F + B) for p devices with v
chunks, where p divides m. The price is up to 2p - 1 stage inputs in place of p.
"""

from collections.abc import Iterable, Iterator

from jaxpar.schedule.groups import Group, groups_of
from jaxpar.schedule.table import Cell, Kind, Place, Schedule, Task


def wave(
    name: str,
    devices: int,
    chunks: int,
    microbatches: int,
    *,
    eager: bool = True,
    split: bool = False,
) -> Schedule:
    """The table of a forward and a backward wave.

    Args:
        name: Of the schedule.
        devices: Positions along the pipeline axis.
        chunks: Stages on each device.
        microbatches: Parts of the batch.
        eager: Whether the last stage runs a microbatch's backward in the tick of its
            forward (1F1B); else all forwards come first (GPipe).
        split: Whether weight gradients are tasks of their own, at one tick on all
            devices: that of the backward on device 0.
    """
    groups = groups_of(devices, chunks, microbatches, whole=not eager)
    last = devices - 1
    if eager:
        first_backward = max((chunks - 1) * g.spacing for g in groups) + last
    else:
        first_backward = 1 + last + max(q for _, _, q in _positions(groups, chunks))
    places: list[Place] = []
    for mb, c, q in _positions(groups, chunks):
        for d in range(devices):
            forward = Task(Kind.FORWARD, mb, c * devices + d)
            stage = (chunks - 1 - c) * devices + d
            tick = first_backward + q + last
            places.append(Place(q + d, d, forward))
            places.append(Place(tick - d, d, Task(Kind.BACKWARD, mb, stage)))
            if split:
                places.append(Place(tick, d, Task(Kind.WEIGHT, mb, stage)))
    ticks = _table(devices, places)
    return Schedule(name, devices, chunks, microbatches, ticks)


def _positions(groups: Iterable[Group], chunks: int) -> Iterator[tuple[int, int, int]]:
    """(microbatch, chunk, tick at which it enters the chunk on device 0)."""
    for group in groups:
        for c in range(chunks):
            for j in range(group.size):
                yield group.first + j, c, group.start + c * group.spacing + j


def _table(devices: int, places: list[Place]) -> tuple[tuple[Cell, ...], ...]:
    ends = 1 + max(place.tick for place in places)
    table: list[list[list[Task]]] = [[[] for _ in range(devices)] for _ in range(ends)]
    for place in places:
        table[place.tick][place.device].append(place.task)
    order = list(Kind)
    return tuple(
        tuple(tuple(sorted(cell, key=lambda t: order.index(t.kind))) for cell in cells)
        for cells in table
    )
