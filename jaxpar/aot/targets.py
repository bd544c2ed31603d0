"""What the TPU compiler calls the topologies, and how fast their clocks run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import MeshError
from jaxpar.hardware import Topology


@dataclass(frozen=True)
class Generation:
    """One TPU generation, as the compiler knows it.

    Attributes:
        name: Of the compiler.
        flops_per_cycle: Of one JAX device, in bfloat16; with the chip's peak it gives
            the clock. From the cycles that the compiler gives matrix products of 4,096
            to 16,384, which are consistent with the public peaks.
        options: Of the topology, besides shape and wraparound.
    """

    name: str
    flops_per_cycle: int
    options: Mapping[str, Any]


GENERATIONS: Mapping[str, Generation] = {
    "TPU v3": Generation("v3", 65_536, {}),
    "TPU v4": Generation("v4", 262_144, {"chip_config_name": "megacore"}),
    "TPU v5e": Generation("v5e", 131_072, {}),
    "TPU v5p": Generation("v5p", 262_144, {}),
    "TPU v6e": Generation("v6e", 524_288, {}),
    "TPU7x": Generation("tpu7x", 524_288, {}),
}
"""By name of the chip."""

_COMPILER_RANK = 3
"""Wraparound is given for three dims, also where a slice has two."""


def generation_of(topology: Topology) -> Generation:
    """The generation of a topology.

    Raises:
        MeshError: if the TPU compiler has no such chip.
    """
    found = GENERATIONS.get(topology.chip.name)
    if found is None:
        raise MeshError(
            f"{topology.name} has chips of kind {topology.chip.name!r}, which the TPU "
            "compiler does not know",
            hint=f"it knows {', '.join(GENERATIONS)}; other machines: --backend cpu",
        )
    return found


def compiler_arguments(topology: Topology) -> dict[str, Any]:
    """Keyword arguments of `jax.experimental.topologies.get_topology_desc`.

    The compiler takes a slice without wraparound unless it is told.

    Raises:
        MeshError: if the TPU compiler has no such chip.
    """
    generation = generation_of(topology)
    torus = [
        (size, link)
        for size, link in zip(topology.shape, topology.links, strict=True)
        if link.kind == "torus"
    ]
    wrap = [link.wrap for _, link in torus]
    found: dict[str, Any] = {
        "platform": "tpu",
        "topology_name": f"{generation.name}:{'x'.join(str(n) for n, _ in torus)}",
        "wrap": (wrap + [False] * _COMPILER_RANK)[:_COMPILER_RANK],
        **generation.options,
    }
    if topology.slices > 1:
        found["num_slices"] = topology.slices
    return found


def clock_hz(topology: Topology) -> float:
    """Cycles per second of one device.

    Raises:
        MeshError: if the TPU compiler has no such chip.
    """
    peak = topology.chip.peak_flops_per_s["bfloat16"]
    return peak / generation_of(topology).flops_per_cycle
