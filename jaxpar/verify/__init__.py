"""Holds a plan against the program that the compiler makes of it."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxpar.api import apply_plan
from jaxpar.errors import MeshError, PlanError
from jaxpar.plan import Plan
from jaxpar.pure import named_leaves
from jaxpar.runtime import Sharded
from jaxpar.topology import get_topology
from jaxpar.verify.compare import Check, MemoryRow, Row, Total
from jaxpar.verify.cpu import check_on_cpu
from jaxpar.verify.tpu import check_on_tpu

__all__ = ["BACKENDS", "Check", "MemoryRow", "Row", "Total", "verify_plan"]

BACKENDS = ("cpu", "tpu")


def verify_plan(
    sharded_or_plan: Sharded | Plan,
    model: Any = None,
    optimizer: Any = None,
    loss: Any = None,
    batch: Any = None,
    *,
    backend: str = "cpu",
    tier: str = "full",
    topology: Any = None,
    **options: Any,
) -> Check:
    """Compiles a plan and compares every prediction with the program.

    Args:
        sharded_or_plan: From `auto_shard` or `apply_plan`; or a plan, which needs the
            model, optimizer, loss and batch as `apply_plan` does.
        model: As in `make_plan`, like the next three.
        optimizer: As in `make_plan`.
        loss: As in `make_plan`.
        batch: As in `make_plan`.
        backend: "cpu": simulated devices, as many as the mesh has. "tpu": the TPU
            compiler; no TPU is needed.
        tier: How far the TPU compiler goes: "partitioned" (collectives), "optimised"
            (memory), "full" (time).
        topology: For "tpu": of the plan if None.
        **options: init, wrt and mutable of `apply_plan`.

    Raises:
        PlanError: for an unknown backend or tier, or if the plan is of another model.
        MeshError: if there are too few devices, or the TPU compiler has no such chip.
    """
    if backend not in BACKENDS:
        raise PlanError(f"backend is {backend!r}", hint=f"use {' or '.join(BACKENDS)}")
    if isinstance(sharded_or_plan, Plan):
        mesh = _mesh(sharded_or_plan, backend)
        sharded = apply_plan(
            sharded_or_plan, model, optimizer, loss, batch, mesh, **options
        )
    else:
        sharded = sharded_or_plan
    plan, structs = sharded.plan, _batch(sharded)
    training = plan.predicted.memory.gradients_bytes > 0
    if backend == "cpu":
        return check_on_cpu(sharded, structs, training=training)
    where = topology or get_topology(plan.topology.name)
    return check_on_tpu(sharded, structs, where, training=training, tier=tier)


def _mesh(plan: Plan, backend: str) -> AbstractMesh | None:
    """The plan's own mesh: over devices, or over none for what is only exported."""
    if backend == "tpu":
        types = (AxisType.Auto,) * len(plan.mesh)
        return AbstractMesh(
            tuple(plan.mesh.values()), tuple(plan.mesh), axis_types=types
        )
    needed = math.prod(plan.mesh.values())
    if needed > jax.device_count():
        raise MeshError(
            f"the plan's mesh needs {needed} devices, there are {jax.device_count()}",
            hint="simulate them with XLA_FLAGS="
            f"--xla_force_host_platform_device_count={needed}",
        )
    return None


def _batch(sharded: Sharded) -> Any:
    """Structs in the structure of the batch."""
    leaves = named_leaves(sharded.batch_shardings)
    structs = [
        jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=sharding)
        for path, sharding in leaves.items()
        for found in [sharded.plan.batch[path]]
    ]
    return jax.tree.structure(sharded.batch_shardings).unflatten(structs)
