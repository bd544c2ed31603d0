"""How long to search, and how large tables may grow."""

from dataclasses import dataclass

from jaxpar.search.contraction import Order
from jaxpar.search.problem import CERTAIN, Incumbent


@dataclass(frozen=True)
class Effort:
    """When to stop.

    Attributes:
        relative_gap: Stop as soon as the gap is certainly no larger.
        until: Reading of `time.perf_counter` at which to stop improving.
        most_labels: (seconds, bytes) pairs in one step of a `Frontier`.
        largest_table: Entries of one table.
    """

    relative_gap: float
    until: float
    most_labels: int
    largest_table: int

    def suffices(self, bound_s: float, incumbent: Incumbent) -> bool:
        """Whether a lower bound certifies the incumbent well enough."""
        best = incumbent.objective_s
        return bound_s >= best - max(CERTAIN, self.relative_gap) * abs(best)

    def affords(self, order: Order, limited: bool) -> bool:
        """Whether the tables of a contraction fit.

        Three of the largest may exist at a time; under a memory limit so may all
        joined tables, where the bounds of single choices are worked out.
        """
        stored = order.work if limited else order.stored
        return order.largest <= self.largest_table and stored <= 3 * self.largest_table
