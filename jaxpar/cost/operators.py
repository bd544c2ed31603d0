"""Seconds and bytes of one operator under one strategy, and of one leaf."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.cost.rates import Rates
from jaxpar.graph import GraphLeaf, Operator, OperatorGraph
from jaxpar.hardware import Chip
from jaxpar.rules.rule import Dims
from jaxpar.sharding import Collective, shards
from jaxpar.strategy import LeafStrategy, Strategy, axes_on

FORWARD, BACKWARD = 1, 2


@dataclass(frozen=True)
class UpdateSum:
    """A sum that the optimizer takes over dims of a leaf (norms, row means).

    Attributes:
        leaf: Index of the leaf.
        kept: Its dims that the result still has.
        over: Its dims that are summed away.
        bytes: Of the whole result.
        stored: Whether it is of the parameter as stored, else of gradients or
            optimizer state.
    """

    leaf: int
    kept: tuple[int, ...]
    over: tuple[int, ...]
    bytes: float
    stored: bool

    def collectives(
        self, strategy: LeafStrategy, sizes: Mapping[str, int]
    ) -> tuple[Collective, ...]:
        """The all-reduce of its terms, if a dim that it sums over is split."""
        spec = strategy.storage if self.stored else strategy.optimizer
        cut = math.prod(sizes[axis] for d in self.kept for axis in spec[d])
        over = {axis for d in self.over for axis in spec[d]}
        axes = tuple(axis for axis in sizes if axis in over)
        return (Collective("all-reduce", axes, self.bytes / cut),) if axes else ()


@dataclass(frozen=True)
class Workload:
    """What surrounds the forward pass.

    Attributes:
        training: Whether there is a backward pass and an update.
        optimizer_bytes: Per leaf index: optimizer bytes per parameter byte.
        unowned_bytes: Optimizer state that belongs to no parameter.
        sums: What the optimizer sums over dims of parameters; of leaves that stand
            for several paths, once per path.
    """

    training: bool
    optimizer_bytes: Mapping[int, float]
    unowned_bytes: float = 0.0
    sums: tuple[UpdateSum, ...] = ()


def parts(
    factors: tuple[int, ...], strategy: Strategy, sizes: Mapping[str, int]
) -> int:
    """Into how many parts a strategy cuts what runs over some factors."""
    return math.prod(sizes[axis] for f in factors for axis in strategy[f])


def _present(dims: Dims) -> tuple[int, ...]:
    return tuple(f for f in dims if f is not None)


def local_bytes(
    graph: OperatorGraph, op: Operator, strategy: Strategy, sizes: Mapping[str, int]
) -> float:
    """Bytes that a device reads and writes in one fused execution."""
    total = 0.0
    for operand in op.operands:
        cut = parts(_present(operand.dims), strategy, sizes)
        total += graph.tensors[operand.uses[0].tensor].bytes / cut
    for result in op.results:
        cut = parts(_present(result.dims), strategy, sizes)
        total += graph.tensors[result.tensor].bytes / cut
    return total


def _passes(op: Operator, *, training: bool) -> float:
    """Passes over an operator in one step, counted in forward passes."""
    backward = 0.0
    if training and op.active:
        active = sum(bool(o.lacks) or o.saved for o in op.operands)
        backward = min(BACKWARD, active) if op.heavy else BACKWARD
    return FORWARD + backward + (1.0 if training and op.replayed else 0.0)


def compute_s(
    graph: OperatorGraph,
    op: Operator,
    strategy: Strategy,
    chip: Chip,
    sizes: Mapping[str, int],
    *,
    training: bool,
) -> float:
    """Roofline seconds of all executions in one step, without communication."""
    if op.kind == "view":
        return 0.0
    memory_s = local_bytes(graph, op, strategy, sizes) / (
        chip.hbm_bytes_per_s * chip.hbm_efficiency
    )
    work_s = 0.0
    if op.heavy:
        cut = parts(tuple(range(len(op.factors))), strategy, sizes)
        dtype = graph.tensors[op.operands[0].uses[0].tensor].dtype
        rate = chip.flops_per_s(dtype) * chip.matmul_efficiency
        work_s = op.flops / cut / rate
    once = max(work_s, memory_s)
    return once * op.executions * _passes(op, training=training)


def reductions_s(
    op: Operator, strategy: Strategy, rates: Rates, *, training: bool
) -> float:
    """Seconds of the sums inside a cluster."""
    total = 0.0
    for reduction in op.reductions:
        if reduction.backward and not training:
            continue
        axes = axes_on(reduction.over, strategy)
        if axes:
            cut = parts(reduction.dims, strategy, rates.sizes)
            again = 2 if op.replayed and training and not reduction.backward else 1
            price = rates.all_reduce(axes, 1.0 / cut)
            total += price.seconds(reduction.bytes) * op.executions * again
    return total


def residual_bytes(
    graph: OperatorGraph,
    op: Operator,
    strategy: Strategy,
    sizes: Mapping[str, int],
    from_outside: Mapping[int, bool],
) -> float:
    """Bytes that the operator keeps from its forward for its backward pass.

    Args:
        graph: The graph.
        op: The operator.
        strategy: Its strategy.
        sizes: Devices per axis.
        from_outside: Tensor -> whether it enters a rematerialised region.
    """
    total = 0.0
    for operand in op.operands:
        tensor = graph.tensors[operand.uses[0].tensor]
        if tensor.leaf is not None and graph.leaves[tensor.leaf].role != "batch":
            continue
        local = tensor.bytes / parts(_present(operand.dims), strategy, sizes)
        if op.recomputed and from_outside[operand.uses[0].tensor]:
            total += local * sum(use.executions for use in operand.uses)
        elif operand.saved:
            # A rematerialised block keeps its own values one block at a time.
            times = sum(use.executions for use in operand.uses)
            total += local * (1 if op.recomputed else times)
    for saved in op.saved:
        local = saved.bytes / parts(saved.dims, strategy, sizes)
        once = op.recomputed and not saved.named
        total += local * (1 if once else op.executions)
    return total


def working_bytes(
    graph: OperatorGraph, op: Operator, strategy: Strategy, sizes: Mapping[str, int]
) -> float:
    """What an operator holds while it runs.

    Its operands and results in the forward, their cotangents in the backward pass.
    Weights are counted elsewhere.
    """
    if op.kind == "view":
        return 0.0
    held = local_bytes(graph, op, strategy, sizes)
    for operand in op.operands:
        tensor = graph.tensors[operand.uses[0].tensor]
        if tensor.leaf is not None and graph.leaves[tensor.leaf].role != "batch":
            held -= tensor.bytes / parts(_present(operand.dims), strategy, sizes)
    # In the backward pass the values that an operator reads are there as well.
    return max(held, 0.0) * (2.0 if op.active else 1.0)


@dataclass(frozen=True)
class LeafCost:
    """Seconds and bytes of one leaf (all blocks together) under one strategy."""

    seconds: float
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    gathered_bytes: float

    @property
    def memory_bytes(self) -> float:
        """All classes together."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.gathered_bytes
        )


def leaf_cost(
    leaf: GraphLeaf,
    strategy: LeafStrategy,
    rates: Rates,
    chip: Chip,
    *,
    training: bool,
    optimizer_ratio: float,
    recomputed: bool,
    replayed: bool,
) -> LeafCost:
    """Prices storage: gathering to read, the update, and memory at rest.

    Args:
        leaf: The leaf.
        strategy: Its layouts.
        rates: Prices of the mesh.
        chip: The device.
        training: Whether there is a backward pass and an update.
        optimizer_ratio: Optimizer bytes per parameter byte.
        recomputed: Whether its readers are rematerialised, and keep it no longer.
        replayed: Whether they gather it twice.
    """
    count = len(leaf.paths)
    whole = leaf.bytes * count
    held = whole / shards(strategy.storage, rates.sizes)
    inner = strategy.storage[1:] if leaf.stacked else strategy.storage
    seconds, gathered = 0.0, 0.0
    if inner != strategy.compute:
        executions = count * (leaf.shape[0] if leaf.stacked else 1)
        price = rates.move(inner, (), strategy.compute)
        twice = 2 if replayed and training else 1
        seconds += (price.rate * whole + price.latency_s * executions) * twice
        gathered = whole / shards(strategy.compute, rates.sizes)
        if recomputed or not training:
            gathered /= executions
    gradient = optimizer = 0.0
    if training and leaf.trained:
        gradient = whole / shards(strategy.optimizer, rates.sizes)
        optimizer = gradient * optimizer_ratio
        traffic = 2 * held + gradient + 2 * optimizer
        seconds += traffic / (chip.hbm_bytes_per_s * chip.hbm_efficiency)
        if strategy.optimizer != strategy.storage:
            price = rates.move(strategy.optimizer, (), strategy.storage)
            seconds += price.rate * whole + price.latency_s * count
    return LeafCost(seconds, held, gradient, optimizer, gathered)
