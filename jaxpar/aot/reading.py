"""What the TPU compiler's dumps say: collectives, memory, time, and why it refused."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxpar.aot.process import Compilation
from jaxpar.aot.targets import clock_hz
from jaxpar.cost.rates import collective_price
from jaxpar.errors import PlanError
from jaxpar.hardware import Topology
from jaxpar.hlo.collectives import HloCollective, collectives
from jaxpar.hlo.cycles import CompiledTime, compiled_time
from jaxpar.hlo.memory import CompiledMemory
from jaxpar.mesh import LogicalMesh, logical_mesh
from jaxpar.sharding import Collective

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*)$", re.MULTILINE)
_SIZE = r"(\d+(?:\.\d+)?)([KMGT]?)"
_TOO_LARGE = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_PRICED = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


@dataclass(frozen=True)
class OutOfMemory:
    """The compiler's refusal of a program that does not fit.

    Attributes:
        needed_bytes: By its account; for temporaries, where it gave up early.
        available_bytes: Of one device.
    """

    needed_bytes: int
    available_bytes: int


def out_of_memory(compilation: Compilation) -> OutOfMemory | None:
    """Its bytes if the program did not fit; None if it compiled.

    Raises:
        PlanError: if it failed for another reason.
    """
    text = compilation.error
    if text is None:
        return None
    for pattern in _TOO_LARGE:
        if found := pattern.search(text):
            needed, unit, there, unit_there = found.groups()
            return OutOfMemory(
                round(float(needed) * _UNITS[unit]),
                round(float(there) * _UNITS[unit_there]),
            )
    raise PlanError(
        f"the TPU compiler refused the program: {text[:600]}",
        hint="the plan may need another layout; `--backend cpu` compiles it as well",
    )


def memory(compilation: Compilation) -> CompiledMemory:
    """Bytes per device of the optimised program.

    Raises:
        PlanError: if the compilation stopped before memory was assigned.
    """
    if compilation.memory is not None:
        return CompiledMemory(**compilation.memory)
    if "buffers" not in compilation.texts:
        raise PlanError(
            "the compilation stopped before memory was assigned",
            hint='ask for the tier "optimised" or "full"',
        )
    arguments = outputs = aliased = temporaries = 0
    for size, rest in _ALLOCATION.findall(compilation.texts["buffers"]):
        if ", color " in rest or "thread-local" in rest or "constant" in rest:
            continue  # on-chip memory, and what is counted with the code
        live_out = "maybe-live-out" in rest
        if ", parameter " in rest:
            arguments += int(size)
            aliased += int(size) * live_out
        elif live_out:
            outputs += int(size)
        else:
            temporaries += int(size)
    return CompiledMemory(arguments, outputs + aliased, aliased, temporaries, 0)


def step_time(
    compilation: Compilation, topology: Topology, mesh: Mapping[str, int]
) -> CompiledTime:
    """Seconds of one step: the compiler's cycles, and modelled collectives.

    Raises:
        PlanError: if the compilation stopped before cycles were known.
    """
    if "full" not in compilation.texts:
        raise PlanError(
            "the compilation stopped before cycles were known",
            hint='ask for the tier "full"',
        )
    prices = _Prices(logical_mesh(topology, mesh), dict(mesh))
    return compiled_time(
        compilation.texts["full"], clock_hz(topology), prices.seconds_of
    )


def compiled_collectives(compilation: Compilation) -> tuple[HloCollective, ...]:
    """Of the program right after the partitioner."""
    return collectives(compilation.texts["partitioned"])


@dataclass(frozen=True)
class _Prices:
    mesh: LogicalMesh
    sizes: Mapping[str, int]

    def seconds_of(self, found: HloCollective) -> float:
        """Seconds of one execution, by the same formulas as the plan's own."""
        kind = found.kind if found.kind in _PRICED else "all-to-all"
        axes = found.axes(self.sizes) or self._widest(found)
        price = collective_price(Collective(kind, axes, 1.0), self.mesh)
        return price.seconds(found.bytes)

    def _widest(self, found: HloCollective) -> tuple[str, ...]:
        """Where groups follow no axes: those of the slowest axis that is as large."""
        sizes = self.sizes
        wide = [a for a, n in sizes.items() if n >= found.group_size] or list(sizes)
        return (min(wide, key=lambda a: self.mesh.link(a).bytes_per_s),)
