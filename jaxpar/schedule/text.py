"""Schedules as CSV, to be read and written by hand or in a spreadsheet.

    schedule,1f1b wave
    devices,2
    chunks,1
    microbatches,2
    tick,0,1
    0,0F0,
    1,0F1,1F0 1B0
    2,0B0,1F1 1B1
    3,0B1,

Below the line that starts with "tick" there is a row per tick and a column per device.
A cell holds the tasks in order, such as "1F0 1B0": stage, kind (F, B or W), microbatch.
The tick may be left out of its column.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace

from jaxpar.errors import PlanError
from jaxpar.schedule.table import Cell, Kind, Schedule, Task

_HEAD = ("schedule", "devices", "chunks", "microbatches")
_Row = tuple[int, list[str]]
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_TASK = re.compile(r"(\d{1,9})([FBW])(\d{1,9})", re.ASCII)


def to_csv(schedule: Schedule) -> str:
    """The schedule as text; `from_csv` gives it back exactly."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    sizes = schedule.devices, schedule.chunks, schedule.microbatches
    writer.writerows(zip(_HEAD, (schedule.name, *sizes), strict=True))
    writer.writerow(["tick", *range(schedule.devices)])
    for tick, cells in enumerate(schedule.ticks):
        writer.writerow([tick, *(" ".join(map(str, cell)) for cell in cells)])
    return out.getvalue()


def from_csv(text: str) -> Schedule:
    """Reads a schedule; `check` it before use.

    Raises:
        PlanError: names row (line of the text, from 1) and column (from 1, or the
            device).
    """
    rows = _rows(text)
    name, *sizes = _head(rows[: len(_HEAD)])
    empty = Schedule(name, *map(int, sizes), ticks=())
    body = rows[len(_HEAD) :]
    if not body or body[0][1][0] != "tick":
        line = body[0][0] if body else text.count("\n") + 1
        raise PlanError(
            f"row {line}, column 1: expected 'tick'",
            hint="the head ends with the line 'tick,0,1,...', a column per device",
        )
    line, columns = body[0]
    if columns[1:] != [str(d) for d in range(min(empty.devices, len(columns)))]:
        raise PlanError(
            f"row {line}: columns {','.join(columns)}, for {empty.devices} devices",
            hint="the line is 'tick,0,1,...', a column per device",
        )
    ticks = (_tick(n, *row, empty) for n, row in enumerate(body[1:]))
    return replace(empty, ticks=tuple(ticks))


def _rows(text: str) -> list[_Row]:
    """Rows that are not blank, with the lines that they end on."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[_Row] = []
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                rows.append((reader.line_num, cells))
    except csv.Error as error:
        raise PlanError(f"row {reader.line_num} is no CSV: {error}") from error
    return rows


def _head(rows: Sequence[_Row]) -> list[str]:
    values: list[str] = []
    for n, key in enumerate(_HEAD):
        line, row = rows[n] if n < len(rows) else (n + 1, [])
        row = row + [""] * (2 - len(row))
        if row[0] != key:
            raise PlanError(
                f"row {line}, column 1: found {row[0]!r}, expected {key!r}",
                hint=f"the text begins with the rows {', '.join(_HEAD)}",
            )
        if any(row[2:]) or (n and not _NUMBER.fullmatch(row[1])):
            raise PlanError(
                f"row {line}, column 2: found {','.join(row[1:])!r}, expected the "
                f"{'name' if n == 0 else 'number'} of {key}"
            )
        values.append(row[1])
    return values


def _tick(n: int, line: int, row: list[str], empty: Schedule) -> tuple[Cell, ...]:
    devices = empty.devices
    if row[0] not in ("", str(n)):
        raise PlanError(
            f"row {line}, column 1: tick {row[0]!r}, expected {n}",
            hint="ticks count from 0 without gaps; the column may be left empty",
        )
    if len(row) > devices + 1:
        raise PlanError(
            f"row {line}, column {devices + 2}: a cell more than the {devices} devices"
        )
    cells = row[1:] + [""] * (devices + 1 - len(row))
    return tuple(_cell(cell, line, d, empty) for d, cell in enumerate(cells))


def _cell(text: str, line: int, device: int, empty: Schedule) -> Cell:
    tasks: list[Task] = []
    for word in text.split():
        where = f"row {line}, column {device + 2} (device {device})"
        found = _TASK.fullmatch(word)
        if not found:
            raise PlanError(
                f"{where}: {word!r} is no task",
                hint="a task is stage, F or B or W, microbatch: 2F0",
            )
        task = Task(Kind(found[2]), int(found[3]), int(found[1]))
        wrong = empty.misfit(device, task)
        if wrong:
            raise PlanError(f"{where}: {wrong}")
        tasks.append(task)
    return tuple(tasks)
