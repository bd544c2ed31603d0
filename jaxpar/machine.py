"""What `mesh=` means: the topology, the axis sizes, and the devices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxpar.errors import MeshError
from jaxpar.hardware import Topology
from jaxpar.mesh import device_order, logical_mesh
from jaxpar.topology import get_topology, physical_order, topology_of_devices


@dataclass(frozen=True)
class Target:
    """Where a model is to run.

    Attributes:
        topology: The machine, with its memory limit.
        sizes: Axis sizes, or None where they are searched.
        devices: In the topology's order; None where there are none, only a name.
        mesh: The user's own mesh, whose device order is kept.
    """

    topology: Topology
    sizes: Mapping[str, int] | None
    devices: tuple[Any, ...] | None
    mesh: Mesh | None = None


@dataclass(frozen=True)
class FixedMesh:
    """Axis sizes on a machine that need not be there."""

    topology: Topology
    sizes: Mapping[str, int]


def on_topology(topology: Topology, sizes: Mapping[str, int]) -> FixedMesh:
    """What `mesh=` takes for given axis sizes on a named machine."""
    return FixedMesh(topology, _sizes(sizes))


def target(mesh: Any, *, slices: int = 1, memory_bytes: int | None = None) -> Target:
    """Reads `mesh=` as users write it.

    Args:
        mesh: None, a jax Mesh, axis sizes, a topology's name, or a Topology.
        slices: Equal groups of devices that only the slow network joins.
        memory_bytes: Limit per device; None takes the topology's.

    Raises:
        MeshError: if it is none of these, or there are not enough devices.
    """
    if isinstance(mesh, FixedMesh):
        topology = mesh.topology.with_limits(memory_bytes, slices)
        return Target(topology, mesh.sizes, None)
    if isinstance(mesh, str | Topology):
        topology = get_topology(mesh) if isinstance(mesh, str) else mesh
        return Target(topology.with_limits(memory_bytes, slices), None, None)
    if isinstance(mesh, Mesh):
        devices = tuple(mesh.devices.flat)
        sizes = {str(a): n for a, n in mesh.shape.items()}
    elif mesh is None or isinstance(mesh, Mapping):
        sizes = None if mesh is None else _sizes(mesh)
        devices = _devices(sizes)
    else:
        raise MeshError(
            f"mesh is {type(mesh).__name__}",
            hint='pass None, a jax Mesh, {"data": 2, "tensor": 4}, a topology name '
            "or a Topology",
        )
    ordered = physical_order(devices)
    topology = topology_of_devices(ordered, slices).with_limits(memory_bytes)
    return Target(topology, sizes, ordered, mesh if isinstance(mesh, Mesh) else None)


def _sizes(mesh: Mapping[Any, Any]) -> dict[str, int]:
    for axis, size in mesh.items():
        if not isinstance(axis, str) or not isinstance(size, int) or size < 1:
            raise MeshError(
                f"mesh axis {axis!r} has size {size!r}",
                hint="map axis names to positive integers",
            )
    return dict(mesh) or {"data": 1}


def _devices(sizes: Mapping[str, int] | None) -> Sequence[Any]:
    present = jax.devices()
    if sizes is None:
        return present
    needed = math.prod(sizes.values())
    if needed > len(present):
        given = ", ".join(f"{a}={n}" for a, n in sizes.items())
        raise MeshError(
            f"mesh {given} needs {needed} devices, there are {len(present)}",
            hint=f"choose sizes that multiply out to at most {len(present)}; simulate "
            "more with XLA_FLAGS=--xla_force_host_platform_device_count=N",
        )
    return present[:needed]


def jax_mesh(where: Target, sizes: Mapping[str, int]) -> Mesh:
    """The jax Mesh of a plan: axes Auto, devices placed along the links.

    Raises:
        MeshError: if the devices are not there.
    """
    types = (AxisType.Auto,) * len(sizes)
    if where.mesh is not None:
        return Mesh(where.mesh.devices, tuple(sizes), axis_types=types)
    needed = math.prod(sizes.values())
    devices = where.devices or tuple(physical_order(jax.devices())[:needed])
    if len(devices) < needed:
        given = ", ".join(f"{a}={n}" for a, n in sizes.items())
        raise MeshError(
            f"the plan's mesh {given} needs {needed} devices, there are {len(devices)}",
            hint="make_plan needs no devices; auto_shard and apply_plan do",
        )
    order = device_order(logical_mesh(where.topology, sizes))
    grid = np.empty(order.shape, dtype=object)
    for place, position in np.ndenumerate(order):
        grid[place] = devices[position]
    return Mesh(grid, tuple(sizes), axis_types=types)
