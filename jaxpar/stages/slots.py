"""Layers that are alike, in stages with equally many slots."""

from dataclasses import dataclass

import numpy as np

from jaxpar.errors import MeshError


@dataclass(frozen=True)
class LayerSlots:
    """Layers that are alike, in stages of equally many slots, some of them empty.

    One program on all devices has to give each stage as many slots as the largest
    has layers. Sizes differ by one at most; the larger stages are in the middle, away
    from embedding and head.

    Attributes:
        layers: In the model.
        devices: Positions along the pipeline axis; stage s lies on s % devices.
        chunks: Stages on each device.
    """

    layers: int
    devices: int
    chunks: int = 1

    def __post_init__(self):
        stages = self.devices * self.chunks
        if self.devices < 1 or self.chunks < 1 or self.layers < stages:
            raise MeshError(
                f"{self.layers} layers cannot fill {stages} pipeline stages "
                f"({self.devices} devices with {self.chunks} each)",
                hint=f"use {self.layers} stages at most",
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Per stage, its layers."""
        stages = self.devices * self.chunks
        size, extra = divmod(self.layers, stages)
        first = (stages - extra + 1) // 2
        return tuple(size + (first <= s < first + extra) for s in range(stages))

    @property
    def slots(self) -> int:
        """Of each stage."""
        return max(self.sizes)

    @property
    def waste(self) -> float:
        """Share of the slots that are empty, 0 to 1."""
        return 1 - self.layers / (self.slots * self.devices * self.chunks)

    @property
    def table(self) -> np.ndarray:
        """Layer in each slot, or -1 where it is empty; [chunks, devices, slots]."""
        table = np.full((self.devices * self.chunks, self.slots), -1)
        first = 0
        for row, size in zip(table, self.sizes, strict=True):
            row[:size] = np.arange(first, first + size)
            first += size
        return table.reshape(self.chunks, self.devices, self.slots)
