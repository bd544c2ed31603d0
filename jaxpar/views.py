"""Views: a tensor with several readers is moved once for all of them.

Each such tensor gets an identity operator in between, whose layout is free: if
the readers want another layout than the writer made, the move is paid once. What a
loop leaves behind is another value than the state that its body reads.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from jaxpar.graph import Operand, Operator, OperatorGraph, Result, Tensor, Use
from jaxpar.rules.rule import Factor


def add_views(graph: OperatorGraph) -> OperatorGraph:
    """Puts a view behind every tensor that several operators read."""
    readers: dict[int, set[int]] = {}
    for i, op in enumerate(graph.operators):
        for operand in op.operands:
            for use in operand.uses:
                readers.setdefault(use.tensor, set()).add(i)
    writers = {r.tensor: op for op in graph.operators for r in op.results}
    tensors = list(graph.tensors)
    views: list[Operator] = []
    renamed: dict[int, dict[int, int]] = {}
    for t in sorted(readers):
        writer = writers.get(t)
        together = readers[t] - _behind_loop(graph, t, writer, readers[t])
        if len(together) > 1:
            for i in together:
                renamed.setdefault(i, {})[t] = len(tensors)
            views.append(_view(graph, t, len(tensors), writer, together))
            tensors.append(replace(tensors[t], leaf=None))
    operators = tuple(
        _redirected(op, renamed.get(i, {})) for i, op in enumerate(graph.operators)
    )
    return replace(graph, tensors=tuple(tensors), operators=(*operators, *views))


def _behind_loop(
    graph: OperatorGraph, t: int, writer: Operator | None, readers: Collection[int]
) -> set[int]:
    """The one reader of what a loop leaves behind, if there is just one.

    Others read the state in every round; it reads once what the last round made.
    """
    if writer is None or writer.kind != "loop_carry":
        return set()
    found = {
        i
        for i in readers
        if sum(
            use.executions
            for operand in graph.operators[i].operands
            for use in operand.uses
            if use.tensor == t
        )
        < writer.executions
    }
    return found if len(found) == 1 else set()


def _view(
    graph: OperatorGraph,
    t: int,
    view: int,
    writer: Operator | None,
    readers: Collection[int],
) -> Operator:
    tensor = graph.tensors[t]
    reading = [graph.operators[i] for i in readers]
    if writer is None:
        leaf = graph.leaves[tensor.leaf or 0]
        executions = max(op.executions for op in reading) if leaf.stacked else 1
        executions = max(executions, len(leaf.paths))
    else:
        executions = writer.executions
    saved = any(
        operand.saved
        for op in reading
        for operand in op.operands
        if any(u.tensor == t for u in operand.uses)
    )
    dims = tuple(range(len(tensor.shape)))
    # The move stands where the value is made, and runs again if that does.
    replayed = writer is not None and writer.replayed
    return Operator(
        f"{tensor.name}:view",
        "view",
        tuple(Factor(_granularity(graph, c)) for c in tensor.classes),
        (Operand((Use(t, executions),), dims, (), saved, replayed),),
        (Result(view, dims),),
        executions=executions,
        recomputed=any(op.recomputed for op in reading),
        replayed=replayed,
        parameter_only=_is_model(graph, tensor, writer),
        active=tensor.active,
        classes=tensor.classes,
    )


def _granularity(graph: OperatorGraph, number: int) -> int:
    return graph.classes[number].granularity


def _is_model(graph: OperatorGraph, tensor: Tensor, writer: Operator | None) -> bool:
    if writer is not None:
        return writer.parameter_only
    return graph.leaves[tensor.leaf or 0].role in ("param", "state")


def _redirected(op: Operator, renamed: Mapping[int, int]) -> Operator:
    """Lets an operator read the views instead of the tensors."""
    operands = tuple(
        replace(
            operand,
            uses=tuple(
                Use(renamed.get(u.tensor, u.tensor), u.executions) for u in operand.uses
            ),
            saved=operand.saved and not any(u.tensor in renamed for u in operand.uses),
        )
        for operand in op.operands
    )
    return replace(op, operands=operands)
