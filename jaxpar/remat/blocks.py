"""Repeated blocks of a traced program: bodies of scans, and runs of equal equations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxpar.flatten import FlatEquation, FlatProgram, Path
from jaxpar.fold import Run, Simplified, fold, simplify
from jaxpar.graph import HEAVY
from jaxpar.remat.edit import Region

_CALLS = frozenset("jit pjit closed_call core_call".split())
_CHECKPOINTS = frozenset("checkpoint remat remat2".split())


def repeated_blocks(closed: ClosedJaxpr, program: FlatProgram) -> list[Region]:
    """Every block that repeats and multiplies matrices, as one region each.

    Left alone is what the model wraps into checkpoints of its own.

    Args:
        closed: The traced loss.
        program: The same, flat.
    """
    scans = list(_scans(closed.jaxpr, ()))
    return scans + _unrolled(closed, program)


# ---- scanned


def _scans(jaxpr: Jaxpr, path: Path) -> Iterator[Region]:
    """Bodies of the outermost scans."""
    for index, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        if name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            names = set(_primitives(body))
            if names & HEAVY and not names & _CHECKPOINTS:
                inner: Path = (*path, (index, "jaxpr", 0))
                yield Region(inner, tuple(range(len(body.eqns))), looped=True)
        elif name in _CALLS:
            inner = (*path, (index, "jaxpr", 0))
            yield from _scans(jaxpr_at(jaxpr, ((index, "jaxpr", 0),)), inner)


def _primitives(jaxpr: Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for held in value if isinstance(value, tuple) else (value,):
                if isinstance(held, ClosedJaxpr):
                    yield from _primitives(held.jaxpr)
                elif isinstance(held, Jaxpr):
                    yield from _primitives(held)


def jaxpr_at(jaxpr: Jaxpr, path: Path) -> Jaxpr:
    """The jaxpr that a path leads to."""
    for index, parameter, item in path:
        held: Any = jaxpr.eqns[index].params[parameter]
        held = held[item] if isinstance(held, tuple) else held
        jaxpr = held.jaxpr if isinstance(held, ClosedJaxpr) else held
    return jaxpr


# ---- unrolled


@dataclass(frozen=True)
class _Cut:
    """A way to cut a run: where in a period, and the bytes that cross."""

    crossing_bytes: float
    offset: int
    regions: tuple[Region, ...]


def _unrolled(closed: ClosedJaxpr, program: FlatProgram) -> list[Region]:
    simple = simplify(program)
    firsts = [group[0] for group in simple.groups]
    found: list[Region] = []
    for run in fold(program, firsts).runs:
        members = firsts[run.start : run.stop]
        heavy = any(e.primitive in HEAVY for e in members)
        if not heavy or any(e.looped or e.recomputed for e in members):
            continue
        cuts = list(_cuts(run, firsts, program, simple, closed))
        if cuts:
            best = min(cuts, key=lambda c: (c.crossing_bytes, c.offset))
            found += best.regions
    return found


def _cuts(
    run: Run,
    firsts: Sequence[FlatEquation],
    program: FlatProgram,
    simple: Simplified,
    closed: ClosedJaxpr,
) -> Iterator[_Cut]:
    """Cuts of a run at the same place of every period, between whole equations.

    Where the run itself begins says nothing: its first block may begin late.
    """
    crossing = _crossing(run, firsts, program, simple)
    prefix = common_path([p for e in firsts[run.start : run.stop] if (p := path_of(e))])
    depth = len(prefix)
    top = [
        None if (p := path_of(e)) is None else p[depth][0]
        for e in firsts[run.start : run.stop]
    ]
    count = len(jaxpr_at(closed.jaxpr, prefix).eqns)
    for offset in range(run.period):
        bounds = [0, *range(offset or run.period, len(top), run.period), len(top)]
        pieces = [
            [t for t in top[a:b] if t is not None] for a, b in pairwise(bounds) if a < b
        ]
        starts = [min(p) for p in pieces if p]
        ends = [max(p) for p in pieces if p]
        if len(starts) < len(pieces) or any(
            end >= start for end, start in zip(ends, starts[1:], strict=False)
        ):
            continue
        stops = [*starts[1:], min(ends[-1] + 1, count)]
        regions = tuple(
            Region(prefix, tuple(range(a, b)), looped=False)
            for a, b in zip(starts, stops, strict=True)
        )
        yield _Cut(float(crossing[offset]), offset, regions)


def _crossing(
    run: Run,
    firsts: Sequence[FlatEquation],
    program: FlatProgram,
    simple: Simplified,
) -> np.ndarray:
    """Bytes made before and read behind each place of the run's second period."""
    made = {t: i for i, e in enumerate(firsts) for t in e.results}
    last: dict[int, int] = {}
    for i, eqn in enumerate(firsts):
        for tensor in eqn.operands:
            if tensor in made and tensor not in simple.free:
                last[tensor] = i
    step = np.zeros(run.period + 1)
    low = run.start + run.period
    for tensor, reader in last.items():
        # Crosses every place behind its writer, up to its last reader.
        a, b = made[tensor] + 1 - low, reader - low
        if run.start <= made[tensor] and b >= 0 and a < run.period and a <= b:
            kind = program.types[tensor]
            size = float(np.prod(kind.shape, dtype=float)) * kind.dtype.itemsize
            step[max(a, 0)] += size
            step[min(b + 1, run.period)] -= size
    return np.cumsum(step)[: run.period]


def path_of(eqn: FlatEquation) -> Path | None:
    """Where an equation stands, its own index last; None where nobody can edit."""
    if eqn.place is not None:
        path, index = eqn.place
        return (*path, (index, "", 0))
    for address in (*eqn.edges[0], *eqn.edges[1]):
        if address is not None:
            return (*address[0], (address[1], "", 0))
    return None


def common_path(paths: Sequence[Path]) -> Path:
    """The innermost jaxpr that holds all of some equations."""
    shortest = min(len(p) for p in paths) - 1
    depth = 0
    while depth < shortest and len({p[depth] for p in paths}) == 1:
        depth += 1
    return paths[0][:depth]
