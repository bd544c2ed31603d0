"""A plan as tables in the terminal."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxpar.plan import ActivationPlan, Change, ParamPlan, Plan, PlanDiff, SearchReport
from jaxpar.report.group import groups
from jaxpar.report.units import (
    bytes_text,
    count_text,
    mesh_text,
    percent_text,
    seconds_text,
    shape_text,
    spec_text,
)

_BAR_CHARS = 16
_WIDE_CHARS = 120
_BATCH_ROWS = 4
_QUOTED = re.compile(r'"[^"]*"')
_UNITS = (
    (re.compile(r"_s(\.|$)"), seconds_text),
    (re.compile(r"_bytes$|bytes_per_device$|^collectives"), bytes_text),
    (re.compile(r"mfu$"), percent_text),
)
_RIGHT = frozenset({"count", "time", "bytes", "per device", "each", "per step"})


@dataclass(frozen=True)
class _Rows:
    """A table before it is drawn; only the first `limit` rows unless all are asked."""

    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    limit: int


def print_plan(
    plan: Plan, console: Console | None = None, *, verbose: bool = False
) -> None:
    """Prints what a plan does, what it costs and why.

    Args:
        plan: The plan.
        console: Where to; standard output by default.
        verbose: Every row of every table, with its reason.
    """
    console = console or Console()
    console.print(_head(plan))
    console.print(Columns([_step(plan), _memory(plan)], padding=(0, 4)))
    reasons = verbose or console.width >= _WIDE_CHARS
    sections = [_parameters(plan), _activations(plan), _collectives(plan)]
    for section in [*sections, _replicated(plan)] + [_meshes(plan)] * verbose:
        _print_rows(console, section, everything=verbose, reasons=reasons)
    for note in plan.notes:
        console.print(Text.assemble(("note ", "bold yellow"), note))
    console.print(_search(plan.search))


def print_diff(difference: PlanDiff, console: Console | None = None) -> None:
    """Prints what differs between two plans; layers that changed alike stand once."""
    console = console or Console()
    if not difference:
        console.print("The plans do the same.")
    for section, changes in vars(difference).items():
        if changes:
            headers = ("where", "count", "before", "after", "")
            console.print(_table(section, headers, _change_rows(changes)))


def print_table(
    title: str,
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    console: Console | None = None,
) -> None:
    """Prints any table of text, such as that of the topologies or of the zoo.

    Args:
        title: What stands over it.
        headers: Names of the columns.
        rows: Cells of each row.
        console: Where to; standard output by default.
    """
    (console or Console()).print(_table(title, headers, rows))


def _table(
    title: str, headers: Sequence[str], rows: Iterable[Sequence[str | Text]]
) -> Table:
    table = Table(
        title=Text(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for header in headers:
        table.add_column(
            Text(header),
            justify="right" if header in _RIGHT else "left",
            no_wrap=header in _RIGHT,
            overflow="fold",
        )
    for row in rows:
        # Text, not str: brackets and colons in names are no markup.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _print_rows(
    console: Console, section: _Rows, *, everything: bool, reasons: bool
) -> None:
    if not section.rows:
        return
    keep = [
        i
        for i, header in enumerate(section.headers)
        if (reasons or header != "reason") and any(row[i] for row in section.rows)
    ]
    shown = section.rows if everything else section.rows[: section.limit]
    headers = [section.headers[i] for i in keep]
    console.print(
        _table(section.title, headers, ([row[i] for i in keep] for row in shown))
    )
    if hidden := len(section.rows) - len(shown):
        console.print(Text(f"and {hidden} more rows\n", "dim"))


def _head(plan: Plan) -> Panel:
    grid = Table.grid(padding=(0, 2))
    machine, model, predicted = plan.topology, plan.model, plan.predicted
    slices = f" in {machine.slices} slices" if machine.slices > 1 else ""
    lines = [
        (
            "machine",
            f"{machine.name}: {machine.devices} x {machine.chip}{slices}, "
            f"{bytes_text(machine.memory_bytes)} each",
        ),
        ("mesh", mesh_text(plan.mesh)),
        *(
            ("", f"{axis}: {n.role}; {n.link}".rstrip("; "))
            for axis, n in plan.axes.items()
        ),
        ("model", f"{count_text(model.parameters)} parameters, {model.leaves} leaves"),
        *_batch_lines(plan),
    ]
    rates = [f"step {seconds_text(predicted.step_s)}"]
    if predicted.mfu is not None:
        rates.append(f"{percent_text(predicted.mfu)} MFU")
    if predicted.tokens_per_s is not None:
        rates.append(f"{count_text(predicted.tokens_per_s)} tokens/s")
    for name, words in [*lines, ("expected", ", ".join(rates))]:
        grid.add_row(Text(name, "bold cyan"), Text(words))
    return Panel(grid, title="jaxpar plan", title_align="left", expand=False)


def _batch_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    for i, (path, array) in enumerate(plan.batch.items()):
        if i == _BATCH_ROWS:
            yield "", f"and {len(plan.batch) - i} more arrays"
            return
        words = (
            f"{path} {array.dtype} {shape_text(array.shape)}: {spec_text(array.spec)}"
        )
        yield "" if i else "batch", words.strip()


def _step(plan: Plan) -> Table:
    predicted = plan.predicted
    parts = [
        ("compute", predicted.compute_s, "green"),
        *(
            (f"communication {axis}", time_s, "blue")
            for axis, time_s in predicted.communication_s.items()
        ),
        ("exposed communication", predicted.exposed_communication_s, "red"),
        ("optimizer", predicted.optimizer_s, "magenta"),
        ("step", predicted.step_s, "bold"),
    ]
    rows = (
        (name, seconds_text(time_s), _bar(time_s, predicted.step_s, style))
        for name, time_s, style in parts
    )
    return _table("step", ("part", "time", ""), rows)


def _memory(plan: Plan) -> Table:
    memory = plan.predicted.memory
    limit = memory.limit_bytes
    over = memory.total_bytes > limit
    rows = [
        (name.replace("_", " "), bytes_text(size), _bar(size, limit, "cyan"))
        for name, size in memory.classes()
    ]
    total = _bar(memory.total_bytes, limit, "red" if over else "bold")
    rows.append(("total", bytes_text(memory.total_bytes), total))
    share = percent_text(memory.total_bytes / limit) if limit else ""
    rows.append(("limit", bytes_text(limit), Text(f"{share} used" if limit else "")))
    return _table("memory per device", ("class", "bytes", ""), rows)


def _bar(part: float, whole: float, style: str) -> Text:
    share = min(1.0, part / whole) if whole else 0.0
    full = max(round(_BAR_CHARS * share), int(part > 0))
    return Text("█" * full, style).append("░" * (_BAR_CHARS - full), "dim")


def _parameters(plan: Plan) -> _Rows:
    def look(path: str) -> tuple[Any, ...]:
        p = plan.params[path]
        return p.shape, p.dtype, p.storage, p.compute, p.optimizer, p.reason

    def total(names: Iterable[str]) -> int:
        return sum(plan.params[name].bytes_per_device for name in names)

    found = sorted(groups(plan.params, look), key=lambda group: -total(group.names))
    rows = [
        (
            group.label,
            str(len(group.names)),
            *_parameter_cells(plan.params[group.names[0]]),
            bytes_text(total(group.names)),
            _stages(plan.params[name].stage for name in group.names),
            plan.params[group.names[0]].reason,
        )
        for group in found
    ]
    specs = ("storage", "compute", "optimizer")
    headers = ("parameter", "count", "shape", *specs, "per device", "stage", "reason")
    return _Rows("parameters", headers, rows, limit=24)


def _parameter_cells(param: ParamPlan) -> tuple[str, ...]:
    """Shape and specs; those that equal the storage are left empty."""
    others = (param.compute, param.optimizer)
    same = param.storage
    cells = ("" if spec == same else spec_text(spec) for spec in others)
    return shape_text(param.shape), spec_text(same), *cells


def _stages(stages: Iterable[int | None]) -> str:
    found = sorted({stage for stage in stages if stage is not None})
    if len(found) > 1:
        return f"{found[0]}-{found[-1]}"
    return str(found[0]) if found else ""


def _activations(plan: Plan) -> _Rows:
    def look(name: str) -> ActivationPlan:
        return plan.activations[name]

    rows = [
        (
            group.label,
            str(len(group.names) * first.executions),
            shape_text(first.shape),
            " > ".join(spec_text(spec) for spec in first.specs),
            first.reason,
        )
        for group in groups(plan.activations, look)
        for first in [look(group.names[0])]
    ]
    headers = ("activation", "count", "shape", "sharding", "reason")
    return _Rows("activations", headers, rows, limit=8)


def _collectives(plan: Plan) -> _Rows:
    named = {f"{c.where} {i}": c for i, c in enumerate(plan.collectives)}

    def look(name: str) -> tuple[Any, ...]:
        c = named[name]
        return c.kind, c.axes, c.bytes, c.phase, c.reason

    found = []
    for group in groups(named, look):
        members = [named[name] for name in group.names]
        first, total = members[0], sum(c.total_bytes for c in members)
        row = (
            f"{first.kind} over {', '.join(first.axes)}",
            str(sum(c.executions for c in members)),
            bytes_text(first.bytes),
            bytes_text(total),
            first.phase,
            group.label.rsplit(" ", 1)[0],
            first.reason,
        )
        found.append((total, row))
    rows = [row for _, row in sorted(found, key=lambda entry: -entry[0])]
    sizes = ("count", "each", "per step")
    headers = ("collective", *sizes, "phase", "where", "reason")
    return _Rows("collectives", headers, rows, limit=8)


def _replicated(plan: Plan) -> _Rows:
    def look(name: str) -> tuple[Any, ...]:
        tensor = plan.replicated[name]
        return tensor.bytes, tensor.wanted, tensor.reason

    rows = [
        (
            group.label,
            str(len(group.names)),
            bytes_text(first.bytes),
            spec_text(first.wanted) if first.wanted else "",
            first.reason,
        )
        for group in groups(plan.replicated, look)
        for first in [plan.replicated[group.names[0]]]
    ]
    headers = ("tensor", "count", "each", "wanted", "why")
    return _Rows("whole on every device", headers, rows, limit=6)


def _meshes(plan: Plan) -> _Rows:
    rows = [
        (
            mesh_text(tried.mesh),
            "" if tried.objective_s is None else seconds_text(tried.objective_s),
            tried.refused or "",
        )
        for tried in plan.search.meshes_tried
    ]
    return _Rows("meshes", ("mesh", "time", "refused"), rows, limit=0)


def _search(search: SearchReport) -> Text:
    words = f", {seconds_text(search.objective_s)}"
    if search.gap is not None and search.lower_bound_s is not None:
        words += f" (lower bound {seconds_text(search.lower_bound_s)}, "
        words += f"gap {percent_text(search.gap)})"
    words += f"; {search.candidates:,} strategies"
    if search.meshes_tried:
        words += f", {len(search.meshes_tried)} meshes"
    words += f", planned in {seconds_text(search.seconds)}"
    style = "bold green" if search.status == "optimal" else "bold yellow"
    return Text.assemble(
        ("search ", "bold"), f"{search.method}: ", (search.status, style), words
    )


def _change_rows(changes: Sequence[Change]) -> Iterator[tuple[str, ...]]:
    by_place = {change.where: change for change in changes}

    def look(where: str) -> tuple[str, str]:
        change = by_place[where]
        return repr(change.before), repr(change.after)

    for group in groups(by_place, look):
        change = by_place[group.names[0]]
        yield (
            group.label,
            str(len(group.names)),
            _value_text(change.where, change.before),
            _value_text(change.where, change.after),
            _growth(change),
        )


def _value_text(where: str, value: Any) -> str:
    """A JSON value of the plan file for people; the unit is in the key path."""
    if value is None:
        return "-"
    if isinstance(value, int | float):
        keys = _QUOTED.sub("", where)
        units = (text for key, text in _UNITS if key.search(keys))
        return next(units, str)(value)
    if isinstance(value, dict) and where != "mesh":
        return "present"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _growth(change: Change) -> str:
    numbers = isinstance(change.before, int | float) and change.before > 0
    if not numbers or not isinstance(change.after, int | float):
        return ""
    return f"{100 * (change.after / change.before - 1):+.1f}%"
