"""Classic tables: one task a tick, each device with an order of its own.

A generator states each device's order; every task then takes the first tick at which
the device is free and what it needs has arrived.
"""

from collections.abc import Iterable, Iterator

from jaxpar.errors import PlanError
from jaxpar.schedule.groups import Group, groups_of
from jaxpar.schedule.table import Cell, Kind, Schedule, Task


def one_by_one(
    name: str,
    devices: int,
    chunks: int,
    microbatches: int,
    orders: Iterable[Iterable[Task]],
) -> Schedule:
    """The table in which every device runs its order as early as it can.

    Args:
        name: Of the schedule.
        devices: Positions along the pipeline axis.
        chunks: Stages on each device.
        microbatches: Parts of the batch.
        orders: Per device, its tasks in order.

    Raises:
        PlanError: where devices would wait for each other for ever.
    """
    empty = Schedule(name, devices, chunks, microbatches, ())
    left = [list(reversed(list(order))) for order in orders]
    done: set[Task] = set()
    ticks: list[tuple[Cell, ...]] = []
    while any(left):
        ready = [
            order[-1] if order and done.issuperset(empty.needs(order[-1])) else None
            for order in left
        ]
        if not any(ready):
            waiting = ", ".join(str(order[-1]) for order in left if order)
            raise PlanError(
                f"{name}, tick {len(ticks)}: the devices wait for each other; next in "
                f"their orders are {waiting}"
            )
        ticks.append(tuple((task,) if task else () for task in ready))
        for order, task in zip(left, ready, strict=True):
            if task:
                order.pop()
                done.add(task)
    return Schedule(name, devices, chunks, microbatches, tuple(ticks))


def naive_orders(devices: int, chunks: int, microbatches: int) -> list[list[Task]]:
    """One microbatch in flight: forward through all stages, then back."""
    stages = range(devices * chunks)
    passes = [(Kind.FORWARD, stages), (Kind.BACKWARD, stages[::-1])]
    line = [
        Task(kind, mb, s)
        for mb in range(microbatches)
        for kind, order in passes
        for s in order
    ]
    return [[t for t in line if t.stage % devices == d] for d in range(devices)]


def interleaved_orders(
    devices: int, chunks: int, microbatches: int
) -> list[list[Task]]:
    """1F1B, interleaved where a device has several chunks.

    Forwards go group by group through the chunks (Narayanan et al. 2021). There a group
    has as many microbatches as there are devices; here it may have more (see
    `groups_of`), so the microbatches need not divide.
    """
    groups = groups_of(devices, chunks, microbatches)
    largest = max(group.size for group in groups)
    orders: list[list[Task]] = []
    for d in range(devices):
        ahead = devices - d - 1
        if chunks > 1:
            ahead = 2 * ahead + (chunks - 1) * largest
        stages = [c * devices + d for c in range(chunks)]
        forward = [Task(Kind.FORWARD, *pair) for pair in _passes(groups, stages)]
        backward = [
            Task(Kind.BACKWARD, *pair) for pair in _passes(groups, stages[::-1])
        ]
        orders.append(_alternate(forward, backward, ahead))
    return orders


def _passes(groups: Iterable[Group], stages: list[int]) -> Iterator[tuple[int, int]]:
    """(microbatch, stage) in a device's order."""
    for group in groups:
        for stage in stages:
            for j in range(group.size):
                yield group.first + j, stage


def _alternate(forward: list[Task], backward: list[Task], ahead: int) -> list[Task]:
    order = forward[:ahead]
    later = forward[ahead:]
    for n, task in enumerate(backward):
        order += [*later[n : n + 1], task]
    return order


def zero_bubble_orders(devices: int, microbatches: int) -> list[list[Task]]:
    """ZB-H1 (Qi et al. 2024): 1F1B with weight gradients put off, on device d by d.

    Delays are in microbatches. What is put off fills the time in which the device
    would wait for gradients, and none holds more stage inputs than there are devices.
    """
    orders: list[list[Task]] = []
    for d in range(devices):
        forward = [Task(Kind.FORWARD, mb, d) for mb in range(microbatches)]
        weight = [Task(Kind.WEIGHT, mb, d) for mb in range(microbatches)]
        ahead = devices - d - 1
        order, later = forward[:ahead], forward[ahead:]
        for mb in range(microbatches):
            order += [*later[mb : mb + 1], Task(Kind.BACKWARD, mb, d)]
            if mb >= d:
                order.append(weight[mb - d])
        orders.append(order + weight[max(0, microbatches - d) :])
    return orders
