"""A chain of blocks, and what a cut of it costs."""

import math
from dataclasses import dataclass
from itertools import pairwise

from jaxpar.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Block:
    """A link of the chain: a layer, or the embedding or head at its ends.

    Attributes:
        name: For readers.
        forward_s: Of one microbatch.
        backward_s: Of one microbatch.
        state_bytes: Held all the time: parameters, gradients, optimizer state.
        stash_bytes: Held for every microbatch in flight.
        input_bytes: Held for every microbatch in flight if the block opens a stage;
            0 for a first block that reads the batch.
        transfer_s: To send its output to the next stage if the block ends one; the
            gradient takes as long to come back. Overlaps with computing.
    """

    name: str
    forward_s: float
    backward_s: float
    state_bytes: float = 0.0
    stash_bytes: float = 0.0
    input_bytes: float = 0.0
    transfer_s: float = 0.0

    def __post_init__(self):
        for key, value in vars(self).items():
            if key != "name" and not 0 <= value < math.inf:
                raise ModelError(
                    f"block {self.name!r}: {key} is {value}; it must be finite and >= 0"
                )


@dataclass(frozen=True)
class Cut:
    """A chain of blocks, cut.

    Attributes:
        blocks: The chain.
        devices: Positions along the pipeline axis; stage s lies on s % devices.
        bounds: Stage s has the blocks bounds[s] to bounds[s + 1] (excluded).
        in_flight: Per stage, microbatches that it holds at most.
        optimal: False where the search gave up looking for a faster cut.
    """

    blocks: tuple[Block, ...]
    devices: int
    bounds: tuple[int, ...]
    in_flight: tuple[int, ...]
    optimal: bool = True

    @property
    def stages(self) -> tuple[tuple[Block, ...], ...]:
        """Per stage, its blocks."""
        return tuple(self.blocks[a:b] for a, b in pairwise(self.bounds))

    @property
    def forward_s(self) -> tuple[float, ...]:
        """Per stage, of one microbatch."""
        return tuple(math.fsum(b.forward_s for b in stage) for stage in self.stages)

    @property
    def backward_s(self) -> tuple[float, ...]:
        """Per stage, of one microbatch."""
        return tuple(math.fsum(b.backward_s for b in stage) for stage in self.stages)

    @property
    def transfer_s(self) -> tuple[float, ...]:
        """Per boundary, of one activation or gradient."""
        return tuple(stage[-1].transfer_s for stage in self.stages[:-1])

    @property
    def bottleneck_s(self) -> float:
        """Of one microbatch through the slowest stage, or over the slowest boundary."""
        stages = zip(self.forward_s, self.backward_s, strict=True)
        return max([f + b for f, b in stages] + list(self.transfer_s))

    def total_s(self, microbatches: int) -> float:
        """Fill, drain, and the slowest stage for each further microbatch (Alpa, 2022).

        With one stage per device; `jaxpar.schedule.simulate` takes the times of any.
        """
        whole = math.fsum(self.forward_s + self.backward_s + 2 * self.transfer_s)
        return whole + (microbatches - 1) * self.bottleneck_s

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """Per device; at most this, since its stages need not peak at once."""
        held = [0.0] * self.devices
        for s, stage in enumerate(self.stages):
            each = math.fsum(b.stash_bytes for b in stage) + stage[0].input_bytes
            state = math.fsum(b.state_bytes for b in stage)
            held[s % self.devices] += state + self.in_flight[s] * each
        return tuple(held)
