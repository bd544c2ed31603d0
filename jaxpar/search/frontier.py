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

from jaxpar.search.contraction import Contraction, join
from jaxpar.search.effort import Effort
from jaxpar.search.problem import CERTAIN, Incumbent

ROUNDING = 1e-12
"""Labels whose seconds differ by less than this share of the plan's are equal."""

MOST_TICKS = 2.0**61
"""Range of the integers that labels are compared by."""

FIRST_SHARE = 16
"""The first threshold is this share of the gap above the bound..."""

GROWTH = 3.0
"""... and every further one this much farther from the priced bound."""

WORTHWHILE = 0.2
"""Share of the choices that has to go for a new contraction to pay."""


class LabelOverflowError(Exception):
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


@dataclass(frozen=True)
class _Rows:
    """The joined entries of one step that a better plan may use.

    Attributes:
        joined: Flat entry of the joined table, (K, *scope).
        entry: Flat entry of the resulting table, (*scope).
        surplus: What the best plan with this entry costs above the best plan.
        excess: What the entry costs above the least of its resulting entry.
        memory: Bytes of its choice of the step's variable, above the least.
        children: Per labelled input, the flat entry of that table.
    """

    joined: np.ndarray
    entry: np.ndarray
    surplus: np.ndarray
    excess: np.ndarray
    memory: np.ndarray
    children: tuple[np.ndarray, ...]


class Frontier:
    """Labels over the tables that `ascend` left in a contraction.

    Args:
        contraction: Run at `price`.
        price: Seconds per byte.
        incumbent: Holds a plan; better ones are offered to it.
        effort: When to stop.
    """

    def __init__(
        self,
        contraction: Contraction,
        price: float,
        incumbent: Incumbent,
        effort: Effort,
    ):
        self.contraction = contraction
        self.price = price
        self.incumbent = incumbent
        self.effort = effort
        self.labels = 0
        network = contraction.network
        limit = incumbent.problem.memory_limit_bytes
        self._spare = limit * (1 + 1e-14) - network.least_bytes
        settled = [
            float(u[0])
            for u, size in zip(network.unary, network.sizes, strict=True)
            if size == 1
        ]
        roots = [float(contraction.tables[r]) for r in contraction.schedule.roots]
        self.lower_bound_s = math.fsum(
            [*settled, *roots, incumbent.problem.constant_s]
        ) - price * (limit - network.least_bytes)
        self._surplus = [b - b.min() for b in contraction.beliefs()]
        self._least_surplus = [
            np.minimum.reduce(s.reshape(s.shape[0], -1), axis=1) for s in self._surplus
        ]

    def below(self) -> dict[int, np.ndarray]:
        """Masks of the choices that a plan better than the incumbent may use.

        Only for the variables that lose some; none loses all.
        """
        best = self.incumbent.objective_s
        allowed = best - self.lower_bound_s + CERTAIN * abs(best)
        return {
            step.variable: surplus <= allowed
            for step, surplus in zip(
                self.contraction.schedule.steps, self._least_surplus, strict=True
            )
            if surplus.max() > allowed
        }

    def worthwhile(self) -> bool:
        """Whether the incumbent rules out enough choices to start anew without them."""
        masks = self.below().values()
        lost = sum(mask.size - int(np.count_nonzero(mask)) for mask in masks)
        return lost > WORTHWHILE * self.contraction.network.candidates

    def close(self, bound_s: float) -> float:
        """Searches ever higher thresholds until the best plan is certain.

        Stops early when the labels outgrow the cap, when time is up, or when a new
        incumbent makes it `worthwhile` to start anew.

        Args:
            bound_s: A lower bound that is certain already.

        Returns:
            The new lower bound in seconds.
        """
        best = self.incumbent
        bound = max(bound_s, self.lower_bound_s)
        rows = self._rows(best.objective_s - self.lower_bound_s)
        while time.perf_counter() < self.effort.until:
            if self.effort.suffices(bound, best):
                break
            step = max(
                (best.objective_s - bound) / FIRST_SHARE,
                GROWTH * (bound - self.lower_bound_s),
            )
            highest = best.objective_s - CERTAIN / 2 * abs(best.objective_s)
            aim, before = min(bound + step, highest), best.objective_s
            try:
                self._search(rows, aim - self.lower_bound_s)
            except LabelOverflowError:
                break
            bound = min(aim, best.objective_s)
            if best.objective_s < before and self.worthwhile():
                break
        return bound

    def _rows(self, allowed: float) -> dict[int, _Rows]:
        """Per labelled table, the entries to look at."""
        contraction, tables = self.contraction, self.contraction.tables
        first = contraction.schedule.first_result
        found: dict[int, _Rows] = {}
        steps = contraction.schedule.steps
        for number, (step, surplus) in enumerate(
            zip(steps, self._surplus, strict=True), first
        ):
            if not contraction.dynamic[number]:
                continue
            joined = np.flatnonzero(surplus <= allowed)
            result = tables[number].ravel()
            entry = joined % result.size
            excess = join(step, tables).ravel()[joined] - result[entry]
            children = []
            for child, shape in zip(step.inputs, step.shapes, strict=True):
                if child in found:
                    entries = np.arange(tables[child].size).reshape(shape)
                    entries = np.broadcast_to(entries, surplus.shape).ravel()
                    children.append(entries[joined])
            extra = contraction.network.extra[step.variable]
            found[number] = _Rows(
                joined,
                entry,
                surplus.ravel()[joined],
                excess,
                extra[joined // result.size],
                tuple(children),
            )
        return found

    def _search(self, rows: dict[int, _Rows], allowed: float) -> None:
        """Offers the best of all plans within `allowed` of the lower bound."""
        contraction = self.contraction
        schedule = contraction.schedule
        found: dict[int, Labels] = {}
        for number, step in enumerate(schedule.steps, schedule.first_result):
            if number in rows:
                children = [found[n] for n in step.inputs if n in found]
                labels = self._extend(rows[number], children, allowed)
                if not labels.entry.size:
                    return
                best = self._pareto(labels.entry, labels.excess, labels.memory)
                found[number] = labels.take(best)
                self.labels += found[number].entry.size
        roots = [r for r in schedule.roots if r in found]
        parents = self._combine_roots(found, roots, allowed)
        if parents is not None:
            given = self._trace(found, dict(zip(roots, parents, strict=True)))
            choice = contraction.assignment(given)
            self.incumbent.offer(contraction.network.original(choice))

    def _extend(self, rows: _Rows, children: list[Labels], allowed: float) -> Labels:
        """All ways to join labels of the inputs."""
        row = np.flatnonzero(rows.surplus <= allowed)
        memory = rows.memory[row]
        excess = np.zeros(row.size)
        parents: list[np.ndarray] = []
        for child, entries in zip(children, rows.children, strict=True):
            old, new = _pair(entries[row], child.entry, self.effort.most_labels)
            excess = excess[old] + child.excess[new]
            memory = memory[old] + child.memory[new]
            fits = rows.surplus[row[old]] + excess <= allowed
            fits &= memory <= self._spare
            best = np.flatnonzero(fits)
            if len(children) > 1:
                best = best[self._pareto(row[old[best]], excess[best], memory[best])]
            old, excess, memory = old[best], excess[best], memory[best]
            row = row[old]
            parents = [p[old] for p in parents] + [new[best]]
        return Labels(
            rows.entry[row],
            excess + rows.excess[row],
            memory,
            rows.joined[row],
            tuple(parents),
        )

    def _pareto(
        self, group: np.ndarray, excess: np.ndarray, memory: np.ndarray
    ) -> np.ndarray:
        """Labels that no other of their group beats in seconds and bytes.

        Returns their positions, sorted by group, then bytes.
        """
        if group.size <= 1:
            return np.arange(group.size)
        unit = ROUNDING * max(abs(self.incumbent.objective_s), abs(self.lower_bound_s))
        seconds = excess - self.price * memory
        seconds -= seconds.min()
        width = np.rint(seconds.max() / unit) + 1.0
        groups = int(group.max()) + 1
        if width * groups > MOST_TICKS:
            unit, width = unit * width * groups / MOST_TICKS, MOST_TICKS / groups
        ticks = np.rint(seconds / unit).astype(np.int64)
        order = np.lexsort((ticks, memory, group))
        # Groups get falling offsets, so that one running minimum serves all of them.
        ticks = ticks[order] - group[order] * int(width + 1)
        keep = np.ones(ticks.size, dtype=bool)
        keep[1:] = ticks[1:] < np.minimum.accumulate(ticks)[:-1]
        return order[keep]

    def _combine_roots(
        self, found: dict[int, Labels], roots: list[int], allowed: float
    ) -> list[int] | None:
        """The labels of the connected parts that together cost least and fit."""
        excess, memory = np.zeros(1), np.zeros(1)
        parents: list[np.ndarray] = []
        for root in roots:
            child = found[root]
            everything = np.zeros(excess.size, dtype=int)
            old, new = _pair(everything, child.entry, self.effort.most_labels)
            excess = excess[old] + child.excess[new]
            memory = memory[old] + child.memory[new]
            best = np.flatnonzero((excess <= allowed) & (memory <= self._spare))
            best = best[self._pareto(everything[old[best]], excess[best], memory[best])]
            excess, memory = excess[best], memory[best]
            parents = [p[old[best]] for p in parents] + [new[best]]
        if not excess.size:
            return None
        best = int((excess - self.price * memory).argmin())
        return [int(p[best]) for p in parents]

    def _trace(self, found: dict[int, Labels], taken: dict[int, int]) -> dict[int, int]:
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
        raise LabelOverflowError
    old = np.repeat(np.arange(wanted.size), count)
    offset = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
    return old, start[old] + offset
