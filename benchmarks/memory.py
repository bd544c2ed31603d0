"""Peak memory per device: what plans predict against what the compiler takes.

    python benchmarks/memory.py [--models tiny] [--plans data,zero-3] [--modes infer]

Every model is planned for forced layouts and compiled for eight simulated CPU devices.
A star marks totals outside of the band that `verify` allows.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console
from rich.table import Table

import jaxpar
from jaxpar.verify.compare import MEMORY_ABOVE, MEMORY_BELOW, MemoryRow
from jaxpar.zoo import zoo

MIB = 2**20
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data": ({"data": 8}, {}),
    "zero-1": ({"fsdp": 8}, {"zero": 1}),
    "zero-2": ({"fsdp": 8}, {"zero": 2}),
    "zero-3": ({"fsdp": 8}, {"zero": 3}),
    "tensor": ({"tensor": 4}, {}),
    "tensor x sequence": ({"tensor": 4, "sequence": 2}, {}),
    "data x tensor": ({"data": 2, "tensor": 4}, {}),
    "fsdp x tensor": ({"fsdp": 4, "tensor": 2}, {}),
    "zero-1 x tensor": ({"fsdp": 4, "tensor": 2}, {"zero": 1}),
    "data x fsdp": ({"data": 2, "fsdp": 4}, {}),
    "data x sequence": ({"data": 4, "sequence": 2}, {}),
    "data x fsdp x tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
}
LLAMA = {
    "kv_heads": 4,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "positions": "rope",
    "attention_bias": False,
    "mlp_bias": False,
    "tied": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"name": "gpt-tiny"},
    "scan": {"name": "gpt-tiny", "scan": True},
    "deep scan": {"name": "gpt-tiny", "scan": True, "layers": 6},
    "remat": {"name": "gpt-tiny", "remat": "full"},
    "scan remat": {"name": "gpt-tiny", "scan": True, "remat": "full"},
    "gated": {"name": "gpt-tiny", "layers": 2, **LLAMA},
    "gated scan": {"name": "gpt-tiny", "layers": 4, "scan": True, **LLAMA},
    "bfloat16": {"name": "gpt-tiny", "layers": 2, "dtype": "bfloat16"},
    "large vocabulary": {"name": "gpt-tiny", "layers": 2, "vocab": 8192},
    "small batch": {"name": "gpt-tiny", "layers": 2, "batch": 8, "seq": 16},
    "vit": {"name": "vit-tiny"},
    "linen": {"name": "gpt-tiny-linen"},
}


def rows(model: str, plan: str, mode: str) -> tuple[MemoryRow, ...]:
    """State, what lives in between, and the total, of one case."""
    sizes, options = PLANS[plan]
    given = zoo(**MODELS[model])
    if mode == "infer":
        given["optimizer"] = None
    sharded = jaxpar.auto_shard(**given, mesh=sizes, **options)
    return jaxpar.verify_plan(sharded).memory


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Model, plan and mode; stages 1 and 2 of ZeRO are of training alone."""
    for model in options.models.split(","):
        for plan in options.plans.split(","):
            for mode in options.modes.split(","):
                if mode == "train" or PLANS[plan][1].get("zero") not in (1, 2):
                    yield model, plan, mode


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--modes", default="train,infer")
    table = Table("model", "plan", "mode", "predicted", "compiled", "ratio", "state")
    ratios: list[float] = []
    for case in cases(parser.parse_args()):
        state, _, total = rows(*case)
        ratio = total.predicted_bytes / total.compiled_bytes
        ratios.append(ratio)
        table.add_row(
            *case,
            f"{total.predicted_bytes / MIB:.2f} MiB",
            f"{total.compiled_bytes / MIB:.2f} MiB",
            f"{ratio:.3f}{'' if _holds(ratio) else ' *'}",
            f"{state.predicted_bytes / state.compiled_bytes:.3f}",
        )
    outside = sum(not _holds(r) for r in ratios)
    console = Console()
    console.print(table)
    console.print(
        f"{min(ratios):.2f} to {max(ratios):.2f}; "
        f"{outside} of {len(ratios)} outside of the band"
    )


def _holds(ratio: float) -> bool:
    return 1 - MEMORY_BELOW <= ratio <= 1 + MEMORY_ABOVE


if __name__ == "__main__":
    main()
