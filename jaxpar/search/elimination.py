"""The exact method: cut down, contract, read back; with a price on bytes if needed.

Variable elimination is exact and fast where its tables are small. Where they are
not, message passing and bounds strike out choices first. A memory limit becomes a
price on bytes, and what gap the price leaves is closed by labels or, at last, by an
integer program.
"""

import math
import time

from jaxpar.search.contraction import Order, find_order
from jaxpar.search.effort import Effort
from jaxpar.search.exact import contract
from jaxpar.search.ilp import IntegerProgram
from jaxpar.search.lagrange import least_memory
from jaxpar.search.network import Network, network_of, propagate
from jaxpar.search.problem import (
    Incumbent,
    SearchProblem,
    Solution,
    register_method,
)
from jaxpar.search.shrink import CHEAP, shrink


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
    incumbent = Incumbent(problem)
    effort = Effort(
        relative_gap, incumbent.started + time_limit_s, most_labels, largest_table
    )
    return _Elimination(incumbent, effort).solve()


class _Elimination:
    """One run: the incumbent, the bound and what was counted on the way."""

    def __init__(self, incumbent: Incumbent, effort: Effort):
        self.problem = incumbent.problem
        self.incumbent = incumbent
        self.effort = effort
        self.bound = -math.inf
        self.stats: dict[str, float] = {}

    def solve(self) -> Solution:
        """The answer, by the shortest way that certifies it."""
        limit = self.problem.memory_limit_bytes
        whole = network_of(self.problem)
        network = propagate(whole, limit)
        if network is None:
            return self._infeasible(whole)
        order, price = find_order(network.sizes, network.neighbours), 0.0
        if order.work > CHEAP:
            if math.isfinite(limit) and not self._smallest(network):
                return self._infeasible(whole)
            shrunk = shrink(network, self.incumbent, self.effort)
            network, order, price = shrunk.network, shrunk.order, shrunk.price
            self.bound = shrunk.lower_bound_s
            self.stats["rounds"] = shrunk.rounds
        self.stats |= {
            "remaining": network.candidates,
            "largest_table": order.largest,
            "work": order.work,
        }
        if not self._done():
            self._finish(network, order, price)
        if self.bound == math.inf and self.incumbent.choice is None:
            return self._infeasible(whole)
        return self.incumbent.solution("elimination", self.bound, self.stats)

    def _done(self) -> bool:
        return self.effort.suffices(self.bound, self.incumbent)

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

    def _finish(self, network: Network, order: Order, price: float) -> None:
        """Exact contraction if it is small enough; raises the bound accordingly."""
        limited = math.isfinite(self.problem.memory_limit_bytes)
        if not self.effort.affords(order, limited):
            if self.incumbent.choice is None:
                self._integer_program(network)
            return
        exact = contract(network, order, self.incumbent, self.effort, price)
        self.bound = max(self.bound, exact.lower_bound_s)
        self.stats |= {"prices": exact.prices, "labels": exact.labels}
        if self.bound < math.inf and not self._done():
            self._integer_program(exact.network)

    def _integer_program(self, network: Network) -> None:
        """The last resort, for the time that is left."""
        left = self.effort.until - time.perf_counter()
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
