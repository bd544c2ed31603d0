"""Peak bytes per device of a chosen layout, by class."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from jaxpar.cost.operators import LeafCost
from jaxpar.cost.problem import MeshProblem
from jaxpar.sharding import shards
from jaxpar.strategy import LeafStrategy


@dataclass(frozen=True)
class Memory:
    """Bytes per device by class.

    Attributes:
        parameters_bytes: Parameters at rest, frozen ones included.
        gradients_bytes: Gradients live at the peak.
        optimizer_bytes: Optimizer state.
        model_state_bytes: Model state that the loss changes, random keys, the step.
        residuals_bytes: What the forward keeps for the backward pass.
        transients_bytes: The most that one operator needs besides.
        batch_bytes: The batch.
    """

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    model_state_bytes: float
    residuals_bytes: float
    transients_bytes: float
    batch_bytes: float

    @property
    def total_bytes(self) -> float:
        """All classes together."""
        return sum(getattr(self, f.name) for f in fields(self))

    @classmethod
    def unknown(cls) -> "Memory":
        """Of no layout at all."""
        return cls(*([math.inf] * 7))


def memory_of(problem: MeshProblem, choice: Sequence[int]) -> Memory:
    """Peak bytes of a choice, at the backward pass of its operators.

    The search adds up gradients in the layout of the optimizer state. The backward
    loop of a scan holds whole stacks besides, see `_in_loop`.
    """
    graph = problem.graph
    parameters = gradients = optimizer = state = batch = residuals = 0.0
    for i, leaf in enumerate(graph.leaves):
        cost = problem.leaf_cost(i, problem.leaves[i][choice[i]])
        if leaf.role == "batch":
            batch += cost.parameter_bytes
        elif leaf.role == "rng":
            state += cost.parameter_bytes
        else:
            parameters += cost.parameter_bytes
        optimizer += cost.optimizer_bytes
        live, kept = _in_loop(problem, i, problem.leaves[i][choice[i]], cost)
        gradients += live
        residuals += kept
    first = len(graph.leaves)
    for i, _ in enumerate(graph.operators):
        strategy = problem.operators[i][choice[first + i]]
        residuals += problem.operator_bytes(i, strategy)
    working = (w[k] for w, k in zip(problem.working, choice, strict=True))
    return Memory(
        parameters,
        gradients,
        optimizer + problem.workload.unowned_bytes,
        state,
        residuals,
        max(map(float, working), default=0.0),
        batch,
    )


def _in_loop(
    problem: MeshProblem, i: int, strategy: LeafStrategy, cost: LeafCost
) -> tuple[float, float]:
    """Bytes of the gradient and of the weight of a leaf in the backward pass.

    The backward loop of a scan fills a stack of gradients as the layers compute
    them, and reads a stack of weights that the forward loop wrote: a copy, even
    where weights rest as they are read.
    """
    leaf = problem.graph.leaves[i]
    if not problem.training or problem.recomputed(leaf.tensor):
        return cost.gradient_bytes, 0.0
    if not (leaf.stacked and leaf.trained):
        return cost.gradient_bytes, cost.gathered_bytes
    whole = leaf.bytes * len(leaf.paths)
    stack = whole / shards(strategy.compute, problem.rates.sizes)
    return max(cost.gradient_bytes, stack), max(cost.gathered_bytes, stack)
