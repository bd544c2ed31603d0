"""Costs of every possible stage, and the exact cut where each fits by itself.

Dynamic programming over (stages, blocks), as in PipeDream (Narayanan et al. 2019) and
Alpa (Zheng et al. 2022).
"""

import math
from collections.abc import Sequence

import numpy as np

from jaxpar.stages.blocks import Block

SLACK = 1e-9
"""Relative difference below which two stage times count as equal."""


class Chain:
    """Costs of every possible stage: blocks i to j, as tables [i, j].

    Attributes:
        seconds: Of the stage, or of the transfer after it where that is slower; inf
            where i >= j.
        transfer: Seconds of the transfer after block j - 1; 0 at the end. [j]
        memory: Bytes; [stage, i, j].
        most_bytes: The limit, rounding forgiven.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        devices: int,
        in_flight: Sequence[int],
        limit_bytes: float,
    ):
        self.blocks, self.devices, self.in_flight = blocks, devices, in_flight
        self.count, self.stages = len(blocks), len(in_flight)
        self.limit_bytes = limit_bytes
        self.most_bytes = limit_bytes * (1 + 1e-12)
        seconds = _sums([b.forward_s + b.backward_s for b in blocks])
        self.transfer = np.array([0.0, *(b.transfer_s for b in blocks[:-1]), 0.0])
        forward = np.tri(self.count + 1, k=-1, dtype=bool).T
        self.seconds = np.where(forward, np.maximum(seconds, self.transfer), math.inf)
        opens = np.array([*(b.input_bytes for b in blocks), 0.0])
        each = _sums([b.stash_bytes for b in blocks]) + opens[:, None]
        state = _sums([b.state_bytes for b in blocks])
        self.memory = state + np.array(in_flight)[:, None, None] * each

    def allowed(self, slowest_s: float) -> np.ndarray:
        """[stage, i, j]: whether the stage is fast enough and fits by itself."""
        fast = np.isfinite(self.seconds) & (self.seconds <= slowest_s)
        return fast & (self.memory <= self.most_bytes)

    def held(self, bounds: Sequence[int]) -> np.ndarray:
        """Bytes of a cut; [device]."""
        held = np.zeros(self.devices)
        for s in range(self.stages):
            held[s % self.devices] += self.memory[s, bounds[s], bounds[s + 1]]
        return held


def _sums(values: Sequence[float]) -> np.ndarray:
    """[i, j]: the sum of values i to j."""
    ends = np.array([0.0, *np.cumsum(values, dtype=np.float64)])
    return ends[None, :] - ends[:, None]


def least_bottleneck(chain: Chain) -> float:
    """Least time of the slowest stage; inf if some stage fits nowhere."""
    best = np.full(chain.count + 1, math.inf)
    best[0] = 0.0
    for allowed in chain.allowed(math.inf):
        slowest = np.maximum(best[:, None], chain.seconds)
        best = np.where(allowed, slowest, math.inf).min(axis=0)
    return float(best[-1])


Sum = tuple[float, float]
"""Transfers and squared stage times, of stages from some stage on."""

NONE: Sum = (math.inf, math.inf)


def remainders(chain: Chain, allowed: np.ndarray) -> list[list[Sum]]:
    """[stage, block]: least sums of the stages from there to the end."""
    left = [[NONE] * (chain.count + 1) for _ in range(chain.stages + 1)]
    left[-1][-1] = (0.0, 0.0)
    for s in reversed(range(chain.stages)):
        for i in range(chain.count):
            steps = (plus(chain, i, j, left[s + 1][j]) for j in ends_of(allowed, s, i))
            left[s][i] = min(steps, default=NONE)
    return left


def plus(chain: Chain, i: int, j: int, rest: Sum) -> Sum:
    """The sums with one more stage, of blocks i to j."""
    seconds = float(chain.seconds[i, j])
    return float(chain.transfer[j]) + rest[0], seconds * seconds + rest[1]


def ends_of(allowed: np.ndarray, s: int, i: int) -> list[int]:
    """Where stage s may end if it begins at block i."""
    return np.flatnonzero(allowed[s, i]).tolist()


def evenest(chain: Chain, slowest_s: float) -> tuple[int, ...]:
    """The best cut with no stage slower, stages that share a device seen apart."""
    allowed = chain.allowed(slowest_s * (1 + SLACK))
    left = remainders(chain, allowed)
    bounds = [0]
    for s in range(chain.stages):
        i = bounds[-1]
        ends = ends_of(allowed, s, i)
        bounds.append(min(ends, key=lambda j: plus(chain, i, j, left[s + 1][j])))
    return tuple(bounds)


def least_bytes(chain: Chain) -> float:
    """Of the fullest stage, in the cut that is best for it, whatever the limit."""
    best = np.full(chain.count + 1, math.inf)
    best[0] = 0.0
    for memory in chain.memory:
        fullest = np.maximum(best[:, None], memory)
        best = np.where(np.isfinite(chain.seconds), fullest, math.inf).min(axis=0)
    return float(best[-1])
