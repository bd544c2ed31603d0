"""Bucket elimination: min-plus contraction of a network, one variable at a time.

Eliminating a variable adds up all tables it appears in and minimises it away; what
is left is one new table over its neighbours (Bertele and Brioschi 1972; Dechter
1999). The cost is exponential in the width of the order only, not in the number of
variables.
"""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpar.search.network import Network

BLOCK = 1 << 17
"""Joined entries worked on at once, so that they stay in cache."""


@dataclass(frozen=True)
class Order:
    """An elimination order, possibly of a part of the network.

    Attributes:
        variables: In order of elimination.
        fixed: Variables left out, to be settled beforehand, so that no table
            exceeds the cap.
        work: Sum of joined entries over all steps.
        largest: Entries of the largest resulting table.
        stored: Sum of entries of the resulting tables.
    """

    variables: tuple[int, ...]
    fixed: tuple[int, ...]
    work: float
    largest: float
    stored: float


def find_order(
    sizes: Sequence[int],
    neighbours: Mapping[int, Collection[int]],
    cap: float = math.inf,
    worn: Sequence[int] | None = None,
) -> Order:
    """Greedy order: leaves first, then whatever leaves the smallest table.

    Args:
        sizes: Choices per variable.
        neighbours: Variables to eliminate -> variables that share an edge.
        cap: Largest number of joined entries of one step; where every variable
            exceeds it, the busiest one is fixed instead of eliminated.
        worn: Per variable, how often it was fixed before; the least worn goes
            first, so that repeated calls free different parts.
    """
    near = {v: set(others) for v, others in neighbours.items()}
    weight: dict[int, float] = {}
    heap: list[tuple[bool, float, int]] = []

    def push(v: int) -> None:
        weight[v] = math.prod([sizes[u] for u in near[v]])
        heapq.heappush(heap, (len(near[v]) > 1, weight[v], v))

    for v in near:
        push(v)
    order: list[int] = []
    fixed: list[int] = []
    tables: list[float] = []
    work = 0.0
    while heap:
        _, table, v = heapq.heappop(heap)
        if v not in near or table != weight[v]:
            continue
        if table * sizes[v] <= cap:
            order.append(v)
            tables.append(table)
            work += table * sizes[v]
            changed = near.pop(v)
            for u in changed:
                near[u] |= changed
                near[u] -= {u, v}
        else:
            gone = _busiest({v, *near[v]}, near, sizes, worn)
            fixed.append(gone)
            changed = near.pop(gone)
            for u in changed:
                near[u].discard(gone)
            # v left the heap above, and has to return to it.
            changed = {v, *changed} - {gone}
        for u in changed:
            push(u)
    return Order(
        tuple(order), tuple(fixed), work, max(tables, default=0.0), sum(tables)
    )


def _busiest(
    variables: Collection[int],
    near: Mapping[int, Collection[int]],
    sizes: Sequence[int],
    worn: Sequence[int] | None,
) -> int:
    def weight(v: int) -> tuple[float, float, int]:
        times = worn[v] if worn is not None else 0
        return -times, len(near[v]) * math.log(sizes[v]), v

    return max(variables, key=weight)


@dataclass(frozen=True, slots=True)
class Step:
    """Elimination of one variable; variables are given by their place in the order.

    Attributes:
        variable: Number of the variable minimised away; first axis of every input.
        scope: Places of the variables of the resulting table, rising.
        inputs: Numbers of the tables to add, fewest variables first.
        shapes: Per input, its shape broadcastable over (variable, *scope).
        rests: Per input, the places of its variables but the first.
        entries: Joined entries.
    """

    variable: int
    scope: tuple[int, ...]
    inputs: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    rests: tuple[tuple[int, ...], ...]
    entries: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """Every step of a contraction, worked out once for many price vectors.

    Tables are numbered: the unary table of variable v is v, then the edges, then
    the result of each step.
    """

    steps: tuple[Step, ...]
    edges: tuple[np.ndarray, ...]
    count: int

    @cached_property
    def first_result(self) -> int:
        """Number of the table that the first step makes."""
        return self.count + len(self.edges)

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """Numbers of the scalar tables: one per connected part."""
        start = self.first_result
        return tuple(start + n for n, step in enumerate(self.steps) if not step.scope)


_Input = tuple[tuple[int, ...], int]
"""Places of the variables of a table but the first, and its number."""


def make_schedule(network: Network, order: Order) -> Schedule:
    """Lays out the contraction of all variables that still have a choice."""
    count = len(network.sizes)
    place = {v: p for p, v in enumerate(order.variables)}
    buckets: list[list[_Input]] = [[((), v)] for v in order.variables]
    edges: list[np.ndarray] = []
    for (i, j), table in network.edges.items():
        p, q = place[i], place[j]
        buckets[min(p, q)].append(((max(p, q),), count + len(edges)))
        edges.append(table if p < q else table.T)
    first = count + len(edges)
    sizes = [network.sizes[v] for v in order.variables]
    steps: list[Step] = []
    for p, bucket in enumerate(buckets):
        step = _make_step(order.variables[p], sizes[p], bucket, sizes)
        steps.append(step)
        if step.scope:
            buckets[step.scope[0]].append((step.scope[1:], first + p))
    return Schedule(tuple(steps), tuple(edges), count)


def _make_step(v: int, size: int, bucket: list[_Input], sizes: list[int]) -> Step:
    bucket.sort(key=lambda item: len(item[0]))
    rests, inputs = zip(*bucket, strict=True)
    scope = tuple(sorted(set().union(*rests)))
    full = (size, *[sizes[q] for q in scope])
    shapes = []
    for rest in rests:
        if len(rest) == len(scope):
            shapes.append(full)
        else:
            shapes.append((size, *[sizes[q] if q in rest else 1 for q in scope]))
    return Step(v, scope, inputs, tuple(shapes), rests, math.prod(full))


class Contraction:
    """Tables of one schedule under changing unary costs.

    Args:
        network: What the schedule was made for.
        schedule: From `make_schedule`.

    Attributes:
        tables: All tables of the last run, by number.
    """

    def __init__(self, network: Network, schedule: Schedule):
        self.network = network
        self.schedule = schedule
        self.tables: list[np.ndarray] = []

    @cached_property
    def dynamic(self) -> list[bool]:
        """Which tables depend on bytes, and so change with their price."""
        moving = [bool(m.any()) for m in self.network.extra]
        moving += [False] * len(self.schedule.edges)
        for step in self.schedule.steps:
            moving.append(any(moving[number] for number in step.inputs))
        return moving

    def run(self, unary: Sequence[np.ndarray]) -> float:
        """Least cost over all variables with a choice; settled ones are not added.

        Args:
            unary: One vector per variable. From the second run on they may differ
                only where bytes differ between choices.
        """
        schedule, tables = self.schedule, self.tables
        if not tables:
            tables.extend(unary)
            tables.extend(schedule.edges)
            for step in schedule.steps:
                tables.append(_eliminate(step, tables))
        else:
            tables[: schedule.count] = unary
            for number, step in enumerate(schedule.steps, schedule.first_result):
                if self.dynamic[number]:
                    tables[number] = _eliminate(step, tables)
        return math.fsum(float(tables[root]) for root in schedule.roots)

    def assignment(self, given: Mapping[int, int] | None = None) -> list[int]:
        """A least-cost choice (0 for settled variables), read back from the tables.

        Args:
            given: Place in the order -> choice, for variables that are not free.
        """
        steps, tables = self.schedule.steps, self.tables
        chosen = [0] * len(steps)
        for place in range(len(steps) - 1, -1, -1):
            if given and place in given:
                chosen[place] = given[place]
                continue
            step = steps[place]
            total = tables[step.inputs[0]]
            for number, rest in zip(step.inputs[1:], step.rests[1:], strict=True):
                table = tables[number]
                if rest:
                    table = table[(slice(None), *[chosen[q] for q in rest])]
                total = total + table
            chosen[place] = int(total.argmin())
        choice = [0] * self.schedule.count
        for step, k in zip(steps, chosen, strict=True):
            choice[step.variable] = k
        return choice

    def beliefs(self) -> list[np.ndarray]:
        """Per step, the least total cost of each entry of its joined table.

        Entry (k, scope...) of step s is the cost of the best plan of the connected
        part with these choices: the inside (below the step) plus the outside.
        Shape (K, *scope); memory is that of the largest joined table, summed over
        steps.
        """
        schedule, tables = self.schedule, self.tables
        outside: dict[int, np.ndarray] = {}
        beliefs: list[np.ndarray] = []
        for offset in range(len(schedule.steps) - 1, -1, -1):
            step = schedule.steps[offset]
            belief = join(step, tables)
            above = outside.pop(schedule.first_result + offset, None)
            if above is not None:
                belief = belief + above
            for number, shape in zip(step.inputs, step.shapes, strict=True):
                if number >= schedule.first_result:
                    outside[number] = _without(belief, tables[number], shape)
            beliefs.append(belief)
        return beliefs[::-1]


def _without(
    belief: np.ndarray, table: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """The outside of one input: beliefs over its variables, less its own entries."""
    axes = tuple(a for a, size in enumerate(shape) if size == 1 < belief.shape[a])
    least = belief.min(axis=axes) if axes else belief
    with np.errstate(invalid="ignore"):
        outside = least.reshape(table.shape) - table
    outside[np.isnan(outside)] = math.inf
    return outside


def join(step: Step, tables: Sequence[np.ndarray]) -> np.ndarray:
    """Sum of all inputs of a step, shape (K, *scope)."""
    total = tables[step.inputs[0]].reshape(step.shapes[0])
    for number, shape in zip(step.inputs[1:], step.shapes[1:], strict=True):
        total = total + tables[number].reshape(shape)
    return total


def _eliminate(step: Step, tables: Sequence[np.ndarray]) -> np.ndarray:
    if step.entries <= BLOCK or not step.scope:
        return np.minimum.reduce(join(step, tables), axis=0)
    parts = [
        tables[number].reshape(shape)
        for number, shape in zip(step.inputs, step.shapes, strict=True)
    ]
    length = max(part.shape[1] for part in parts)
    width = max(1, BLOCK * length // step.entries)
    blocks = []
    for start in range(0, length, width):
        total = parts[0]
        for part in parts[1:]:
            whole = part.shape[1] == 1
            total = total + (part if whole else part[:, start : start + width])
        blocks.append(np.minimum.reduce(total, axis=0))
    return np.concatenate(blocks)
