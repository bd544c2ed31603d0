"""Exact integer program (HiGHS): an independent certificate, and the last resort."""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array

from jaxpar.search.network import Network, network_of, of_bytes, propagate
from jaxpar.search.problem import Incumbent, SearchProblem, Solution, register_method

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

Constraint = tuple[csr_array, np.ndarray | float, np.ndarray | float]
"""matrix, low, high: low <= matrix @ columns <= high."""

SOLVED, INFEASIBLE = 0, 2
"""Status numbers of `scipy.optimize.milp`."""

SCALE = 1e4
"""Size to which the objective and the memory row are brought: the tolerances of
HiGHS (1e-6) are absolute."""

CUTS = 50
"""Choices that overstep the limit by less than the tolerance, excluded at most."""


@register_method("ilp")
def ilp(problem: SearchProblem, *, time_limit_s: float = 60.0) -> Solution:
    """Solves a problem as one integer program over its local polytope.

    Args:
        problem: What to minimise.
        time_limit_s: After this the best plan so far is returned, with its gap.
    """
    incumbent = Incumbent(problem)
    network = propagate(network_of(problem), math.inf)
    if network is None:
        return incumbent.infeasible("ilp", None, {})
    limit = problem.memory_limit_bytes
    program = IntegerProgram(network, network.unary, limit)
    choice, bound = program.minimise(time_limit_s)
    stats = {"columns": program.columns, "rows": program.rows}
    if choice is not None:
        incumbent.offer(network.original(choice))
    elif bound == math.inf:
        smallest = IntegerProgram(of_bytes(network), network.memory, math.inf)
        choice, _ = smallest.minimise(time_limit_s)
        least = None
        if choice is not None:
            _, least = incumbent.offer(network.original(choice))
        return incumbent.infeasible("ilp", least, stats)
    return incumbent.solution("ilp", bound + problem.constant_s, stats)


class IntegerProgram:
    """0/1 columns per choice, columns in [0, 1] per allowed pair of choices.

    Args:
        network: Its edges and bytes; forbidden pairs get no column.
        unary: Seconds per choice, finite.
        limit_bytes: On the sum of the chosen bytes.
    """

    def __init__(
        self, network: Network, unary: Sequence[np.ndarray], limit_bytes: float
    ):
        self.network = network
        self.limit_bytes = limit_bytes
        sizes = np.array(network.sizes, dtype=int)
        self._start = np.concatenate([[0], np.cumsum(sizes)])
        self._cost = [np.asarray(u) for u in unary]
        self._triplets: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._equal: list[np.ndarray] = []
        self._choices = int(sizes.sum())
        self.columns = self._choices
        self.rows = 0
        self._add_choices(sizes)
        for (i, j), table in network.edges.items():
            self._add_edge(i, j, table)

    def _add_choices(self, sizes: np.ndarray) -> None:
        """One choice per variable."""
        row = np.repeat(np.arange(sizes.size), sizes)
        self._triplets.append((row, np.arange(row.size), np.ones(row.size)))
        self._equal.append(np.ones(sizes.size))
        self.rows = sizes.size

    def _add_edge(self, i: int, j: int, table: np.ndarray) -> None:
        """Pair columns, whose sums over one end are the columns of the other."""
        first, second = np.nonzero(table < math.inf)
        pairs = self.columns + np.arange(first.size)
        ones = np.ones(first.size)
        for v, end in ((i, first), (j, second)):
            size = self.network.sizes[v]
            own = np.arange(size)
            self._triplets += [
                (self.rows + end, pairs, ones),
                (self.rows + own, self._start[v] + own, -np.ones(size)),
            ]
            self._equal.append(np.zeros(size))
            self.rows += size
        self._cost.append(table[first, second])
        self.columns += first.size

    def minimise(self, time_limit_s: float) -> tuple[list[int] | None, float]:
        """The least-cost choice within the limit, and a lower bound in seconds.

        Returns:
            (choice, its own cost) if solved; (None, inf) if certainly infeasible;
            otherwise what was found by the time limit, and the bound.
        """
        if self.network.least_bytes > self.limit_bytes * (1 + 1e-14):
            return None, math.inf
        if not self._cost:
            return [], 0.0
        until = time.perf_counter() + time_limit_s
        cost = np.concatenate(self._cost)
        # A first guess of the size of the objective; corrected when it was far off.
        span = float(sum(np.median(c) for c in self._cost if c.size)) or 1.0
        cuts: list[np.ndarray] = []
        while True:
            left = max(until - time.perf_counter(), 0.01)
            result = self._run(cost * (SCALE / abs(span)), cuts, left)
            choice, value = self._read(result)
            if result.status == INFEASIBLE:
                return None, math.inf
            if result.status != SOLVED or choice is None:
                bound = result.get("mip_dual_bound")
                bound = -math.inf if bound is None else bound * abs(span) / SCALE
                return (choice if self._fits(choice) else None), bound
            if 0.0 < abs(value) < abs(span) / 100:
                span = value
            elif self._fits(choice) or len(cuts) == CUTS:
                return choice, value
            else:
                cuts.append(self._start[:-1] + choice)

    def _run(
        self, cost: np.ndarray, cuts: list[np.ndarray], time_limit_s: float
    ) -> "OptimizeResult":
        # Slow to import (about half a second), and elimination rarely comes here.
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415

        row, column, value = map(np.concatenate, zip(*self._triplets, strict=True))
        matrix = csr_array((value, (row, column)), shape=(self.rows, self.columns))
        equal = np.concatenate(self._equal)
        constraints: list[Constraint] = [(matrix, equal, equal)]
        if math.isfinite(self.limit_bytes):
            constraints.append(self._memory_row())
        for cut in cuts:
            row = csr_array(
                (np.ones(cut.size), (np.zeros(cut.size, dtype=int), cut)),
                shape=(1, self.columns),
            )
            constraints.append((row, -math.inf, cut.size - 1.0))
        whole = np.zeros(self.columns)
        whole[: self._choices] = 1.0
        return milp(
            cost,
            integrality=whole,
            bounds=Bounds(0.0, 1.0),
            # SciPy's own annotations know only the scalar bounds of its defaults.
            constraints=[
                LinearConstraint(*c)  # pyright: ignore[reportArgumentType]
                for c in constraints
            ],
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )

    def _memory_row(self) -> Constraint:
        """Bytes above each variable's least, scaled so that the limit is SCALE."""
        extra = np.concatenate(self.network.extra)
        spare = self.limit_bytes - self.network.least_bytes
        unit = SCALE / max(abs(spare), extra.max(initial=0.0) / 100, 1e-300)
        row = np.zeros((1, self.columns))
        row[0, : self._choices] = extra * unit
        return csr_array(row), -math.inf, spare * unit

    def _read(self, result: "OptimizeResult") -> tuple[list[int] | None, float]:
        if result.x is None:
            return None, math.inf
        bounds = zip(self._start[:-1], self._start[1:], strict=True)
        choice = [int(result.x[a:b].argmax()) for a, b in bounds]
        # The unary costs come first, one vector per variable; then the edges'.
        value = [float(u[k]) for u, k in zip(self._cost, choice, strict=False)]
        value += [
            float(table[choice[i], choice[j]])
            for (i, j), table in self.network.edges.items()
        ]
        return choice, math.fsum(value)

    def _fits(self, choice: Sequence[int] | None) -> bool:
        if choice is None:
            return False
        pairs = zip(self.network.memory, choice, strict=True)
        total = math.fsum(float(m[k]) for m, k in pairs)
        return total <= self.limit_bytes * (1 + 1e-14)
