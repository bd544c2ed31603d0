"""The simulated timeline against the TPU compiler's own schedule.

    python benchmarks/timeline.py [--case fsdp] [--form scanned]

A small decoder on eight TPU v5e that need not be there (pip install '.[tpu]').
"compiler" plays its scheduled program: cycles of its fusions at the chip's clock, and
collectives, of which it says no cycles, priced by the same formulas as the plan's. So
what differs is what is computed, what is sent, and what runs beside what. "sum" is the
plan's time with nothing overlapping.
"""

import argparse
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import jaxpar
from jaxpar.aot.process import compile_program, default_cache
from jaxpar.aot.program import program_of
from jaxpar.aot.reading import step_time
from jaxpar.machine import on_topology
from jaxpar.timeline import timeline_of
from jaxpar.topology import get_topology
from jaxpar.zoo import zoo

TOPOLOGY = "tpu-v5e-2x4"
CASES = {
    "fsdp": ({"fsdp": 8}, {"zero": 3}),
    "data x tensor": ({"data": 2, "tensor": 4}, {}),
}
FORMS = {"unrolled": False, "scanned": True}
SIZES = {
    "batch": 32,
    "seq": 1024,
    "layers": 4,
    "d_model": 1024,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 128,
    "d_ff": 4096,
    "vocab": 8192,
    "dtype": "bfloat16",
}
ROWS = ("computation", "communication", "exposed", "step")


def compare(case: str, form: str) -> dict[str, tuple[float, ...]]:
    """Seconds by part: of the sum, of the timeline, and of the compiler."""
    mesh, options = CASES[case]
    topology = get_topology(TOPOLOGY)
    given = zoo("gpt-tiny", scan=FORMS[form], **SIZES)
    subject = [given[key] for key in ("model", "optimizer", "loss", "batch")]
    plan = jaxpar.make_plan(*subject, on_topology(topology, mesh), **options)
    there = jax.sharding.AbstractMesh(
        tuple(plan.mesh.values()),
        tuple(plan.mesh),
        axis_types=(jax.sharding.AxisType.Auto,) * len(plan.mesh),
    )
    sharded = jaxpar.apply_plan(plan, *subject, there)
    program = program_of(sharded, _batch(sharded, given["batch"]), training=True)
    made = compile_program(
        program, topology, plan.mesh, tier="full", cache=default_cache()
    )
    compiled = step_time(made, topology, plan.mesh)
    beside, alone = timeline_of(plan), timeline_of(plan, overlap=False)
    exposed = compiled.synchronous_s + compiled.exposed_s
    sent = compiled.synchronous_s + compiled.asynchronous_s
    theirs = (compiled.compute_s, sent, exposed, compiled.step_s)
    ours = [
        (
            found.compute_s,
            sum(found.communication_s.values()),
            sum(found.exposed_s.values()),
            found.step_s,
        )
        for found in (alone, beside)
    ]
    return dict(zip(ROWS, zip(*ours, theirs, strict=True), strict=True))


def _batch(sharded: Any, batch: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        batch,
        sharded.batch_shardings,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--form", choices=FORMS)
    wanted = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    table = Table(title=f"milliseconds of one step, {TOPOLOGY}")
    for header in ("plan", "form", "part", "sum", "timeline", "compiler", "ratio"):
        table.add_column(header)
    for case in CASES:
        for form in FORMS:
            if wanted.case in (None, case) and wanted.form in (None, form):
                for part, (alone, ours, theirs) in compare(case, form).items():
                    table.add_row(
                        case,
                        form,
                        part,
                        *(f"{1e3 * seconds:.2f}" for seconds in (alone, ours, theirs)),
                        f"{ours / theirs:.2f}" if theirs else "",
                    )
    Console().print(table)


if __name__ == "__main__":
    main()
