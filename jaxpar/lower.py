"""From a traced loss to its operator graph.

flatten -> simplify -> fold -> quotient -> clusters -> operators with views.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.classes import dim_classes
from jaxpar.cluster import Cluster, build_cluster, tensor_names
from jaxpar.errors import RuleError
from jaxpar.flatten import Address, FlatProgram, flatten
from jaxpar.fold import fold, simplify, unfolded
from jaxpar.graph import GraphLeaf, Operator, OperatorGraph, Tensor
from jaxpar.quotient import PSEUDO, Quotient, clusters, quotient
from jaxpar.replay import mark_replayed
from jaxpar.rules.rule import has_rule
from jaxpar.trace import Leaf, Traced
from jaxpar.views import add_views

FLAT = frozenset({"stop_gradient", "sign", "round", "floor", "ceil"})
"""Primitives through which no gradient flows."""


@dataclass(frozen=True)
class Lowered:
    """An operator graph, and where its tensors stand in the traced jaxpr.

    Attributes:
        graph: The graph.
        before: (operator, operand) -> places for a constraint on that use.
        after: Tensor -> places for a constraint on its value.
    """

    graph: OperatorGraph
    before: Mapping[tuple[int, int], tuple[Address, ...]]
    after: Mapping[int, tuple[Address, ...]]


def lower(traced: Traced, batch_size: int, *, folded: bool = True) -> Lowered:
    """Lifts a traced loss to its operator graph.

    Args:
        traced: The loss.
        batch_size: Of the global batch.
        folded: Whether repeated blocks share their strategies.

    Raises:
        RuleError: for a primitive without a factor rule.
    """
    program = flatten(traced.jaxpr)
    simple = simplify(program)
    for primitive in sorted(simple.primitives - PSEUDO):
        if not has_rule(primitive):
            raise RuleError(
                f"primitive {primitive!r} has no factor rule",
                hint=f"register one: @jaxpar.factor_rule({primitive!r})",
            )
    firsts = [group[0] for group in simple.groups]
    folding = fold(program, firsts) if folded else unfolded(program, firsts)
    program.outputs = [
        None if t is None else folding.tensor[t] for t in program.outputs
    ]
    return _Lowering(traced, program, quotient(program, simple, folding)).build(
        batch_size
    )


class _Lowering:
    """The state of one lowering; `build` runs its steps in order."""

    def __init__(self, traced: Traced, program: FlatProgram, graph: Quotient):
        self.graph = graph
        self.program = program
        self.leaves = dict(zip(program.inputs, traced.leaves, strict=False))
        self.read_as = {t: program.stacked.get(t, t) for t in program.inputs}
        trained = [
            self.read_as[t] for t in graph.leaf_groups if self.leaves[t].role == "param"
        ]
        by_role = {
            role: [
                self.read_as[t]
                for t in graph.leaf_groups
                if (self.leaves[t].role in ("param", "state")) == (role == "model")
            ]
            for role in ("model", "data")
        }
        self.active = frozenset(self._reached(trained, floating=True) & self._needed())
        mark_replayed(graph, self.active)
        from_model = self._reached(by_role["model"])
        from_data = self._reached(by_role["data"])
        self.parameter_only = {
            i: all(t in from_model and t not in from_data for t in node.results)
            for i, node in enumerate(graph.nodes)
        }

    def _reached(self, start: Iterable[int], *, floating: bool = False) -> set[int]:
        """Tensors that depend on the given ones."""
        reached, stack = set(start), list(start)
        while stack:
            for reader in self.graph.readers.get(stack.pop(), ()):
                if floating and self.graph.nodes[reader].equation.primitive in FLAT:
                    continue
                for tensor in self.graph.nodes[reader].results:
                    dtype = self.graph.types[tensor].dtype
                    if floating and not _is_float(dtype):
                        continue
                    if tensor not in reached:
                        reached.add(tensor)
                        stack.append(tensor)
        return reached

    def _needed(self) -> set[int]:
        """Tensors that the loss, the first output, is made of."""
        stack = [t for t in self.program.outputs[:1] if t is not None]
        needed = set(stack)
        while stack:
            writer = self.graph.writer.get(stack.pop())
            reads = () if writer is None else self.graph.nodes[writer].reads
            fresh = {t for slot in reads for t in slot} - needed
            needed |= fresh
            stack += fresh
        return needed

    def build(self, batch_size: int) -> Lowered:
        graph = self.graph
        groups = clusters(graph, self.parameter_only)
        outputs = frozenset(t for t in self.program.outputs if t is not None)
        built = [build_cluster(nodes, graph, outputs, self.active) for nodes in groups]
        paths = {
            self.read_as[t]: group_path([self.leaves[m].path for m in members])
            for t, members in graph.leaf_groups.items()
        }
        names = tensor_names(
            graph, self._paths("model", paths), self._paths("batch", paths), groups
        )
        numbers, tensors = self._tensors(built, names, paths)
        operators = tuple(
            self._operator(c, name, numbers)
            for c, name in zip(built, names, strict=True)
        )
        leaves = self._leaves(numbers, paths)
        classes, tensors, operators = dim_classes(
            tensors, operators, leaves, batch_size
        )
        whole = OperatorGraph(tensors, operators, leaves, classes, batch_size)
        before = {
            (i, k): read.before
            for i, c in enumerate(built)
            for k, read in enumerate(c.reads)
        }
        return Lowered(add_views(whole), before, self._after(numbers))

    def _paths(self, role: str, paths: Mapping[int, str]) -> dict[int, str]:
        """Paths of the tensors of the batch, or of the model."""
        tensors = (
            self.read_as[t]
            for t in self.graph.leaf_groups
            if (self.leaves[t].role == "batch") == (role == "batch")
        )
        return {t: paths[t] for t in tensors}

    def _after(self, numbers: Mapping[int, int]) -> dict[int, tuple[Address, ...]]:
        """Where values can be constrained as they arise."""
        made = {
            numbers[t]: node.after[slot]
            for node in self.graph.nodes
            for slot, t in enumerate(node.results)
            if t in numbers
        }
        read = {
            numbers[self.read_as[t]]: tuple(
                self.program.input_sites[m] for m in members
            )
            for t, members in self.graph.leaf_groups.items()
        }
        return made | read

    def _tensors(
        self, built: Sequence[Cluster], names: Sequence[str], paths: Mapping[int, str]
    ) -> tuple[dict[int, int], tuple[Tensor, ...]]:
        """Numbers the tensors that stand between operators."""
        owners = dict(paths)
        for cluster, name in zip(built, names, strict=True):
            for k, written in enumerate(cluster.writes):
                owners[written.tensor] = name if k == 0 else f"{name}#{k}"
        numbers = {tensor: i for i, tensor in enumerate(owners)}
        leaf_number = {self.read_as[t]: i for i, t in enumerate(self.graph.leaf_groups)}
        return numbers, tuple(
            Tensor(
                name,
                self.graph.types[t].shape,
                str(self.graph.types[t].dtype),
                self.graph.types[t].dtype.itemsize,
                t in self.active,
                leaf_number.get(t),
            )
            for t, name in owners.items()
        )

    def _operator(
        self, cluster: Cluster, name: str, numbers: Mapping[int, int]
    ) -> Operator:
        return cluster.operator(
            name,
            numbers,
            self.graph.nodes[cluster.nodes[-1]],
            self.parameter_only[cluster.nodes[0]],
        )

    def _leaves(
        self, numbers: Mapping[int, int], paths: Mapping[int, str]
    ) -> tuple[GraphLeaf, ...]:
        found: list[GraphLeaf] = []
        for tensor, members in self.graph.leaf_groups.items():
            leaf: Leaf = self.leaves[tensor]
            found.append(
                GraphLeaf(
                    tuple(self.leaves[m].path for m in members),
                    leaf.role,
                    leaf.shape,
                    str(leaf.dtype),
                    leaf.dtype.itemsize,
                    tensor in self.program.stacked,
                    numbers[self.read_as[tensor]],
                    leaf.role == "param",
                    leaf.names,
                    leaf.names_kind,
                )
            )
        return tuple(found)


def group_path(paths: Sequence[str]) -> str:
    """One pattern for the same leaf of all blocks: "blocks/*/up/kernel"."""
    parts = [path.split("/") for path in paths]
    return "/".join(
        column[0] if len(set(column)) == 1 else "*"
        for column in zip(*parts, strict=False)
    )


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or str(dtype) in ("bfloat16", "complex64")
