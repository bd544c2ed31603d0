"""Topologies: by name, from a file, or of the devices at hand.

The packaged machines are data, one TOML file per chip family in `meshes/`. Names
give the family and the size of one slice; one dim more than the family has puts the
number of slices first: `cpu-8`, `tpu-v5e-4x4`, `tpu-v4-2x12x16x16` (two slices),
`dgx-a100-80g-64` (eight nodes of eight).
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jaxpar.errors import MeshError
from jaxpar.hardware import Chip, Family, Link, Topology
from jaxpar.hardware_toml import read_family, read_topology
from jaxpar.strict_toml import StrictTable

__all__ = [
    "Chip",
    "Link",
    "Topology",
    "get_topology",
    "load_topology",
    "physical_order",
    "topologies",
    "topology_of_devices",
]


def get_topology(name: str) -> Topology:
    """The packaged topology of a name.

    Raises:
        MeshError: if the family is unknown, or the size is none that it has.
    """
    match = re.fullmatch(r"(?P<family>.+)-(?P<dims>\d+(?:x\d+)*)", name)
    family = _families().get(match["family"] if match else name)
    if family is None:
        names = ", ".join(dict.fromkeys(f.name for f in _families().values()))
        raise MeshError(
            f"unknown topology {name!r}",
            hint=f"families: {names}; or load_topology(path) of a TOML file",
        )
    example = f"{family.name}-{family.examples[0]}"
    if match is None:
        raise MeshError(
            f"topology {name!r} lacks a size", hint=f"write it like {example}"
        )
    dims = tuple(int(size) for size in match["dims"].split("x"))
    if len(dims) not in (family.rank, family.rank + 1):
        raise MeshError(
            f"topology {name!r} has {len(dims)} dims; {family.name} takes "
            f"{family.rank}, or {family.rank + 1} with the number of slices first",
            hint=f"write it like {example}",
        )
    slices = dims[0] if len(dims) > family.rank else 1
    if slices < 1:
        raise MeshError(f"topology {name!r} has no slices", hint=f"like {example}")
    return family.topology(dims[-family.rank :], slices)


def topologies() -> tuple[Topology, ...]:
    """A few topologies of every packaged family, for listings."""
    return tuple(
        get_topology(f"{family.name}-{size}")
        for family in dict.fromkeys(_families().values())
        for size in family.examples
    )


def load_topology(path: str | Path) -> Topology:
    """Reads a topology from a TOML file of one's own.

    The file has a table `topology` (name, slices, shape, devices, and for each dim
    of the shape the name of its link and whether it wraps), `chip`, `links.NAME`, and
    `network` (between slices), with the keys of the packaged files.

    Raises:
        MeshError: if a key is missing, unknown, out of range or in an unknown unit,
            or if the shape does not multiply out to the devices; with the key's path.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise MeshError(
            f"cannot read topology file {path}: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise MeshError(
            f"topology file {path} is not UTF-8 text: byte {error.start} is no "
            "character",
            hint="save it as UTF-8",
        ) from error
    return read_topology(StrictTable.parse(text, path.name))


def physical_order(devices: Sequence[Any]) -> tuple[Any, ...]:
    """Devices in the order of a topology's positions: slices, then coordinates.

    Args:
        devices: JAX devices, or anything with their attributes.
    """

    def position(device: Any) -> tuple[Any, ...]:
        near = () if device.platform == "cpu" else (device.process_index,)
        if device.platform == "tpu":
            near = (*device.coords, getattr(device, "core_on_chip", 0))
        return (_slice_index(device), *near, device.id)

    return tuple(sorted(devices, key=position))


def topology_of_devices(devices: Sequence[Any], slices: int = 1) -> Topology:
    """The topology of JAX devices; position `i` is `physical_order(devices)[i]`.

    Args:
        devices: JAX devices, or anything with their attributes.
        slices: Equal groups that only the slow network joins; 1 takes what the
            devices say.

    Raises:
        MeshError: if the devices are of several or of unknown kinds, or do not make
            equal slices.
    """
    devices = physical_order(devices)
    kinds = sorted({(device.platform, device.device_kind) for device in devices})
    if len(kinds) != 1:
        found = ", ".join(kind for _, kind in kinds) or "no devices"
        raise MeshError(f"a topology needs devices of one kind, found {found}")
    ((platform, kind),) = kinds
    if platform == "cpu":
        topology = get_topology(f"cpu-{len(devices)}")
    else:
        family = _family_of(kind)
        topology = (_tpu_topology if platform == "tpu" else _gpu_topology)(
            devices, family
        )
    return topology.with_limits(slices=slices)


def _family_of(kind: str) -> Family:
    for family in _families().values():
        if kind in family.device_kinds:
            return family
    raise MeshError(
        f"no packaged topology describes devices of kind {kind!r}",
        hint="describe the machine in a TOML file and pass load_topology(path)",
    )


def _slice_index(device: Any) -> int:
    # Absent on CPU, and None on TPU topologies of one slice.
    return getattr(device, "slice_index", None) or 0


def _equal_groups(devices: Sequence[Any], key: Any, what: str) -> tuple[int, int]:
    """Number and size of the groups that a key makes, if the sizes are equal."""
    sizes = Counter(key(device) for device in devices)
    if len(set(sizes.values())) != 1:
        found = ", ".join(map(str, sizes.values()))
        raise MeshError(
            f"the {what} have {found} devices; a mesh needs equal ones",
            hint="leave devices out until they are equal",
        )
    return len(sizes), len(devices) // len(sizes)


def _tpu_topology(devices: Sequence[Any], family: Family) -> Topology:
    slices, count = _equal_groups(devices, _slice_index, "slices")
    parts = [devices[i * count : (i + 1) * count] for i in range(slices)]
    boxes = {_box(part, family) for part in parts}
    if len(boxes) == 1 and (box := boxes.pop()) is not None:
        return family.topology(box, slices)
    return Topology(
        name=f"{family.name} ({len(devices)} devices)",
        chip=family.chip,
        slices=slices,
        shape=(count,),
        links=(family.outer,),
        network=family.network,
        memory_bytes=family.chip.usable_bytes,
        note="the devices do not fill a box of the torus: priced as one open line",
    )


def _box(devices: Sequence[Any], family: Family) -> tuple[int, ...] | None:
    """Extent of the devices per torus dim, or None if they do not fill a box."""
    columns = list(zip(*(device.coords for device in devices), strict=True))
    extents = [max(column) - min(column) + 1 for column in columns]
    dims, rest = tuple(extents[: family.rank]), extents[family.rank :]
    places = {(*d.coords, getattr(d, "core_on_chip", 0)) for d in devices}
    full = math.prod(dims) * family.inner_size
    if any(size > 1 for size in rest) or not len(places) == len(devices) == full:
        return None
    return dims


def _gpu_topology(devices: Sequence[Any], family: Family) -> Topology:
    has_slices = any(_slice_index(device) for device in devices)
    nodes, count = _equal_groups(
        devices, _slice_index if has_slices else lambda d: d.process_index, "nodes"
    )
    inner = family.inner or family.outer
    one_each = nodes > 1 and count == 1 and len(devices) % family.inner_size == 0
    if (
        one_each
        or count == family.inner_size
        or (nodes == 1 and count < family.inner_size)
    ):
        note = f"assumed to be nodes of {family.inner_size}" if one_each else ""
        return replace(family.topology((len(devices),)), note=note)
    return Topology(
        name=f"{family.name} ({nodes} nodes of {count})",
        chip=family.chip,
        slices=1,
        shape=(nodes, count),
        links=(family.outer, inner),
        network=family.network,
        memory_bytes=family.chip.usable_bytes,
        note=f"nodes of {count} devices, where {family.inner_size} are usual",
    )


@functools.cache
def _families() -> dict[str, Family]:
    """All packaged families by name and alias, in the order of their files."""
    folder = files("jaxpar") / "meshes"
    found: dict[str, Family] = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            root = StrictTable.parse(file.read_text(encoding="utf-8"), file.name)
            family = read_family(root)
            found.update(dict.fromkeys((family.name, *family.aliases), family))
    return found
