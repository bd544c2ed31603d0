"""The command `simulate`: a plan's step on a clock, and the cost of a run."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

PlanArgument = Annotated[Path, typer.Argument(help="A plan file", metavar="PLAN")]
PriceOption = Annotated[float | None, typer.Option(help="Of one device for one hour")]
TokensOption = Annotated[
    float | None, typer.Option(help="Tokens of a whole run, as 1e12")
]
OverlapOption = Annotated[bool, typer.Option(help="Collectives run beside computation")]
FigureOption = Annotated[
    Path | None, typer.Option(help="Draw to this file; needs jaxpar[report]")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else")]


def simulate(
    plan_file: PlanArgument,
    price: PriceOption = None,
    tokens: TokensOption = None,
    overlap: OverlapOption = True,
    figure: FigureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plays the step of a plan: what overlaps, what waits, what a run costs."""
    from jaxpar.errors import PlanError
    from jaxpar.plan import load_plan
    from jaxpar.report.timeline import print_timeline, save_figure
    from jaxpar.timeline import pace, run_of, timeline_of

    if price is not None and tokens is None:
        raise PlanError("--price needs --tokens", hint="say how long the run is")
    plan = load_plan(plan_file)
    alone = timeline_of(plan, overlap=False)
    shown = timeline_of(plan) if overlap else alone
    rates = pace(plan, shown)
    run = None if tokens is None else run_of(plan, rates, tokens, price)
    if figure is not None:
        save_figure(plan, shown, figure)
    if not as_json:
        print_timeline(plan, (shown, alone), rates, run, Console())
        return
    found = {
        **vars(rates),
        "compute_s": shown.compute_s,
        "communication_s": shown.communication_s,
        "exposed_communication_s": shown.exposed_s,
        "without_overlap_s": alone.step_s,
        "run": None if run is None else vars(run),
    }
    print(json.dumps(found, indent=1))
