"""Predicted against compiled: collectives one by one, and memory."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from jaxpar.hlo.collectives import HloCollective
from jaxpar.hlo.memory import CompiledMemory
from jaxpar.plan import CollectivePlan, MemoryPrediction

BYTES_SLACK = 1e-3
"""Share of all bytes sent by which one kind of collective may differ."""
MEMORY_BELOW, MEMORY_ABOVE = 0.02, 0.10
"""How far the predicted memory may be below and above the compiled program's."""


@dataclass(frozen=True)
class Row:
    """Collectives of one kind, over the same axes, of the same size.

    Attributes:
        kind: As compiled programs call it.
        axes: In mesh order; None where the groups follow no axes.
        bytes: Per device and execution.
        predicted: Executions in one step, by the plan.
        compiled: Executions in one step, by the program.
    """

    kind: str
    axes: tuple[str, ...] | None
    bytes: int
    predicted: int
    compiled: int


@dataclass(frozen=True)
class Total:
    """All collectives of one kind over the same axes, in bytes of one step."""

    kind: str
    axes: tuple[str, ...] | None
    predicted_bytes: int
    compiled_bytes: int


@dataclass(frozen=True)
class MemoryRow:
    """One class of memory, in bytes per device."""

    name: str
    predicted_bytes: int
    compiled_bytes: int


@dataclass(frozen=True)
class Check:
    """A plan held against the program that the compiler made of it.

    Attributes:
        backend: "cpu" or "tpu".
        stage: Of the compiler, at which collectives were read.
        rows: Collectives, largest first.
        memory: State and batch, what lives in between, and all together; () where
            the compiler was stopped before.
        available_bytes: Of one device, by the compiler's own account if it has one.
        needed_bytes: Where the compiler refused the program: what it asked for.
        predicted_step_s: By the plan.
        compiled_step_s: From the compiler's cycles and modelled collectives; None
            where there are none.
        seconds: The compilation took.
    """

    backend: str
    stage: str
    rows: tuple[Row, ...]
    memory: tuple[MemoryRow, ...]
    available_bytes: int
    predicted_step_s: float
    needed_bytes: int | None = None
    compiled_step_s: float | None = None
    seconds: float = 0.0

    def totals(self) -> tuple[Total, ...]:
        """Bytes of one step by kind and axes."""
        sums: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
        for row in self.rows:
            found = sums[row.kind, row.axes]
            found[0] += row.bytes * row.predicted
            found[1] += row.bytes * row.compiled
        return tuple(Total(*key, *both) for key, both in sums.items())

    def problems(self) -> tuple[str, ...]:
        """Where prediction and program differ by more than is allowed."""
        return (*self._refusal(), *self._of_collectives(), *self._of_memory())

    @property
    def agrees(self) -> bool:
        """Whether there are no problems."""
        return not self.problems()

    def to_json(self) -> dict[str, object]:
        """Plain values, the totals and problems too."""
        return asdict(self) | {
            "totals": [asdict(total) for total in self.totals()],
            "problems": list(self.problems()),
            "agrees": self.agrees,
        }

    def _refusal(self) -> Iterator[str]:
        if self.needed_bytes is not None:
            yield (
                f"the compiler needs {self.needed_bytes:,} bytes of memory and has "
                f"{self.available_bytes:,}"
            )

    def _of_collectives(self) -> Iterator[str]:
        totals = self.totals()
        everything = sum(max(t.predicted_bytes, t.compiled_bytes) for t in totals)
        for t in totals:
            if abs(t.predicted_bytes - t.compiled_bytes) > BYTES_SLACK * everything:
                axes = " + ".join(t.axes) if t.axes else "no axes"
                yield (
                    f"{t.kind} over {axes}: {t.predicted_bytes:,} bytes predicted, "
                    f"{t.compiled_bytes:,} compiled"
                )

    def _of_memory(self) -> Iterator[str]:
        for row in self.memory[-1:]:
            low, high = 1 - MEMORY_BELOW, 1 + MEMORY_ABOVE
            ratio = row.predicted_bytes / max(row.compiled_bytes, 1)
            if not low <= ratio <= high:
                yield (
                    f"memory: {row.predicted_bytes:,} bytes predicted, "
                    f"{row.compiled_bytes:,} compiled ({ratio - 1:+.1%})"
                )


def collective_rows(
    predicted: Iterable[CollectivePlan],
    compiled: Iterable[HloCollective],
    sizes: Mapping[str, int],
    *,
    scatters: bool,
) -> tuple[Row, ...]:
    """Lays collectives side by side.

    Args:
        predicted: Of the plan.
        compiled: Of the program.
        sizes: Of the mesh, in its order.
        scatters: Whether the program may hold reduce-scatters. Right after the
            partitioner it does not: it has all-reduces whose result is cut.
    """
    counts: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for c in predicted:
        kind = c.kind
        if kind == "reduce-scatter" and not scatters:
            kind = "all-reduce"
        counts[kind, _ordered(c.axes, sizes), c.bytes][0] += c.executions
    for c in compiled:
        if c.wire_bytes:
            axes = c.axes(sizes)
            key = c.kind, None if axes is None else _ordered(axes, sizes), c.bytes
            counts[key][1] += c.executions
    rows = (Row(*key, *both) for key, both in counts.items())
    return tuple(sorted(rows, key=lambda r: -r.bytes * max(r.predicted, r.compiled)))


def _ordered(axes: Iterable[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    named = set(axes)
    return tuple(axis for axis, n in sizes.items() if axis in named and n > 1)


def memory_rows(
    predicted: MemoryPrediction, compiled: CompiledMemory
) -> tuple[MemoryRow, ...]:
    """What rests on a device, what comes and goes, and both."""
    classes = dict(predicted.classes())
    rests = ("parameters", "optimizer", "model_state", "batch")
    state = sum(classes[name] for name in rests)
    kept = compiled.arguments_bytes + compiled.outputs_bytes - compiled.aliased_bytes
    return (
        MemoryRow("state and batch", state, kept),
        MemoryRow(
            "gradients, residuals, transients",
            predicted.total_bytes - state,
            compiled.temporaries_bytes,
        ),
        MemoryRow("total", predicted.total_bytes, kept + compiled.temporaries_bytes),
    )
