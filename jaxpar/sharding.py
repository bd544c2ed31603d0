"""How a tensor lies on the mesh, and what moving it to another layout costs.

A sharding is a `Spec`: per dim, the mesh axes that split it, major axis first.
A tensor may besides be *partial* over some axes: each device holds a term of a
sum. `reshard` lists the collectives that lead from one layout to another.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Collective:
    """One collective operation over a group of devices.

    Attributes:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or
            "collective-permute", as compiled programs call them.
        axes: The mesh axes that the group spans.
        bytes: Per device: of the result of an all-gather, of the operand of the
            others.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float


@cache
def axes_of(spec: Spec) -> tuple[str, ...]:
    """All axes that a spec uses, dim by dim."""
    return tuple(axis for dim in spec for axis in dim)


def shards(spec: Spec, sizes: Mapping[str, int]) -> int:
    """Into how many parts a spec cuts its tensor."""
    return math.prod(sizes[axis] for axis in axes_of(spec))


def unsharded(rank: int) -> Spec:
    """The spec that leaves every dim whole."""
    return ((),) * rank


def without(spec: Spec, axes: Iterable[str]) -> Spec:
    """The spec with some axes taken out."""
    gone = set(axes)
    return tuple(tuple(a for a in dim if a not in gone) for dim in spec)


def fits(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
    """Whether every sharded dim divides by its axes."""
    return all(
        n % math.prod(sizes[axis] for axis in dim) == 0
        for n, dim in zip(shape, spec, strict=True)
    )


def reshard(
    source: Spec,
    partial: tuple[str, ...],
    target: Spec,
    sizes: Mapping[str, int],
    *,
    reduce_scatter: bool = True,
) -> tuple[Collective, ...]:
    """The collectives that move a tensor of one byte from one layout to another.

    Args:
        source: The layout at hand.
        partial: Axes over which the tensor is an unreduced sum.
        target: The layout wanted; never partial.
        sizes: Devices per axis.
        reduce_scatter: Whether the compiler turns an all-reduce followed by a
            slice into a reduce-scatter. The CPU backend does not.

    Returns:
        The collectives in order, their `bytes` as shares of the whole tensor's.
    """
    steps: list[Collective] = []
    wanted, held = set(axes_of(target)), set(axes_of(source))
    share = 1.0 / shards(source, sizes)
    scattered = tuple(a for a in partial if a in wanted) if reduce_scatter else ()
    summed = tuple(a for a in partial if a not in scattered)
    if scattered:
        steps.append(Collective("reduce-scatter", scattered, share))
        share /= math.prod(sizes[a] for a in scattered)
    if summed:
        steps.append(Collective("all-reduce", summed, share))
    for axis in wanted - held - set(scattered):
        share /= sizes[axis]
    return tuple(steps) + _moves(source, target, share, sizes)


def _moves(
    source: Spec, target: Spec, share: float, sizes: Mapping[str, int]
) -> tuple[Collective, ...]:
    """All-to-alls for axes that change dims, then all-gathers, then permutes."""
    steps: list[Collective] = []
    wanted = set(axes_of(target))
    dim_of = {axis: i for i, dim in enumerate(target) for axis in dim}
    for i, dim in enumerate(source):
        moved = tuple(a for a in dim if a in wanted and dim_of[a] != i)
        if moved:
            steps.append(Collective("all-to-all", moved, share))
    gathered = tuple(a for a in axes_of(source) if a not in wanted)
    if gathered:
        share *= math.prod(sizes[a] for a in gathered)
        steps.append(Collective("all-gather", gathered, share))
    turned = tuple(
        axis
        for held, want in zip(source, target, strict=True)
        for axis in _misplaced(held, want)
    )
    if turned:
        steps.append(Collective("collective-permute", turned, share))
    return tuple(steps)


def _misplaced(held: tuple[str, ...], want: tuple[str, ...]) -> tuple[str, ...]:
    """Axes that stay on a dim whose parts they would hold in another order."""
    kept = tuple(a for a in held if a in want)
    if not kept or held[: len(kept)] == want[: len(kept)]:
        return ()
    return kept
