"""The flat program with equal blocks laid on top of each other.

Every equation of a repeated block is represented by that of the first block, so
one operand slot may read several tensors: in the first block what came before the
run, in the others what the block before them made.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxpar.flatten import Address, FlatEquation, FlatProgram
from jaxpar.fold import Folding, Simplified
from jaxpar.graph import HEAVY
from jaxpar.rules.rule import (
    ArrayType,
    Factor,
    FactorKind,
    FactorRule,
    rule_for,
)

PSEUDO = frozenset({"loop_carry", "layer_slice", "layer_stack", "branch_join"})


@dataclass
class Node:
    """A representative equation.

    Attributes:
        equation: The equation of the first block.
        rule: Its factor rule.
        reads: Per operand slot: tensor -> executions; empty for what is free.
        before: Per operand slot, all places for a constraint on that use.
        after: Per result, all places for a constraint on the value.
        executions: Of all blocks together, in one forward pass.
        replayed: Whether a checkpoint runs it again in the backward pass.
        reread: Operand slots that the backward pass of a checkpoint reads.
    """

    equation: FlatEquation
    rule: FactorRule
    reads: tuple[Counter[int], ...]
    before: tuple[tuple[Address, ...], ...]
    after: tuple[tuple[Address, ...], ...]
    executions: int
    replayed: bool = False
    reread: set[int] = field(default_factory=set)

    @property
    def results(self) -> tuple[int, ...]:
        """Tensors that it writes."""
        return self.equation.results


@dataclass
class Quotient:
    """Representative equations over representative tensors.

    Attributes:
        types: Per tensor id.
        nodes: In program order.
        leaf_groups: Representative input tensor -> all inputs it stands for.
        writer: Tensor -> index of the node that writes it.
        readers: Tensor -> indices of the nodes that read it.
    """

    types: Sequence[ArrayType]
    nodes: list[Node]
    leaf_groups: dict[int, list[int]]
    writer: dict[int, int]
    readers: dict[int, list[int]]


def quotient(program: FlatProgram, simple: Simplified, folding: Folding) -> Quotient:
    """Lays the blocks found by `fold` on top of each other."""
    firsts = [group[0] for group in simple.groups]
    leaf_of = _leaf_representatives(program, firsts, folding)
    instances: dict[int, list[int]] = defaultdict(list)
    for index, representative in enumerate(folding.equation):
        instances[representative].append(index)

    def stand_in(tensor: int) -> int:
        return leaf_of.get(tensor, folding.tensor[tensor])

    nodes: list[Node] = []
    for first, indices in instances.items():
        reads: list[Counter[int]] = [Counter() for _ in firsts[first].operands]
        for index in indices:
            for slot, tensor in enumerate(firsts[index].operands):
                if tensor is not None and tensor not in simple.free:
                    times = _use_executions(firsts[index], slot)
                    reads[slot][stand_in(tensor)] += times
        nodes.append(_node(firsts[first], indices, simple, program, tuple(reads)))
    groups: dict[int, list[int]] = defaultdict(list)
    for tensor in program.inputs:
        groups[leaf_of.get(tensor, tensor)].append(tensor)
    return _linked(program, nodes, dict(groups))


def _use_executions(eqn: FlatEquation, slot: int) -> int:
    """Loop state is initialised once, and written by every pass."""
    return 1 if eqn.primitive == "loop_carry" and slot == 0 else eqn.executions


def _node(
    eqn: FlatEquation,
    indices: Sequence[int],
    simple: Simplified,
    program: FlatProgram,
    reads: tuple[Counter[int], ...],
) -> Node:
    equal = [e for index in indices for e in simple.groups[index]]
    return Node(
        eqn,
        rule_of(eqn, program.types),
        reads,
        tuple(
            tuple(dict.fromkeys(a for e in equal if (a := e.before(slot))))
            for slot in range(len(eqn.operands))
        ),
        tuple(
            tuple(dict.fromkeys(a for e in equal if (a := e.after(slot))))
            for slot in range(len(eqn.results))
        ),
        eqn.executions * len(indices),
    )


def _linked(
    program: FlatProgram, nodes: list[Node], groups: dict[int, list[int]]
) -> Quotient:
    writer = {t: i for i, node in enumerate(nodes) for t in node.results}
    readers: dict[int, list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        for tensor in dict.fromkeys(t for slot in node.reads for t in slot):
            readers[tensor].append(i)
    return Quotient(program.types, nodes, groups, writer, dict(readers))


def _leaf_representatives(
    program: FlatProgram, firsts: Sequence[FlatEquation], folding: Folding
) -> dict[int, int]:
    """Inputs of later blocks -> the input that the first block has there."""
    inputs = set(program.inputs)
    found: dict[int, int] = {}
    for index, first in enumerate(folding.equation):
        if index == first:
            continue
        slots = zip(firsts[index].operands, firsts[first].operands, strict=True)
        for here, there in slots:
            if here in inputs and there in inputs and here != there:
                found.setdefault(here, there)
    return found


_BARE = FactorKind.PASS


def rule_of(eqn: FlatEquation, types: Sequence[ArrayType]) -> FactorRule:
    """The factor rule of an equation, pseudo equations included."""
    results = tuple(types[t] for t in eqn.results)
    scalar = ArrayType((), np.dtype(np.float32))
    operands = tuple(scalar if t is None else types[t] for t in eqn.operands)
    if eqn.primitive in ("loop_carry", "branch_join"):
        return _identity(operands, results[0])
    if eqn.primitive == "layer_slice":
        return _stacking(operands[0], results[0])
    if eqn.primitive == "layer_stack":
        rule = _stacking(results[0], operands[0])
        return replace(rule, operands=rule.results, results=rule.operands)
    return rule_for(eqn.primitive, operands, results, eqn.params)


def _identity(operands: tuple[ArrayType, ...], result: ArrayType) -> FactorRule:
    dims = tuple(i if n > 1 else None for i, n in enumerate(result.shape))
    bare = (None,) * len(result.shape)
    return FactorRule(
        tuple(Factor(n, _BARE) for n in result.shape),
        tuple(
            dims if o.shape == result.shape else bare[: len(o.shape)] for o in operands
        ),
        (dims,),
    )


def _stacking(stacked: ArrayType, part: ArrayType) -> FactorRule:
    """The layer dim has a factor of length 1: nothing divides it."""
    if not stacked.shape:
        return FactorRule((), ((),), ((None,) * len(part.shape),))
    factors = (*(Factor(n, _BARE) for n in part.shape), Factor(1, _BARE))
    inner = tuple(range(len(part.shape)))
    return FactorRule(factors, ((len(part.shape), *inner),), (inner,))


def clusterable(node: Node) -> bool:
    """Whether the equation may be priced as part of a cluster."""
    name = node.equation.primitive
    if name in HEAVY or name in ("loop_carry", "layer_slice", "layer_stack"):
        return False
    if name == "gather" or name.startswith(("scatter", "dynamic", "random")):
        return False
    return all(f.kind is not FactorKind.WHOLE or f.size == 1 for f in node.rule.factors)


def clusters(graph: Quotient, parameter_only: Mapping[int, bool]) -> list[list[int]]:
    """Groups of nodes that split alike.

    A node joins its readers where all of them are already in one cluster: what
    several clusters read stays a tensor of its own.
    """
    root = list(range(len(graph.nodes)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = root[root[i]]
            i = root[i]
        return i

    joins = [clusterable(node) for node in graph.nodes]
    changed = True
    while changed:
        changed = False
        for i, node in reversed(list(enumerate(graph.nodes))):
            if not joins[i]:
                continue
            for tensor in node.results:
                readers = {find(r) for r in graph.readers.get(tensor, ())}
                if len(readers) != 1 or find(i) in readers:
                    continue
                (other,) = readers
                if joins[other] and _alike(graph, i, other, parameter_only):
                    root[find(i)] = other
                    changed = True
    found: dict[int, list[int]] = defaultdict(list)
    for i in range(len(graph.nodes)):
        found[find(i)].append(i)
    return sorted(found.values())


def _alike(graph: Quotient, i: int, j: int, parameter_only: Mapping[int, bool]) -> bool:
    a, b = graph.nodes[i], graph.nodes[j]
    same_place = (
        a.equation.region == b.equation.region
        and a.executions == b.executions
        and a.equation.recomputed == b.equation.recomputed
    )
    return same_place and parameter_only[i] == parameter_only[j]
