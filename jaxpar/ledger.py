"""What a chosen layout communicates and computes, item by item."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxpar.cost.operators import compute_s
from jaxpar.cost.problem import Link, MeshProblem
from jaxpar.cost.rates import collective_price
from jaxpar.planner import Decision
from jaxpar.sharding import Collective, axes_of
from jaxpar.strategy import LeafStrategy, Strategy, axes_on

NORM_BYTES = 4.0  # of a float32 scalar


@dataclass(frozen=True)
class Entry:
    """One collective of the step.

    Attributes:
        collective: Kind, axes and bytes per device and execution.
        executions: In one step.
        seconds: Of all executions.
        phase: "forward", "backward" or "update".
        where: What it moves.
        reason: Why.
        operator: Index of the operator that needs it, or that made the terms it adds;
            None in the update.
        weight: Whether it moves a parameter or a gradient of one, so that it may run
            long before or after the operator.
    """

    collective: Collective
    executions: int
    seconds: float
    phase: str
    where: str
    reason: str
    operator: int | None = None
    weight: bool = False


def entries(decision: Decision) -> list[Entry]:
    """All collectives of one step, in the order of the graph."""
    return list(_Ledger(decision).all())


def compute_seconds(decision: Decision) -> float:
    """Seconds of forward and backward computation."""
    problem = decision.problem
    return sum(
        compute_s(
            problem.graph,
            op,
            strategy,
            problem.chip,
            problem.rates.sizes,
            training=problem.training,
        )
        for op, strategy in zip(
            problem.graph.operators, decision.operators, strict=True
        )
    )


def update_seconds(decision: Decision) -> float:
    """Seconds of the optimizer's traffic with memory."""
    problem, moved = decision.problem, 0.0
    for i, leaf in enumerate(problem.graph.leaves):
        if leaf.trained and problem.training:
            cost = problem.leaf_cost(i, decision.leaves[i])
            moved += 2 * cost.parameter_bytes + cost.gradient_bytes
            moved += 2 * cost.optimizer_bytes
    return moved / (problem.chip.hbm_bytes_per_s * problem.chip.hbm_efficiency)


class _Ledger:
    def __init__(self, decision: Decision):
        self.problem: MeshProblem = decision.problem
        self.leaves = decision.leaves
        self.operators = decision.operators

    def all(self) -> Iterator[Entry]:
        for i, strategy in enumerate(self.leaves):
            yield from self._of_leaf(i, strategy)
        for link in self.problem.links:
            yield from self._of_link(link)
        for i, strategy in enumerate(self.operators):
            yield from self._of_operator(i, strategy)
        if self.problem.training:
            yield from self._of_update()

    def _entry(
        self,
        step: Collective,
        whole_bytes: float,
        executions: float,
        phase: str,
        where: str,
        reason: str,
        *,
        operator: int | None = None,
        weight: bool = False,
    ) -> Entry:
        price = collective_price(step, self.problem.mesh)
        return Entry(
            Collective(step.kind, step.axes, step.bytes * whole_bytes),
            round(executions),
            price.seconds(whole_bytes) * executions,
            phase,
            where,
            reason,
            operator,
            weight,
        )

    def _of_leaf(self, i: int, strategy: LeafStrategy) -> Iterator[Entry]:
        problem = self.problem
        leaf = problem.graph.leaves[i]
        tensor = problem.graph.tensors[leaf.tensor]
        inner = strategy.storage[1:] if leaf.stacked else strategy.storage
        if inner != strategy.compute:
            times = len(leaf.paths) * (leaf.shape[0] if leaf.stacked else 1)
            twice = 2 if problem.replayed(leaf.tensor) and problem.training else 1
            for step in problem.rates.steps(inner, (), strategy.compute):
                yield self._entry(
                    step,
                    tensor.bytes,
                    times * twice,
                    "forward",
                    tensor.name,
                    "gathers the parameter to read it",
                    operator=self._first_reader(leaf.tensor),
                    weight=True,
                )
        if leaf.trained and problem.training and strategy.optimizer != strategy.storage:
            for step in problem.rates.steps(strategy.optimizer, (), strategy.storage):
                yield self._entry(
                    step,
                    leaf.bytes,
                    len(leaf.paths),
                    "update",
                    tensor.name,
                    "gathers the updated parameter",
                )

    def _first_reader(self, tensor: int) -> int | None:
        first = len(self.leaves)
        readers = (k.reader - first for k in self.problem.links if k.tensor == tensor)
        return min(readers, default=None)

    def _of_model(self, variable: int) -> bool:
        """Whether a leaf, or what an operator makes, is a parameter."""
        first, graph = len(self.leaves), self.problem.graph
        if variable < first:
            return graph.leaves[variable].role == "param"
        return graph.operators[variable - first].parameter_only

    def _choice(self, variable: int) -> Strategy | LeafStrategy:
        count = len(self.leaves)
        if variable < count:
            return self.leaves[variable]
        return self.operators[variable - count]

    def _of_link(self, link: Link) -> Iterator[Entry]:
        problem = self.problem
        tensor = problem.graph.tensors[link.tensor]
        writer, reader = self._choice(link.writer), self._choice(link.reader)
        if isinstance(reader, LeafStrategy):
            return
        spec, partial = problem.written(link, writer)
        want, lacks = problem.wanted(link, reader)
        forward, backward = problem.times(link)
        op = link.reader - len(self.leaves)
        name, weight = problem.graph.operators[op].name, self._of_model(link.writer)
        grain = problem.grain(link.tensor)
        for step in problem.rates.steps(spec, partial, want, grain):
            why = "adds the terms of a split sum" if partial else f"moved for {name}"
            yield self._entry(
                step,
                tensor.bytes,
                forward,
                "forward",
                tensor.name,
                why,
                operator=op,
                weight=weight,
            )
        if backward:
            gradient = problem.gradient(link, writer)
            share = problem.merged(link) if lacks else 1.0
            for step in problem.rates.steps(want, lacks, gradient, grain):
                why = f"adds the gradients of {name}" if lacks else "moves back"
                yield self._entry(
                    step,
                    tensor.bytes,
                    backward * share,
                    "backward",
                    tensor.name,
                    why,
                    operator=op,
                    weight=weight,
                )

    def _of_operator(self, i: int, strategy: Strategy) -> Iterator[Entry]:
        problem = self.problem
        op = problem.graph.operators[i]
        for reduction in op.reductions:
            axes = axes_on(reduction.over, strategy)
            if not axes or (reduction.backward and not problem.training):
                continue
            cut = 1
            for f in reduction.dims:
                for axis in strategy[f]:
                    cut *= problem.rates.sizes[axis]
            replayed = op.replayed and problem.training
            again = 2 if replayed and not reduction.backward else 1
            yield self._entry(
                Collective("all-reduce", axes, 1 / cut),
                reduction.bytes,
                op.executions * again,
                "backward" if reduction.backward else "forward",
                op.name,
                "adds the terms of a sum inside the operator",
                operator=i,
            )
        for result in op.results:
            axes = axes_on(result.sums, strategy)
            if axes and result.tensor not in problem.readers:
                yield self._entry(
                    Collective("all-reduce", axes, 1.0),
                    problem.graph.tensors[result.tensor].bytes,
                    op.executions,
                    "forward",
                    op.name,
                    "adds the terms of a result",
                    operator=i,
                )

    def _of_update(self) -> Iterator[Entry]:
        graph, sizes = self.problem.graph, self.problem.rates.sizes
        splitting: dict[tuple[str, ...], None] = {}
        for leaf, strategy in zip(graph.leaves, self.leaves, strict=True):
            if leaf.trained:
                used = axes_of(strategy.optimizer)
                splitting[tuple(a for a in sizes if a in used)] = None
        for axes in splitting:
            if axes:
                step = Collective("all-reduce", axes, 1.0)
                why = "adds up the norm of the gradients"
                yield self._entry(step, NORM_BYTES, 1, "update", "gradients", why)
        for found in self.problem.workload.sums:
            leaf = graph.leaves[found.leaf]
            name = graph.tensors[leaf.tensor].name
            why = "adds the terms of a sum of the optimizer"
            for step in found.collectives(self.leaves[found.leaf], sizes):
                yield self._entry(step, 1.0, len(leaf.paths), "update", name, why)
