"""Dual message passing: a lower bound, a plan, and a bound for every single choice.

Sequential tree-reweighted message passing (Kolmogorov 2006, 2015): the costs are
moved between tables without changing their sum, so that the sum of the tables'
minima, a lower bound at any time, never falls. At convergence it is the bound of
the local-polytope linear program, or close to it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee

from jaxpar.search.network import Network, Pair

Messages = dict[tuple[int, int], np.ndarray]
"""(from, to) -> seconds per choice of `to`, shape (K_to,)."""


@dataclass(frozen=True)
class Pass:
    """What one pass over all variables found.

    Attributes:
        lower_bound_s: No choice costs less (unary costs as given, no constant).
        slack: Per variable with a choice, what each choice adds at least to
            `before_s`, shape (K,).
        before_s: The bound before the pass, which `slack` refers to.
    """

    lower_bound_s: float
    slack: dict[int, np.ndarray]
    before_s: float

    def conditional(self, v: int) -> np.ndarray:
        """Lower bounds on all plans with each choice of a variable, shape (K,)."""
        return self.before_s + self.slack[v]


class MessagePassing:
    """Message passing on a network, forward and backward along one variable order.

    Args:
        network: Every choice must have an allowed partner along every edge, as
            `propagate` leaves it.
        unary: Seconds per choice, one vector per variable (bytes priced in).
        messages: Messages to start from, of the same network; zero where missing.
    """

    def __init__(
        self,
        network: Network,
        unary: Sequence[np.ndarray],
        messages: Messages | None = None,
    ):
        self.network = network
        self.messages: Messages = {} if messages is None else messages
        self.reprice(unary)
        self._order = _line_up(network)
        self._tables: dict[Pair, np.ndarray] = {}
        for (i, j), table in network.edges.items():
            # Minima run fastest over the first axis, so both layouts are kept.
            self._tables[i, j] = np.ascontiguousarray(table)
            self._tables[j, i] = np.ascontiguousarray(table.T)
            for pair in ((i, j), (j, i)):
                if pair not in self.messages:
                    self.messages[pair] = np.zeros(network.sizes[pair[1]])
        self._forward = True

    def reprice(self, unary: Sequence[np.ndarray]) -> None:
        """Changes the unary costs, keeps the messages and forgets the bound."""
        self.unary = unary
        self.lower_bound_s = -math.inf
        self._settled = math.fsum(
            float(u[0])
            for u, size in zip(unary, self.network.sizes, strict=True)
            if size == 1
        )

    def sweep(self) -> Pass:
        """One forward and one backward pass; the result describes the second."""
        self.step()
        return self.step()

    def step(self) -> Pass:
        """One pass over all variables, then turns around."""
        order = self._order if self._forward else self._order[::-1]
        rank = {v: position for position, v in enumerate(order)}
        messages, tables = self.messages, self._tables
        slack: dict[int, np.ndarray] = {}
        bound = [self._settled]
        for v in order:
            near = self.network.neighbours[v]
            total = self.unary[v]
            for other in near:
                total = total + messages[other, v]
            least = float(total.min())
            slack[v] = total - least
            ahead = [other for other in near if rank[other] > rank[v]]
            chains = max(len(ahead), len(near) - len(ahead), 1)
            bound.append(least * (1.0 - len(ahead) / chains))
            share = total / chains
            for other in ahead:
                out = (share - messages[other, v])[:, None] + tables[v, other]
                messages[v, other] = np.minimum.reduce(out, axis=0)
        before = self.lower_bound_s
        self.lower_bound_s = max(before, math.fsum(bound))
        self._forward = not self._forward
        return Pass(self.lower_bound_s, slack, before)

    def decode(self) -> list[int]:
        """A choice read off the messages, one variable after another."""
        order = self._order if self._forward else self._order[::-1]
        choice = [0] * len(self.unary)
        done: set[int] = set()
        for v in order:
            total = self.unary[v]
            for other in self.network.neighbours[v]:
                if other in done:
                    total = total + self._tables[other, v][choice[other]]
                else:
                    total = total + self.messages[other, v]
            choice[v] = int(total.argmin())
            done.add(v)
        return choice


def restrict_messages(messages: Messages, old: Network, new: Network) -> Messages:
    """The messages along the edges that are left after a restriction."""
    left: Messages = {}
    for i, j in new.edges:
        for source, to in ((i, j), (j, i)):
            message = messages[source, to]
            if new.sizes[to] < old.sizes[to]:
                message = message[np.searchsorted(old.kept[to], new.kept[to])]
            left[source, to] = message
    return left


def _line_up(network: Network) -> list[int]:
    """An order in which neighbours are near each other, whatever the numbering."""
    variables = list(network.neighbours)
    if not network.edges:
        return variables
    rank = {v: position for position, v in enumerate(variables)}
    rows = [rank[i] for i, _ in network.edges] + [rank[j] for _, j in network.edges]
    columns = [rank[j] for _, j in network.edges] + [rank[i] for i, _ in network.edges]
    shape = (len(variables), len(variables))
    graph = csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)
    return [variables[p] for p in reverse_cuthill_mckee(graph, symmetric_mode=True)]
