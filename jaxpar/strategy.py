"""Candidates: the ways in which operators and leaves may be split over a mesh."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxpar.graph import DimClass, GraphLeaf, Operator, OperatorGraph, Tensor
from jaxpar.rules.rule import Dims, FactorKind
from jaxpar.sharding import Spec, axes_of, unsharded, without

Strategy = tuple[tuple[str, ...], ...]
"""Per factor of an operator, the axes that split it."""

BATCH_ROLES = ("data", "fsdp")
ROLES = ("pipeline", "data", "fsdp", "expert", "sequence", "tensor")
"""Axis names with a fixed meaning; any other name may be used for anything."""


@dataclass(frozen=True)
class Axes:
    """The axes of more than one device, and what they may do.

    Attributes:
        sizes: Devices per axis, in mesh order.
        remembered: Strategies of operators that are alike, found before.
    """

    sizes: Mapping[str, int]
    remembered: dict[tuple, tuple[Strategy, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def ordered(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Axes of one dim in their fixed order: those that gather last are minor.

        Parameters gather over fsdp and keep tensor, so tensor has to be major.
        """
        rank = {axis: i for i, axis in enumerate(self.sizes)}
        return tuple(sorted(axes, key=lambda a: (a in BATCH_ROLES, rank[a])))

    def may_split(self, axis: str, op: Operator, dim: DimClass) -> bool:
        """Whether an axis may split a factor of an operator, by its role."""
        if op.parameter_only:
            return axis not in ("data", "sequence")
        if axis in BATCH_ROLES:
            return dim.batch
        if axis == "tensor":
            return not dim.batch
        if axis == "sequence":
            return dim.token
        if axis == "expert":
            return dim.expert or dim.batch
        return True


@dataclass(frozen=True)
class Pin:
    """A binding wish for a tensor: per dim the axes, or None for "anything"."""

    dims: tuple[tuple[str, ...] | None, ...]
    source: str

    def admits(self, spec: Spec) -> bool:
        """Whether a spec obeys the pin."""
        pairs = zip(self.dims, spec, strict=True)
        return all(want is None or set(want) == set(have) for want, have in pairs)


Bound = tuple[tuple[Dims, Pin], ...]
"""What binds an operator: pins on operands or results, with their dims."""


def strategies(
    op: Operator,
    classes: Sequence[DimClass],
    axes: Axes,
    *,
    weights_first: bool = False,
    bound: Bound = (),
) -> tuple[Strategy, ...]:
    """All strategies of an operator, the unsharded one first where allowed.

    What has a batch factor must split it over the batch axes that divide it, and
    matrix multiplications must use every axis that some factor admits: repeating
    such work over an axis is not a choice.

    Args:
        op: The operator.
        classes: Of the graph.
        axes: The mesh.
        weights_first: Whether the tensor axis splits weights rather than tokens.
        bound: Pins that they obey; there may be no such strategy.
    """
    key = (_signature(op, classes), weights_first, bound)
    known = axes.remembered
    if key not in known:
        known[key] = _enumerate(
            op, classes, axes, weights_first=weights_first, bound=bound
        )
    return known[key]


def _signature(op: Operator, classes: Sequence[DimClass]) -> tuple:
    """All that the strategies of an operator depend on."""
    dims = tuple(classes[c] for c in op.classes)
    return op.factors, dims, op.parameter_only, op.heavy, op.weighted


def _enumerate(
    op: Operator,
    classes: Sequence[DimClass],
    axes: Axes,
    *,
    weights_first: bool,
    bound: Bound,
) -> tuple[Strategy, ...]:
    admitted = [
        [
            f
            for f, factor in enumerate(op.factors)
            if factor.kind is not FactorKind.WHOLE
            and classes[op.classes[f]].granularity % size == 0
            and factor.size % size == 0
            and axes.may_split(axis, op, classes[op.classes[f]])
        ]
        for axis, size in axes.sizes.items()
    ]
    found = [
        strategy
        for choice in itertools.product(*([None, *fs] for fs in admitted))
        if (strategy := _strategy(op, classes, axes, choice)) is not None
        and all(pin.admits(spec_of(dims, strategy)) for dims, pin in bound)
    ]
    return _busiest(found, op, classes, axes, weights_first=weights_first)


def _strategy(
    op: Operator,
    classes: Sequence[DimClass],
    axes: Axes,
    choice: Sequence[int | None],
) -> Strategy | None:
    held: list[list[str]] = [[] for _ in op.factors]
    for axis, f in zip(axes.sizes, choice, strict=True):
        if f is not None:
            held[f].append(axis)
    for f, used in enumerate(held):
        parts = math.prod(axes.sizes[a] for a in used)
        limit = math.gcd(op.factors[f].size, classes[op.classes[f]].granularity)
        if parts > 1 and limit % parts:
            return None
    return tuple(axes.ordered(used) for used in held)


def _busiest(
    found: list[Strategy],
    op: Operator,
    classes: Sequence[DimClass],
    axes: Axes,
    *,
    weights_first: bool,
) -> tuple[Strategy, ...]:
    if op.parameter_only:
        return tuple(found)
    must = [a for a in axes.sizes if a in BATCH_ROLES]
    if op.heavy:
        must = list(axes.sizes)
        if weights_first:
            found = _weights_first(found, op, classes, axes)

    def idle(strategy: Strategy) -> int:
        used = set(itertools.chain.from_iterable(strategy))
        return math.prod(axes.sizes[a] for a in must if a not in used)

    least = min(map(idle, found), default=1)
    return tuple(s for s in found if idle(s) == least)


def _weights_first(
    found: list[Strategy], op: Operator, classes: Sequence[DimClass], axes: Axes
) -> list[Strategy]:
    """Without those that split tokens over the tensor axis where weights can be.

    Who asks for a tensor axis asks for weights in parts; tokens have their own axis.
    """
    if not op.weighted or "tensor" not in axes.sizes:
        return found
    on_weights = [
        strategy
        for strategy in found
        if any(
            "tensor" in used and not classes[c].token
            for used, c in zip(strategy, op.classes, strict=True)
        )
    ]
    return on_weights or found


def spec_of(dims: Dims, strategy: Strategy) -> Spec:
    """How a strategy splits a tensor whose dims run over the given factors."""
    return tuple(() if f is None else strategy[f] for f in dims)


def axes_on(factors: Sequence[int], strategy: Strategy) -> tuple[str, ...]:
    """The axes that split any of some factors."""
    return tuple(axis for f in factors for axis in strategy[f])


@dataclass(frozen=True)
class LeafStrategy:
    """How a leaf rests and is read.

    Attributes:
        storage: Of the parameter, between steps.
        optimizer: Of its gradient and optimizer state.
        compute: As operators read it, without the layer dim of a stacked leaf.
    """

    storage: Spec
    optimizer: Spec
    compute: Spec


def leaf_strategies(
    graph: OperatorGraph,
    leaf: GraphLeaf,
    axes: Axes,
    *,
    pin: Pin | None,
    must_store: Sequence[str] = (),
    zero: int | None = None,
) -> tuple[LeafStrategy, ...]:
    """All ways to store and read one leaf.

    Args:
        graph: The graph that the leaf belongs to.
        leaf: The leaf.
        axes: The mesh.
        pin: Binds the storage.
        must_store: Axes that it must be stored over where a dim divides.
        zero: Stage of ZeRO that the fsdp axis is for, or None (see `_staged`).
    """
    tensor = graph.tensors[leaf.tensor]
    if leaf.role == "batch":
        specs = _batch_specs(graph, tensor, leaf, axes)
        return tuple(LeafStrategy(s, s, s) for s in specs)
    if leaf.role == "rng" or not tensor.shape:
        whole = unsharded(len(leaf.shape))
        return (LeafStrategy(whole, whole, unsharded(len(tensor.shape))),)
    specs = [s for s in _storage_specs(graph, tensor, leaf, axes, pin)]
    if pin is not None:
        stored, zero = [s for s in specs if pin.admits(s)], None
    else:
        must = must_store if zero is None else ("fsdp",) * (zero == 3)
        stored = _most_used(specs, must, axes.sizes)
    found = (
        reading
        for spec in stored
        for reading in _readings(spec, specs, leaf, axes, pinned=pin is not None)
    )
    return tuple(found) if zero is None else _staged(tuple(found), zero)


def _staged(found: tuple[LeafStrategy, ...], zero: int) -> tuple[LeafStrategy, ...]:
    """Those that cut over fsdp what a stage of ZeRO cuts, where a dim divides.

    Rajbhandari et al. 2020: 1 the optimizer state, 2 gradients too, 3 parameters
    too. Gradients always end in the layout of the optimizer state, so 1 is 2.
    """

    def cut(spec: Spec) -> bool:
        return "fsdp" in axes_of(spec)

    if zero == 3:
        return found
    whole = tuple(s for s in found if not cut(s.storage))
    if zero == 0:
        return tuple(s for s in whole if not cut(s.optimizer))
    stored = {s.storage for s in whole if cut(s.optimizer)}
    return tuple(s for s in whole if cut(s.optimizer) or s.storage not in stored)


def _storage_specs(
    graph: OperatorGraph,
    tensor: Tensor,
    leaf: GraphLeaf,
    axes: Axes,
    pin: Pin | None,
) -> Iterator[Spec]:
    """Every way to cut a leaf, its layer dim excepted unless pinned."""
    first = len(leaf.shape) - len(tensor.shape)
    usable = [a for a in axes.sizes if a not in ("data", "sequence")]
    if pin is not None:
        usable = [a for a in axes.sizes if a in usable or _pinned(a, pin)]
    dims = range(0 if pin is not None else first, len(leaf.shape))
    for choice in itertools.product((None, *dims), repeat=len(usable)):
        held: list[list[str]] = [[] for _ in leaf.shape]
        for axis, d in zip(usable, choice, strict=True):
            if d is not None:
                held[d].append(axis)
        if all(
            _divides(leaf, d, math.prod(axes.sizes[a] for a in used))
            and (
                (pin is not None and pin.dims[d] is not None)
                or _keeps_parts_whole(graph, leaf, d, used, axes)
            )
            for d, used in enumerate(held)
        ):
            yield tuple(axes.ordered(used) for used in held)


def _pinned(axis: str, pin: Pin) -> bool:
    return any(axis in (dim or ()) for dim in pin.dims)


def _divides(leaf: GraphLeaf, dim: int, parts: int) -> bool:
    return leaf.shape[dim] % parts == 0


def _keeps_parts_whole(
    graph: OperatorGraph, leaf: GraphLeaf, dim: int, used: Sequence[str], axes: Axes
) -> bool:
    """Whether heads and the like are not cut in the middle.

    Axes that gather a parameter before it is read may cut them.
    """
    tensor = graph.tensors[leaf.tensor]
    inner = dim - (len(leaf.shape) - len(tensor.shape))
    if inner < 0:
        return not used
    parts = math.prod(axes.sizes[a] for a in used if a not in BATCH_ROLES)
    return graph.classes[tensor.classes[inner]].granularity % parts == 0


def _most_used(
    specs: list[Spec], must: Sequence[str], sizes: Mapping[str, int]
) -> list[Spec]:
    def stored(spec: Spec) -> int:
        return math.prod(sizes[a] for a in must if a in axes_of(spec))

    most = max(map(stored, specs), default=1)
    return [s for s in specs if stored(s) == most]


def _readings(
    storage: Spec,
    specs: Sequence[Spec],
    leaf: GraphLeaf,
    axes: Axes,
    *,
    pinned: bool,
) -> Iterator[LeafStrategy]:
    """All ways to read a storage, and to lay out the optimizer state beside it.

    Every set of its axes may be gathered for reading; the optimizer state is cut
    like it or, where it is whole, over the fsdp axis.
    """
    stored = axes_of(storage)
    inner = storage[1:] if leaf.stacked else storage
    optimizers = [storage]
    if leaf.trained and not pinned and "fsdp" in axes.sizes and "fsdp" not in stored:
        optimizers += [
            s for s in specs if s != storage and without(s, ("fsdp",)) == storage
        ]
    for count in range(len(stored) + 1):
        for gathered in itertools.combinations(stored, count):
            compute = without(inner, gathered)
            if leaf.stacked and any(a in storage[0] for a in gathered):
                compute = without(inner, gathered)
            for optimizer in optimizers:
                yield LeafStrategy(storage, optimizer, compute)


def _batch_specs(
    graph: OperatorGraph, tensor: Tensor, leaf: GraphLeaf, axes: Axes
) -> list[Spec]:
    """Batch dims over the batch axes; free axes wherever they divide."""
    whole = unsharded(len(leaf.shape))
    if not leaf.shape or leaf.stacked:
        return [whole]
    batched = graph.classes[tensor.classes[0]].batch
    free = [a for a in axes.sizes if a not in ROLES]
    batch_axes = [a for a in axes.sizes if a in BATCH_ROLES] if batched else []
    found: list[Spec] = []
    for choice in itertools.product((None, *range(len(leaf.shape))), repeat=len(free)):
        held: list[list[str]] = [[] for _ in leaf.shape]
        held[0] += batch_axes
        for axis, d in zip(free, choice, strict=True):
            if d is not None:
                held[d].append(axis)
        spec = tuple(axes.ordered(used) for used in held)
        parts = [math.prod(axes.sizes[a] for a in used) for used in held]
        if all(n % p == 0 for n, p in zip(leaf.shape, parts, strict=True)):
            found.append(spec)
    return found or [whole]
