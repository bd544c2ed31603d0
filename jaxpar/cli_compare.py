"""`jaxpar compare`: a published layout beside the one that the search finds."""

import json
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxpar.cli_values import machine
from jaxpar.errors import InfeasibleError, ModelError

RunOption = Annotated[
    int, typer.Option("--run", help="Which published run of the model, from 1")
]


def as_published(model: str, number: int = 1) -> tuple[Any, Any]:
    """The published run of zoo:NAME, and the plan of its layout.

    Raises:
        ModelError: if there is no such run, or its layout cannot be planned.
    """
    import jaxpar
    from jaxpar.zoo import zoo
    from jaxpar.zoo.published import published_run

    where, _, name = model.partition(":")
    if where != "zoo":
        raise ModelError(
            f"{model!r} has no published run",
            hint="only models of the zoo have: zoo:NAME",
        )
    run = published_run(name, number)
    topology, mesh = run.machine()
    given = zoo(name, batch=run.batch, seq=run.seq, **run.options)
    sizes = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    plan = jaxpar.make_plan(**given, mesh=machine(topology, sizes), zero=run.zero)
    return run, replace(plan, notes=(*plan.notes, *_notes(run)))


def _notes(run: Any) -> list[str]:
    found = [f"layout as published: {run.source}"]
    if "pad_vocab" in run.options:
        from jaxpar.zoo import find
        from jaxpar.zoo.config import DecoderConfig

        config = find(run.model).changed(**run.options).config
        if isinstance(config, DecoderConfig):
            found.append(
                f"the vocabulary of {config.vocab} is padded to {config.table_rows} "
                f"rows (multiples of {config.pad_vocab}); logits of the rest are masked"
            )
    return found


def compare(
    model: Annotated[str, typer.Argument(help="zoo:NAME", metavar="MODEL")],
    run: RunOption = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone")] = False,
) -> None:
    """Plans a model as it was published and freely, on the same machine."""
    import jaxpar
    from jaxpar.plan import diff
    from jaxpar.report.table import print_diff, print_table
    from jaxpar.zoo import zoo

    try:
        known, theirs = as_published(model, run)
    except InfeasibleError as problem:
        raise InfeasibleError(
            f"as published: {problem.message}", hint=problem.hint
        ) from problem
    given = zoo(known.model, batch=known.batch, seq=known.seq, **known.options)
    ours = jaxpar.make_plan(**given, mesh=known.topology)
    rows = _rows(known, theirs, ours)
    if as_json:
        print(
            json.dumps(
                [dict(zip(_HEADERS, row, strict=True)) for row in rows], indent=1
            )
        )
        return
    console = Console()
    print_table(f"{model} on {known.topology}", _HEADERS, rows, console)
    print_diff(diff(theirs, ours), console)
    for note in (*theirs.notes, *ours.notes):
        console.print(f"note {note}", highlight=False, markup=False)


_HEADERS = ("", "published", "planned as published", "searched")


def _rows(run: Any, theirs: Any, ours: Any) -> list[tuple[str, str, str, str]]:
    """What was measured, and what both plans are predicted to do."""
    from jaxpar.report.units import bytes_text

    def both(text: Any) -> tuple[str, str]:
        return text(theirs), text(ours)

    def mesh(sizes: Any) -> str:
        return " ".join(f"{axis}={size}" for axis, size in sizes.items())

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        ("mesh", mesh(run.mesh), *both(lambda p: mesh(p.mesh))),
        (
            "step, s",
            number(run.step_s, ".3g"),
            *both(lambda p: f"{p.predicted.step_s:.3g}"),
        ),
        ("MFU", number(run.mfu, ".1%"), *both(lambda p: f"{p.predicted.mfu:.1%}")),
        (
            "exposed communication, s",
            "",
            *both(lambda p: f"{p.predicted.exposed_communication_s:.3g}"),
        ),
        (
            "memory per device",
            "",
            *both(lambda p: bytes_text(p.predicted.memory.total_bytes)),
        ),
    ]
