"""The families of schedules, all of one signature."""

from collections.abc import Mapping
from typing import Protocol

from jaxpar.errors import PlanError
from jaxpar.schedule.classic import (
    interleaved_orders,
    naive_orders,
    one_by_one,
    zero_bubble_orders,
)
from jaxpar.schedule.table import Schedule, require_positive
from jaxpar.schedule.wave import wave as wave_table


class Family(Protocol):
    """Makes a schedule of a family for any number of devices and microbatches."""

    def __call__(
        self, devices: int, microbatches: int, chunks: int = 1, *, wave: bool = True
    ) -> Schedule:
        """A wave table, or a classic one."""
        ...


def naive(
    devices: int, microbatches: int, chunks: int = 1, *, wave: bool = True
) -> Schedule:
    """One microbatch in flight: one device works, the others wait.

    Both flavours are the same table.
    """
    del wave
    require_positive(devices=devices, microbatches=microbatches, chunks=chunks)
    orders = naive_orders(devices, chunks, microbatches)
    return one_by_one("naive", devices, chunks, microbatches, orders)


def gpipe(
    devices: int, microbatches: int, chunks: int = 1, *, wave: bool = True
) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019); stores every microbatch.

    With several chunks it is the circular one: all microbatches pass a chunk before
    any enters the next (Lamy-Poirier 2023). Both flavours are the same table.
    """
    del wave
    require_positive(devices=devices, microbatches=microbatches, chunks=chunks)
    name = "gpipe" if chunks == 1 else "circular"
    return wave_table(name, devices, chunks, microbatches, eager=False)


def one_f_one_b(
    devices: int, microbatches: int, chunks: int = 1, *, wave: bool = True
) -> Schedule:
    """1F1B, interleaved with several chunks (Narayanan et al. 2019 and 2021).

    A backward runs as soon as it can, so that what is stored does not grow with the
    microbatches. Their number is free; where it is no multiple of the devices, groups
    are larger than usual and store a little more (see `groups_of`).
    """
    require_positive(devices=devices, microbatches=microbatches, chunks=chunks)
    name = "1f1b" if chunks == 1 else "interleaved"
    if wave:
        return wave_table(f"{name} wave", devices, chunks, microbatches)
    orders = interleaved_orders(devices, chunks, microbatches)
    return one_by_one(name, devices, chunks, microbatches, orders)


def zero_bubble(
    devices: int, microbatches: int, chunks: int = 1, *, wave: bool = True
) -> Schedule:
    """ZB-H1 (Qi et al. 2024): 1F1B with weight gradients put off to where devices wait.

    Raises:
        PlanError: for a classic table with several chunks.
    """
    require_positive(devices=devices, microbatches=microbatches, chunks=chunks)
    if wave:
        return wave_table("zero-bubble wave", devices, chunks, microbatches, split=True)
    if chunks > 1:
        raise PlanError(
            f"the classic zero-bubble table has one chunk per device, not {chunks}",
            hint="use wave=True, or the interleaved family",
        )
    orders = zero_bubble_orders(devices, microbatches)
    return one_by_one("zero-bubble", devices, 1, microbatches, orders)


FAMILIES: Mapping[str, Family] = {
    "naive": naive,
    "gpipe": gpipe,
    "circular": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": one_f_one_b,
    "zero-bubble": zero_bubble,
}
"""By name. Circular and interleaved are GPipe and 1F1B with several chunks."""


def make_schedule(
    family: str, devices: int, microbatches: int, chunks: int = 1, *, wave: bool = True
) -> Schedule:
    """A schedule by the name of its family.

    Args:
        family: A key of `FAMILIES`.
        devices: Positions along the pipeline axis.
        microbatches: Parts of the batch; any number.
        chunks: Stages on each device.
        wave: Forward and backward in one tick, for one program on all devices; else
            one task a tick, for a program on each.

    Raises:
        PlanError: unknown family, a size below 1, or chunks that it does not have.
    """
    if family not in FAMILIES:
        raise PlanError(
            f"unknown schedule {family!r}", hint=f"known are {', '.join(FAMILIES)}"
        )
    return FAMILIES[family](devices, microbatches, chunks, wave=wave)
