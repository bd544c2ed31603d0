"""Text of a program on its way through the compiler."""

import tempfile
from pathlib import Path
from typing import Any

_PARTITIONED = "*.after_*spmd-partitioning.*.txt"


def compiled_and_partitioned(lowered: Any, folder: Path) -> tuple[Any, str | None]:
    """The compiled program of a `jax.stages.Lowered`, and HLO after the partitioner.

    In that text collectives still have the types of the program, also on CPU.

    Args:
        lowered: What is to be compiled.
        folder: Empty; the compiler writes there.

    Returns:
        A `jax.stages.Compiled`, and the text; None if it runs on one device.
    """
    compiled = lowered.compile(
        compiler_options={
            "xla_dump_to": str(folder),
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_pass_re": "spmd|partition",
        }
    )
    found = sorted(folder.glob(_PARTITIONED))
    return compiled, found[-1].read_text(encoding="utf-8") if found else None


def partitioned_text(lowered: Any) -> str:
    """HLO right after the SPMD partitioner, of a `jax.stages.Lowered`.

    Compiles the whole program, since JAX has no way to stop at this stage.

    Raises:
        ValueError: if the backend wrote no such text: it runs on one device.
    """
    with tempfile.TemporaryDirectory() as folder:
        _, text = compiled_and_partitioned(lowered, Path(folder))
    if text is None:
        raise ValueError("the program was not partitioned: it uses one device")
    return text
