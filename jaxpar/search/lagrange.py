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


@dataclass(frozen=True)
class Dual:
    """Where the price of bytes ended.

    Attributes:
        price: Seconds per byte; 0 where the cheapest plan fits.
        lower_bound_s: No plan of the network within the limit costs less.
        rounds: Prices tried.
    """

    price: float
    lower_bound_s: float
    rounds: int


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


def ascend(contraction: Contraction, incumbent: Incumbent) -> Dual:
    """Finds the best price; every plan met on the way is offered to the incumbent.

    Afterwards the tables of the contraction are those of the best price. The bound
    is inf if no plan of the network is allowed.
    """
    network = contraction.network
    limit = incumbent.problem.memory_limit_bytes

    def cheapest(price: float) -> tuple[float, float]:
        contraction.run(network.priced(price))
        return incumbent.offer(network.original(contraction.assignment()))

    over = cheapest(0.0)
    if over[0] == math.inf or incumbent.problem.fits(over[1]):
        return Dual(0.0, over[0], 1)
    if incumbent.choice is None:
        smallest = least_memory(network)
        if smallest is not None:
            incumbent.offer(network.original(smallest))
        if incumbent.choice is None:
            return Dual(0.0, math.inf, 1)
    price, bound, rounds = 0.0, over[0], 1
    fits = (incumbent.objective_s, incumbent.memory_bytes)
    while rounds < ROUNDS and fits[0] > over[0]:
        price = (fits[0] - over[0]) / (over[1] - fits[1])
        seconds, memory = cheapest(price)
        rounds += 1
        value = seconds + price * (memory - limit)
        bound = max(bound, value)
        if value >= over[0] + price * (over[1] - limit) - 1e-12 * abs(value):
            break
        if incumbent.problem.fits(memory):
            fits = (seconds, memory)
        else:
            over = (seconds, memory)
    return Dual(price, bound, rounds)
