"""The timeline of a step as bars, in the terminal or in a file."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from jaxpar.errors import PlanError
from jaxpar.plan import Plan
from jaxpar.report.table import print_table
from jaxpar.report.units import count_text, mesh_text, percent_text, seconds_text
from jaxpar.timeline import Pace, Run, Timeline
from jaxpar.timeline.play import COMPUTE

STYLES = {"forward": "green", "backward": "yellow", "update": "magenta"}
_LEVELS = " ▁▂▃▄▅▆▇█"
_NAME_CHARS = 16
_ROW_INCHES = 0.6


def print_timeline(
    plan: Plan,
    timelines: tuple[Timeline, Timeline],
    rates: Pace,
    run: Run | None = None,
    console: Console | None = None,
) -> None:
    """Prints a step: its bars, what it waits for, and what it means for a run.

    Args:
        plan: Whose step it is.
        timelines: With overlap, and without.
        rates: Of the first of them.
        run: A whole run at these rates.
        console: Where to; standard output by default.
    """
    console = console or Console()
    beside, alone = timelines
    title = f"{plan.topology.name}, {mesh_text(plan.mesh)}: one step"
    console.print(f"{title}, {seconds_text(beside.step_s)}", style="bold")
    for line in bars(beside, max(console.width - _NAME_CHARS - 2, 10)):
        console.print(line, no_wrap=True)
    legend = (Text(f" {name} ", style) for name, style in STYLES.items())
    console.print(Text("").join([Text(" " * _NAME_CHARS), *legend]))
    rows = [
        (axes, seconds_text(time_s), seconds_text(beside.exposed_s[axes]))
        for axes, time_s in beside.communication_s.items()
    ]
    rows.append(("computation, update", seconds_text(beside.compute_s), ""))
    rows.append(("step", seconds_text(alone.step_s), seconds_text(beside.step_s)))
    headers = ("part", "one by one", "exposed")
    print_table("seconds of one step", headers, rows, console)
    console.print(_rates(rates))
    if run is not None:
        console.print(_run(run))


def bars(timeline: Timeline, width: int) -> list[Text]:
    """One line per stream: height is the share of time in use, colour the phase."""
    lines: list[Text] = []
    for stream, busy in _busy(timeline, width).items():
        line = Text(f"{stream:<{_NAME_CHARS}.{_NAME_CHARS}} ")
        for phases in busy:
            share = min(1.0, sum(phases.values()))
            level = _LEVELS[round(share * (len(_LEVELS) - 1))]
            phase = max(phases, key=lambda p: phases[p], default="forward")
            line.append(level, STYLES[phase])
        lines.append(line)
    return lines


def _busy(timeline: Timeline, width: int) -> dict[str, list[dict[str, float]]]:
    """Per stream and column, the share of its time that each phase uses."""
    found: dict[str, list[dict[str, float]]] = {COMPUTE: [{} for _ in range(width)]}
    per_column = timeline.step_s / width or 1.0
    for span in timeline.spans:
        row = found.setdefault(span.stream, [{} for _ in range(width)])
        first, last = span.start_s / per_column, span.end_s / per_column
        for column in range(int(first), min(int(last) + 1, width)):
            part = min(last, column + 1) - max(first, column)
            phases = row[column]
            phases[span.task.phase] = phases.get(span.task.phase, 0.0) + part
    return found


def save_figure(plan: Plan, timeline: Timeline, path: Path) -> None:
    """Draws the timeline to a picture file.

    Raises:
        PlanError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as problem:
        raise PlanError(
            "drawing needs matplotlib", hint="pip install 'jaxpar[report]'"
        ) from problem
    streams = list(dict.fromkeys([COMPUTE, *(s.stream for s in timeline.spans)]))
    figure = Figure(figsize=(12, 1 + _ROW_INCHES * len(streams)), layout="constrained")
    axes = figure.add_subplot()
    for row, stream in enumerate(streams):
        for phase, style in STYLES.items():
            pieces = [
                (s.start_s, s.end_s - s.start_s)
                for s in timeline.spans
                if (s.stream, s.task.phase) == (stream, phase)
            ]
            axes.broken_barh(pieces, (row - 0.4, 0.8), facecolors=f"tab:{_HUES[style]}")
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(f"{plan.topology.name}, {mesh_text(plan.mesh)}")
    figure.savefig(path)


_HUES = {"green": "green", "yellow": "orange", "magenta": "purple"}


def _rates(rates: Pace) -> Text:
    words = [f"step {seconds_text(rates.step_s)}"]
    if rates.mfu is not None:
        words.append(f"{percent_text(rates.mfu)} MFU")
    if rates.hfu is not None:
        words.append(f"{percent_text(rates.hfu)} HFU")
    if rates.tokens_per_s is not None:
        words.append(f"{count_text(rates.tokens_per_s)} tokens/s")
    return Text(", ".join(words))


def _run(run: Run) -> Text:
    words = (
        f"{count_text(run.tokens)} tokens: {run.steps:,.0f} steps, "
        f"{run.hours:,.1f} hours, {run.device_hours:,.0f} device hours"
    )
    if run.price is not None:
        words += f", {run.price:,.0f} at this price"
    return Text(words)
