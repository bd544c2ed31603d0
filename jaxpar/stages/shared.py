"""The cut where several stages share the memory of a device, and the limit binds.

Whether any cut with stages fast enough fits is asked in three ways. The evenest cut is
*mended*: one block at a time moves from a stage to another, the boundaries between
following, as long as that takes bytes off the overfull devices. *Prices*: give the
bytes of every device a price, prices adding up to 1, and the cheapest cut costs no more
than the fullest device of any cut holds; where it costs more than the limit, none fits.
What is still open, and which of the cuts that fit is best, is left to a *search* over
partial cuts.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from jaxpar.stages.chain import (
    NONE,
    SLACK,
    Chain,
    Sum,
    ends_of,
    evenest,
    plus,
    remainders,
)

PRICES = 100
"""Tried at most for one bound on the slowest stage."""

PARTIAL_CUTS = 4_000
"""Tried at most for one bound on the slowest stage."""


@dataclass(frozen=True)
class Found:
    """What is known of the cuts whose stages fit together.

    Attributes:
        bounds: Of the best one found; None if none was.
        certain: Whether there is no better one; or, if none was found, none at all.
        least_bytes: No cut does with less on its fullest device.
    """

    bounds: tuple[int, ...] | None
    certain: bool
    least_bytes: float = 0.0


def shared(chain: Chain, least_s: float) -> Found:
    """The best cut whose stages fit together, by halving what the slowest may take.

    Args:
        chain: What to cut.
        least_s: No slowest stage can be faster.
    """
    times = np.unique(chain.seconds[np.isfinite(chain.seconds)])
    times = times[times >= least_s]
    best, certain = _any(chain, float(times[-1])), True
    if best.bounds is None:
        return best
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        found = _any(chain, float(times[middle]))
        if found.bounds is None:
            low, certain = middle + 1, certain and found.certain
        else:
            best, high = found, middle
    last = _search(chain, chain.allowed(float(times[low]) * (1 + SLACK)))
    return Found(last.bounds or best.bounds, certain and last.certain)


def _any(chain: Chain, slowest_s: float) -> Found:
    """Some cut with no stage slower whose stages fit together."""
    allowed = chain.allowed(slowest_s * (1 + SLACK))
    bounds = _mended(chain, allowed, evenest(chain, slowest_s))
    if bounds is not None:
        return Found(bounds, False)
    priced = _priced(chain, allowed)
    if priced.bounds is not None or priced.certain:
        return priced
    found = _search(chain, allowed)
    return Found(found.bounds, found.certain, priced.least_bytes)


def _mended(
    chain: Chain, allowed: np.ndarray, bounds: tuple[int, ...]
) -> tuple[int, ...] | None:
    stages = np.arange(chain.stages)
    source, target, k = np.ix_(stages, stages, np.arange(chain.stages + 1))
    # A block that moves on pulls the bounds between back by one, and the reverse.
    shift = ((target < k) & (k <= source)) * 1 - ((source < k) & (k <= target))
    now, excess = np.array(bounds), math.inf
    while True:
        tried = (now + shift).reshape(-1, chain.stages + 1)
        begin, end = tried[:, :-1], tried[:, 1:]
        valid = (begin < end).all(axis=1) & allowed[stages, begin, end].all(axis=1)
        each = chain.memory[stages, begin, end].reshape(len(tried), -1, chain.devices)
        over = np.maximum(each.sum(axis=1) - chain.most_bytes, 0).sum(axis=1)
        best = int(np.where(valid, over, math.inf).argmin())
        if over[best] >= excess:
            return None
        now, excess = tried[best], float(over[best])
        if excess == 0:
            return tuple(now.tolist())


def _priced(chain: Chain, allowed: np.ndarray) -> Found:
    price = np.full(chain.devices, 1 / chain.devices)
    least = 0.0
    for n in range(PRICES):
        bounds, cost = _cheapest(chain, allowed, price)
        least = max(least, cost)
        if cost > chain.most_bytes:
            return Found(None, True, least)
        held = chain.held(bounds)
        if (held <= chain.most_bytes).all():
            return Found(bounds, False, least)
        price *= np.exp(2 / math.sqrt(n + 1) * (held / held.max() - 1))
        price /= price.sum()
    return Found(None, False, least)


def _cheapest(
    chain: Chain, allowed: np.ndarray, price: np.ndarray
) -> tuple[tuple[int, ...], float]:
    """The cut with the cheapest bytes, and what they cost."""
    left = np.full(chain.count + 1, math.inf)
    left[-1] = 0.0
    ends: list[np.ndarray] = []
    for s in reversed(range(chain.stages)):
        cost = np.where(
            allowed[s], price[s % chain.devices] * chain.memory[s], math.inf
        )
        cost += left
        ends.append(cost.argmin(axis=1))
        left = cost.min(axis=1)
    bounds = [0]
    for end in reversed(ends):
        bounds.append(int(end[bounds[-1]]))
    return tuple(bounds), float(left[0])


_Partial = tuple[Sum, tuple[int, ...], tuple[float, ...], Sum]
"""Bound on the sums of the whole, bounds so far, bytes per device, sums so far."""


def _search(chain: Chain, allowed: np.ndarray) -> Found:
    """The best cut with no stage slower whose stages fit together.

    Goes over partial cuts, best first; the sums that are left bound what can follow.
    """
    left, room = remainders(chain, allowed), _Room(chain, allowed)
    heap: list[_Partial] = [(left[0][0], (0,), (0.0,) * chain.devices, (0.0, 0.0))]
    seen: set[tuple[int, int, tuple[float, ...]]] = set()
    for _ in range(PARTIAL_CUTS):
        if not heap:
            return Found(None, True)
        _, bounds, held, spent = heapq.heappop(heap)
        s, i = len(bounds) - 1, bounds[-1]
        if s == chain.stages:
            return Found(bounds, True)
        if (s, i, held) in seen:
            continue
        seen.add((s, i, held))
        device = s % chain.devices
        for j in ends_of(allowed, s, i):
            more = held[device] + float(chain.memory[s, i, j])
            holds = (*held[:device], more, *held[device + 1 :])
            if left[s + 1][j] != NONE and room.enough(s + 1, j, holds):
                so_far = plus(chain, i, j, spent)
                rest = left[s + 1][j]
                total = so_far[0] + rest[0], so_far[1] + rest[1]
                heapq.heappush(heap, (total, (*bounds, j), holds, so_far))
    return Found(None, False)


class _Room:
    """Least bytes that later stages add to each device, and to all together."""

    def __init__(self, chain: Chain, allowed: np.ndarray):
        devices, self._most = chain.devices, chain.most_bytes
        least = np.full((chain.stages + 1, chain.count + 1, devices + 1), math.inf)
        least[-1, -1] = 0.0
        for s in reversed(range(chain.stages)):
            for d in range(devices + 1):
                adds = chain.memory[s] if d in (s % devices, devices) else 0.0
                later = np.where(allowed[s], adds + least[s + 1, :, d], math.inf)
                least[s, :, d] = later.min(axis=1)
        self._least: list[list[list[float]]] = least.tolist()

    def enough(self, s: int, i: int, held: tuple[float, ...]) -> bool:
        """Whether the stages from s on, blocks from i on, may still fit."""
        *each, together = self._least[s][i]
        return sum(held) + together <= self._most * len(held) and all(
            have + add <= self._most for have, add in zip(held, each, strict=True)
        )
