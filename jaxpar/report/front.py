"""The front of memory against time, as a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from jaxpar.report.table import print_table
from jaxpar.report.units import bytes_text, mesh_text, percent_text, seconds_text

if TYPE_CHECKING:
    from jaxpar.front import ParetoPoint


def print_front(points: "Sequence[ParetoPoint]", console: Console) -> None:
    """Prints the points, the fastest first."""
    rows = [
        (
            bytes_text(p.memory_bytes) + ("" if p.fits else " (too much)"),
            seconds_text(p.step_s),
            f"+{percent_text(p.slower)}",
            mesh_text(p.mesh),
            ", ".join(p.saved) or p.remat,
            bytes_text(p.memory["residuals_bytes"]),
        )
        for p in points
    ]
    headers = ("per device", "step", "slower", "mesh", "remat", "of it residuals")
    print_table("memory against time", headers, rows, console)
