"""Classes of dims: which dims split alike, how finely, and what they mean.

Dims that operators tie by a shared factor form a class. The heads that a reshape
cuts out of a projection's width, say, forbid to cut that width anywhere else.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from jaxpar.dims import Unions
from jaxpar.graph import (
    HEAVY,
    DimClass,
    GraphLeaf,
    Operator,
    OperatorGraph,
    Tensor,
)


def dim_classes(
    tensors: Sequence[Tensor],
    operators: Sequence[Operator],
    leaves: Sequence[GraphLeaf],
    batch_size: int,
) -> tuple[tuple[DimClass, ...], tuple[Tensor, ...], tuple[Operator, ...]]:
    """Classes, and the tensors and operators with their dims' classes filled in."""
    number, granularity = _ties(tensors, operators)
    model = _made_of_parameters(operators, leaves)
    tensors = tuple(
        replace(t, classes=tuple(number["dim", i, d] for d in range(len(t.shape))))
        for i, t in enumerate(tensors)
    )
    operators = tuple(
        replace(
            op,
            classes=tuple(number["factor", o, f] for f in range(len(op.factors))),
            weighted=any(u.tensor in model for x in op.operands for u in x.uses),
        )
        for o, op in enumerate(operators)
    )
    batch = {
        tensors[leaf.tensor].classes[0]
        for leaf in leaves
        if leaf.role == "batch" and leaf.shape and leaf.shape[0] == batch_size
    }
    weights, experts = _weight_classes(tensors, operators, leaves)
    classes = tuple(
        DimClass(
            granularity[c],
            batch=c in batch,
            token=c not in batch and c not in weights,
            expert=c in experts,
        )
        for c in range(len(granularity))
    )
    return classes, tensors, operators


def _ties(
    tensors: Sequence[Tensor], operators: Sequence[Operator]
) -> tuple[dict[tuple, int], dict[int, int]]:
    """Class per dim and factor, and granularity per class."""
    unions: Unions[tuple] = Unions()
    sizes: dict[tuple, int] = {}
    for t, tensor in enumerate(tensors):
        sizes.update((("dim", t, d), n) for d, n in enumerate(tensor.shape))
    for o, op in enumerate(operators):
        sizes.update((("factor", o, f), x.size) for f, x in enumerate(op.factors))
    for item in sizes:
        unions.add(item)
    for o, op in enumerate(operators):
        ends = [
            (use.tensor, operand.dims)
            for operand in op.operands
            for use in operand.uses
        ]
        ends += [(result.tensor, result.dims) for result in op.results]
        for t, dims in ends:
            for d, f in enumerate(dims):
                if f is not None:
                    unions.join(("dim", t, d), ("factor", o, f))
    number = unions.numbered()
    granularity: dict[int, int] = {}
    for item, c in number.items():
        granularity[c] = math.gcd(granularity.get(c, 0), sizes[item])
    return number, granularity


def _made_of_parameters(
    operators: Sequence[Operator], leaves: Sequence[GraphLeaf]
) -> set[int]:
    found = {leaf.tensor for leaf in leaves if leaf.role in ("param", "state")}
    made = {r.tensor for op in operators if op.parameter_only for r in op.results}
    return found | made


def _weight_classes(
    tensors: Sequence[Tensor],
    operators: Sequence[Operator],
    leaves: Sequence[GraphLeaf],
) -> tuple[set[int], set[int]]:
    """Classes of dims of weights that are contracted or looked up.

    Returns:
        All of them, and the experts among them: batch dims of a contraction.
    """
    model = _made_of_parameters(operators, leaves)
    weights: set[int] = set()
    experts: set[int] = set()
    for op in operators:
        if op.parameter_only or op.kind not in HEAVY | {"gather"}:
            continue
        for k, operand in enumerate(op.operands):
            if not any(u.tensor in model for u in operand.uses):
                continue
            for tensor in (tensors[u.tensor] for u in operand.uses):
                weights.update(tensor.classes if len(tensor.shape) > 1 else ())
            others = [o for i, o in enumerate(op.operands) if i != k]
            shared = set(operand.dims) & {f for o in others for f in o.dims}
            shared &= {f for result in op.results for f in result.dims}
            experts |= {op.classes[f] for f in shared if f is not None}
            if op.kind.startswith("ragged_dot"):
                # Rows are sorted by group, so only the weights have the group dim.
                groups = set(operand.dims) - {f for o in others for f in o.dims}
                groups -= {f for result in op.results for f in result.dims}
                experts |= {op.classes[f] for f in groups if f is not None}
    return weights, experts


def weights(graph: OperatorGraph) -> frozenset[int]:
    """Leaves that a matrix multiplication or a look-up reads.

    Directly, or by way of operators on parameters alone (casts, transposes).
    """
    readers: dict[int, list[Operator]] = {}
    for op in graph.operators:
        for operand in op.operands:
            for use in operand.uses:
                readers.setdefault(use.tensor, []).append(op)
    found: set[int] = set()
    for i, leaf in enumerate(graph.leaves):
        stack, seen = [leaf.tensor], {leaf.tensor}
        while stack and i not in found:
            for op in readers.get(stack.pop(), ()):
                if op.kind in HEAVY | {"gather"}:
                    found.add(i)
                elif op.parameter_only:
                    fresh = {r.tensor for r in op.results} - seen
                    seen |= fresh
                    stack += fresh
    return frozenset(found)
