"""Predicted against published training runs, from the published configuration alone.

    python benchmarks/published.py [--data FILE]... [--worst 10] [--all]

Without a file, the rows of papers in published_rows.toml. A file is JSON: a list of
runs (model, hardware, parallel, measured), or columns and rows of step times. Nothing
is fitted to a run: one set of constants per chip (jaxpar/configurations/chips.py), and
per source what software it ran. Every run that is not predicted is listed, with why.
"""

import argparse
import json
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.published_gates import gates
from benchmarks.published_runs import (
    RefusedError,
    Run,
    distinct,
    predict,
    read_run,
    step_time_runs,
)

ROWS = Path(__file__).with_name("published_rows.toml")


def records(paths: list[str]) -> Iterator[dict]:
    """Runs of some files as records."""
    for path in map(Path, paths or [ROWS]):
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        if "run" in content:
            yield from content["run"]
        elif isinstance(content, dict):
            yield from step_time_runs(content)
        else:
            yield from content


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    options.add_argument("--data", action="append", default=[], help="JSON file")
    options.add_argument("--worst", type=int, default=10, help="worst runs to list")
    options.add_argument("--all", action="store_true", help="list every run")
    given = options.parse_args()
    runs, refused = [], defaultdict(list)
    for record in records(given.data):
        try:
            runs.append(read_run(record))
        except RefusedError as why:
            refused[str(why)].append(record["id"])
    read, runs = len(runs), distinct(runs)
    predicted = predict(runs)
    console = Console(width=150)
    errors = predicted / [run.seconds for run in runs] - 1
    print_sources(console, runs, errors)
    order = np.argsort(-np.abs(errors))
    shown = range(len(runs)) if given.all else order[: given.worst]
    print_runs(console, runs, predicted, errors, shown, "all" if given.all else "worst")
    print_gates(console, runs, predicted)
    if read > len(runs):
        console.print(f"{read - len(runs)} runs are in the files twice, counted once")
    for why, names in sorted(refused.items()):
        console.print(f"not predicted ({len(names)}): {why}: {', '.join(names)}")


def print_sources(console: Console, runs: list[Run], errors: np.ndarray) -> None:
    table = Table(title="predicted / published - 1, by source")
    for name in ("group", "runs", "mean |error|", "worst", "bias"):
        table.add_column(name)
    groups = defaultdict(list)
    for run, error in zip(runs, errors, strict=True):
        groups[run.group].append(error)
    for name, found in groups.items():
        worst = max(found, key=abs)
        table.add_row(
            name,
            str(len(found)),
            f"{np.mean(np.abs(found)):.1%}",
            f"{worst:+.1%}",
            f"{np.mean(found):+.1%}",
        )
    console.print(table)


def print_runs(
    console: Console,
    runs: list[Run],
    predicted: np.ndarray,
    errors: np.ndarray,
    shown: range | np.ndarray,
    title: str,
) -> None:
    table = Table(title=f"{title}: seconds of a step")
    for name in ("run", "published", "predicted", "error", "assumed"):
        table.add_column(name)
    for i in shown:
        run = runs[i]
        table.add_row(
            run.name,
            f"{run.seconds:.3f}",
            f"{predicted[i]:.3f}",
            f"{errors[i]:+.1%}",
            "; ".join(run.assumed),
        )
    console.print(table)


def print_gates(console: Console, runs: list[Run], predicted: np.ndarray) -> None:
    table = Table(title="gates")
    for name in ("gate", "runs", "figure", "limit", ""):
        table.add_column(name)
    for gate in gates(runs, predicted):
        verdict = "pass" if gate.holds else "FAIL"
        if not gate.runs:
            verdict = "no such runs"
        table.add_row(
            gate.name, str(gate.runs), f"{gate.figure:.2%}", gate.limit, verdict
        )
    console.print(table)


if __name__ == "__main__":
    main()
