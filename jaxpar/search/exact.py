"""Exact answer of a network that is small enough to contract."""

from dataclasses import dataclass

from jaxpar.search.contraction import Contraction, Order, find_order, make_schedule
from jaxpar.search.effort import Effort
from jaxpar.search.frontier import Frontier
from jaxpar.search.lagrange import ascend
from jaxpar.search.network import Network, restrict
from jaxpar.search.problem import Incumbent

FIRST_PRICES = 4
"""Prices tried before choices are struck out for the first time."""


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
    network: Network,
    order: Order,
    incumbent: Incumbent,
    effort: Effort,
    price: float = 0.0,
) -> Exact:
    """Finds the best plan by elimination: at once, or with priced bytes and labels.

    Choices that cannot be part of a better plan are struck out on the way, as soon
    as a price gives a bound for each of them.

    Args:
        network: What to contract.
        order: An elimination order of it.
        incumbent: Gets every plan found.
        effort: When to stop.
        price: A good price of bytes, if one is known; choices are struck out by it
            before anything else. The incumbent must then hold a plan.
    """
    contraction = Contraction(network, make_schedule(network, order))
    if price:
        contraction.run(network.priced(price))
        contraction = _cut(Frontier(contraction, price, incumbent, effort))
    dual = ascend(contraction, incumbent, rounds=FIRST_PRICES)
    bound, labels = dual.lower_bound_s, 0
    while not effort.suffices(bound, incumbent) and incumbent.choice is not None:
        frontier = Frontier(contraction, dual.price, incumbent, effort)
        if frontier.worthwhile():
            contraction = _cut(frontier)
        elif dual.best:
            bound = max(bound, frontier.close(bound))
            labels += frontier.labels
            if not frontier.worthwhile():
                network = restrict(contraction.network, frontier.below())
                return Exact(bound, dual.price, network, dual.rounds, labels)
            continue
        dual = ascend(contraction, incumbent, start=dual)
        bound = max(bound, dual.lower_bound_s)
    return Exact(bound, dual.price, contraction.network, dual.rounds, labels)


def _cut(frontier: Frontier) -> Contraction:
    """Strikes out what cannot beat the incumbent, and lays out what is left."""
    left = restrict(frontier.contraction.network, frontier.below())
    order = find_order(left.sizes, left.neighbours)
    return Contraction(left, make_schedule(left, order))
