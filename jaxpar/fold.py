"""Repeated blocks of an unrolled model, found and folded into one.

Equations are compared by what they compute (primitive, parameters, types). A run
of blocks is a stretch of the program that equals itself when shifted by one
period and whose dataflow shifts along. Folding maps every block onto the first,
so that depth costs nothing in the search.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpar.flatten import FlatEquation, FlatProgram

LEAST_BLOCK = 3
"""Equations; shorter periods are not worth folding."""
PERIODS_TRIED = 24


@dataclass(frozen=True)
class Run:
    """`blocks` repeats of `period` equations from equation `start` on."""

    start: int
    period: int
    blocks: int

    @property
    def stop(self) -> int:
        """Index behind the last equation."""
        return self.start + self.period * self.blocks


@dataclass(frozen=True)
class Simplified:
    """Equations that matter to the search.

    Attributes:
        groups: Groups of equal equations in program order; the first of each
            computes, the others only say where else constraints go.
        free: Tensors that any device can make for itself in any layout: made of
            scalars and constants alone (masks, positions, random bits).
        primitives: Names of the primitives that make the free ones.
    """

    groups: tuple[tuple[FlatEquation, ...], ...]
    free: frozenset[int]
    primitives: frozenset[str]


@dataclass(frozen=True)
class Folding:
    """Which equation and tensor stands for which.

    Attributes:
        equation: Per equation, the index of its representative.
        tensor: Per tensor id, its representative (itself outside of runs).
        runs: The runs found.
    """

    equation: tuple[int, ...]
    tensor: tuple[int, ...]
    runs: tuple[Run, ...]


def simplify(program: FlatProgram) -> Simplified:
    """Drops dead and free equations and merges equal ones."""
    live = _live(program)
    free, primitives = _free(program)
    seen: dict[Any, int] = {}
    alias: dict[int, int] = {}
    groups: list[list[FlatEquation]] = []
    for eqn in program.equations:
        if not any(r in live and r not in free for r in eqn.results):
            continue
        operands = tuple(None if t is None else alias.get(t, t) for t in eqn.operands)
        renamed = eqn
        if operands != eqn.operands:
            renamed = replace(eqn, operands=operands)
        key = (_identity(renamed, program), operands, eqn.region)
        if (
            eqn.primitive in ("loop_carry", "layer_stack", "branch_join")
            or key not in seen
        ):
            seen[key] = len(groups)
            groups.append([renamed])
        else:
            first = groups[seen[key]]
            first.append(renamed)
            alias.update(zip(eqn.results, first[0].results, strict=True))
    program.outputs = [None if t is None else alias.get(t, t) for t in program.outputs]
    merged = tuple((_with_aliases(group[0], alias), *group[1:]) for group in groups)
    return Simplified(merged, frozenset(free), frozenset(primitives))


def _free(program: FlatProgram) -> tuple[set[int], set[str]]:
    """Tensors made of constants and scalar inputs, and what makes them.

    A scalar that sums over an array is not free: its terms meet in a collective.
    """
    inputs = set(program.inputs) | set(program.stacked.values())
    carried = {
        t for e in program.equations if e.primitive == "loop_carry" for t in e.results
    }
    made = {t for e in program.equations for t in e.results}
    free = set(range(len(program.types))) - made - inputs
    free |= {t for t in inputs | carried if not program.types[t].shape}
    primitives: set[str] = set()
    for eqn in program.equations:
        if eqn.primitive == "loop_carry":
            continue
        if all(t is None or t in free for t in eqn.operands):
            free.update(eqn.results)
            primitives.add(eqn.primitive)
    return free, primitives


def _with_aliases(eqn: FlatEquation, alias: dict[int, int]) -> FlatEquation:
    """A carry reads a tensor that is written, and perhaps merged, after it."""
    if eqn.primitive != "loop_carry":
        return eqn
    operands = tuple(None if t is None else alias.get(t, t) for t in eqn.operands)
    return replace(eqn, operands=operands)


def _live(program: FlatProgram) -> set[int]:
    writer = {t: e for e in program.equations for t in e.results}
    live: set[int] = set()
    stack = [t for t in program.outputs if t is not None]
    while stack:
        tensor = stack.pop()
        if tensor in live:
            continue
        live.add(tensor)
        if tensor in writer:
            stack += [t for t in writer[tensor].operands if t is not None]
    return live


def _identity(eqn: FlatEquation, program: FlatProgram) -> Any:
    """What an equation computes, but for which tensors it reads."""
    types = program.types
    return (
        eqn.primitive,
        _hashable(eqn.params),
        tuple(None if t is None else types[t] for t in eqn.operands),
        tuple(types[t] for t in eqn.results),
        eqn.literals,
        eqn.executions,
        eqn.recomputed,
    )


def _hashable(params: Any) -> Any:
    items = tuple(params.items())
    try:
        hash(items)
    except TypeError:
        return tuple((k, repr(v)) for k, v in items)
    return items


def fold(program: FlatProgram, equations: Sequence[FlatEquation]) -> Folding:
    """Finds runs of isomorphic blocks and maps them onto their first block."""
    numbers: dict[Any, int] = {}
    codes = np.array(
        [numbers.setdefault(_identity(e, program), len(numbers)) for e in equations],
        dtype=np.int64,
    )
    writer = {t: i for i, e in enumerate(equations) for t in e.results}
    equation = list(range(len(equations)))
    tensor = list(range(len(program.types)))
    runs: list[Run] = []
    pending = [(0, len(equations))]
    while pending:
        low, high = pending.pop()
        run = _best_run(codes, low, high, equations, writer)
        if run is None:
            continue
        runs.append(run)
        _map_onto_first(run, equations, equation, tensor)
        pending += [(low, run.start), (run.stop, high)]
    return Folding(tuple(equation), tuple(tensor), tuple(sorted(runs, key=_start)))


def unfolded(program: FlatProgram, equations: Sequence[FlatEquation]) -> Folding:
    """Every equation stands for itself."""
    count = len(equations)
    return Folding(tuple(range(count)), tuple(range(len(program.types))), ())


def _start(run: Run) -> int:
    return run.start


def _best_run(
    codes: np.ndarray,
    low: int,
    high: int,
    equations: Sequence[FlatEquation],
    writer: dict[int, int],
) -> Run | None:
    """The run that covers most; of equals, the one of the shortest period."""
    best: Run | None = None
    for period in _periods(codes[low:high]):
        equal = codes[low : high - period] == codes[low + period : high]
        for start, length in _stretches(equal):
            if length < period:
                continue
            found = _verified(low + start, period, length, equations, writer)
            if found is None:
                continue
            covered = found.period * (found.blocks - 1)
            if best is None or covered > best.period * (best.blocks - 1):
                best = found
    return best


def _periods(codes: np.ndarray) -> list[int]:
    """Distances between equal equations, the most promising first."""
    places: dict[int, list[int]] = defaultdict(list)
    for i, code in enumerate(codes.tolist()):
        places[code].append(i)
    votes: Counter[int] = Counter()
    for found in places.values():
        for a, b in itertools.pairwise(found):
            if b - a >= LEAST_BLOCK:
                votes[b - a] += b - a
        for step in (2, 3, 4):
            for a, b in zip(found, found[step:], strict=False):
                votes[b - a] += b - a
    likely = [p for p, _ in votes.most_common(PERIODS_TRIED)]
    return sorted(p for p in likely if p >= LEAST_BLOCK)


def _stretches(equal: np.ndarray) -> list[tuple[int, int]]:
    """Start and length of every stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], equal.view(np.int8), [0]))))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _verified(
    start: int,
    period: int,
    length: int,
    equations: Sequence[FlatEquation],
    writer: dict[int, int],
) -> Run | None:
    """The longest run in a stretch whose dataflow repeats as well.

    Which equation a block begins with is open: try where the first block's inputs
    come from outside, by starting as early as the dataflow allows.
    """
    total = length + period
    for offset in range(0, min(period, total - 2 * period + 1)):
        blocks = (total - offset) // period
        if blocks < 2:
            return None
        run = Run(start + offset, period, blocks)
        good = _good_blocks(run, equations, writer)
        if good >= 2:
            return replace(run, blocks=good)
        if offset > 8:
            return None
    return None


def _good_blocks(
    run: Run, equations: Sequence[FlatEquation], writer: dict[int, int]
) -> int:
    """How many blocks from the start on have the dataflow of the second one."""
    if run.blocks < 2:
        return 0
    wanted = [
        _sources(run.start + run.period + j, run, equations, writer)
        for j in range(run.period)
    ]
    first = [_sources(run.start + j, run, equations, writer) for j in range(run.period)]
    if not all(
        _enters(a, b)
        for x, y in zip(first, wanted, strict=True)
        for a, b in zip(x, y, strict=True)
    ):
        return 0
    for block in range(2, run.blocks):
        for j in range(run.period):
            index = run.start + block * run.period + j
            if _sources(index, run, equations, writer) != wanted[j]:
                return block
    return run.blocks


def _sources(
    index: int, run: Run, equations: Sequence[FlatEquation], writer: dict[int, int]
) -> tuple[Any, ...]:
    """Where each operand comes from.

    The distance to its writer inside of the run, else "input" for a leaf, else the
    tensor that all blocks share.
    """
    found: list[Any] = []
    for tensor in equations[index].operands:
        origin = -1 if tensor is None else writer.get(tensor, -1)
        if tensor is None:
            found.append(None)
        elif origin >= run.start:
            distance = index - origin
            found.append(distance if distance <= 2 * run.period else ("far", tensor))
        elif origin < 0:
            found.append("input")
        else:
            found.append(("shared", tensor))
    return tuple(found)


def _enters(first: Any, later: Any) -> bool:
    """Whether an operand of the first block may differ so from the later ones'."""
    return first == later or (
        isinstance(later, int) and (first == "input" or isinstance(first, tuple))
    )


def _map_onto_first(
    run: Run,
    equations: Sequence[FlatEquation],
    equation: list[int],
    tensor: list[int],
) -> None:
    for block in range(1, run.blocks):
        for j in range(run.period):
            index = run.start + block * run.period + j
            first = run.start + j
            equation[index] = first
            pairs = zip(equations[index].results, equations[first].results, strict=True)
            for here, there in pairs:
                tensor[here] = there
