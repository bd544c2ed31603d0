"""The process that compiles: `python -m jaxpar.aot.worker JOB`.

The TPU compiler lives in a library that may be loaded once per process, prints much,
and cannot be stopped half-way: a process of its own can.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # else it asks the network which TPU this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process fails at once
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any will do; unset, it complains
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def main(folder: Path) -> None:
    """Compiles `job.json` and `program.bin` of a folder; writes `done.json` there."""
    os.environ.update(ENVIRONMENT)
    job = json.loads((folder / "job.json").read_text("utf-8"))
    try:
        answer = _compiled(job, (folder / "program.bin").read_bytes(), folder / "dump")
    except Exception as problem:  # the parent turns the text into an error of its own
        answer = {"error": f"{type(problem).__name__}: {problem}"}
    unfinished = folder / "done.part"
    unfinished.write_text(json.dumps(answer), encoding="utf-8")
    unfinished.rename(folder / "done.json")


def _compiled(job: dict[str, Any], code: bytes, dump: Path) -> dict[str, Any]:
    import jax  # noqa: PLC0415 (after the environment is set)
    from jax import export  # noqa: PLC0415

    from jaxpar.hlo.memory import memory_of  # noqa: PLC0415

    exported = export.deserialize(bytearray(code))
    mesh = _mesh(job)
    shardings = exported.in_shardings_jax(mesh)
    arguments = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(exported.in_avals, shardings, strict=True)
    ]
    results = exported.out_shardings_jax(mesh)
    function = jax.jit(
        exported.call,
        out_shardings=exported.out_tree.unflatten(results),
        donate_argnums=tuple(range(job["donated"])),
    )
    lowered = function.trace(*arguments).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile(
        compiler_options={
            "xla_dump_to": str(dump),
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_pass_re": "spmd",
        }
    )
    return asdict(memory_of(compiled))


def _mesh(job: dict[str, Any]) -> Any:
    import numpy as np  # noqa: PLC0415
    from jax.experimental import topologies  # noqa: PLC0415
    from jax.sharding import AxisType, Mesh  # noqa: PLC0415

    from jaxpar.topology import physical_order  # noqa: PLC0415

    found = topologies.get_topology_desc(**job["topology"])
    devices = physical_order(found.devices)
    grid = np.empty(len(job["order"]), dtype=object)
    grid[:] = [devices[position] for position in job["order"]]
    types = (AxisType.Auto,) * len(job["mesh"])
    shape = tuple(job["mesh"].values())
    return Mesh(grid.reshape(shape), tuple(job["mesh"]), axis_types=types)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
