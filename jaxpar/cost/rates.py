"""Linear prices of collectives and of resharding, cached per mesh.

Every price is `bytes * rate + latency`: the bytes are those of the whole tensor,
so that one rate serves all tensors that make the same move.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxpar.mesh import AxisLink, LogicalMesh
from jaxpar.sharding import Collective, Spec, reshard

WIRE_SHARE = {
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-reduce": 2.0,
    "all-to-all": 1.0,
    "collective-permute": 1.0,
}
"""Bytes that a ring sends per device, over its `Collective.bytes * (n-1)/n`
(Thakur et al. 2005; Patarasuk and Yuan 2009)."""


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


def axis_price(kind: str, link: AxisLink, size: int, share: float) -> Price:
    """One collective over one axis.

    Args:
        kind: Of the collective.
        link: What joins the devices along the axis.
        size: Devices along the axis.
        share: `Collective.bytes` as a share of the whole tensor's.
    """
    if size == 1:
        return Price()
    hops = size - 1
    if kind == "collective-permute":
        return Price(share / link.bytes_per_s, link.latency_s)
    wire = WIRE_SHARE[kind] * hops / size
    if kind == "all-to-all":
        wire *= link.all_to_all_factor(size)
    return Price(
        share * wire / link.bytes_per_s,
        WIRE_SHARE[kind] * hops * link.latency_s,
    )


def collective_price(collective: Collective, mesh: LogicalMesh) -> Price:
    """A collective over several axes, as a hierarchy of rings.

    The fast axes go first: they gather, or reduce, most of the bytes, so that the
    slow ones see the smallest share.
    """
    share, total = collective.bytes, Price()
    fast = sorted(collective.axes, key=lambda a: -mesh.link(a).bytes_per_s)
    if collective.kind == "all-gather":
        share /= math.prod(mesh.sizes[a] for a in fast)
        for axis in reversed(fast):
            share *= mesh.sizes[axis]
            total += axis_price("all-gather", mesh.link(axis), mesh.sizes[axis], share)
        return total
    for axis in fast:
        size = mesh.sizes[axis]
        total += axis_price(collective.kind, mesh.link(axis), size, share)
        if collective.kind in ("all-reduce", "reduce-scatter"):
            share /= size
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
    _known: dict[tuple[Spec, tuple[str, ...], Spec], Price] = field(
        default_factory=dict
    )

    @property
    def sizes(self) -> Mapping[str, int]:
        """Devices per axis."""
        return self.mesh.sizes

    def steps(
        self, source: Spec, partial: tuple[str, ...], target: Spec
    ) -> tuple[Collective, ...]:
        """The collectives of a move, their bytes as shares of the whole tensor."""
        return reshard(
            source, partial, target, self.sizes, reduce_scatter=self.reduce_scatter
        )

    def move(self, source: Spec, partial: tuple[str, ...], target: Spec) -> Price:
        """Price of a move from one layout to another."""
        key = (source, partial, target)
        if key not in self._known:
            total = Price()
            if partial or source != target:
                for collective in self.steps(source, partial, target):
                    total += collective_price(collective, self.mesh)
            self._known[key] = total
        return self._known[key]

    def all_reduce(self, axes: tuple[str, ...], share: float) -> Price:
        """Price of an all-reduce of a share of a tensor."""
        if not axes:
            return Price()
        return collective_price(Collective("all-reduce", axes, share), self.mesh)
