"""A check of a plan as tables in the terminal."""

from rich.console import Console

from jaxpar.report.table import print_table
from jaxpar.report.units import bytes_text, seconds_text
from jaxpar.verify.compare import Check


def print_check(check: Check, console: Console | None = None) -> None:
    """Prints predicted against compiled, and where they differ."""
    console = console or Console()
    rows = [
        (
            row.kind,
            " + ".join(row.axes) if row.axes else "no axes",
            bytes_text(row.bytes),
            f"{row.predicted:,}",
            f"{row.compiled:,}",
            "" if row.predicted == row.compiled else "differs",
        )
        for row in check.rows
    ]
    headers = ("collective", "axes", "bytes", "predicted", "compiled", "")
    print_table(f"collectives, {check.stage} ({check.backend})", headers, rows, console)
    cells = [
        (
            row.name,
            bytes_text(row.predicted_bytes),
            bytes_text(row.compiled_bytes),
            f"{row.predicted_bytes / max(row.compiled_bytes, 1) - 1:+.1%}",
        )
        for row in check.memory
    ]
    if cells:
        titles = ("memory per device", "predicted", "compiled", "difference")
        print_table("memory", titles, cells, console)
    step = f"step predicted {seconds_text(check.predicted_step_s)}"
    if check.compiled_step_s is not None:
        step += f", by the compiler's cycles {seconds_text(check.compiled_step_s)}"
    console.print(f"{step}; compiled in {seconds_text(check.seconds)}")
    for problem in check.problems():
        console.print(f"differs: {problem}", style="yellow", highlight=False)
    if check.agrees:
        console.print("the program is as predicted", style="green")
