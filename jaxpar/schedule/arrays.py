"""A schedule as dense integer arrays, for a program that all devices run alike.

One tick, on every device d of p:

1. the slots, in the order forward, backward, weight gradients; those that hold -1 on
   this device compute on garbage, or not at all, and keep nothing;
2. two shifts around the ring: what the forward slot made goes to device (d+1) % p,
   what the backward slot made (the gradient of its input) to device (d-1) % p;
3. what has arrived is written into the buffers, at `input_arrival` and
   `gradient_arrival`. A row may be free for it only since this tick read it, so
   arrivals are written after all slots.

There is a buffer of stage inputs and one of gradients of stage outputs, and what is
received goes straight in. An input stays for the backward that recomputes from it, so
that no other copy is made; rows are reused, so their number depends on the schedule
and not on the microbatches. The first stage reads the batch and the last stage the
loss: where a slot has row -1 there is nothing to read, and where an arrival has row -1
there is nothing to keep. (A buffer with one row more than it needs gives -1 a place.)
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxpar.schedule.check import check
from jaxpar.schedule.table import Kind, Place, Schedule, Task

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


@dataclass(frozen=True, eq=False)
class Slot:
    """What one kind of task does, on every device at every tick.

    Attributes:
        microbatch: [ticks, devices], or -1 where the device has nothing to do.
        chunk: [ticks, devices]; the stage is chunk * devices + device. 0 where there
            is nothing to do, which is safe to index with.
        input_row: [ticks, devices], row of the stage's input; -1 for the first stage,
            and where there is nothing to do.
        gradient_row: [ticks, devices], row of the gradient of the stage's output; -1
            for the last stage, in the forward slot, and where there is nothing to do.
        first: [ticks], microbatch that is in the model's first stage, or -1. It is the
            same number for all devices, so all may branch on it.
        last: [ticks], microbatch that is in the model's last stage, or -1.
    """

    microbatch: IntArray
    chunk: IntArray
    input_row: IntArray
    gradient_row: IntArray
    first: IntArray
    last: IntArray


class Run(NamedTuple):
    """Ticks start to stop (excluded) in which devices use the same kinds of slots.

    A kind is listed if any device uses it; a tick in which none does anything has none.
    """

    start: int
    stop: int
    kinds: tuple[Kind, ...]


@dataclass(frozen=True, eq=False)
class ScheduleArrays:
    """A schedule to run; see the module for what a tick does.

    Attributes:
        forward: Its slot.
        backward: Its slot. Where `weight` has anything to do, it makes the gradient of
            its input only.
        weight: Its slot; reads the same rows as the backward.
        input_arrival: [ticks, devices], row for the activation that arrives at the end
            of the tick, or -1.
        gradient_arrival: [ticks, devices], row for the gradient that does.
        input_rows: Rows that the buffer of inputs needs, on the device with most.
        gradient_rows: Rows that the buffer of gradients needs.
        runs: All ticks in order, cut into runs as long as can be.
    """

    forward: Slot
    backward: Slot
    weight: Slot
    input_arrival: IntArray
    gradient_arrival: IntArray
    input_rows: int
    gradient_rows: int
    runs: tuple[Run, ...]


def arrays(schedule: Schedule) -> ScheduleArrays:
    """Lowers a schedule, wave or classic, to arrays.

    Raises:
        PlanError: as `check` does.
    """
    check(schedule)
    places = {place.task: place for place in schedule.places()}
    last_kind = Kind.WEIGHT if schedule.splits_backward else Kind.BACKWARD
    rows: dict[Kind, dict[Task, int]] = {}
    counts: dict[Kind, int] = {}
    arrivals: dict[Kind, IntArray] = {}
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        stays = _stays(schedule, places, kind, last_kind)
        rows[kind], counts[kind] = _allocate(stays)
        arrivals[kind] = _table(schedule)
        for stay in stays:
            arrivals[kind][stay.arrives, stay.device] = rows[kind][stay.task]
    slots = {kind: _slot(schedule, kind, rows) for kind in Kind}
    return ScheduleArrays(
        forward=slots[Kind.FORWARD],
        backward=slots[Kind.BACKWARD],
        weight=slots[Kind.WEIGHT],
        input_arrival=arrivals[Kind.FORWARD],
        gradient_arrival=arrivals[Kind.BACKWARD],
        input_rows=counts[Kind.FORWARD],
        gradient_rows=counts[Kind.BACKWARD],
        runs=_runs(schedule),
    )


class _Stay(NamedTuple):
    """A received array in a device's buffer.

    Attributes:
        arrives: Tick at whose end it is written.
        leaves: Tick that reads it last.
        device: Whose buffer.
        task: The forward, or backward, that reads it first.
    """

    arrives: int
    leaves: int
    device: int
    task: Task


def _stays(
    schedule: Schedule, places: Mapping[Task, Place], kind: Kind, last_kind: Kind
) -> list[_Stay]:
    """What devices receive for tasks of a kind, and how long it stays, in order."""
    stays: list[_Stay] = []
    for sender in places.values():
        task = schedule.receiver(sender.task)
        if task is not None and task.kind is kind:
            last = places[Task(last_kind, task.microbatch, task.stage)]
            stays.append(_Stay(sender.tick, last.tick, last.device, task))
    return sorted(stays, key=lambda stay: stay.arrives)


def _allocate(stays: list[_Stay]) -> tuple[dict[Task, int], int]:
    """Rows of what stays, reused as early as can be; and how many there are.

    Taking the first free row in order of arrival needs as many rows as there are
    arrays at once, and no more: stays are intervals.
    """
    rows: dict[Task, int] = {}
    free: dict[int, list[int]] = {}
    held: dict[int, list[tuple[int, int]]] = {}
    used: dict[int, int] = {}
    for stay in stays:
        mine = free.setdefault(stay.device, [])
        until = held.setdefault(stay.device, [])
        while until and until[0][0] <= stay.arrives:
            heapq.heappush(mine, heapq.heappop(until)[1])
        if mine:
            row = heapq.heappop(mine)
        else:
            row = used.get(stay.device, 0)
            used[stay.device] = row + 1
        heapq.heappush(until, (stay.leaves, row))
        rows[stay.task] = row
    return rows, max(used.values(), default=0)


def _table(schedule: Schedule) -> IntArray:
    return np.full((len(schedule.ticks), schedule.devices), -1, np.int32)


def _slot(
    schedule: Schedule, kind: Kind, rows: Mapping[Kind, Mapping[Task, int]]
) -> Slot:
    tables = [_table(schedule) for _ in range(4)]
    microbatch, chunk, input_row, gradient_row = tables
    chunk[:] = 0
    ends = np.full((2, len(schedule.ticks)), -1, np.int32)
    for tick, device, task in schedule.places():
        if task.kind is not kind:
            continue
        mb, stage = task.microbatch, task.stage
        place = tick, device
        microbatch[place], chunk[place] = mb, stage // schedule.devices
        input_row[place] = rows[Kind.FORWARD].get(Task(Kind.FORWARD, mb, stage), -1)
        if kind is not Kind.FORWARD:
            back = Task(Kind.BACKWARD, mb, stage)
            gradient_row[place] = rows[Kind.BACKWARD].get(back, -1)
        for end, where in enumerate((0, schedule.stages - 1)):
            if stage == where:
                ends[end, tick] = mb
    return Slot(microbatch, chunk, input_row, gradient_row, ends[0], ends[1])


def _runs(schedule: Schedule) -> tuple[Run, ...]:
    runs: list[Run] = []
    for tick, cells in enumerate(schedule.ticks):
        used = {task.kind for cell in cells for task in cell}
        kinds = tuple(kind for kind in Kind if kind in used)
        if runs and runs[-1].kinds == kinds:
            runs[-1] = runs[-1]._replace(stop=tick + 1)
        else:
            runs.append(Run(tick, tick + 1, kinds))
    return tuple(runs)
