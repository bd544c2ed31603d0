"""The exact method: cut down, contract, read back; with a price on bytes if needed.

Variable elimination is exact and fast where its tables are small. Where they are
not, message passing and bounds strike out choices first. A memory limit becomes a
price on bytes, and what gap the price leaves is closed by labels or, at last, by an
integer program.
"""

import math
import time

from jaxpar.search.contraction import Contraction, Order, find_order, make_schedule
from jaxpar.search.frontier import Frontier
from jaxpar.search.ilp import IntegerProgram
from jaxpar.search.lagrange import ascend, least_memory
from jaxpar.search.network import Network, network_of, propagate, restrict
from jaxpar.search.problem import (
    CERTAIN,
    Incumbent,
    SearchProblem,
    Solution,
    register_method,
)
from jaxpar.search.shrink import CHEAP, shrink


FIRST_PRICES = 4
"""Prices tried before choices are struck out for the first time."""

WORTHWHILE = 0.8
"""Share of the choices that has to go at least before a new contraction pays."""


@register_method("elimination")
def eliminate(
    problem: SearchProblem,
    *,
    relative_gap: float = 0.0,
    time_limit_s: float = 60.0,
    largest_table: int = 20_000_000,
    most_labels: int = 1_000_000,
) -> Solution:
    """Solves a problem exactly by variable elimination.

    Args:
        problem: What to minimise.
        relative_gap: Stop as soon as the gap is certainly no larger.
        time_limit_s: Stop improving after about this time; a contraction once begun
            is finished.
        largest_table: Entries of one table, and a third of those of all tables;
            beyond it the best plan so far is returned, with its gap.
        most_labels: (seconds, bytes) pairs in one step, beyond which the integer
            program takes over.
    """
    return _Elimination(
        problem, relative_gap, time_limit_s, largest_table, most_labels
    ).solve()


class _Elimination:
    """One run: the incumbent, the bound and what was counted on the way."""

    def __init__(
        self,
        problem: SearchProblem,
        relative_gap: float,
        time_limit_s: float,
        largest_table: int,
        most_labels: int,
    ):
        self.problem = problem
        self.incumbent = Incumbent(problem)
        self.until = self.incumbent.started + time_limit_s
        self.relative_gap = relative_gap
        self.largest_table = largest_table
        self.most_labels = most_labels
        self.bound = -math.inf
        self.stats: dict[str, float] = {}

    def solve(self) -> Solution:
        """The answer, by the shortest way that certifies it."""
        limit = self.problem.memory_limit_bytes
        whole = network_of(self.problem)
        network = propagate(whole, limit)
        if network is None:
            return self._infeasible(whole)
        order = find_order(network.sizes, network.neighbours)
        if order.work > CHEAP:
            if math.isfinite(limit) and not self._smallest(network):
                return self._infeasible(whole)
            shrunk = shrink(network, self.incumbent, self.relative_gap, self.until)
            network, order = shrunk.network, shrunk.order
            self.bound = shrunk.lower_bound_s
            self.stats["rounds"] = shrunk.rounds
        self.stats |= {
            "remaining": network.candidates,
            "largest_table": order.largest,
            "work": order.work,
        }
        if not self._done():
            self._finish(network, order)
        if self.bound == math.inf and self.incumbent.choice is None:
            return self._infeasible(whole)
        return self.incumbent.solution("elimination", self.bound, self.stats)

    def _done(self) -> bool:
        best = self.incumbent.objective_s
        return self.bound >= best - max(CERTAIN, self.relative_gap) * abs(best)

    def _smallest(self, network: Network) -> bool:
        """Offers the plan of least bytes; False if none fits."""
        choice = least_memory(network)
        if choice is not None:
            self.incumbent.offer(network.original(choice))
        return self.incumbent.choice is not None

    def _infeasible(self, whole: Network) -> Solution:
        """The certificate, with the least bytes of any plan without the limit."""
        least = None
        network = propagate(whole, math.inf)
        choice = None if network is None else least_memory(network)
        if network is not None and choice is not None:
            _, least = self.incumbent.offer(network.original(choice))
        return self.incumbent.infeasible("elimination", least, self.stats)

    def _finish(self, network: Network, order: Order) -> None:
        """Exact contraction if it is small enough; raises the bound accordingly."""
        cap = self.largest_table
        if order.largest > cap or order.stored > 3 * cap:
            if self.incumbent.choice is None:
                self._integer_program(network)
            return
        contraction = Contraction(network, make_schedule(network, order))
        dual = ascend(contraction, self.incumbent, rounds=FIRST_PRICES)
        while True:
            self.stats["prices"] = dual.rounds
            self.bound = max(self.bound, dual.lower_bound_s)
            if self._done() or self.incumbent.choice is None:
                return
            frontier = Frontier(
                contraction, dual.price, self.incumbent, self.most_labels
            )
            left = restrict(network, frontier.below(self.incumbent.objective_s))
            few = left.candidates < WORTHWHILE * network.candidates
            if dual.best and not few:
                break
            if few:
                network, order = left, find_order(left.sizes, left.neighbours)
                contraction = Contraction(network, make_schedule(network, order))
            dual = ascend(contraction, self.incumbent, start=dual)
        self.bound = max(self.bound, frontier.close(self.relative_gap, self.until))
        self.stats["labels"] = frontier.labels
        if not self._done():
            best = self.incumbent.objective_s
            self._integer_program(restrict(network, frontier.below(best)))

    def _integer_program(self, network: Network) -> None:
        """The last resort, for the time that is left."""
        left = self.until - time.perf_counter()
        if left <= 0.0:
            return
        limit = self.problem.memory_limit_bytes
        program = IntegerProgram(network, network.unary, limit)
        choice, bound = program.minimise(left)
        if choice is not None:
            self.incumbent.offer(network.original(choice))
        # Whatever the network lacks costs more than the incumbent.
        bound = min(bound + self.problem.constant_s, self.incumbent.objective_s)
        self.bound = max(self.bound, bound)
