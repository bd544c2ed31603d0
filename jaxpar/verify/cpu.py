"""Checks a plan by compiling it for simulated CPU devices."""

import tempfile
import time
from pathlib import Path
from typing import Any

from jaxpar.hlo.collectives import collectives
from jaxpar.hlo.dump import compiled_and_partitioned
from jaxpar.hlo.memory import memory_of
from jaxpar.runtime import Sharded
from jaxpar.verify.compare import Check, collective_rows, memory_rows


def check_on_cpu(sharded: Sharded, batch: Any, *, training: bool) -> Check:
    """Compiles the step for the devices that it was built for.

    Collectives are read right after the partitioner: later the CPU compiler turns
    bfloat16 sums into float32 ones, which no other machine does. There sums over two
    dims are still two, which other compilers fold.
    """
    plan, started = sharded.plan, time.perf_counter()
    function = sharded.step if training else sharded.apply
    lowered = function.lower(sharded.abstract_state, batch)
    with tempfile.TemporaryDirectory() as folder:
        compiled, text = compiled_and_partitioned(lowered, Path(folder))
    found = collectives(text, folds=True) if text else ()
    return Check(
        backend="cpu",
        stage="after the partitioner",
        rows=collective_rows(plan.collectives, found, plan.mesh, scatters=False),
        memory=memory_rows(plan.predicted.memory, memory_of(compiled)),
        available_bytes=plan.predicted.memory.limit_bytes,
        predicted_step_s=plan.predicted.step_s,
        seconds=time.perf_counter() - started,
    )
