"""How the constants of a chip were chosen, on the rows that the project names.

    python benchmarks/published_choice.py

Prints the best points of a coarse grid: A100 on 2205.05198 Table 5, TPU v5e on two of
MaxText's rows, 16B and 128B on one slice. No other run is looked at.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.published import ROWS, records
from benchmarks.published_gates import CHOSEN_ON
from benchmarks.published_runs import Run, read_run
from jaxpar.configurations import evaluate, kernels, layouts

GRIDS = {
    "A100": {
        "matmul_efficiency": (0.76, 0.78, 0.80, 0.82, 0.84, 0.869),
        "hbm_efficiency": (0.60, 0.65, 0.70, 0.75, 0.80, 0.85),
        "fill": (32, 64, 128, 192),
    },
    "TPU v5e": {
        "matmul_efficiency": (0.76, 0.78, 0.80, 0.82, 0.84, 0.86, 0.88),
        "pointwise": (0.1, 0.2, 0.3, 0.4, 0.5),
        "flash_efficiency": (0.4, 0.6),
    },
}
SHOWN = 5


def errors(runs: list[Run], point: dict[str, float]) -> np.ndarray:
    """Predicted over published, less one."""
    found = []
    for run in runs:
        constants = replace(kernels(run.topology), **point)
        rows = layouts(**run.columns)
        step = evaluate(run.shape, rows, run.topology, kernels=constants).seconds.step
        found.append(step[0] / run.seconds - 1)
    return np.array(found)


def main() -> None:
    runs = [read_run(record) for record in records([str(ROWS)])]
    sets = {
        "A100": [run for run in runs if run.group == "2205.05198 Table 5"],
        "TPU v5e": [run for run in runs if run.name in CHOSEN_ON],
    }
    for chip, grid in GRIDS.items():
        points = [
            dict(zip(grid, values, strict=True)) for values in product(*grid.values())
        ]
        tried = [(errors(sets[chip], point), point) for point in points]
        tried.sort(key=lambda pair: np.abs(pair[0]).mean())
        print(f"{chip}: {len(points)} points on {len(sets[chip])} runs")
        for found, point in tried[:SHOWN]:
            mean, worst = np.abs(found).mean(), np.abs(found).max()
            print(
                f"  mean {mean:.2%} worst {worst:.2%} bias {found.mean():+.2%}: {point}"
            )


if __name__ == "__main__":
    main()
