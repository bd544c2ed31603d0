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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
)
from jaxpar.configurations import evaluate, layouts
from jaxpar.errors import MeshError

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


def step_time_runs(content: Mapping[str, Any]) -> Iterator[dict]:
    """Rows of measured step times, as records."""
    for kind in ("multi", "single"):
        for i, row in enumerate(content[kind]):
            values = dict(zip(content["columns"], row, strict=True))
            width = values["hidden"]
            yield {
                "id": f"vtrain-{kind}-{i}",
                "source": f"vTrain {kind}",
                "tier": "A",
                "precision": "fp16",
                "model": {
                    "layers": values["layers"],
                    "d_model": width,
                    "heads": values["heads"],
                    "kv_heads": values["heads"],
                    "d_ff": 4 * width,
                    "vocab": 50257,
                    "seq_len": values["seq_len"],
                    "mlp": "gelu",
                },
                "hardware": {
                    "chip": "A100-80",
                    "count": values["gpus"],
                    "nic": "800Gb/s per node",
                },
                "parallel": {
                    "data": values["data"],
                    "tensor": values["tensor"],
                    "pipeline": values["pipeline"],
                    "microbatch": values["micro_batch"],
                    "global_batch": values["global_batch"],
                    "recompute": "full",
                    "zero": 0,
                },
                "measured": {"iteration_s": values["iteration_ms"] / 1e3},
            }


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
        except (RefusedError, MeshError) as why:
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
    print_memory(console, runs)
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


def print_memory(console: Console, runs: list[Run]) -> None:
    """Bytes of the fullest device over the peak that a source gives, by group."""
    ratios = defaultdict(list)
    for run in runs:
        given = run.record["measured"].get("memory") or {}
        peak = given.get("peak_GB", 0) * 1e9 or given.get("peak_GiB", 0) * 2**30
        if peak:
            held = evaluate(run.shape, layouts(**run.columns), run.topology).memory
            ratios[run.group].append(held.total[0] / peak)
    for group, found in ratios.items():
        console.print(
            f"memory of {len(found)} runs of {group}, predicted over published peak: "
            f"{min(found):.2f} to {max(found):.2f}, median {np.median(found):.2f}"
        )


if __name__ == "__main__":
    main()
