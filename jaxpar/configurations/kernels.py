"""What the kernels of a chip cost, beyond what its data sheet says."""

from dataclasses import dataclass

import numpy as np

from jaxpar.configurations.shape import Numbers
from jaxpar.hardware import Chip


@dataclass(frozen=True)
class Kernels:
    """One chip and the software on it.

    Attributes:
        chip: Its data sheet.
        matmul_efficiency: Share of the peak that the inner loop of a matrix product
            reaches.
        hbm_efficiency: Share of the memory bandwidth that pointwise kernels reach.
        units: Processors that compute a tile each at a time; 1 where products are
            only padded.
        tiles: Rows, columns and relative speed of the tiles a product may use.
        fill: Time to fill and drain the pipeline of one tile, as a number of steps
            of the contraction.
        align: Elements; a product whose contraction or columns are no multiple of it
            runs at `misaligned` times the speed.
        flash_efficiency: Share of the peak that fused attention reaches.
        pointwise: Share of the pointwise traffic that fusion leaves.
        gap_s: Device time between two kernels.
        dispatch_s: Host time per operator; 0 where one program holds the step.
        prunes: Whether recomputation leaves out what no gradient reads.
        hidden: Share of a computation behind which a collective can hide.
        source: Where the numbers come from.
    """

    chip: Chip
    matmul_efficiency: float
    hbm_efficiency: float
    units: int
    tiles: tuple[tuple[int, int, float], ...]
    fill: float
    align: int
    misaligned: float
    flash_efficiency: float
    pointwise: float
    gap_s: float
    dispatch_s: float
    prunes: bool
    hidden: float
    source: str

    def traffic_s(self, n_bytes: Numbers) -> Numbers:
        """Time to read and write that many bytes of memory."""
        return n_bytes / (self.chip.hbm_bytes_per_s * self.hbm_efficiency)

    def matmul_s(
        self,
        rows: Numbers,
        columns: Numbers,
        contraction: Numbers,
        count: Numbers = 1,
        dtype: str = "bfloat16",
    ) -> Numbers:
        """Time of `count` products of one shape in one kernel.

        Tiles are computed in whole waves over the chip's units (NVIDIA, "Matrix
        Multiplication Background User's Guide"); the fastest tile is taken. Not less
        than the time that operands and result need to cross the memory.
        """
        peak = self.chip.flops_per_s(dtype) * self.matmul_efficiency
        odd = (contraction % self.align != 0) | (columns % self.align != 0)
        # Of one unit and one step of the contraction, for one element of the tile.
        step_s = 2.0 * self.units / peak * np.where(odd, 1 / self.misaligned, 1.0)
        best: Numbers = np.inf
        for height, breadth, speed in self.tiles:
            tiles = np.ceil(rows / height) * np.ceil(columns / breadth) * count
            waves = np.ceil(tiles / self.units)
            best = np.minimum(best, waves * (height * breadth / speed))
        compute = best * (contraction + self.fill) * step_s
        elements = rows * contraction + contraction * columns + rows * columns
        return np.maximum(compute, self.traffic_s(2.0 * count * elements)) + self.gap_s
