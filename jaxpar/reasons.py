"""Why a parameter lies as it does, in words and numbers."""

from jaxpar.cost.problem import MeshProblem
from jaxpar.graph import GraphLeaf
from jaxpar.planner import Decision
from jaxpar.sharding import axes_of
from jaxpar.strategy import BATCH_ROLES, LeafStrategy

SHOWN = 3
"""Names in one note."""


def leaf_reason(decision: Decision, i: int) -> str:
    """One line on the storage of a leaf."""
    problem = decision.problem
    leaf, strategy = problem.graph.leaves[i], decision.leaves[i]
    if not problem.axes.sizes:
        return "one device"
    parts: list[str] = []
    if i in problem.pins:
        parts.append(f"bound by {problem.pins[i].source}")
    inner = strategy.storage[1:] if leaf.stacked else strategy.storage
    for axis in problem.axes.sizes:
        words = _axis_words(problem, leaf, strategy, axis, inner != strategy.compute)
        if words:
            parts.append(words)
    if not axes_of(strategy.storage):
        parts.append(_why_whole(decision, i))
    if strategy.optimizer != strategy.storage:
        parts.append("optimizer state is cut further, and gathered after the update")
    return "; ".join(parts)


def idle_notes(decision: Decision) -> tuple[str, ...]:
    """One line per axis on the matrix multiplications that repeat work over it."""
    problem, found = decision.problem, []
    pairs = list(zip(problem.graph.operators, decision.operators, strict=True))
    for axis, size in problem.axes.sizes.items():
        idle = [
            f"{op.name} ({' x '.join(str(f.size) for f in op.factors if f.size > 1)})"
            for op, strategy in pairs
            if op.heavy
            and not op.parameter_only
            and not any(axis in used for used in strategy)
        ]
        if idle:
            more = f" and {len(idle) - SHOWN} more" if len(idle) > SHOWN else ""
            names = ", ".join(idle[:SHOWN])
            found.append(
                f"axis {axis} ({size}) splits nothing of {names}{more}: "
                "that work is repeated over it"
            )
    return tuple(found)


def _axis_words(
    problem: MeshProblem,
    leaf: GraphLeaf,
    strategy: LeafStrategy,
    axis: str,
    gathers: bool,
) -> str:
    for d, axes in enumerate(strategy.storage):
        if axis not in axes:
            continue
        if gathers and axis not in axes_of(strategy.compute):
            return f"dim {d} stored over {axis}, gathered to be read"
        return f"dim {d} over {axis}, as it is read"
    if axis in BATCH_ROLES and axis != "fsdp":
        return ""
    return _indivisible(problem, leaf, axis)


def _indivisible(problem: MeshProblem, leaf: GraphLeaf, axis: str) -> str:
    """Dims that an axis cannot cut, with the counts."""
    size = problem.axes.sizes[axis]
    tensor = problem.graph.tensors[leaf.tensor]
    first = len(leaf.shape) - len(tensor.shape)
    found: list[str] = []
    for d in range(first, len(leaf.shape)):
        whole = problem.graph.classes[tensor.classes[d - first]].granularity
        if leaf.shape[d] % size:
            found.append(f"dim {d} ({leaf.shape[d]})")
        elif axis not in BATCH_ROLES and whole % size:
            found.append(f"dim {d} ({whole} whole parts of {leaf.shape[d] // whole})")
    return f"{axis} ({size}) does not divide {', '.join(found)}" if found else ""


def _why_whole(decision: Decision, i: int) -> str:
    problem, choice = decision.problem, decision.solution.choice or ()
    tables = decision.search_problem
    total = tables.cost_s[i].copy()
    for edge in tables.edges:
        if edge.first == i:
            total += edge.cost_s[:, choice[edge.second]]
        elif edge.second == i:
            total += edge.cost_s[choice[edge.first]]
    split = [
        total[k] - total[choice[i]]
        for k, s in enumerate(problem.leaves[i])
        if axes_of(s.storage)
    ]
    if not split:
        return "whole on every device: no axis may cut any of its dims"
    return f"whole on every device: any cut costs {min(split):.2g} s more per step"
