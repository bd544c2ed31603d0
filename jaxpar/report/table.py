"""A plan as tables in the terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxpar.plan import Plan, PlanDiff, SearchReport
from jaxpar.report import rows
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
_RIGHT = frozenset(
    {"count", "time", "bytes", "per device", "each", "per step", "growth"}
)


def print_plan(
    plan: Plan, console: Console | None = None, *, verbose: bool = False
) -> None:
    """Prints what a plan does, what it costs and why.

    Args:
        plan: The plan.
        console: Where to; standard output by default.
        verbose: Every row and column of every table, and the meshes tried.
    """
    console = console or Console()
    console.print(_head(plan))
    console.print(Columns([_step(plan), _memory(plan)], padding=(0, 4)))
    sections = [
        rows.parameters(plan),
        rows.activations(plan),
        rows.collectives(plan),
        rows.replicated(plan),
        *([rows.meshes(plan)] if verbose else []),
    ]
    for section in sections:
        _print_rows(console, section, verbose=verbose)
    console.print()
    if plan.remat.reason:
        kept = ", ".join(plan.remat.saved) or plan.remat.level
        text = f"{kept}: {plan.remat.reason}"
        console.print(Text.assemble(("rematerialisation ", "bold cyan"), text))
    for note in plan.notes:
        console.print(Text.assemble(("note ", "bold yellow"), note))
    console.print(_search(plan.search))


def print_diff(difference: PlanDiff, console: Console | None = None) -> None:
    """Prints what differs between two plans; layers that changed alike stand once."""
    console = console or Console()
    if not difference:
        console.print("The plans do the same.")
    for section, found in vars(difference).items():
        _print_rows(console, rows.changes(section, found), verbose=True)


def print_table(
    title: str,
    headers: Sequence[str],
    cells: Iterable[Sequence[str]],
    console: Console | None = None,
) -> None:
    """Prints any table of text, such as that of the topologies or of the zoo.

    Args:
        title: What stands over it.
        headers: Names of the columns.
        cells: The rows, each with a cell per header.
        console: Where to; standard output by default.
    """
    console = console or Console()
    _print_fitting(console, _table(title, headers, cells))


def _print_rows(console: Console, section: rows.Rows, *, verbose: bool) -> None:
    """Prints the rows and columns that there is room for; empty columns never."""
    if not section.rows:
        return
    wide = verbose or console.width >= _WIDE_CHARS
    dropped = frozenset() if wide else section.details
    keep = [
        i
        for i, header in enumerate(section.headers)
        if header not in dropped and any(row[i] for row in section.rows)
    ]
    shown = section.rows if verbose else section.rows[: section.limit]
    headers = [section.headers[i] for i in keep]
    cells = ([row[i] for i in keep] for row in shown)
    _print_fitting(console, _table(section.title, headers, cells))
    if hidden := len(section.rows) - len(shown):
        console.print(Text(f"and {hidden} more rows", "dim"))


def _print_fitting(console: Console, table: Table) -> None:
    """Prints a table whose first column keeps a third of the line, if it can."""
    names = table.columns[0]
    longest = console.measure(Group(*names.cells)).maximum
    names.width = min(longest, console.width // 3)
    if console.measure(table).minimum > console.width:
        names.width = None
    console.print(table)


def _table(
    title: str, headers: Sequence[str], cells: Iterable[Sequence[str | Text]]
) -> Table:
    table = Table(
        title=Text(f"\n{title}", "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for header in headers:
        right = header in _RIGHT
        justify = "right" if right else "left"
        table.add_column(Text(header), justify=justify, no_wrap=right, overflow="fold")
    for row in cells:
        # Text, not str: brackets and colons in names are no markup.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


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
    rates.append(f"{bytes_text(predicted.memory.total_bytes)} per device")
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
    if predicted.overlapped is not None:
        parts.append(("with overlap", predicted.overlapped.step_s, "bold"))
    cells = (
        (name, seconds_text(time_s), _bar(time_s, predicted.step_s, style))
        for name, time_s, style in parts
    )
    return _table("step", ("part", "time", ""), cells)


def _memory(plan: Plan) -> Table:
    memory = plan.predicted.memory
    limit = memory.limit_bytes
    over = memory.total_bytes > limit
    cells = [
        (name.replace("_", " "), bytes_text(size), _bar(size, limit, "cyan"))
        for name, size in memory.classes()
    ]
    total = _bar(memory.total_bytes, limit, "red" if over else "bold")
    cells.append(("total", bytes_text(memory.total_bytes), total))
    share = percent_text(memory.total_bytes / limit) if limit else ""
    cells.append(("limit", bytes_text(limit), Text(f"{share} used" if limit else "")))
    return _table("memory per device", ("class", "bytes", ""), cells)


def _bar(part: float, whole: float, style: str) -> Text:
    share = min(1.0, part / whole) if whole else 0.0
    bar = "█" * round(_BAR_CHARS * share) or "▏" * (part > 0)
    return Text(bar, style).append("░" * (_BAR_CHARS - len(bar)), "dim")


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
