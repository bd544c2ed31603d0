"""What stands behind an axis of a mesh: pieces of physical dims, and their rings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.hardware import Link, Topology

ACROSS_SLICES = -1
"""The "physical dim" between slices."""

_SMALLEST_RING = 3
"""Two devices are neighbours over one link, whether or not the dim closes."""


@dataclass(frozen=True)
class Piece:
    """The part of one physical dim that an axis runs over.

    Attributes:
        dim: Index into the shape of the topology; -1 is across slices.
        size: Steps of the axis along it.
        stride: Devices per step.
    """

    dim: int
    size: int
    stride: int


@dataclass(frozen=True)
class Level:
    """One group of devices along an axis that are joined by like links.

    Bandwidths are those of large collectives, per device, when every group of the
    axis communicates at once.

    Attributes:
        kind: "torus", "switch" or "network".
        link: Name of the link.
        size: Devices of the group.
        bytes_per_s: Rings of both directions together: gathering V bytes over n
            devices takes V (n-1)/n / bytes_per_s. Twice the link per ring that
            closes, once per open line (scaling-book, "TPU networking").
        one_way_bytes_per_s: To one neighbour along the axis.
        all_to_all_bytes_per_s: V over this is the time in which every device sends
            an equal part of its V bytes to each device of the group, itself too.
        latency_s: Per message between neighbours of the axis.
        hops: Such messages, one after another, of a gather.
        rings: Physical dims that carry rings in parallel.
        wrap: Whether all of them close.
    """

    kind: str
    link: str
    size: int
    bytes_per_s: float
    one_way_bytes_per_s: float
    all_to_all_bytes_per_s: float
    latency_s: float
    hops: int
    rings: int
    wrap: bool


@dataclass(frozen=True)
class AxisLink:
    """What stands behind one axis of a mesh.

    The properties treat the axis as one flat group that runs at the pace of its
    slowest level; an axis of size 1 has no levels and costs nothing.

    Attributes:
        size: Of the axis; the product of the sizes of the levels.
        levels: Outermost (slowest) first: position k of the axis is row-major in
            them.
    """

    size: int
    levels: tuple[Level, ...]

    @property
    def kind(self) -> str:
        """Kind of the slowest level; "none" for an axis of size 1."""
        slowest = min(self.levels, key=lambda level: level.bytes_per_s, default=None)
        return slowest.kind if slowest else "none"

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of rings over the whole axis; infinite at size 1."""
        return min((level.bytes_per_s for level in self.levels), default=math.inf)

    @property
    def one_way_bytes_per_s(self) -> float:
        """Bandwidth to one neighbour; infinite at size 1."""
        speeds = (level.one_way_bytes_per_s for level in self.levels)
        return min(speeds, default=math.inf)

    @property
    def all_to_all_bytes_per_s(self) -> float:
        """Bandwidth of an all-to-all over the axis; infinite at size 1."""
        speeds = (level.all_to_all_bytes_per_s for level in self.levels)
        return min(speeds, default=math.inf)

    @property
    def latency_s(self) -> float:
        """The longest latency between neighbours of the axis."""
        return max((level.latency_s for level in self.levels), default=0.0)

    @property
    def hops(self) -> int:
        """Messages, one after another, of a gather level by level."""
        return sum(level.hops for level in self.levels)

    @property
    def wrap(self) -> bool:
        """Whether every level closes to rings."""
        return all(level.wrap for level in self.levels)


def axis_link(topology: Topology, pieces: Sequence[Piece]) -> AxisLink:
    """The axis over some pieces, outermost first; like links make one level."""
    levels: list[Level] = []
    for piece in pieces:
        level = ring_level(topology, piece)
        if levels and (levels[-1].kind, levels[-1].link) == (level.kind, level.link):
            level = _join(levels.pop(), level)
        levels.append(level)
    size = math.prod(piece.size for piece in pieces)
    return AxisLink(size, tuple(levels))


def ring_level(topology: Topology, piece: Piece) -> Level:
    """The level of an axis along one physical dim."""
    link = topology.network
    if piece.dim != ACROSS_SLICES:
        link = topology.links[piece.dim]
    if link.kind == "torus":
        return _torus_level(link, piece, topology.shape[piece.dim])
    one_way, n = link.effective_bytes_per_s, piece.size
    return Level(
        kind=link.kind,
        link=link.name,
        size=n,
        bytes_per_s=one_way,
        one_way_bytes_per_s=one_way,
        all_to_all_bytes_per_s=_switch_all_to_all(one_way, n),
        latency_s=link.latency_s,
        hops=n - 1,
        rings=1,
        wrap=True,
    )


def _torus_level(link: Link, piece: Piece, length: int) -> Level:
    """The level along one torus dim of that length.

    A strided axis shares the links between its neighbours with the axes inside it.
    """
    n, one_way = piece.size, link.effective_bytes_per_s / piece.stride
    wrap = link.wrap and n >= _SMALLEST_RING and n * piece.stride == length
    ring = one_way * (2 if wrap else 1)
    return Level(
        kind=link.kind,
        link=link.name,
        size=n,
        bytes_per_s=ring,
        one_way_bytes_per_s=one_way,
        # The middle of a line, or two opposite cuts of a ring, are crossed each way
        # by floor(n^2 / 4) messages of 1/n of a device's bytes.
        all_to_all_bytes_per_s=ring * n / (n * n // 4),
        latency_s=link.latency_s * piece.stride,
        hops=n // 2 if wrap else n - 1,
        rings=1,
        wrap=wrap,
    )


def _switch_all_to_all(one_way_bytes_per_s: float, n: int) -> float:
    return one_way_bytes_per_s * n / (n - 1)


def _join(outer: Level, inner: Level) -> Level:
    """One level of two over like links: torus rings add up, switch ports do not."""
    torus, n = inner.kind == "torus", outer.size * inner.size
    one_way = min(outer.one_way_bytes_per_s, inner.one_way_bytes_per_s)
    spread = min(outer.all_to_all_bytes_per_s, inner.all_to_all_bytes_per_s)
    return Level(
        kind=inner.kind,
        link=inner.link,
        size=n,
        bytes_per_s=outer.bytes_per_s + inner.bytes_per_s if torus else one_way,
        one_way_bytes_per_s=one_way,
        all_to_all_bytes_per_s=spread if torus else _switch_all_to_all(one_way, n),
        latency_s=max(outer.latency_s, inner.latency_s),
        hops=outer.hops + inner.hops if torus else n - 1,
        rings=outer.rings + inner.rings if torus else 1,
        wrap=outer.wrap and inner.wrap,
    )
