"""Refusals: what was found, the numbers, and the nearest change that helps."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxpar.cost.memory import Memory
from jaxpar.errors import InfeasibleError, MeshError
from jaxpar.graph import OperatorGraph
from jaxpar.hardware import Topology
from jaxpar.remat_choice import Remat

if TYPE_CHECKING:
    from jaxpar.cost.problem import MeshProblem


def check_roles(graph: OperatorGraph, sizes: Mapping[str, int]) -> None:
    """Refuses an axis that its role lets split nothing.

    Raises:
        MeshError: names the axis, its size and the dims that it does not divide.
    """
    if sizes.get("pipeline", 1) > 1:
        raise _no_pipeline(graph, sizes["pipeline"])
    for role, what in (("sequence", "token"), ("expert", "expert")):
        size = sizes.get(role, 1)
        if size == 1:
            continue
        dims = _sizes_of(graph, what)
        if not any(n % size == 0 for n in dims):
            found = ", ".join(map(str, sorted(dims))) or "none"
            raise MeshError(
                f"axis {role!r} ({size}) divides no {what} dim of the model: they have "
                f"sizes {found}",
                hint=f"give {role!r} a size that divides one of them, or leave it out",
            )


def _sizes_of(graph: OperatorGraph, what: str) -> set[int]:
    """Sizes of the dims that a role may split, as far as they are activations'."""
    found: set[int] = set()
    for op in graph.operators:
        if op.parameter_only or (what == "token" and not op.heavy):
            continue
        for f, c in enumerate(op.classes):
            if getattr(graph.classes[c], what) and op.factors[f].size > 1:
                found.add(op.factors[f].size)
    return found


def _no_pipeline(graph: OperatorGraph, size: int) -> MeshError:
    layers = {len(leaf.paths) for leaf in graph.leaves if leaf.role == "param"}
    layers |= {leaf.shape[0] for leaf in graph.leaves if leaf.stacked}
    depth = max(layers, default=1)
    return MeshError(
        f"axis 'pipeline' ({size}): this version lays out no pipeline stages; the "
        f"model repeats a block {depth} times, for {size} stages",
        hint="use data, fsdp and tensor axes instead",
    )


def refuse_memory(
    graph: OperatorGraph,
    topology: Topology,
    memory: Memory,
    problem: "MeshProblem",
    remat: Remat,
) -> InfeasibleError:
    """The model does not fit: bytes by class, bytes available, what would fit."""
    limit = topology.memory_bytes
    classes = ", ".join(
        f"{name.removesuffix('_bytes')} {_human(size)}"
        for name, size in vars(memory).items()
        if size
    )
    need = math.ceil(memory.total_bytes)
    mesh = ", ".join(f"{a}={n}" for a, n in problem.mesh.sizes.items())
    return InfeasibleError(
        f"no layout fits {topology.name}: the smallest one found (mesh {mesh}) needs "
        f"{need} bytes ({_human(need)}) per device, {limit} bytes ({_human(limit)}) "
        f"are available; by class: {classes}",
        hint=_nearest(memory, limit, graph, topology, remat),
    )


def _nearest(
    memory: Memory,
    limit: float,
    graph: OperatorGraph,
    topology: Topology,
    remat: Remat,
) -> str:
    """The least change that would make the smallest layout fit."""
    at_rest = (
        memory.parameters_bytes
        + memory.gradients_bytes
        + memory.optimizer_bytes
        + memory.model_state_bytes
    )
    passing = memory.total_bytes - at_rest
    changes: list[str] = []
    if at_rest < limit and passing > 0:
        batch = int(graph.batch_size * (limit - at_rest) / passing)
        if 0 < batch < graph.batch_size:
            changes.append(f"a global batch of about {batch} (now {graph.batch_size})")
        if memory.residuals_bytes > passing / 2 and remat.level != "full":
            changes.append('rematerialised layers (remat="auto")')
    devices = math.ceil(topology.devices * memory.total_bytes / limit)
    changes.append(f"about {devices} devices of this kind (now {topology.devices})")
    changes.append(f"{_human(memory.total_bytes)} of memory per device")
    return "fits with " + ", or with ".join(changes)


def _human(size: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"
