"""One operator out of a cluster of equations: factors unified, costs collected."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxpar.dims import Unions
from jaxpar.flatten import Address
from jaxpar.graph import Operand, Operator, Reduction, Result, Saved, Use
from jaxpar.quotient import Node, Quotient
from jaxpar.residuals import Kept, kept_values
from jaxpar.rules.rule import Dims, Factor, FactorKind


@dataclass(frozen=True)
class Read:
    """An operand of a cluster: the tensors read, its dims, its places."""

    tensors: tuple[tuple[int, int], ...]
    dims: Dims
    lacks: tuple[int, ...]
    before: tuple[Address, ...]
    saved: bool
    active: bool
    replayed: bool


@dataclass(frozen=True)
class Written:
    """A tensor that a cluster writes and others read."""

    tensor: int
    dims: Dims
    sums: tuple[int, ...]


@dataclass
class Cluster:
    """What the operator graph keeps of a group of nodes.

    Attributes:
        factors: Unified loop indices.
        flops: Of one forward execution.
        saved: Values inside that the backward pass needs.
        replayed: Whether a checkpoint runs any of it again.
    """

    nodes: list[int]
    factors: tuple[Factor, ...] = ()
    reads: list[Read] = field(default_factory=list)
    writes: list[Written] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    flops: float = 0.0
    replayed: bool = False

    def operator(
        self, name: str, numbers: Mapping[int, int], node: Node, parameter_only: bool
    ) -> Operator:
        """The operator of the graph; `numbers` counts the tensors there."""
        equation = node.equation
        kind = equation.primitive if len(self.nodes) == 1 else "pointwise"
        operands = tuple(
            Operand(
                tuple(Use(numbers[t], n) for t, n in read.tensors),
                read.dims,
                read.lacks,
                read.saved,
                read.replayed,
            )
            for read in self.reads
        )
        results = tuple(Result(numbers[w.tensor], w.dims, w.sums) for w in self.writes)
        return Operator(
            name,
            kind,
            self.factors,
            operands,
            results,
            tuple(self.reductions),
            tuple(self.saved),
            self.flops,
            node.executions,
            equation.recomputed,
            self.replayed,
            parameter_only,
            any(read.active for read in self.reads),
        )


def build_cluster(
    nodes: list[int],
    graph: Quotient,
    outputs: frozenset[int],
    active: frozenset[int],
) -> Cluster:
    """Unifies the factors of the nodes and sorts their costs inside and outside."""
    return _Building(nodes, graph, outputs, active).cluster()


class _Building:
    """One cluster while it is built."""

    def __init__(
        self,
        nodes: list[int],
        graph: Quotient,
        outputs: frozenset[int],
        active: frozenset[int],
    ):
        self.nodes, self.graph, self.outputs, self.active = (
            nodes,
            graph,
            outputs,
            active,
        )
        self.unified = _Unified(nodes, graph)
        self.inside = {t for i in nodes for t in graph.nodes[i].results}
        self.found = Cluster(nodes, self.unified.factors)

    def cluster(self) -> Cluster:
        """Visits every node, then collects what is read from outside."""
        self.found.flops = sum(self.graph.nodes[i].rule.flops for i in self.nodes)
        self.found.replayed = any(self.graph.nodes[i].replayed for i in self.nodes)
        for i in self.nodes:
            self._writes(i)
        kept = kept_values(self.nodes, self.graph, self.active)
        for uses in self._reads().values():
            self.found.reads.append(self._read(uses, kept))
        for i in self.nodes:
            node = self.graph.nodes[i]
            for slot, tensor in enumerate(node.results):
                named = node.equation.saveable and tensor in self.active
                if named or tensor in kept.inside:
                    dims = self.unified.dims(i, node.rule.results[slot])
                    size = _bytes(self.graph, tensor)
                    self.found.saved.append(Saved(_present(dims), size, named))
        return self.found

    def _reads(self) -> dict[tuple[int, ...], list[tuple[int, int]]]:
        """Tensors from outside -> (node, slot) pairs that read them."""
        reads: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for i in self.nodes:
            for slot, tensors in enumerate(self.graph.nodes[i].reads):
                outside = tuple(sorted(t for t in tensors if t not in self.inside))
                if outside:
                    reads.setdefault(outside, []).append((i, slot))
                if len(outside) < len(tensors):
                    self._broadcast(i, slot)
        return reads

    def _read(self, uses: list[tuple[int, int]], kept: Kept) -> Read:
        """One operand of the cluster, from all places that read it."""
        i, slot = uses[0]
        node = self.graph.nodes[i]
        tensors = sorted(
            (t, n) for t, n in node.reads[slot].items() if t not in self.inside
        )
        lacks: set[int] = set()
        for j, s in uses:
            own = self.unified.dims(j, self.graph.nodes[j].rule.operands[s])
            lacks |= self.unified.all_of(j) - set(_present(own))
        is_active = any(t in self.active for t, _ in tensors)
        return Read(
            tuple(tensors),
            self.unified.dims(i, node.rule.operands[slot]),
            tuple(sorted(lacks)) if is_active else (),
            tuple(a for j, s in uses for a in self.graph.nodes[j].before[s]),
            any(use in kept.slots for use in uses),
            is_active,
            any(s in self.graph.nodes[j].reread for j, s in uses),
        )

    def _writes(self, i: int) -> None:
        """Results that others read; sums that are resolved inside."""
        node, sums = self.graph.nodes[i], self.unified.sums(i)
        alone = len(self.nodes) == 1
        for slot, tensor in enumerate(node.results):
            dims = self.unified.dims(i, node.rule.results[slot])
            readers = self.graph.readers.get(tensor, ())
            if tensor in self.outputs or any(r not in self.nodes for r in readers):
                self.found.writes.append(Written(tensor, dims, sums if alone else ()))
            if sums and not alone and slot == 0:
                size = _bytes(self.graph, tensor)
                self.found.reductions.append(
                    Reduction(_present(dims), sums, size, False)
                )

    def _broadcast(self, i: int, slot: int) -> None:
        """A value broadcast inside the cluster: its cotangent is summed there."""
        node = self.graph.nodes[i]
        tensor = next(t for t in node.reads[slot] if t in self.inside)
        if tensor not in self.active:
            return
        dims = _present(self.unified.dims(i, node.rule.operands[slot]))
        over = tuple(sorted(self.unified.all_of(i) - set(dims)))
        if over:
            self.found.reductions.append(
                Reduction(dims, over, _bytes(self.graph, tensor), True)
            )


def _present(dims: Dims) -> tuple[int, ...]:
    return tuple(f for f in dims if f is not None)


def _bytes(graph: Quotient, tensor: int) -> float:
    array = graph.types[tensor]
    size = 1.0
    for n in array.shape:
        size *= n
    return size * array.dtype.itemsize


class _Unified:
    """Factors of all nodes of a cluster, made one where tensors tie them."""

    def __init__(self, nodes: Sequence[int], graph: Quotient):
        self.graph = graph
        unions: Unions[tuple[int, int]] = Unions()
        held: dict[int, list[tuple[int, Dims]]] = {}
        for i in nodes:
            node = graph.nodes[i]
            for k in range(len(node.rule.factors)):
                unions.add((i, k))
            for slot, tensors in enumerate(node.reads):
                for tensor in tensors:
                    held.setdefault(tensor, []).append((i, node.rule.operands[slot]))
            for slot, tensor in enumerate(node.results):
                held.setdefault(tensor, []).append((i, node.rule.results[slot]))
        for ties in held.values():
            i, dims = ties[0]
            for j, others in ties[1:]:
                for a, b in zip(dims, others, strict=True):
                    if a is not None and b is not None:
                        unions.join((i, a), (j, b))
        self.index = unions.numbered()
        self.factors = self._merge(nodes)

    def _merge(self, nodes: Sequence[int]) -> tuple[Factor, ...]:
        count = 1 + max(self.index.values(), default=-1)
        sizes, whole = [0] * count, [False] * count
        for (i, k), number in self.index.items():
            factor = self.graph.nodes[i].rule.factors[k]
            sizes[number] = _gcd(sizes[number], factor.size)
            whole[number] |= factor.kind is FactorKind.WHOLE
        for i in nodes:
            rule = self.graph.nodes[i].rule
            for dims in rule.operands + rule.results:
                numbers = [self.index[i, f] for f in dims if f is not None]
                for number in numbers:
                    whole[number] |= numbers.count(number) > 1
        kind = {True: FactorKind.WHOLE, False: FactorKind.PASS}
        return tuple(Factor(n, kind[w]) for n, w in zip(sizes, whole, strict=True))

    def dims(self, node: int, dims: Dims) -> Dims:
        """A node's dims in factors of the cluster; whole ones become None."""
        numbers = (None if f is None else self.index[node, f] for f in dims)
        return tuple(None if f is None or self._whole(f) else f for f in numbers)

    def _whole(self, factor: int) -> bool:
        return self.factors[factor].kind is FactorKind.WHOLE

    def all_of(self, node: int) -> set[int]:
        count = len(self.graph.nodes[node].rule.factors)
        numbers = {self.index[node, k] for k in range(count)}
        return {f for f in numbers if not self._whole(f)}

    def sums(self, node: int) -> tuple[int, ...]:
        """Factors that the node sums away."""
        rule = self.graph.nodes[node].rule
        return tuple(
            sorted(
                self.index[node, k]
                for k, factor in enumerate(rule.factors)
                if factor.kind is FactorKind.REDUCE
                and not self._whole(self.index[node, k])
            )
        )


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def tensor_names(
    graph: Quotient,
    weights: Mapping[int, str],
    inputs: Mapping[int, str],
    order: Sequence[list[int]],
) -> list[str]:
    """A stable name per cluster: the weight it reads, or the last one read.

    Names are unique; where several operators share a stem they are numbered.

    Args:
        graph: The nodes.
        weights: Path per tensor of a parameter or of model state.
        inputs: Path per tensor of the batch; names what comes before any weight.
        order: The clusters.
    """
    known = dict(weights)
    stem, counts, names = "input", {}, []
    for nodes in order:
        read = [t for i in nodes for slot in graph.nodes[i].reads for t in slot]
        own = [known[t] for t in read if t in known]
        stem = next(iter(own), None) or next(
            (inputs[t] for t in read if t in inputs and stem == "input"), stem
        )
        kinds = [graph.nodes[i].equation.primitive for i in nodes]
        kind = kinds[0] if len(kinds) == 1 else "pointwise"
        name = f"{stem}:{kind}"
        counts[name] = counts.get(name, 0) + 1
        names.append(name if counts[name] == 1 else f"{name}.{counts[name]}")
        if own and len(nodes) == 1 and kind in ("convert_element_type", "transpose"):
            known.update(dict.fromkeys(graph.nodes[nodes[0]].results, stem))
    return names
