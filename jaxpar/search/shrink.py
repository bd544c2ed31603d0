"""Striking out choices until elimination is cheap.

Each round passes messages (a bound for every single choice), searches a large
neighbourhood of the most promising choices exactly (a plan), and drops every choice
whose bound exceeds the best plan's cost. Nothing is lost: a dropped choice cannot
be part of a better plan.
"""

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from jaxpar.search.contraction import Order, find_order
from jaxpar.search.effort import Effort
from jaxpar.search.exact import contract
from jaxpar.search.messages import MessagePassing, Pass, restrict_messages
from jaxpar.search.neighbourhood import Neighbourhood
from jaxpar.search.network import Network, propagate, restrict, undominated
from jaxpar.search.problem import CERTAIN, Incumbent

SWEEPS = 3
"""Message sweeps (forward and back) per round."""

CALL = 5_000
"""Joined entries that take as long as the fixed cost of one message."""

CHEAP = 4e6
"""Joined entries that are eliminated without further ado."""

PRICED_RUNS = 10
"""Contractions that a binding memory limit costs, about."""

FEW_LABELS = 50_000
"""Labels of one step in a neighbourhood search."""

STALLED = 5
"""Rounds without progress after which messages have nothing more to give."""

SAME_PRICE = 0.02
"""Relative change of the price of bytes that is not worth starting bounds anew."""

SMALL = 40
"""Choices of a variable up to which dominance is cheap to check."""


@dataclass(frozen=True)
class Shrunk:
    """What is left of a network.

    Attributes:
        network: The choices that a better plan may still use.
        order: An elimination order of it.
        price: The best price of bytes found, seconds per byte.
        lower_bound_s: No plan within the memory limit costs less.
        rounds: Rounds taken.
    """

    network: Network
    order: Order
    price: float
    lower_bound_s: float
    rounds: int


def shrink(network: Network, incumbent: Incumbent, effort: Effort) -> Shrunk:
    """Rounds of bounds, plans and cuts, while they pay.

    Args:
        network: From `propagate`.
        incumbent: Gets every plan found. Under a memory limit that may bind it must
            hold a plan already.
        effort: When to stop.
    """
    state = _Shrinking(network, incumbent, effort)
    while state.round() and not state.certain:
        work = state.order.work * (PRICED_RUNS if state.limited else 1)
        affordable = effort.affords(state.order, state.limited)
        if affordable and work <= max(CHEAP, state.spent / 2):
            break
        if time.perf_counter() > effort.until:
            break
    if not state.certain and not effort.affords(state.order, state.limited):
        state.polish()
    return Shrunk(
        state.network, state.order, state.price, state.lower_bound_s, state.rounds
    )


class _Shrinking:
    """A network on its way down."""

    def __init__(self, network: Network, incumbent: Incumbent, effort: Effort):
        self.network = network
        self.effort = replace(effort, most_labels=FEW_LABELS)
        self.incumbent = incumbent
        self.limited = math.isfinite(incumbent.problem.memory_limit_bytes)
        self.price = 0.0
        self.lower_bound_s = -math.inf
        self.rounds = 0
        # In joined entries rather than seconds, so that every run goes the same way.
        self.spent = 0.0
        self.order = find_order(network.sizes, network.neighbours)
        self._passing = MessagePassing(network, network.unary)
        self._near = Neighbourhood(len(network.sizes))
        self._stalled = 0
        self._pause = 1
        self._next_look = 0

    @property
    def certain(self) -> bool:
        """Whether the bound has reached the plan."""
        return self.effort.suffices(self.lower_bound_s, self.incumbent)

    def round(self) -> bool:
        """One round; False once nothing more is to be expected of another."""
        before = (self.network.candidates, self._gap())
        self.rounds += 1
        for _ in range(SWEEPS - 1):
            self._passing.sweep()
        last = self._passing.sweep()
        tables = self.network.edges.values()
        self.spent += 2 * SWEEPS * sum(2 * table.size + CALL for table in tables)
        problem = self.incumbent.problem
        offset = problem.constant_s
        if self.price:
            spare = problem.memory_limit_bytes - self.network.least_bytes
            offset -= self.price * spare
        self.lower_bound_s = max(self.lower_bound_s, last.lower_bound_s + offset)
        price = self._look(last)
        self._strike(last, offset)
        if price != self.price:
            self.price = price
            self._passing.reprice(self.network.priced(price))
        if self.network.candidates < 0.99 * before[0] or self._gap() < 0.9 * before[1]:
            self._stalled = 0
        else:
            self._stalled += 1
            if self._stalled == STALLED:
                self._dominate()
        return self._stalled < STALLED

    def _look(self, last: Pass) -> float:
        """Looks for a better plan, less often the less there is to find.

        Returns the price of bytes to go on with.
        """
        if self.rounds < self._next_look:
            return self.price
        before = self.incumbent.objective_s
        choice = self._passing.decode()
        self.incumbent.offer(self.network.original(choice))
        price = self._search_near(choice, last.slack)
        moved = abs(price - self.price) > SAME_PRICE * max(price, self.price)
        found = self.incumbent.objective_s < before
        self._pause = 1 if moved or found else 2 * self._pause
        self._next_look = self.rounds + self._pause
        return price if moved else self.price

    def polish(self) -> None:
        """Improves the plan by further neighbourhoods; for where no proof comes."""
        last, failures = self._passing.sweep(), 0
        while failures < STALLED and time.perf_counter() < self.effort.until:
            before, self._next_look = self.incumbent.objective_s, 0
            self._look(last)
            failures = 0 if self.incumbent.objective_s < before else failures + 1

    def _gap(self) -> float:
        return self.incumbent.objective_s - self.lower_bound_s

    def _search_near(self, choice: list[int], slack: dict[int, np.ndarray]) -> float:
        """Searches around the plans in hand; returns the price of bytes there."""
        plans = [choice]
        if self.incumbent.choice is not None:
            plans.insert(0, self.network.local(self.incumbent.choice))
        small = self._near.around(self.network, plans, slack, self.price)
        order = find_order(small.sizes, small.neighbours)
        calls = 2 * CALL * len(small.neighbours)
        self.spent += (order.work + calls) * (PRICED_RUNS if self.limited else 1)
        return contract(small, order, self.incumbent, self.effort).price

    def _strike(self, last: Pass, offset: float) -> None:
        """Drops the choices whose bound exceeds the best plan's cost."""
        best = self.incumbent.objective_s
        if not math.isfinite(best):
            return
        worst = best + CERTAIN * abs(best) - offset
        masks = {v: last.conditional(v) <= worst for v in last.slack}
        masks = {v: mask for v, mask in masks.items() if not mask.all()}
        if not masks:
            return
        if not all(mask.any() for mask in masks.values()):
            self.lower_bound_s = best
            return
        self._replace(restrict(self.network, masks))

    def _dominate(self) -> None:
        small = [v for v, size in enumerate(self.network.sizes) if 1 < size <= SMALL]
        left = undominated(self.network, small)
        if left.candidates < self.network.candidates:
            self._stalled = 0
            self._replace(left)

    def _replace(self, network: Network) -> None:
        limit = self.incumbent.problem.memory_limit_bytes
        left = propagate(network, limit)
        if left is None:
            # Only plans that are not better were left.
            self.lower_bound_s = self.incumbent.objective_s
            return
        messages = restrict_messages(self._passing.messages, self.network, left)
        self.network = left
        self._passing = MessagePassing(left, left.priced(self.price), messages)
        self.order = find_order(left.sizes, left.neighbours)
