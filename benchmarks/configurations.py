"""How many whole configurations are priced in a second of CPU time.

    python benchmarks/configurations.py [--full]

Every configuration of the space is enumerated and priced: step time by part, memory by
class, whether it fits. The best public tool prices 589 configurations per CPU-second of
its own 22B space on 8 GPUs (calculon-ai/calculon@caa4b11, quiet logger).
"""

import argparse
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpar.configurations import REMAT, Layouts, Shape, evaluate, space
from jaxpar.topology import get_topology

PEER_PER_S = 589
BLOCK = 4096
"""Configurations priced at a time: their arrays stay in the cache."""

CASES = {
    "22B, 8 GPUs, batch 4": (48, 6144, 64, 8, 4),
    "22B, 8 GPUs, batch 512": (48, 6144, 64, 8, 512),
    "175B, 64 GPUs, batch 64": (96, 12288, 96, 64, 64),
    "1T, 512 GPUs, batch 512": (128, 25600, 160, 512, 512),
}
QUICK = 2


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    options.add_argument("--full", action="store_true", help="larger models too")
    names = list(CASES) if options.parse_args().full else list(CASES)[:QUICK]
    table = Table(title=f"configurations per CPU-second (peer: {PEER_PER_S})")
    for column in ("case", "configurations", "fit", "CPU s", "per CPU s", "best", "s"):
        table.add_column(column)
    for name in names:
        table.add_row(name, *race(*CASES[name]))
    Console(width=150).print(table)


def race(layers: int, width: int, heads: int, gpus: int, batch: int) -> list[str]:
    """One row: all configurations of a model of 2205.05198, and the best that fits."""
    shape = Shape(layers, width, heads, heads, width // heads, 4 * width, 51200, 2048)
    topology = get_topology(f"dgx-a100-80g-{gpus}")
    start = time.process_time()
    rows = space(shape, gpus, batch, most_tensor=64)
    seconds, fits = np.empty(len(rows)), np.empty(len(rows), bool)
    for first in range(0, len(rows), BLOCK):
        part = slice(first, first + BLOCK)
        found = evaluate(shape, rows[part], topology)
        seconds[part], fits[part] = found.seconds.step, found.fits
    spent = time.process_time() - start
    best = int(np.argmin(np.where(fits, seconds, np.inf)))
    return [
        f"{len(rows):,}",
        f"{fits.mean():.0%}",
        f"{spent:.2f}",
        f"{len(rows) / spent:,.0f}",
        describe(rows, best),
        f"{seconds[best]:.3f}",
    ]


def describe(rows: Layouts, i: int) -> str:
    """One configuration in words."""
    axes = ("data", "fsdp", "sequence", "tensor", "pipeline")
    sizes = {axis: int(getattr(rows, axis)[i]) for axis in axes}
    words = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    words += [f"zero {rows.zero[i]}", f"interleave {rows.interleave[i]}"]
    words += [f"microbatch {rows.microbatch[i]}", f"remat {REMAT[rows.remat[i]]}"]
    return ", ".join(words)


if __name__ == "__main__":
    main()
