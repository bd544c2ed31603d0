"""Whether a schedule computes what it should, in an order that can be run."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from jaxpar.errors import PlanError
from jaxpar.schedule.stash import live_inputs
from jaxpar.schedule.table import Cell, Kind, Place, Schedule, Task


def check(schedule: Schedule, stash_limit: int | Sequence[int] | None = None) -> None:
    """Checks that a schedule is whole, ordered, and can be carried by the links.

    - Every microbatch passes every stage once forward and once backward and, if any
      weight gradients are tasks of their own, has them once too.
    - A cell has one task of a kind at most, forward before backward before weight
      gradients. So each link carries one activation and one gradient a tick, and what
      a device sends is what its neighbour, and no other, receives.
    - Results of other stages are sent at the end of a tick and read in a later one;
      those of the same stage may be read in the same cell.

    Args:
        schedule: What to check.
        stash_limit: Stage inputs that a device may hold, or one number per device.

    Raises:
        PlanError: names tick, device and task.
    """
    for tick, cells in enumerate(schedule.ticks):
        for device, cell in enumerate(cells):
            _check_cell(cell, tick, device)
    found = _once(schedule)
    _all_there(schedule, found)
    for place in found.values():
        for need in schedule.needs(place.task):
            _check_order(place, found[need])
    if stash_limit is not None:
        _check_stash(schedule, stash_limit)


def _check_cell(cell: Cell, tick: int, device: int) -> None:
    order = list(Kind)
    for before, task in pairwise(cell):
        if order.index(task.kind) <= order.index(before.kind):
            raise PlanError(
                f"tick {tick}, device {device}: {task} after {before}",
                hint="a cell has one F, one B and one W at most, in this order",
            )


def _once(schedule: Schedule) -> Mapping[Task, Place]:
    found: dict[Task, Place] = {}
    for place in schedule.places():
        first = found.setdefault(place.task, place)
        if first is not place:
            raise PlanError(f"{_at(place)} runs again; it ran at tick {first.tick}")
    return found


def _all_there(schedule: Schedule, found: Mapping[Task, Place]) -> None:
    split = schedule.splits_backward
    kinds = tuple(Kind) if split else (Kind.FORWARD, Kind.BACKWARD)
    for kind in kinds:
        for mb in range(schedule.microbatches):
            for stage in range(schedule.stages):
                task = Task(kind, mb, stage)
                if task not in found:
                    raise PlanError(
                        f"{schedule.name}: task {task} is in none of its "
                        f"{len(schedule.ticks)} ticks (device "
                        f"{stage % schedule.devices}, microbatch {mb}, stage {stage})"
                    )


def _check_order(place: Place, need: Place) -> None:
    """A task reads what was computed before it."""
    if need.task.stage == place.task.stage:
        # A cell runs in the order of kinds, so the same tick will do.
        if need.tick > place.tick:
            raise PlanError(f"{_at(place)} needs {need.task}, of tick {need.tick}")
    elif need.tick >= place.tick:
        raise PlanError(
            f"{_at(place)} needs {need.task}, which device {need.device} sends at the "
            f"end of tick {need.tick}"
        )


def _check_stash(schedule: Schedule, stash_limit: int | Sequence[int]) -> None:
    limits = stash_limit
    if isinstance(limits, int):
        limits = [limits] * schedule.devices
    if len(limits) != schedule.devices:
        raise PlanError(
            f"{len(limits)} stash limits for {schedule.devices} devices",
            hint="give one number, or one per device",
        )
    for place, live in live_inputs(schedule):
        limit = limits[place.device]
        if sum(live) > limit:
            raise PlanError(
                f"{_at(place)} is the device's stage input number {sum(live)}; it may "
                f"hold {limit}"
            )


def _at(place: Place) -> str:
    return f"tick {place.tick}, device {place.device}: task {place.task}"
