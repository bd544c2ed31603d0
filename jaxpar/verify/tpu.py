"""Checks a plan by compiling it for the TPUs that it was made for, with none here."""

from typing import Any

from jaxpar.aot.process import compile_program, default_cache
from jaxpar.aot.program import program_of
from jaxpar.aot.reading import memory, out_of_memory, step_time
from jaxpar.hardware import Topology
from jaxpar.hlo.collectives import collectives
from jaxpar.runtime import Sharded
from jaxpar.verify.compare import Check, collective_rows, memory_rows


def check_on_tpu(
    sharded: Sharded,
    batch: Any,
    topology: Topology,
    *,
    training: bool,
    tier: str = "full",
) -> Check:
    """Compiles the step for a TPU topology, as far as the tier asks.

    Collectives are read from the furthest program that there is: the optimised one
    holds what will run, with fused reduce-scatters and asynchronous pairs.

    Raises:
        PlanError: if the TPU compiler is not installed or fails.
        MeshError: if it does not know the chip.
    """
    plan = sharded.plan
    program = program_of(sharded, batch, training=training)
    made = compile_program(
        program,
        topology,
        plan.mesh,
        tier=tier,
        cache=default_cache(),
    )
    refused = out_of_memory(made)
    # A small program may be optimised before it is stopped: the tier decides, so that
    # a fresh compile and a cached one show the same.
    optimised = tier != "partitioned" and "optimised" in made.texts
    stage = "optimised" if optimised else "partitioned"
    found = collectives(made.texts[stage]) if stage in made.texts else ()
    cycles = tier == "full" and not refused
    return Check(
        backend="tpu",
        stage=stage,
        rows=collective_rows(
            plan.collectives, found, plan.mesh, scatters=stage == "optimised"
        ),
        memory=memory_rows(plan.predicted.memory, memory(made))
        if "buffers" in made.texts and not refused
        else (),
        available_bytes=refused.available_bytes if refused else topology.memory_bytes,
        needed_bytes=refused.needed_bytes if refused else None,
        predicted_step_s=plan.predicted.step_s,
        compiled_step_s=step_time(made, topology, plan.mesh).step_s if cycles else None,
        seconds=made.seconds,
    )
