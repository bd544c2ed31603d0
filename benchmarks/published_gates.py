"""What predictions of published runs have to reach, and whether they do."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from benchmarks.published_runs import Run

# Limits: errors of Calculon (calculon-ai/calculon@caa4b11) on the same runs, or of one
# constant utilisation where that is the lower.
MEAN_LIMITS = (
    ("2205.05198 Table 5", "2205.05198 Table 5", 0.0365),
    ("2104.04473 Table 1", "2104.04473 Table 1", 0.120),
    ("2104.04473 Table 2", "2104.04473 Table 2", 0.075),
    ("MegaScale's Megatron-LM", "MegaScale's Megatron-LM", 0.086),
    ("BLOOM grid", "BLOOM grid", 0.212),
)
TPU_LIMIT = 0.10
TPU_SETS = (
    ("TPU v5e without the two chosen rows", ("TPUv5e",)),
    ("TPU v5p and v4, data sheets alone", ("TPUv5p", "TPUv4")),
    ("of these, v5p", ("TPUv5p",)),
    ("of these, v4", ("TPUv4",)),
)
CHOSEN_ON = ("maxtext-v5e-16B-1x256", "maxtext-v5e-128B-1x256")
ORDER_LIMITS = {3072: 0.948, 6144: 0.752, 8192: 0.677, 12288: 0.824}
"""Width of the model of a vTrain group to the pairwise order agreement to beat."""
REGRET_LIMIT = 0.02


@dataclass(frozen=True)
class Gate:
    """One figure and its limit."""

    name: str
    runs: int
    figure: float
    limit: str
    holds: bool


def gates(runs: list[Run], predicted: np.ndarray) -> Iterator[Gate]:
    """All gates."""
    seconds = np.array([run.seconds for run in runs])
    errors = np.abs(predicted / seconds - 1)

    def below(name: str, rows: list[int], limit: float, *, worst: bool = False) -> Gate:
        found = errors[rows] if rows else np.zeros(1)
        figure = float(found.max() if worst else found.mean())
        kind = "worst" if worst else "mean"
        return Gate(f"{name}, {kind}", len(rows), figure, f"< {limit}", figure < limit)

    def where(keep) -> list[int]:
        return [i for i, run in enumerate(runs) if keep(run)]

    for name, group, limit in MEAN_LIMITS:
        rows = where(lambda run, group=group: run.group == group)
        yield below(name, rows, limit)
        if "Table 5" in name:
            yield below(name, rows, 0.089, worst=True)
    multi = where(lambda run: run.group == "vTrain multi-node")
    few = [i for i in multi if runs[i].columns["tensor"] <= 8]
    yield below("vTrain multi-node, tensor <= 8", few, 0.111)
    for name, chips in TPU_SETS:
        rows = where(lambda run, chips=chips: run.record["hardware"]["chip"] in chips)
        new = [i for i in rows if runs[i].name not in CHOSEN_ON]
        yield below(name, new, TPU_LIMIT)
    groups = defaultdict(list)
    for i in multi:
        groups[runs[i].shape.width].append(i)
    for width, rows in sorted(groups.items()):
        yield from _ranking(f"vTrain width {width}", rows, seconds, predicted, width)


def _ranking(
    name: str, rows: list[int], seconds: np.ndarray, predicted: np.ndarray, width: int
) -> Iterator[Gate]:
    """Pairwise order agreement, and what the predicted best costs over the best."""
    pairs = [(i, j) for i, j in combinations(rows, 2) if seconds[i] != seconds[j]]
    agree = [
        (seconds[i] < seconds[j]) == (predicted[i] < predicted[j]) for i, j in pairs
    ]
    order, limit = float(np.mean(agree)), ORDER_LIMITS[width]
    yield Gate(f"{name}, order", len(rows), order, f"> {limit}", order > limit)
    best = seconds[rows][np.argmin(predicted[rows])]
    regret = float(best / seconds[rows].min() - 1)
    holds = regret <= REGRET_LIMIT
    yield Gate(f"{name}, regret", len(rows), regret, f"<= {REGRET_LIMIT}", holds)
