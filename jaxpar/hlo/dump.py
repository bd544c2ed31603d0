"""Text of a program on its way through the compiler."""

import tempfile
from pathlib import Path
from typing import Any

_PARTITIONED = "*.after_*spmd-partitioning.*.txt"


def partitioned_text(lowered: Any) -> str:
    """HLO right after the SPMD partitioner, of a `jax.stages.Lowered`.

    Here collectives still have the types of the program, also on CPU. Compiles the
    whole program, since JAX has no way to stop at this stage.

    Raises:
        ValueError: if the backend wrote no such text: it runs on one device.
    """
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(
            compiler_options={
                "xla_dump_to": folder,
                "xla_dump_hlo_as_text": True,
                "xla_dump_hlo_pass_re": "spmd|partition",
            }
        )
        found = sorted(Path(folder).glob(_PARTITIONED))
        if not found:
            raise ValueError("the program was not partitioned: it uses one device")
        return found[-1].read_text(encoding="utf-8")
