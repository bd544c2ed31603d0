"""Pipeline schedules as data: made, checked, simulated, written, lowered to arrays."""

from jaxpar.schedule.arrays import Run, ScheduleArrays, Slot, arrays
from jaxpar.schedule.check import check
from jaxpar.schedule.families import (
    FAMILIES,
    gpipe,
    make_schedule,
    naive,
    one_f_one_b,
    zero_bubble,
)
from jaxpar.schedule.simulate import Simulation, Timed, simulate
from jaxpar.schedule.stash import Stash, live_inputs, stash
from jaxpar.schedule.table import Cell, Kind, Place, Schedule, Task
from jaxpar.schedule.text import from_csv, to_csv

__all__ = [
    "FAMILIES",
    "Cell",
    "Kind",
    "Place",
    "Run",
    "Schedule",
    "ScheduleArrays",
    "Simulation",
    "Slot",
    "Stash",
    "Task",
    "Timed",
    "arrays",
    "check",
    "from_csv",
    "gpipe",
    "live_inputs",
    "make_schedule",
    "naive",
    "one_f_one_b",
    "simulate",
    "stash",
    "to_csv",
    "zero_bubble",
]
