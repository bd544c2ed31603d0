"""What a machine is made of: chips, links, and how they are joined.

A topology is `slices` equal boxes of devices. A box has one or more physical dims,
each with its own link; the boxes are joined by a slow network. Device `i` of the
topology stands at the row-major position `i` of (slices, *shape).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxpar.errors import MeshError

_STAND_INS = {
    "float16": "bfloat16",
    "int8": "bfloat16",
    "uint8": "bfloat16",
    "int4": "int8",
    "uint4": "int8",
    "float4": "float8",
    "float8": "bfloat16",
}
"""The dtype whose peak counts where a chip lists none for a narrow dtype."""

_CUBE = 4
"""Chips along each edge of the cubes that optical switches join into a torus."""


@dataclass(frozen=True)
class Chip:
    """One device as JAX counts devices; on two-core chips that is one core.

    Attributes:
        name: For people.
        peak_flops_per_s: By dtype; dense matrix products at JAX's default precision.
        matmul_efficiency: Share of the peak that a large matrix product reaches.
        matmul_tile: A product's rows, columns and contraction are paid in multiples
            of these.
        overhead_s: Time of an operator that does nothing.
        hbm_bytes: Memory of the device.
        usable_bytes: What a program may have of it.
        hbm_bytes_per_s: Nominal memory bandwidth.
        hbm_efficiency: Share of it that a large copy reaches.
        layout_tile: Rows and columns: the last two dims of an array are padded in
            memory to multiples of these.
        reduce_scatter: Whether the compiler turns an all-reduce followed by a slice
            into a reduce-scatter.
        merges_partial_sums: Whether it adds partial sums before reducing them, so
            that two all-reduces become one.
        overlaps: Kinds of collectives of weights and gradients that it starts early,
            or waits for late, so that they run beside computation.
        source: Where the numbers come from.
    """

    name: str
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    matmul_efficiency: float
    matmul_tile: tuple[int, int, int]
    overhead_s: float
    hbm_bytes: int
    usable_bytes: int
    hbm_bytes_per_s: float
    hbm_efficiency: float
    layout_tile: tuple[int, int]
    reduce_scatter: bool
    merges_partial_sums: bool
    overlaps: tuple[str, ...]
    source: str

    def flops_per_s(self, dtype: str) -> float:
        """Peak for a dtype by name; wide and unlisted dtypes run as float32."""
        name = next((f for f in ("float8", "float4") if dtype.startswith(f)), dtype)
        while name not in self.peak_flops_per_s and name in _STAND_INS:
            name = _STAND_INS[name]
        return self.peak_flops_per_s.get(name, self.peak_flops_per_s["float32"])


@dataclass(frozen=True)
class Link:
    """What joins neighbours along one physical dim.

    Attributes:
        name: "ici", "nvlink", "infiniband", ...
        kind: "torus" (two neighbours, one link each), "switch" (every device
            reaches every other at full rate) or "network" (a switch between hosts).
        bytes_per_s: Nominal, one way, per device and link: a torus device has two
            such links along the dim, a switch or network device one.
        latency_s: Per message and hop.
        efficiency: Share of the nominal bandwidth that large collectives reach.
        wrap: Whether a torus dim closes to a ring.
        source: Where the numbers come from.
    """

    name: str
    kind: str
    bytes_per_s: float
    latency_s: float
    efficiency: float
    wrap: bool
    source: str

    @property
    def effective_bytes_per_s(self) -> float:
        """Bandwidth that large collectives reach, one way, per device and link."""
        return self.bytes_per_s * self.efficiency


@dataclass(frozen=True)
class Topology:
    """A machine: `slices` boxes of `shape` devices, joined by a slow network.

    Attributes:
        name: As `get_topology` takes it, where the machine has such a name.
        chip: What stands at every position.
        slices: Number of boxes.
        shape: Physical dims of one box, in devices.
        links: Per physical dim, its link.
        network: The link between boxes.
        memory_bytes: Limit per device.
        note: What had to be assumed about the machine, for people; often empty.
        family: The family that the machine was built from, if any.

    Raises:
        MeshError: if slices, shape, links or memory_bytes make no machine.
    """

    name: str
    chip: Chip
    slices: int
    shape: tuple[int, ...]
    links: tuple[Link, ...]
    network: Link
    memory_bytes: int
    note: str = ""
    family: "Family | None" = field(default=None, repr=False, compare=False)

    def __post_init__(self):
        if self.slices < 1 or not self.shape or min(self.shape) < 1:
            raise MeshError(
                f"topology {self.name}: {self.slices} slices of {self.shape} devices "
                "are no machine; every number must be at least 1"
            )
        if len(self.links) != len(self.shape):
            raise MeshError(
                f"topology {self.name}: {len(self.links)} links for "
                f"{len(self.shape)} physical dims; each dim has one link"
            )
        if self.memory_bytes < 1:
            raise MeshError(
                f"topology {self.name}: memory_bytes is {self.memory_bytes}; "
                "it must be positive"
            )

    @property
    def devices(self) -> int:
        """Number of devices, as JAX counts them."""
        return self.slices * math.prod(self.shape)

    def with_limits(
        self, memory_bytes: int | None = None, slices: int | None = None
    ) -> "Topology":
        """The same machine with another memory limit, or cut into slices.

        Args:
            memory_bytes: Limit per device; None keeps it.
            slices: Equal groups of devices that only the slow network joins. None
                and 1 keep what the machine has.

        Raises:
            MeshError: if the devices do not make that many equal slices.
        """
        topology = self
        if slices not in (None, 1, self.slices):
            topology = replace(self._cut(slices), memory_bytes=self.memory_bytes)
        if memory_bytes is not None:
            topology = replace(topology, memory_bytes=memory_bytes)
        return topology

    def _cut(self, slices: int) -> "Topology":
        if self.slices > 1:
            raise MeshError(
                f"topology {self.name} has {self.slices} slices, {slices} asked for",
                hint="leave slices out to take those of the topology",
            )
        if slices < 1 or self.devices % slices:
            raise MeshError(
                f"the {self.devices} devices of {self.name} do not make {slices} "
                "equal slices",
                hint=f"use a divisor of {self.devices}",
            )
        if self.family is not None:
            return self.family.topology(self.family.cut(self.shape, slices), slices)
        shape = cut_shape(self.shape, slices, self.name)
        return replace(
            self,
            name=f"{self.name} in {slices} slices",
            slices=slices,
            shape=shape,
            links=tuple(
                replace(link, wrap=link.wrap and new == old)
                for link, new, old in zip(self.links, shape, self.shape, strict=True)
            ),
        )


def cut_shape(shape: tuple[int, ...], slices: int, name: str) -> tuple[int, ...]:
    """Shape of one of `slices` equal parts, cut along the leading dims.

    Raises:
        MeshError: if the leading dims do not split so; names the topology.
    """
    rest, cut = slices, []
    for size in shape:
        part = math.gcd(size, rest)
        # A dim that is cut, but not used up, must be the last one to be cut:
        # otherwise a slice would not be one run of devices.
        if part != min(size, rest):
            break
        cut.append(size // part)
        rest //= part
    if rest != 1 or len(cut) != len(shape):
        box = "x".join(map(str, shape))
        raise MeshError(
            f"{name}: a box of {box} does not cut into {slices} equal slices along "
            "its leading dims",
            hint="use a number of slices that divides the first dim",
        )
    return tuple(cut)


@dataclass(frozen=True)
class Family:
    """Machines of one chip: `tpu-v5e`, `dgx-h100`, `cpu`.

    Attributes:
        name: What topology names start with.
        aliases: Other spellings of it.
        device_kinds: `device_kind` of the JAX devices that it describes.
        chip: Its chip.
        rank: How many dims a topology name gives (one more: slices come first).
        counts: "chips" or "devices": what those dims count.
        outer: Link along the named dims.
        inner: Link among the `inner_size` devices of a chip or node, if any.
        inner_size: Devices of one chip or node.
        network: Link between slices.
        pod: The largest slice, or () for no limit.
        wrap: "pod": a dim is a ring where it has the length of the pod's;
            "cubes": all are, where the slice is made of whole 4x4x4 cubes; "never".
        examples: Sizes worth listing.
    """

    name: str
    aliases: tuple[str, ...]
    device_kinds: tuple[str, ...]
    chip: Chip
    rank: int
    counts: str
    outer: Link
    inner: Link | None
    inner_size: int
    network: Link
    pod: tuple[int, ...]
    wrap: str
    examples: tuple[str, ...]

    def topology(self, dims: tuple[int, ...], slices: int = 1) -> Topology:
        """The machine of `slices` slices of these dims.

        Raises:
            MeshError: if a slice is larger than a pod, or not whole nodes.
        """
        size = "x".join(map(str, dims if slices == 1 else (slices, *dims)))
        name = f"{self.name}-{size}"
        self._check(name, dims)
        outer = tuple(replace(self.outer, wrap=wrap) for wrap in self._wraps(dims))
        inner = () if self.inner is None else (self.inner,)
        if self.inner is None:
            shape, links = dims, outer
        elif self.counts == "chips":
            shape, links = (*dims, self.inner_size), outer + inner
        elif dims[0] <= self.inner_size:
            shape, links = dims, inner
        else:
            shape = (dims[0] // self.inner_size, self.inner_size)
            links = outer + inner
        return Topology(
            name=name,
            chip=self.chip,
            slices=slices,
            shape=shape,
            links=links,
            network=self.network,
            memory_bytes=self.chip.usable_bytes,
            family=self,
        )

    def cut(self, shape: tuple[int, ...], slices: int) -> tuple[int, ...]:
        """The dims, as names give them, of one of `slices` parts of a shape."""
        if self.counts == "devices":
            return (math.prod(shape) // slices,)
        return cut_shape(shape[: self.rank], slices, self.name)

    def _check(self, name: str, dims: tuple[int, ...]) -> None:
        if min(dims) < 1:
            raise MeshError(f"topology {name}: every dim must be at least 1")
        fits = zip(sorted(dims), sorted(self.pod), strict=False)
        if any(size > most for size, most in fits):
            pod = "x".join(map(str, self.pod))
            raise MeshError(
                f"topology {name}: a slice is larger than the pod of {pod}",
                hint=f"join slices by putting their number first: {self.name}-2x{pod}",
            )
        if self.counts == "devices" and self.inner is not None:
            node = self.inner_size
            if dims[0] > node and dims[0] % node:
                raise MeshError(
                    f"topology {name}: {dims[0]} devices are not whole nodes of {node}",
                    hint=f"use at most {node} or a multiple of {node}",
                )

    def _wraps(self, dims: tuple[int, ...]) -> tuple[bool, ...]:
        if self.wrap == "cubes":
            return (all(size % _CUBE == 0 for size in dims),) * len(dims)
        if self.wrap == "pod":
            return tuple(
                size == full for size, full in zip(dims, self.pod, strict=True)
            )
        return (False,) * len(dims)
