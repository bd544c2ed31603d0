"""Logical meshes: named axes, laid over the physical links of a topology."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.axis_link import ACROSS_SLICES, AxisLink, Piece, axis_link, ring_level
from jaxpar.errors import MeshError
from jaxpar.hardware import Topology

_SLOW_NAMES = ("data", "pipeline")
"""Axes that may cross the slow network first: their messages are few and large."""


@dataclass(frozen=True)
class LogicalMesh:
    """Named axes over a topology.

    Attributes:
        axes: Names, outermost first.
        shape: Their sizes.
        links: What stands behind each axis.
        pieces: Per axis, the parts of physical dims that it runs over.
        topology: The machine.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    links: tuple[AxisLink, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    topology: Topology

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, in order."""
        return dict(zip(self.axes, self.shape, strict=True))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def slow_axis(self) -> str | None:
        """The axis that spans slices, if there are several."""
        for axis, pieces in zip(self.axes, self.pieces, strict=True):
            if any(piece.dim == ACROSS_SLICES for piece in pieces):
                return axis
        return None

    def link(self, axis: str) -> AxisLink:
        """What stands behind an axis."""
        return self.links[self.axes.index(axis)]


def logical_mesh(
    topology: Topology, sizes: Mapping[str, int], *, slow_axis: str | None = None
) -> LogicalMesh:
    """Lays axes over the physical dims of a topology.

    One axis spans the slices: the first named data or pipeline, else the first
    whose size is a multiple of them. Within a slice the last axis is placed first:
    on the devices of a chip or node, then on whole torus dims where its size is a
    product of them, else on parts of dims.

    Args:
        topology: The machine.
        sizes: Axis name to size, outermost first; they multiply out to the devices.
        slow_axis: The axis that is to span the slices instead.

    Raises:
        MeshError: if the sizes do not multiply out, or no axis can span the slices.
    """
    _check_sizes(topology, sizes)
    crossing = None
    if topology.slices > 1:
        names = [slow_axis] if slow_axis is not None else None
        crossing = _slow_axis(sizes, topology.slices, names)
        if crossing is None:
            raise _no_slow_axis(topology, sizes, slow_axis)
    free = _FreeDims(topology)
    pieces: dict[str, tuple[Piece, ...]] = {}
    for axis in reversed(list(sizes)):
        across = topology.slices if axis == crossing else 1
        taken = free.take(sizes[axis] // across)
        if axis == crossing:
            taken.append(Piece(ACROSS_SLICES, across, 1))
        pieces[axis] = tuple(sorted(taken, key=lambda piece: piece.dim))
    return LogicalMesh(
        axes=tuple(sizes),
        shape=tuple(sizes.values()),
        links=tuple(axis_link(topology, pieces[axis]) for axis in sizes),
        pieces=tuple(pieces[axis] for axis in sizes),
        topology=topology,
    )


def device_order(mesh: LogicalMesh) -> np.ndarray:
    """Positions of the topology's devices, in the shape of the mesh.

    Position // (devices / slices) is the slice; an axis that spans slices has them
    outermost. `physical_order(devices)` gives the device of each position.
    """
    parts = [
        (piece.dim, -piece.stride, piece.size, axis)
        for axis, pieces in enumerate(mesh.pieces)
        for piece in pieces
    ]
    parts.sort()
    grid = np.arange(mesh.devices).reshape([size for _, _, size, _ in parts])
    by_axis = sorted(range(len(parts)), key=lambda i: parts[i][3])
    return grid.transpose(by_axis).reshape(mesh.shape)


def factorizations(
    n_devices: int,
    axes: Sequence[str],
    slices: int = 1,
    at_most: Mapping[str, int] | None = None,
) -> list[dict[str, int]]:
    """All ways to write the device count as a product of axis sizes.

    Args:
        n_devices: Number of devices.
        axes: Names of the axes, outermost first; sizes of 1 are allowed.
        slices: Groups that only the slow network joins: an axis named data or
            pipeline, or any axis where neither is among the axes, must be a
            multiple of them.
        at_most: Largest size of some axes.

    Returns:
        Axis name to size, in the order of `axes`; sorted by sizes.

    Raises:
        MeshError: if the devices do not make equal slices, or names repeat.
    """
    limits = dict(at_most or {})
    if len(set(axes)) != len(axes) or not set(limits) <= set(axes):
        raise MeshError(
            f"axes {tuple(axes)} with limits {limits}: names must be distinct, "
            "and limits name axes"
        )
    if n_devices < 1 or slices < 1 or n_devices % slices:
        raise MeshError(f"{n_devices} devices do not make {slices} equal slices")
    found = (
        dict(zip(axes, sizes, strict=True))
        for sizes in _products(n_devices, [limits.get(a, n_devices) for a in axes])
    )
    names = [name for name in _SLOW_NAMES if name in axes] or list(axes)
    return [
        sizes
        for sizes in found
        if slices == 1 or _slow_axis(sizes, slices, names) is not None
    ]


def _products(n: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Tuples of divisors, each within its limit, that multiply out to n."""
    if not limits:
        if n == 1:
            yield ()
        return
    if len(limits) == 1:
        if n <= limits[0]:
            yield (n,)
        return
    for size in _divisors(n):
        if size > limits[0]:
            return
        for rest in _products(n // size, limits[1:]):
            yield (size, *rest)


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def _slow_axis(
    sizes: Mapping[str, int], slices: int, names: Sequence[str] | None = None
) -> str | None:
    """The first axis that can span the slices, by default data or pipeline first."""
    if names is None:
        named = [axis for axis in sizes if axis in _SLOW_NAMES]
        names = [*named, *sizes]
    fits = (axis for axis in names if sizes.get(axis, 1) % slices == 0)
    return next(fits, None)


def _check_sizes(topology: Topology, sizes: Mapping[str, int]) -> None:
    given = ", ".join(f"{axis}={size}" for axis, size in sizes.items()) or "no axes"
    if any(size < 1 for size in sizes.values()):
        raise MeshError(f"mesh {given}: every axis must have a size of at least 1")
    needed = math.prod(sizes.values())
    if needed != topology.devices:
        raise MeshError(
            f"mesh {given} needs {needed} devices, but {topology.name} has "
            f"{topology.devices}",
            hint=f"choose sizes that multiply out to {topology.devices}",
        )


def _no_slow_axis(
    topology: Topology, sizes: Mapping[str, int], wanted: str | None
) -> MeshError:
    given = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    which = "no axis" if wanted is None else f"axis {wanted!r}"
    verb = "has" if wanted is None else "does not have"
    return MeshError(
        f"mesh {given} over the {topology.slices} slices of {topology.name}: {which} "
        f"{verb} a size that is a multiple of {topology.slices}, so none can span "
        "the slices",
        hint=f"make data (or pipeline) a multiple of {topology.slices}",
    )


class _FreeDims:
    """What is left of the physical dims while axes are placed, innermost first."""

    def __init__(self, topology: Topology):
        self._topology = topology
        self._left = list(topology.shape)

    def take(self, size: int) -> list[Piece]:
        """Parts of dims whose sizes multiply out to `size`.

        Always succeeds while the sizes asked for multiply out to the shape: every
        dim gives all the prime factors that it shares with what is still needed.
        """
        taken = []
        inner = [d for d in self._dims() if self._topology.links[d].kind == "switch"]
        for dim in reversed(inner):
            size = self._take(dim, size, taken)
        for dim in self._whole(size) or self._by_use(size):
            size = self._take(dim, size, taken)
        return taken

    def _dims(self) -> list[int]:
        return [dim for dim, left in enumerate(self._left) if left > 1]

    def _take(self, dim: int, size: int, taken: list[Piece]) -> int:
        part = math.gcd(size, self._left[dim])
        if part > 1:
            stride = self._topology.shape[dim] // self._left[dim]
            taken.append(Piece(dim, part, stride))
            self._left[dim] //= part
        return size // part

    def _whole(self, size: int) -> tuple[int, ...]:
        """The fastest dims, the last of equals, that fit without being cut."""
        dims = self._dims()[::-1]
        fits = [
            some
            for count in range(1, len(dims) + 1)
            for some in itertools.combinations(dims, count)
            if math.prod(self._left[dim] for dim in some) == size
        ]
        return max(fits, key=self._speed, default=())

    def _speed(self, dims: tuple[int, ...]) -> float:
        pieces = tuple(
            Piece(dim, self._left[dim], self._topology.shape[dim] // self._left[dim])
            for dim in dims
        )
        return sum(ring_level(self._topology, piece).bytes_per_s for piece in pieces)

    def _by_use(self, size: int) -> list[int]:
        """Dims that the size uses up first, long ones first, so that few are cut."""
        left = self._left
        return sorted(self._dims(), key=lambda d: (size % left[d] != 0, -left[d], -d))
