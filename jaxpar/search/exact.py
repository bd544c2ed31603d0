"""Exact answer of a network that is small enough to contract."""

from dataclasses import dataclass

from jaxpar.search.contraction import Contraction, Order, find_order, make_schedule
from jaxpar.search.frontier import Frontier
from jaxpar.search.lagrange import ascend
from jaxpar.search.network import Network, restrict
from jaxpar.search.problem import CERTAIN, Incumbent

FIRST_PRICES = 4
"""Prices tried before choices are struck out for the first time."""

WORTHWHILE = 0.8
"""A new contraction pays if no more than this share of the choices is left."""


@dataclass(frozen=True)
class Effort:
    """When to stop.

    Attributes:
        relative_gap: Stop as soon as the gap is certainly no larger.
        until: Reading of `time.perf_counter` at which to stop improving.
        most_labels: (seconds, bytes) pairs in one step of a `Frontier`.
    """

    relative_gap: float
    until: float
    most_labels: int

    def suffices(self, bound_s: float, incumbent: Incumbent) -> bool:
        """Whether a lower bound certifies the incumbent well enough."""
        best = incumbent.objective_s
        return bound_s >= best - max(CERTAIN, self.relative_gap) * abs(best)


@dataclass(frozen=True)
class Exact:
    """What contraction could certify; the plan itself is the incumbent.

    Attributes:
        lower_bound_s: No plan of the network within the limit, other than the
            incumbent, costs less; inf if there is none.
        price: Best price of bytes, seconds per byte.
        network: The choices that a still better plan may use.
        prices: Prices tried.
        labels: Labels made.
    """

    lower_bound_s: float
    price: float
    network: Network
    prices: int
    labels: int = 0


def contract(
    network: Network, order: Order, incumbent: Incumbent, effort: Effort
) -> Exact:
    """Finds the best plan by elimination: at once, or with priced bytes and labels.

    Choices that cannot be part of a better plan are struck out on the way, as soon
    as a price gives a bound for each of them.
    """
    contraction = Contraction(network, make_schedule(network, order))
    dual = ascend(contraction, incumbent, rounds=FIRST_PRICES)
    while True:
        bound = dual.lower_bound_s
        if effort.suffices(bound, incumbent) or incumbent.choice is None:
            return Exact(bound, dual.price, network, dual.rounds)
        frontier = Frontier(contraction, dual.price, incumbent, effort.most_labels)
        left = restrict(network, frontier.below(incumbent.objective_s))
        few = left.candidates < WORTHWHILE * network.candidates
        if dual.best and not few:
            break
        if few:
            network, order = left, find_order(left.sizes, left.neighbours)
            contraction = Contraction(network, make_schedule(network, order))
        dual = ascend(contraction, incumbent, start=dual)
    bound = max(bound, frontier.close(effort.relative_gap, effort.until))
    left = restrict(network, frontier.below(incumbent.objective_s))
    return Exact(bound, dual.price, left, dual.rounds, frontier.labels)
