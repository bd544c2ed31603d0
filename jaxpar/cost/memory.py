"""Peak bytes per device of a chosen layout, by class."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from jaxpar.cost.operators import local_bytes
from jaxpar.cost.problem import MeshProblem
from jaxpar.sharding import shards
from jaxpar.strategy import Strategy, spec_of


@dataclass(frozen=True)
class Memory:
    """Bytes per device by class.

    Attributes:
        parameters_bytes: Parameters at rest, frozen ones included.
        gradients_bytes: Gradients in the layout of the optimizer state.
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
    """Peak bytes of a choice: the sums that the search saw, and the transients."""
    graph, sizes = problem.graph, problem.rates.sizes
    parameters = gradients = optimizer = state = batch = residuals = 0.0
    gathered_once = 0.0
    for i, leaf in enumerate(graph.leaves):
        strategy = problem.leaves[i][choice[i]]
        if leaf.role in ("batch", "rng"):
            held = leaf.bytes * len(leaf.paths) / shards(strategy.storage, sizes)
            batch += held if leaf.role == "batch" else 0.0
            state += held if leaf.role == "rng" else 0.0
            continue
        cost = problem.leaf_cost(i, strategy)
        parameters += cost.parameter_bytes
        gradients += cost.gradient_bytes
        optimizer += cost.optimizer_bytes
        if problem.training and not problem.recomputed(leaf.tensor):
            residuals += cost.gathered_bytes
        else:
            gathered_once = max(gathered_once, cost.gathered_bytes)
    first = len(graph.leaves)
    transients = gathered_once
    for i, _ in enumerate(graph.operators):
        strategy = problem.operators[i][choice[first + i]]
        residuals += problem.operator_bytes(i, strategy)
        transients = max(transients, _working_bytes(problem, i, strategy))
    return Memory(
        parameters,
        gradients,
        optimizer + problem.workload.unowned_bytes,
        state,
        residuals,
        transients,
        batch,
    )


def _working_bytes(problem: MeshProblem, i: int, strategy: Strategy) -> float:
    """What one operator holds while it runs, its cotangents included.

    Weights and their gradients are counted elsewhere.
    """
    graph, op = problem.graph, problem.graph.operators[i]
    if op.kind == "view":
        return 0.0
    held = local_bytes(graph, op, strategy, problem.rates.sizes)
    for operand in op.operands:
        tensor = graph.tensors[operand.uses[0].tensor]
        if tensor.leaf is not None and graph.leaves[tensor.leaf].role != "batch":
            cut = shards(spec_of(operand.dims, strategy), problem.rates.sizes)
            held -= tensor.bytes / cut
    return held * (2.0 if problem.training and op.active else 1.0)
