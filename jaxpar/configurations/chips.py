"""Constants of each chip's kernels, one set per chip, each with its source."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxpar.configurations.kernels import Kernels
from jaxpar.errors import MeshError
from jaxpar.hardware import Topology

_NVIDIA = {
    # Tiles of cuBLAS and CUTLASS; smaller ones move more bytes per FLOP.
    "tiles": ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.75)),
    "align": 8,
    "misaligned": 0.5,
    "flash_efficiency": 0.6,
    "pointwise": 1.0,
    "gap_s": 2.5e-6,
    "dispatch_s": 10e-6,
    "prunes": False,
    "hidden": 0.9,
}
_A100 = _NVIDIA | {
    "units": 108,
    "matmul_efficiency": 0.80,
    "hbm_efficiency": 0.75,
    "fill": 192.0,
    "source": "chosen on 2205.05198 Table 5: matmul_efficiency, hbm_efficiency and "
    "fill, on a coarse grid; tiles, alignment, waves: NVIDIA Matrix Multiplication "
    "Background guide; fused attention: Dao 2023 (up to 0.73 of peak forward); gap: "
    "stas00/ml-engineering; dispatch: order of magnitude of an eager PyTorch "
    "operator; hidden: assumed",
}
_H100 = _A100 | {
    "units": 132,
    "matmul_efficiency": 0.74,
    "flash_efficiency": 0.35,
    "source": "as A100, whose matmul_efficiency is scaled by the best products of both "
    "(0.803 and 0.869 of peak, stas00/ml-engineering compute/accelerator); units: "
    "data sheet; fused attention: FlashAttention-2 reaches 0.35 (Shah et al. 2024)",
}
_B200 = _H100 | {
    "units": 148,
    "matmul_efficiency": 0.71,
    "source": "as H100; best product 0.776 of peak, same source; units: data sheet",
}
_TPU = {
    "units": 1,
    "tiles": ((8, 128, 1.0),),
    "fill": 0.0,
    "align": 1,
    "misaligned": 1.0,
    "matmul_efficiency": 0.80,
    "hbm_efficiency": 0.83,
    "flash_efficiency": 0.4,
    "pointwise": 0.2,
    "gap_s": 1e-6,
    "dispatch_s": 0.0,
    "prunes": True,
    "hidden": 0.9,
    "source": "chosen on MaxText's rows for v5e, 16B and 128B on one slice: "
    "matmul_efficiency, pointwise and flash_efficiency, on a coarse grid; used for "
    "every TPU; hbm_efficiency: best copies of v6e (AI-Hypercomputer/tpu-recipes "
    "microbenchmarks); hidden: assumed; padding to the 8 x 128 registers",
}

KERNELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dgx-a100-80g": _A100,
        "dgx-a100-40g": _A100,
        "dgx-h100": _H100,
        "dgx-h200": _H100,
        "dgx-b200": _B200,
        "tpu-v3": _TPU,
        "tpu-v4": _TPU,
        "tpu-v5e": _TPU,
        "tpu-v5p": _TPU,
        "tpu-v6e": _TPU,
        "tpu7x": _TPU,
    }
)
"""By family of topologies, the fields of `Kernels` but its chip."""


def kernels(topology: Topology) -> Kernels:
    """The kernels of a topology's chip.

    Raises:
        MeshError: if no table describes the family of the topology.
    """
    family = topology.family.name if topology.family else topology.name
    if family not in KERNELS:
        raise MeshError(
            f"the kernels of {family!r} are not known",
            hint=f"known are {', '.join(KERNELS)}",
        )
    return Kernels(chip=topology.chip, **KERNELS[family])
