"""The memory limit as a price on bytes, raised until the plan fits.

For any price p >= 0, the least of seconds + p * (bytes - limit) is a lower bound on
the seconds of every plan within the limit. The best price is found exactly, by
intersecting the lines of the cheapest plan that does not fit and of one that does
(Handler and Zang 1980; Juttner et al. 2001), each plan exact by elimination.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxpar.search.contraction import Contraction, find_order, make_schedule
from jaxpar.search.ilp import IntegerProgram
from jaxpar.search.network import Network, of_bytes
from jaxpar.search.problem import Incumbent

ROUNDS = 60
"""Prices tried at most; a handful is usual."""

WIDE = 1e8
"""Joined entries above which forbidden pairs go to the integer program."""


Point = tuple[float, float]
"""Seconds and bytes of a plan."""


@dataclass(frozen=True)
class Dual:
    """Where the price of bytes ended.

    Attributes:
        price: Seconds per byte; 0 where the cheapest plan fits.
        lower_bound_s: No plan of the network within the limit costs less.
        rounds: Prices tried.
        over: The last plan that does not fit, or None where the cheapest plan fits.
        best: Whether no other price gives a higher bound, or none is worth trying.
    """

    price: float
    lower_bound_s: float
    rounds: int
    over: Point | None = None
    best: bool = True


def least_memory(network: Network, time_limit_s: float = 60.0) -> list[int] | None:
    """A choice of the least bytes, cheap where bytes tie; None if all is forbidden.

    Forbidden pairs make this a search of its own, by elimination, or by the integer
    program where the graph of forbidden pairs is too wide.
    """
    if not network.blocked:
        pairs = zip(network.unary, network.memory, strict=True)
        return [int(np.lexsort((u, m))[0]) for u, m in pairs]
    walled = of_bytes(network)
    order = find_order(walled.sizes, walled.neighbours)
    if order.work > WIDE:
        return IntegerProgram(walled, walled.unary, math.inf).minimise(time_limit_s)[0]
    contraction = Contraction(walled, make_schedule(walled, order))
    if contraction.run(walled.unary) == math.inf:
        return None
    return contraction.assignment()


def _fitting(network: Network, incumbent: Incumbent) -> Point | None:
    """A plan within the limit, the one of least bytes if need be."""
    if incumbent.choice is None:
        smallest = least_memory(network)
        if smallest is not None:
            incumbent.offer(network.original(smallest))
    if incumbent.choice is None:
        return None
    return incumbent.objective_s, incumbent.memory_bytes


def ascend(
    contraction: Contraction,
    incumbent: Incumbent,
    rounds: int = ROUNDS,
    start: Dual | None = None,
) -> Dual:
    """Finds the best price; every plan met on the way is offered to the incumbent.

    Afterwards the tables of the contraction are those of the price. The bound is
    inf if no plan of the network is allowed.

    Args:
        contraction: Of the network to solve.
        incumbent: Its plan, if any, is where the price starts from.
        rounds: Prices to try at most, those of `start` included.
        start: Where an earlier ascent, over more choices, broke off.
    """
    network, problem = contraction.network, incumbent.problem
    limit = problem.memory_limit_bytes

    def cheapest(price: float) -> Point:
        contraction.run(network.priced(price))
        return incumbent.offer(network.original(contraction.assignment()))

    over = cheapest(0.0) if start is None or start.over is None else start.over
    if over[0] == math.inf or problem.fits(over[1]):
        return Dual(0.0, over[0], 1)
    price, bound, tried = 0.0, over[0], 1
    if start is not None:
        price, bound, tried = start.price, start.lower_bound_s, start.rounds
        # The tables have to be those of this network: at least one run.
        rounds = max(rounds, tried + 1)
    fits = _fitting(network, incumbent)
    if fits is None:
        return Dual(0.0, math.inf, 1)
    while tried < rounds and fits[0] > over[0]:
        price = (fits[0] - over[0]) / (over[1] - fits[1])
        seconds, memory = cheapest(price)
        tried += 1
        value = seconds + price * (memory - limit)
        bound = max(bound, value)
        if value >= over[0] + price * (over[1] - limit) - 1e-12 * abs(value):
            return Dual(price, bound, tried, over)
        if problem.fits(memory):
            fits = (seconds, memory)
        else:
            over = (seconds, memory)
    return Dual(price, bound, tried, over, best=tried >= ROUNDS)
