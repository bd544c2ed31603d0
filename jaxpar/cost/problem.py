"""The search problem of one mesh: variables, choices, and tables of seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from jaxpar.classes import weights
from jaxpar.cost.operators import (
    LeafCost,
    Workload,
    compute_s,
    leaf_cost,
    reductions_s,
    residual_bytes,
    working_bytes,
)
from jaxpar.cost.rates import Rates, State
from jaxpar.graph import Operand, Operator, OperatorGraph
from jaxpar.hardware import Chip
from jaxpar.mesh import LogicalMesh
from jaxpar.search.problem import Edge, SearchProblem
from jaxpar.sharding import Grain, Spec, grain_of, without
from jaxpar.strategy import (
    Axes,
    Bound,
    LeafStrategy,
    Pin,
    Strategy,
    axes_on,
    leaf_strategies,
    spec_of,
    strategies,
)


@dataclass(frozen=True)
class Link:
    """An edge of the graph: a tensor that goes from a writer to an operand.

    Attributes:
        writer: Variable that writes it: a leaf or an operator.
        reader: Variable of the operator that reads it.
        operand: Index of the operand slot.
        tensor: The tensor.
        executions: Reads in one forward pass.
    """

    writer: int
    reader: int
    operand: int
    tensor: int
    executions: int


class MeshProblem:
    """Choices and prices of all variables on one mesh.

    Variables are the leaves, then the operators, in the order of the graph.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        mesh: LogicalMesh,
        workload: Workload,
        *,
        pins: Mapping[int, Pin],
        must_store: Sequence[str] = (),
        weights_first: bool = False,
        bound: Mapping[int, Bound] | None = None,
        zero: int | None = None,
    ):
        self.graph = graph
        self.mesh = mesh
        self.chip: Chip = mesh.topology.chip
        self.workload = workload
        self.pins = pins
        self.axes = Axes({a: n for a, n in mesh.sizes.items() if n > 1})
        self.rates = Rates(mesh, self.chip.reduce_scatter)
        self._source_cache: dict[Any, Any] = {}
        self._target_cache: dict[Any, Any] = {}
        stored = weights(graph)
        self.leaves: list[tuple[LeafStrategy, ...]] = [
            leaf_strategies(
                graph,
                leaf,
                self.axes,
                pin=pins.get(i),
                must_store=must_store if i in stored else (),
                zero=zero,
            )
            for i, leaf in enumerate(graph.leaves)
        ]
        self.operators = self._strategies(bound or {}, weights_first=weights_first)

    def _strategies(
        self, bound: Mapping[int, Bound], *, weights_first: bool
    ) -> list[tuple[Strategy, ...]]:
        return [
            strategies(
                op,
                self.graph.classes,
                self.axes,
                weights_first=weights_first,
                bound=bound.get(i, ()),
            )
            for i, op in enumerate(self.graph.operators)
        ]

    @property
    def unmet(self) -> str | None:
        """Name of an operator that can do nothing that its pins admit."""
        pairs = zip(self.graph.operators, self.operators, strict=True)
        return next((op.name for op, found in pairs if not found), None)

    @property
    def training(self) -> bool:
        """Whether the step has a backward pass."""
        return self.workload.training

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """All edges of the graph."""
        writer = {leaf.tensor: i for i, leaf in enumerate(self.graph.leaves)}
        first = len(self.graph.leaves)
        for i, op in enumerate(self.graph.operators):
            writer.update((r.tensor, first + i) for r in op.results)
        return tuple(
            Link(writer[use.tensor], first + i, k, use.tensor, use.executions)
            for i, op in enumerate(self.graph.operators)
            for k, operand in enumerate(op.operands)
            for use in operand.uses
        )

    @cached_property
    def readers(self) -> dict[int, list[Operator]]:
        """Operators that read a tensor."""
        found: dict[int, list[Operator]] = {}
        for op in self.graph.operators:
            for operand in op.operands:
                for use in operand.uses:
                    found.setdefault(use.tensor, []).append(op)
        return found

    @cached_property
    def enters_region(self) -> dict[int, bool]:
        """Tensor -> whether its writer is outside of every checkpoint."""
        found = {leaf.tensor: True for leaf in self.graph.leaves}
        for op in self.graph.operators:
            found.update((r.tensor, not op.recomputed) for r in op.results)
        return found

    def recomputed(self, tensor: int) -> bool:
        """Whether all readers of a tensor are rematerialised."""
        readers = self.readers.get(tensor, [])
        return bool(readers) and all(op.recomputed for op in readers)

    def replayed(self, tensor: int) -> bool:
        """Whether readers of a tensor ask for it once more in the backward pass."""
        return self.recomputed(tensor) and any(
            operand.replayed
            for op in self.readers[tensor]
            for operand in op.operands
            if any(use.tensor == tensor for use in operand.uses)
        )

    def leaf_cost(self, i: int, strategy: LeafStrategy) -> LeafCost:
        """Price of one leaf under one strategy."""
        leaf = self.graph.leaves[i]
        return leaf_cost(
            leaf,
            strategy,
            self.rates,
            self.chip,
            training=self.training,
            optimizer_ratio=self.workload.optimizer_bytes.get(i, 0.0),
            recomputed=self.recomputed(leaf.tensor),
            replayed=self.replayed(leaf.tensor),
        )

    def operator_s(self, i: int, strategy: Strategy) -> float:
        """Seconds of one operator, sums inside it included."""
        op = self.graph.operators[i]
        return compute_s(
            self.graph,
            op,
            strategy,
            self.chip,
            self.rates.sizes,
            training=self.training,
        ) + reductions_s(op, strategy, self.rates, training=self.training)

    def operator_bytes(self, i: int, strategy: Strategy) -> float:
        """Residual bytes of one operator."""
        op = self.graph.operators[i]
        if not self.training or not op.active:
            return 0.0
        return residual_bytes(
            self.graph, op, strategy, self.rates.sizes, self.enters_region
        )

    # ---- moves along edges

    def written(self, link: Link, choice: Strategy | LeafStrategy) -> State:
        """How the writer leaves the tensor."""
        if isinstance(choice, LeafStrategy):
            return choice.compute, ()
        op = self.graph.operators[link.writer - len(self.graph.leaves)]
        result = next(r for r in op.results if r.tensor == link.tensor)
        return spec_of(result.dims, choice), axes_on(result.sums, choice)

    def gradient(self, link: Link, choice: Strategy | LeafStrategy) -> Spec:
        """How the writer wants the cotangent."""
        if isinstance(choice, LeafStrategy):
            leaf = self.graph.leaves[link.writer]
            return choice.optimizer[1:] if leaf.stacked else choice.optimizer
        spec, partial = self.written(link, choice)
        return without(spec, partial)

    def operand(self, link: Link) -> Operand:
        """The slot that reads."""
        op = self.graph.operators[link.reader - len(self.graph.leaves)]
        return op.operands[link.operand]

    def wanted(self, link: Link, choice: Strategy) -> State:
        """How the reader wants the tensor, and how it leaves the cotangent."""
        operand = self.operand(link)
        return spec_of(operand.dims, choice), axes_on(operand.lacks, choice)

    def times(self, link: Link) -> tuple[float, float]:
        """Moves forward and backward in one step."""
        again = self.operand(link).replayed and self.training
        forward = 2.0 if again else 1.0
        tensor = self.graph.tensors[link.tensor]
        backward = 1.0 if self.training and tensor.active else 0.0
        return forward * link.executions, backward * link.executions

    def grain(self, tensor: int) -> Grain:
        """How finely the dims of a tensor split on this mesh."""
        return grain_of(self.graph.tensors[tensor].shape, self.mesh.devices)

    def merged(self, link: Link) -> float:
        """Share of one reader in the reduction of a cotangent.

        Less than 1 where the compiler sums over all readers first.
        """
        if not self.chip.merges_partial_sums:
            return 1.0
        return 1.0 / max(1, sum(op.heavy for op in self.readers[link.tensor]))

    def edge(self, link: Link) -> np.ndarray:
        """Table of seconds over the writer's and the reader's choices."""
        sources, from_source = self._sources(link.writer, link)
        targets, from_target = self._targets(link)
        forward, backward = self.times(link)
        size, grain = self.graph.tensors[link.tensor].bytes, self.grain(link.tensor)
        there = self.rates.table(
            [s for s, _ in sources], [(want, ()) for want, _ in targets], grain
        )
        table = forward * (size * there[0] + there[1])
        if self._is_weight(link):
            table[there[0] > 0] = np.inf
        if backward:
            back = self.rates.table(targets, [(g, ()) for _, g in sources], grain)
            shares = [self.merged(link) if lacks else 1.0 for _, lacks in targets]
            seconds = (size * back[0] + back[1]) * np.array(shares)[:, None]
            table = table + backward * seconds.T
        return table[np.ix_(from_source, from_target)]

    def _sources(
        self, variable: int, link: Link
    ) -> tuple[list[tuple[State, Spec]], list[int]]:
        """Distinct (layout written, layout wanted for the cotangent) of a writer."""
        key = (variable, link.tensor)
        if key not in self._source_cache:
            self._source_cache[key] = _distinct(
                [
                    (self.written(link, c), self.gradient(link, c))
                    for c in self.choices(variable)
                ]
            )
        return self._source_cache[key]

    def _targets(self, link: Link) -> tuple[list[State], list[int]]:
        """Distinct (layout read, axes of the partial cotangent) of a reader."""
        key = (link.reader, link.operand)
        if key not in self._target_cache:
            self._target_cache[key] = _distinct(
                [self.wanted(link, c) for c in self.operators_of(link.reader)]
            )
        return self._target_cache[key]

    def _is_weight(self, link: Link) -> bool:
        """Whether the tensor is a parameter.

        All that gathers it is its own choice of how to be read, so that one layout
        has one description.
        """
        count = len(self.graph.leaves)
        return link.writer < count and self.graph.leaves[link.writer].role in (
            "param",
            "state",
        )

    def choices(self, variable: int) -> Sequence[Strategy | LeafStrategy]:
        """All choices of a variable."""
        count = len(self.graph.leaves)
        if variable < count:
            return self.leaves[variable]
        return self.operators[variable - count]

    def operators_of(self, variable: int) -> tuple[Strategy, ...]:
        """Choices of an operator by the number of its variable."""
        return self.operators[variable - len(self.graph.leaves)]

    @cached_property
    def working(self) -> tuple[np.ndarray, ...]:
        """Bytes that each choice of each variable needs only while it runs."""
        leaves = [
            np.array([self._gathered_once(i, s) for s in found])
            for i, found in enumerate(self.leaves)
        ]
        operators = [
            np.array(
                [working_bytes(self.graph, op, s, self.rates.sizes) for s in found]
            )
            for op, found in zip(self.graph.operators, self.operators, strict=True)
        ]
        return (*leaves, *operators)

    def _gathered_once(self, i: int, strategy: LeafStrategy) -> float:
        """Bytes of a gathered parameter that is not kept for the backward pass."""
        kept = self.training and not self.recomputed(self.graph.leaves[i].tensor)
        return 0.0 if kept else self.leaf_cost(i, strategy).gathered_bytes

    def build(self) -> SearchProblem:
        """Fills all tables; without a memory limit."""
        leaf_costs = [
            [self.leaf_cost(i, s) for s in found] for i, found in enumerate(self.leaves)
        ]
        cost = [np.array([c.seconds for c in costs]) for costs in leaf_costs]
        memory = [np.array([c.memory_bytes for c in costs]) for costs in leaf_costs]
        for i, found in enumerate(self.operators):
            cost.append(np.array([self.operator_s(i, s) for s in found]))
            memory.append(np.array([self.operator_bytes(i, s) for s in found]))
        edges = tuple(
            Edge(link.writer, link.reader, self.edge(link)) for link in self.links
        )
        names = [self.graph.tensors[leaf.tensor].name for leaf in self.graph.leaves]
        names += [op.name for op in self.graph.operators]
        return SearchProblem(tuple(names), tuple(cost), edges, tuple(memory))

    def limited(
        self, tables: SearchProblem, limit: float, threshold: float
    ) -> SearchProblem:
        """The tables with a limit on peak memory.

        Args:
            tables: From `build`.
            limit: Bytes per device.
            threshold: Bytes of it kept for what runs; choices that need more while
                they run are forbidden.
        """
        cost = tuple(
            np.where(w > threshold, np.inf, c)
            for w, c in zip(self.working, tables.cost_s, strict=True)
        )
        fixed = self.workload.unowned_bytes + threshold
        return replace(tables, cost_s=cost, memory_limit_bytes=max(limit - fixed, 0.0))

    def by_memory(self, tables: SearchProblem) -> SearchProblem:
        """Tables whose cheapest plan is the one of least memory.

        Bytes are the unit of cost; forbidden choices stay forbidden.
        """
        cost = tuple(
            np.where(np.isinf(c), np.inf, m)
            for c, m in zip(tables.cost_s, tables.memory_bytes, strict=True)
        )
        edges = tuple(
            replace(e, cost_s=np.where(np.isinf(e.cost_s), np.inf, 0.0))
            for e in tables.edges
        )
        return replace(tables, cost_s=cost, edges=edges, memory_limit_bytes=np.inf)


def _distinct(keys: list) -> tuple[list, list[int]]:
    """Distinct keys, and per key the index of its equal."""
    index: dict = {}
    return_to = [index.setdefault(key, len(index)) for key in keys]
    return list(index), return_to
