"""Which devices talk to each other, and along which mesh axes.

XLA numbers the devices of a partitioned program by their place in the mesh that the
program was compiled for, row by row, whatever their own ids are.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from jaxpar.errors import MeshError

Groups = tuple[tuple[int, ...], ...]

_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTS = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"\breplica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"\breplica_groups=mesh\[([^\]]*)\]"
    r"(?:, *device_ids=\(((?:[^()]|\([^()]*\))*)\))? *\{([^}]*)\}"
)
_AXIS = re.compile(r"([^=,]+)=(\d+)")
_PART = re.compile(r"([^,:]+)(?::\((\d+)\)(\d+))?")
_NUMBER = re.compile(r"\d+")


def parse_groups(attributes: str, devices: int) -> Groups:
    """The groups of a collective, from the text of its attributes.

    XLA writes them as lists, as a reshaped and transposed range, or as axes of a
    mesh (which may be parts of axes). Source and target of a permutation are groups
    of two.

    Args:
        attributes: Of the instruction.
        devices: Of the program; they make one group where none is written.
    """
    if found := _PAIRS.search(attributes) or _LISTS.search(attributes):
        groups = tuple(
            tuple(map(int, _NUMBER.findall(group)))
            for group in re.findall(r"\{([\d,]+)\}", found[1])
        )
        return groups or (tuple(range(devices)),)
    if found := _IOTA.search(attributes):
        return _rows(_array(found[2]).reshape(_numbers(found[1])))
    if found := _MESH.search(attributes):
        return _mesh_groups(found[1], found[2], found[3])
    return (tuple(range(devices)),)


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> Groups:
    """Groups along whole axes or, written `axis:(before)size`, parts of them."""
    sizes = {name: int(size) for name, size in _AXIS.findall(mesh)}
    parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in _PART.findall(axes)
    ]
    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, whole in sizes.items():
        ends = ((start, start * size) for axis, start, size in parts if axis == name)
        cuts = sorted({1, whole}.union(*ends))
        for low, high in pairwise(cuts):
            place[name, low] = len(dims)
            dims.append(high // low)
    grouped = [place[name, start] for name, start, size in parts if size > 1]
    others = [i for i in range(len(dims)) if i not in grouped]
    total = math.prod(dims)
    ids = _array(device_ids) if device_ids else np.arange(total)
    in_group = math.prod(dims[i] for i in grouped)
    ids = ids.reshape(dims).transpose(others + grouped)
    return _rows(ids.reshape(total // in_group, in_group))


def _array(text: str) -> np.ndarray:
    """Device numbers: `[2,4]T(1,0)` is a range, reshaped and transposed."""
    if not text.startswith("["):
        return np.array(_numbers(text))
    dims, _, order = text.partition("T")
    shape = _numbers(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> list[int]:
    return [int(n) for n in _NUMBER.findall(text)]


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in ids.tolist())


def axes_crossed(
    groups: Groups,
    mesh_shape: Mapping[str, int],
    device_ids: Sequence[int] | None = None,
) -> tuple[str, ...]:
    """The axes along which members of one group lie apart, in mesh order.

    Args:
        groups: Numbers of devices.
        mesh_shape: Size of each axis, outermost first.
        device_ids: The device at each place of the mesh, row by row; None where
            devices are numbered by their place.

    Raises:
        MeshError: if a group names a device that the mesh lacks.
    """
    total = math.prod(mesh_shape.values())
    ids = range(total) if device_ids is None else device_ids
    place = {device: i for i, device in enumerate(ids)}
    strange = {device for group in groups for device in group} - place.keys()
    if strange:
        raise MeshError(
            f"device {min(strange)} of a replica group is not in mesh "
            f"{dict(mesh_shape)}",
            hint="pass the mesh for which the program was compiled",
        )
    crossed = np.zeros(len(mesh_shape), bool)
    for group in groups:
        places = [place[device] for device in group]
        where = np.array(np.unravel_index(places, tuple(mesh_shape.values())))
        crossed |= (where != where[:, :1]).any(axis=1)
    return tuple(axis for axis, hit in zip(mesh_shape, crossed, strict=True) if hit)


def axes_of(
    groups: Groups,
    mesh_shape: Mapping[str, int],
    device_ids: Sequence[int] | None = None,
) -> tuple[str, ...] | None:
    """The axes that the groups span, in mesh order; None if they span parts of axes.

    Same arguments and errors as `axes_crossed`.
    """
    axes = axes_crossed(groups, mesh_shape, device_ids)
    full = math.prod(mesh_shape[axis] for axis in axes)
    return axes if all(len(set(group)) == full for group in groups) else None
