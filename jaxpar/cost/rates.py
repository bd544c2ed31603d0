"""Linear prices of collectives and of resharding, cached per mesh.

Every price is `bytes * rate + latency`: the bytes are those of the whole tensor,
so that one rate serves all tensors that make the same move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.axis_link import Level
from jaxpar.mesh import LogicalMesh
from jaxpar.sharding import Collective, Grain, Spec, reshard

State = tuple[Spec, tuple[str, ...]]
"""A layout, and the axes over which the value is a partial sum."""


@dataclass(frozen=True)
class Price:
    """Seconds per byte of the whole tensor, and seconds per execution."""

    rate: float = 0.0
    latency_s: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        return Price(self.rate + other.rate, self.latency_s + other.latency_s)

    def seconds(self, whole_bytes: float) -> float:
        """Seconds of one execution."""
        return whole_bytes * self.rate + self.latency_s


def level_price(kind: str, level: Level, share: float) -> Price:
    """One collective among the devices of one level of links.

    A ring gathers or scatters bytes (n-1)/n / bandwidth and all-reduces twice that
    (Thakur et al. 2005; Patarasuk and Yuan 2009).

    Args:
        kind: Of the collective.
        level: The links.
        share: `Collective.bytes` as a share of the whole tensor's.
    """
    if kind == "collective-permute":
        return Price(share / level.one_way_bytes_per_s, level.latency_s)
    if kind == "all-to-all":
        rate = share / level.all_to_all_bytes_per_s
        return Price(rate, level.hops * level.latency_s)
    rounds = 2 if kind == "all-reduce" else 1
    wire = rounds * (level.size - 1) / level.size
    return Price(
        share * wire / level.bytes_per_s, rounds * level.hops * level.latency_s
    )


def collective_price(collective: Collective, mesh: LogicalMesh) -> Price:
    """A collective over one or more axes, as a hierarchy of rings.

    The order of levels is the one in which slow links see the smallest share: last
    where bytes are reduced, first where they are gathered.
    """
    levels = [level for axis in collective.axes for level in mesh.link(axis).levels]
    levels.sort(key=lambda level: -level.bytes_per_s)
    share, total = collective.bytes, Price()
    if collective.kind == "all-gather":
        for level in levels:
            total += level_price("all-gather", level, share)
            share /= level.size
        return total
    for level in levels:
        total += level_price(collective.kind, level, share)
        if collective.kind in ("all-reduce", "reduce-scatter"):
            share /= level.size
    return total


@dataclass
class Rates:
    """Prices of resharding on one mesh, remembered by layouts.

    Attributes:
        mesh: The mesh.
        reduce_scatter: Whether the compiler makes reduce-scatters.
    """

    mesh: LogicalMesh
    reduce_scatter: bool
    _known: dict[tuple[Spec, tuple[str, ...], Spec, Grain | None], Price] = field(
        default_factory=dict
    )
    _tables: dict[Any, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self):
        self.sizes: Mapping[str, int] = self.mesh.sizes

    def steps(
        self,
        source: Spec,
        partial: tuple[str, ...],
        target: Spec,
        grain: Grain | None = None,
    ) -> tuple[Collective, ...]:
        """The collectives of a move, their bytes as shares of the whole tensor."""
        return reshard(
            source,
            partial,
            target,
            self.sizes,
            reduce_scatter=self.reduce_scatter,
            grain=grain,
        )

    def move(
        self,
        source: Spec,
        partial: tuple[str, ...],
        target: Spec,
        grain: Grain | None = None,
    ) -> Price:
        """Price of a move from one layout to another."""
        key = (source, partial, target, grain)
        if key not in self._known:
            total = Price()
            if partial or source != target:
                for collective in self.steps(source, partial, target, grain):
                    total += collective_price(collective, self.mesh)
            self._known[key] = total
        return self._known[key]

    def table(
        self,
        sources: Sequence[State],
        targets: Sequence[State],
        grain: Grain | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rates and latencies of all moves from sources to targets.

        Operators of one kind share their layouts, so whole tables are remembered.
        Whether a target is partial does not matter: it says what happens there.
        """
        key = (tuple(sources), tuple(spec for spec, _ in targets), grain)
        if key not in self._tables:
            prices = [
                [self.move(spec, partial, want, grain) for want, _ in targets]
                for spec, partial in sources
            ]
            self._tables[key] = (
                np.array([[p.rate for p in row] for row in prices]),
                np.array([[p.latency_s for p in row] for row in prices]),
            )
        return self._tables[key]

    def all_reduce(self, axes: tuple[str, ...], share: float) -> Price:
        """Price of an all-reduce of a share of a tensor."""
        if not axes:
            return Price()
        return collective_price(Collective("all-reduce", axes, share), self.mesh)
