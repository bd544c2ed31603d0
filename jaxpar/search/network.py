"""A search problem cut down to the choices still in play.

Every cut here is exact: it drops choices that no allowed plan can use, or that some
other choice can stand in for at no extra cost, or that cannot beat a plan in hand.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxpar.search.problem import SearchProblem

Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Network:
    """Variables (numbered as in the problem) with the choices they still have.

    Attributes:
        kept: Per variable, the numbers of its remaining choices, rising.
        unary: Per variable, seconds per remaining choice, shape (K,).
        memory: Per variable, bytes per remaining choice, shape (K,).
        edges: (i, j) with i < j -> seconds, shape (K_i, K_j); one per pair, none at
            variables with a single choice left (those are folded into `unary`).
        blocked: The edges that may hold inf.
    """

    kept: tuple[np.ndarray, ...]
    unary: tuple[np.ndarray, ...]
    memory: tuple[np.ndarray, ...]
    edges: Mapping[Pair, np.ndarray]
    blocked: frozenset[Pair]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of remaining choices per variable."""
        return tuple(u.size for u in self.unary)

    @cached_property
    def candidates(self) -> int:
        """Remaining choices of the variables that still have a choice."""
        return sum(size for size in self.sizes if size > 1)

    @cached_property
    def neighbours(self) -> dict[int, set[int]]:
        """Variables that share an edge, for every variable with a choice left."""
        near: dict[int, set[int]] = {
            v: set() for v, k in enumerate(self.sizes) if k > 1
        }
        for i, j in self.edges:
            near[i].add(j)
            near[j].add(i)
        return near

    @cached_property
    def extra(self) -> tuple[np.ndarray, ...]:
        """Per variable, bytes per choice above the least of its choices, shape (K,)."""
        return tuple(m - m.min() for m in self.memory)

    @cached_property
    def least_bytes(self) -> float:
        """Sum over the variables of the least bytes of their choices."""
        return math.fsum(float(m.min()) for m in self.memory)

    def priced(self, price: float) -> list[np.ndarray]:
        """Unary seconds plus `price` (seconds per byte) times `extra`."""
        if not price:
            return list(self.unary)
        return [u + price * m for u, m in zip(self.unary, self.extra, strict=True)]

    def table(self, row: int, column: int) -> np.ndarray:
        """Seconds of an edge, shape (K_row, K_column)."""
        if row < column:
            return self.edges[row, column]
        return self.edges[column, row].T

    def original(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Remaining-choice numbers -> choice numbers of the problem."""
        return tuple(int(k[c]) for k, c in zip(self.kept, choice, strict=True))

    def local(self, original: Sequence[int]) -> list[int]:
        """Choice numbers of the problem -> the nearest remaining-choice numbers."""
        near = []
        for kept, choice in zip(self.kept, original, strict=True):
            near.append(min(int(np.searchsorted(kept, choice)), kept.size - 1))
        return near


def network_of(problem: SearchProblem) -> Network:
    """The network with every choice of a problem, parallel edges added up."""
    edges: dict[Pair, np.ndarray] = {}
    for edge in problem.edges:
        i, j, table = edge.first, edge.second, edge.cost_s
        if i > j:
            i, j, table = j, i, table.T
        known = edges.get((i, j))
        edges[i, j] = table if known is None else known + table
    blocked = frozenset(p for p, t in edges.items() if t.size and t.max() == math.inf)
    numbers = np.arange(max((c.size for c in problem.cost_s), default=0))
    return Network(
        kept=tuple(numbers[: c.size] for c in problem.cost_s),
        unary=problem.cost_s,
        memory=problem.memory_bytes,
        edges=edges,
        blocked=blocked,
    )


def of_bytes(network: Network) -> Network:
    """The same choices with bytes as their cost, and only walls along the edges."""
    walls = {
        pair: np.where(network.edges[pair] < math.inf, 0.0, math.inf)
        for pair in network.blocked
    }
    return replace(network, unary=network.memory, edges=walls)


def restrict(network: Network, keep: Mapping[int, np.ndarray]) -> Network:
    """Keeps only some choices of some variables, and folds what is then settled.

    Args:
        network: Where to drop choices.
        keep: Per changed variable, positions (rising) or a mask of what stays; at
            least one each.
    """
    kept, unary, memory = list(network.kept), list(network.unary), list(network.memory)
    for v, stays in keep.items():
        kept[v], unary[v], memory[v] = kept[v][stays], unary[v][stays], memory[v][stays]
    edges: dict[Pair, np.ndarray] = {}
    for (i, j), whole in network.edges.items():
        table = whole
        if i in keep:
            table = table[keep[i]]
        if j in keep:
            table = table[:, keep[j]]
        if table.shape[0] == 1:
            unary[j] = unary[j] + table[0]
        elif table.shape[1] == 1:
            unary[i] = unary[i] + table[:, 0]
        else:
            edges[i, j] = table
    blocked = frozenset(
        p for p in network.blocked if p in edges and edges[p].max() == math.inf
    )
    return Network(tuple(kept), tuple(unary), tuple(memory), edges, blocked)


def propagate(network: Network, limit_bytes: float) -> Network | None:
    """Drops every choice that is forbidden on its face; None if nothing is left.

    A choice goes if its own cost is inf, if it has no allowed partner along an edge,
    or if it breaks the memory limit even beside the smallest choices elsewhere.
    """
    settled = any(1 in network.edges[p].shape for p in network.edges)
    while True:
        keep = _allowed(network, limit_bytes)
        if not all(stays.any() for stays in keep.values()):
            return None
        if not keep and not settled:
            return network
        network, settled = restrict(network, keep), False


def _allowed(network: Network, limit_bytes: float) -> dict[int, np.ndarray]:
    """Masks of allowed choices, for the variables that lose some."""
    masks: dict[int, np.ndarray] = {}

    def forbid(v: int, bad: np.ndarray) -> None:
        if bad.any():
            masks[v] = masks.get(v, True) & ~bad

    if network.unary and np.concatenate(network.unary).max() == math.inf:
        for v, unary in enumerate(network.unary):
            forbid(v, unary == math.inf)
    for i, j in network.blocked:
        table = network.edges[i, j]
        forbid(i, table.min(axis=1) == math.inf)
        forbid(j, table.min(axis=0) == math.inf)
    if math.isfinite(limit_bytes):
        spare = limit_bytes * (1 + 1e-12) - network.least_bytes
        for v, extra in enumerate(network.extra):
            forbid(v, extra > spare)
    return masks


def undominated(network: Network, variables: Iterable[int]) -> Network:
    """Drops choices that another choice of the same variable can always replace.

    Choice a falls to choice b if b takes no more bytes and, whatever the neighbours
    choose, no more seconds: sum over edges of min (cost of a - cost of b) >= 0
    (Goldstein 1994). Variables are treated one after another, so that of choices
    equal to one another the first stays.
    """
    for v in variables:
        if network.sizes[v] > 1:
            stays = _undominated(network, v)
            if not stays.all():
                network = restrict(network, {v: stays})
    return network


def _undominated(network: Network, v: int) -> np.ndarray:
    unary, memory = network.unary[v], network.memory[v]
    surplus = unary[:, None] - unary[None, :]
    with np.errstate(invalid="ignore"):
        for other in network.neighbours[v]:
            table = network.table(v, other)
            difference = table[:, None, :] - table[None, :, :]
            # inf - inf: where the choice to drop is forbidden, it is no better.
            difference[np.isnan(difference)] = math.inf
            surplus = surplus + difference.min(axis=2)
    falls = (surplus >= 0.0) & (memory[:, None] >= memory[None, :])
    rank = np.arange(unary.size)
    earlier = rank[None, :] < rank[:, None]
    return np.asarray(~(falls & (~falls.T | earlier)).any(axis=1))
