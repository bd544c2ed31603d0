"""How many stage inputs a schedule keeps for its backward passes."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxpar.schedule.table import Kind, Place, Schedule


@dataclass(frozen=True)
class Stash:
    """Most stage inputs held at once, in microbatches.

    Attributes:
        stages: Per stage.
        devices: Per device, over its stages together; these need not peak at once.
    """

    stages: tuple[int, ...]
    devices: tuple[int, ...]


def live_inputs(schedule: Schedule) -> Iterator[tuple[Place, tuple[int, ...]]]:
    """Every task, and how many inputs each chunk of its device holds while it runs.

    An input counts from its forward to the end of the last task that reads it, which
    is the backward, or the weight gradients where these are tasks of their own.
    """
    frees = Kind.WEIGHT if schedule.splits_backward else Kind.BACKWARD
    live = [[0] * schedule.chunks for _ in range(schedule.devices)]
    for place in schedule.places():
        held, chunk = live[place.device], place.task.stage // schedule.devices
        held[chunk] += place.task.kind is Kind.FORWARD
        yield place, tuple(held)
        held[chunk] -= place.task.kind is frees


def stash(schedule: Schedule) -> Stash:
    """The peaks of `live_inputs`; they depend on the order alone, not on times."""
    stages, devices = [0] * schedule.stages, [0] * schedule.devices
    for place, live in live_inputs(schedule):
        d, stage = place.device, place.task.stage
        devices[d] = max(devices[d], sum(live))
        stages[stage] = max(stages[stage], live[stage // schedule.devices])
    return Stash(tuple(stages), tuple(devices))
