"""How a tensor lies on the mesh, and what moving it to another layout costs.

A sharding is a `Spec`: per dim, the mesh axes that split it, major axis first.
A tensor may besides be *partial* over some axes: each device holds a term of a
sum. `reshard` lists the collectives that lead from one layout to another.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

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


Grain = tuple[int, ...]
"""Per dim the most parts, as far as the mesh can tell, that it splits into."""


def grain_of(shape: tuple[int, ...], devices: int) -> Grain:
    """The grain of a tensor on a mesh: shapes of one grain are moved alike."""
    return tuple(math.gcd(n, devices) for n in shape)


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


@dataclass(frozen=True)
class Move:
    """One step on the way from one layout to another.

    Attributes:
        layout: Behind it.
        collective: What it takes; None where each device just drops a part.
    """

    layout: Spec
    collective: Collective | None = None


def reshard(
    source: Spec,
    partial: tuple[str, ...],
    target: Spec,
    sizes: Mapping[str, int],
    *,
    reduce_scatter: bool = True,
    grain: Grain | None = None,
) -> tuple[Collective, ...]:
    """The collectives that move a tensor of one byte from one layout to another.

    Args:
        source: The layout at hand.
        partial: Axes over which the tensor is an unreduced sum.
        target: The layout wanted; never partial.
        sizes: Devices per axis.
        reduce_scatter: Whether the compiler turns an all-reduce followed by a
            slice into a reduce-scatter. The CPU backend does not.
        grain: From `grain_of`: how finely each dim may be split on the way, which
            takes other axes than either end where one axis comes before one goes.

    Returns:
        The collectives in order, their `bytes` as shares of the whole tensor's.
    """
    steps = moves(
        source, partial, target, sizes, reduce_scatter=reduce_scatter, grain=grain
    )
    return tuple(step.collective for step in steps if step.collective is not None)


def moves(
    source: Spec,
    partial: tuple[str, ...],
    target: Spec,
    sizes: Mapping[str, int],
    *,
    reduce_scatter: bool = True,
    grain: Grain | None = None,
) -> tuple[Move, ...]:
    """Every step from one layout to another; arguments as for `reshard`.

    Parts are dropped first, gathered last, and change their dim or order in between,
    so that as little as possible is sent; the way back takes the same steps. Axes
    leave a dim, and come to it, at its minor end, as compilers have it.
    """
    if source == target and not partial:
        return ()
    walk = _Walk(source, target, sizes, grain)
    walk.reduce(partial, scatters=reduce_scatter)
    walk.gather(walk.behind_moved)
    walk.drop()
    walk.gather(walk.in_the_way)
    walk.exchange()
    walk.turn()
    walk.gather(lambda _: True)
    walk.drop(late=True)
    walk.turn()
    return tuple(walk.steps)


class _Walk:
    """A layout on its way; `steps` grow from source to target."""

    def __init__(
        self,
        source: Spec,
        target: Spec,
        sizes: Mapping[str, int],
        grain: Grain | None,
    ):
        self.sizes, self.target, self.grain = sizes, target, grain
        self.layout, self.steps = source, list[Move]()
        self.source_dim = {a: d for d, axes in enumerate(source) for a in axes}
        self.target_dim = {a: d for d, axes in enumerate(target) for a in axes}
        self.moved = {
            a for a, d in self.source_dim.items() if self.target_dim.get(a, d) != d
        }
        self.share = 1.0 / shards(source, sizes)

    def step(self, layout: Spec, kind: str, axes: tuple[str, ...]) -> None:
        self.layout = layout
        self.steps.append(Move(layout, Collective(kind, axes, self.share)))

    def reduce(self, partial: tuple[str, ...], *, scatters: bool) -> None:
        """Adds up a partial sum; where the target splits it, each its own part."""
        layout = self.layout
        for d, axis in self._droppable(late=True):
            if scatters and axis in partial and self._fits(d, (*layout[d], axis)):
                layout = _with(layout, d, (*layout[d], axis))
        scattered = tuple(a for a in partial if a in axes_of(layout))
        if scattered:
            self.step(layout, "reduce-scatter", scattered)
            self.share /= math.prod(self.sizes[a] for a in scattered)
        summed = tuple(a for a in partial if a not in scattered)
        if summed:
            self.step(self.layout, "all-reduce", summed)

    def _droppable(self, *, late: bool) -> list[tuple[int, str]]:
        """Axes that the target adds to a dim; those behind moved ones are late."""
        found: list[tuple[int, str]] = []
        for d, axes in enumerate(self.target):
            behind = False
            for axis in axes:
                behind |= axis in self.moved
                if axis not in self.source_dim and (late or not behind):
                    found.append((d, axis))
        return found

    def drop(self, *, late: bool = False) -> None:
        """Each device keeps a part of what it holds."""
        held, layout = set(axes_of(self.layout)), self.layout
        for d, axis in self._droppable(late=late):
            if axis not in held and self._fits(d, (*layout[d], axis)):
                layout = _with(layout, d, (*layout[d], axis))
                self.share /= self.sizes[axis]
        if layout != self.layout:
            self.layout = layout
            self.steps.append(Move(layout))

    def _fits(self, dim: int, axes: Sequence[str]) -> bool:
        """Whether a dim may be split over some axes at once."""
        parts = math.prod(self.sizes[a] for a in axes)
        return self.grain is None or self.grain[dim] % parts == 0

    def in_the_way(self, axis: str) -> bool:
        """Whether an axis must go before others can come to its dim."""
        dim = self.source_dim[axis]
        coming = [
            a
            for a in self.moved
            if self.target_dim[a] == dim and a not in self.layout[dim]
        ]
        return bool(coming) and not self._fits(dim, (*self.layout[dim], *coming))

    def behind_moved(self, axis: str) -> bool:
        """Whether an axis must go before one that moves to another dim can."""
        dim = self.layout[self.source_dim[axis]]
        return any(a in self.moved for a in dim[: dim.index(axis)])

    def gather(self, which: Callable[[str], bool]) -> None:
        """Devices exchange their parts over axes that the target lacks."""
        gone = {
            a for a in axes_of(self.layout) if a not in self.target_dim and which(a)
        }
        if not gone:
            return
        self.at_end(gone)
        for dim in reversed(self.layout):  # compilers gather dim by dim
            if gathered := tuple(a for a in dim if a in gone):
                self.share *= math.prod(self.sizes[a] for a in gathered)
                self.step(without(self.layout, gathered), "all-gather", gathered)

    def exchange(self) -> None:
        """Axes that change dims; those that go the same way go together."""
        ways: dict[tuple[int, int], list[str]] = {}
        for axis in axes_of(self.target):
            if axis in self.moved:
                way = self.source_dim[axis], self.target_dim[axis]
                ways.setdefault(way, []).append(axis)
        while ways:
            old, new = way = min(ways, key=lambda way: self._obstacles(*way, ways[way]))
            axes = ways.pop(way)
            self.at_end(set(axes))
            going = tuple(a for a in self.layout[old] if a in axes)
            layout = without(self.layout, going)
            layout = _with(layout, new, (*layout[new], *going))
            self.step(layout, "all-to-all", going)

    def _obstacles(self, old: int, new: int, axes: Sequence[str]) -> int:
        """Axes that had better leave or arrive before some move."""
        dim, there, wanted = self.layout[old], self.layout[new], self.target[new]
        behind = set(dim[dim.index(axes[0]) :]) - set(axes)
        before = set(wanted[: wanted.index(axes[0])]) - set(there)
        leaving = [a for a in there if self.target_dim.get(a, new) != new]
        return len(behind) + len(before) + len(leaving)

    def at_end(self, axes: Set[str]) -> None:
        """Brings axes to the minor end of their dims, the others into order."""
        if any(self._before(dim, axes) for dim in self.layout):
            self.turn(axes)

    def _before(self, dim: tuple[str, ...], axes: Set[str]) -> bool:
        """Whether one of some axes stands before another axis of the dim."""
        return any(a in axes and b not in axes for a, b in pairwise(dim))

    def turn(self, last: Set[str] = frozenset()) -> None:
        """Brings axes into the order of the target, those that leave it behind them."""
        rank = {a: i for i, a in enumerate(axes_of(self.target))}
        count = len(rank)
        self.turn_to(
            tuple(
                tuple(sorted(dim, key=lambda a: (a in last, rank.get(a, count))))
                for dim in self.layout
            )
        )

    def turn_to(self, layout: Spec) -> None:
        """Devices swap their parts."""
        if layout != self.layout:
            pairs = zip(axes_of(self.layout), axes_of(layout), strict=True)
            self.step(
                layout, "collective-permute", tuple(a for a, b in pairs if a != b)
            )


def _with(layout: Spec, dim: int, axes: tuple[str, ...]) -> Spec:
    return (*layout[:dim], axes, *layout[dim + 1 :])
