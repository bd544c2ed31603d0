"""Closing the gap that a price on bytes leaves: elimination with sets of labels.

Where the cheapest plans at the best price are all a little too large or too small,
one number per table entry is not enough. Here every entry holds its Pareto set of
(seconds, bytes), as in TensorOpt (Cai et al. 2020), but only those labels that may
still end below a threshold: the tables of the priced contraction say exactly how
much each entry costs at least in the best whole plan.
"""

import math
import time
from dataclasses import dataclass

import numpy as np

from jaxpar.search.contraction import Contraction, Step, join
from jaxpar.search.problem import CERTAIN, Incumbent

ROUNDING = 1e-12
"""Labels whose seconds differ by less than this share of the plan's are equal."""


class TooManyLabels(Exception):
    """The sets outgrew the cap."""


@dataclass(frozen=True)
class Labels:
    """Partial plans below one step, sorted by entry, then bytes.

    Attributes:
        entry: Flat entry of the step's resulting table.
        excess: Priced seconds above the least of that entry.
        memory: Bytes above the least bytes of the variables below.
        joined: Flat entry of the step's joined table, (K, *scope).
        parents: Per labelled input of the step, the label taken from it.
    """

    entry: np.ndarray
    excess: np.ndarray
    memory: np.ndarray
    joined: np.ndarray
    parents: tuple[np.ndarray, ...]

    def take(self, rows: np.ndarray) -> "Labels":
        """Some of the labels, in the given order."""
        return Labels(
            self.entry[rows],
            self.excess[rows],
            self.memory[rows],
            self.joined[rows],
            tuple(p[rows] for p in self.parents),
        )


class Frontier:
    """Labels over the tables that `ascend` left in a contraction.

    Args:
        contraction: Run at `price`.
        price: Seconds per byte.
        incumbent: Holds a plan; better ones are offered to it.
        cap: Most labels of one step before `TooManyLabels` is raised.
    """

    def __init__(
        self, contraction: Contraction, price: float, incumbent: Incumbent, cap: int
    ):
        self.contraction = contraction
        self.price = price
        self.incumbent = incumbent
        self.cap = cap
        self.labels = 0
        network = contraction.network
        limit = incumbent.problem.memory_limit_bytes
        least = math.fsum(float(m.min()) for m in network.memory)
        self._spare = limit * (1 + 1e-14) - least
        settled = [
            float(u[0])
            for u, k in zip(network.priced(price), network.sizes, strict=True)
            if k == 1
        ]
        roots = [float(contraction.tables[r]) for r in contraction.schedule.roots]
        self.lower_bound_s = (
            math.fsum([*settled, *roots, incumbent.problem.constant_s]) - price * limit
        )
        self._surplus = self._surpluses()

    def _surpluses(self) -> list[np.ndarray]:
        """Per step, what each joined entry costs above the best plan, flat."""
        return [b.ravel() - b.min() for b in self.contraction.beliefs()]

    def below(self, seconds: float) -> dict[int, np.ndarray]:
        """Masks of the choices that some plan below a cost may use."""
        allowed = seconds - self.lower_bound_s + CERTAIN * abs(seconds)
        masks = {}
        steps = self.contraction.schedule.steps
        for step, surplus in zip(steps, self._surplus, strict=True):
            size = self.contraction.network.sizes[step.variable]
            masks[step.variable] = surplus.reshape(size, -1).min(axis=1) <= allowed
        return masks

    def close(self, relative_gap: float, until: float) -> float:
        """Searches ever higher thresholds until the best plan is certain.

        Args:
            relative_gap: Stop once the gap is no larger.
            until: Reading of `time.perf_counter` at which to stop.

        Returns:
            The new lower bound in seconds.
        """
        best, bound = self.incumbent, self.lower_bound_s
        width = (best.objective_s - bound) / 64
        tolerance = max(CERTAIN, relative_gap)
        while time.perf_counter() < until:
            highest = best.objective_s - CERTAIN / 2 * abs(best.objective_s)
            if bound >= best.objective_s - tolerance * abs(best.objective_s):
                break
            aim = min(bound + width, highest)
            try:
                self._search(aim - self.lower_bound_s)
            except TooManyLabels:
                break
            bound, width = aim, 4 * width
        return min(bound, best.objective_s)

    def _search(self, allowed: float) -> None:
        """Offers the best of all plans within `allowed` of the lower bound."""
        contraction = self.contraction
        schedule = contraction.schedule
        found: dict[int, Labels] = {}
        for place, step in enumerate(schedule.steps):
            number = schedule.first_result + place
            if contraction.dynamic[number]:
                found[number] = self._extend(place, step, found, allowed)
                if not found[number].entry.size:
                    return
        roots = [r for r in schedule.roots if r in found]
        parents = self._combine_roots(found, roots, allowed)
        if parents is not None:
            given = self._trace(found, dict(zip(roots, parents, strict=True)))
            choice = contraction.assignment(given)
            self.incumbent.offer(contraction.network.original(choice))

    def _extend(
        self, place: int, step: Step, found: dict[int, Labels], allowed: float
    ) -> Labels:
        network, tables = self.contraction.network, self.contraction.tables
        surplus = self._surplus[place]
        rows = np.flatnonzero(surplus <= allowed)
        result = tables[self.contraction.schedule.first_result + place]
        size = result.size
        own = network.memory[step.variable]
        joined = rows
        memory = (own - own.min())[rows // size]
        excess = np.zeros(rows.size)
        parents: tuple[np.ndarray, ...] = ()
        for number, shape in zip(step.inputs, step.shapes, strict=True):
            if number not in found:
                continue
            child = found[number]
            entries = np.arange(tables[number].size).reshape(shape)
            entries = np.broadcast_to(entries, (own.size, *result.shape)).ravel()
            old, new = _pair(entries[joined], child.entry, self.cap)
            excess = excess[old] + child.excess[new]
            memory = memory[old] + child.memory[new]
            fits = surplus[joined[old]] + excess <= allowed
            fits &= memory <= self._spare
            old, new, excess, memory = old[fits], new[fits], excess[fits], memory[fits]
            joined = joined[old]
            parents = (*[p[old] for p in parents], new)
        local = join(step, tables).ravel()[joined] - result.ravel()[joined % size]
        labels = Labels(joined % size, excess + local, memory, joined, parents)
        labels = self._pareto(labels)
        self.labels += labels.entry.size
        return labels

    def _pareto(self, labels: Labels) -> Labels:
        """Drops labels that another of the same entry beats in seconds and bytes."""
        seconds = labels.excess - self.price * labels.memory
        unit = ROUNDING * abs(self.incumbent.objective_s) or 1.0
        ticks = np.unique(np.rint(seconds / unit), return_inverse=True)[1]
        order = np.lexsort((ticks, labels.memory, labels.entry))
        ticks, entry = ticks[order], labels.entry[order]
        # Later entries get lower keys, so one running minimum serves all of them.
        keys = ticks - entry * (ticks.size + 1)
        ahead = np.minimum.accumulate(keys)
        keep = np.ones(keys.size, dtype=bool)
        keep[1:] = keys[1:] < ahead[:-1]
        return labels.take(order[keep])

    def _combine_roots(
        self, found: dict[int, Labels], roots: list[int], allowed: float
    ) -> list[int] | None:
        """The labels of the connected parts that together cost least and fit."""
        excess, memory = np.zeros(1), np.zeros(1)
        parents: list[np.ndarray] = []
        for root in roots:
            child = found[root]
            everything = np.zeros(excess.size, dtype=int)
            old, new = _pair(everything, child.entry, self.cap)
            excess = excess[old] + child.excess[new]
            memory = memory[old] + child.memory[new]
            fits = (excess <= allowed) & (memory <= self._spare)
            excess, memory = excess[fits], memory[fits]
            parents = [p[old[fits]] for p in parents] + [new[fits]]
        if not excess.size:
            return None
        best = int((excess - self.price * memory).argmin())
        return [int(p[best]) for p in parents]

    def _trace(
        self, found: dict[int, Labels], taken: dict[int, int]
    ) -> dict[int, int]:
        """Place in the order -> choice, for every step with labels."""
        schedule = self.contraction.schedule
        given: dict[int, int] = {}
        for place in range(len(schedule.steps) - 1, -1, -1):
            number = schedule.first_result + place
            if number not in found:
                continue
            labels, row = found[number], taken[number]
            size = self.contraction.tables[number].size
            given[place] = int(labels.joined[row]) // size
            children = [n for n in schedule.steps[place].inputs if n in found]
            for child, parent in zip(children, labels.parents, strict=True):
                taken[child] = int(parent[row])
        return given


def _pair(
    wanted: np.ndarray, entries: np.ndarray, cap: int
) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (row of wanted, row of entries) with equal values; entries sorted."""
    start = np.searchsorted(entries, wanted, "left")
    count = np.searchsorted(entries, wanted, "right") - start
    total = int(count.sum())
    if total > cap:
        raise TooManyLabels
    old = np.repeat(np.arange(wanted.size), count)
    offset = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
    return old, start[old] + offset
