"""Attention cores: scores, softmax, dropout and context.

They hold the largest values of a transformer block and little of its work: what
selective recomputation computes twice (Korthikanti et al. 2022, arXiv:2205.05198).
"""

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxpar.flatten import FlatProgram
from jaxpar.graph import HEAVY
from jaxpar.remat.blocks import common_path, jaxpr_at, path_of
from jaxpar.remat.edit import Region

_EXPONENTIALS = frozenset({"exp", "exp2"})


def attention_cores(
    closed: ClosedJaxpr, program: FlatProgram, batch: Iterable[int]
) -> list[Region]:
    """Every attention core that is no part of a checkpoint already.

    A core goes from a product of two activations (scores) through an exponential to
    another one (context).

    Args:
        closed: The traced loss.
        program: The same, flat.
        batch: Its inputs that hold the batch.
    """
    flow = _Flow.of(program, batch)
    found: list[Region] = []
    for core in flow.cores():
        members = [program.equations[i] for i in core]
        if any(e.recomputed for e in members):
            continue
        paths = [p for e in members if (p := path_of(e)) is not None]
        prefix = common_path(paths)
        jaxpr = jaxpr_at(closed.jaxpr, prefix)
        chosen = {p[len(prefix)][0] for p in paths}
        if len(chosen) > 1:
            whole = _with_makers(jaxpr, _between(jaxpr, chosen))
            looped = members[0].looped
            found.append(Region(prefix, tuple(sorted(whole)), looped))
    return found


@dataclass(frozen=True)
class _Flow:
    """Who reads what in the flat program."""

    program: FlatProgram
    readers: dict[int, list[int]]
    products: frozenset[int]

    @classmethod
    def of(cls, program: FlatProgram, batch: Iterable[int]) -> "_Flow":
        data = set(batch) | {program.stacked[t] for t in batch if t in program.stacked}
        readers: dict[int, list[int]] = {}
        for i, eqn in enumerate(program.equations):
            for tensor in dict.fromkeys(eqn.operands):
                if tensor is not None:
                    readers.setdefault(tensor, []).append(i)
        stack = list(data)
        while stack:
            for reader in readers.get(stack.pop(), ()):
                fresh = set(program.equations[reader].results) - data
                data |= fresh
                stack += fresh
        products = frozenset(
            i
            for i, eqn in enumerate(program.equations)
            if eqn.primitive == "dot_general" and set(eqn.operands) <= data
        )
        return cls(program, readers, products)

    def cores(self) -> list[list[int]]:
        """Indices of the equations of every core, in program order."""
        found: dict[int, set[int]] = {}
        for start in sorted(self.products):
            behind = self._behind(start)
            for end in sorted(behind & self.products - {start}):
                core = {start, end} | (behind & self._before(end, behind))
                names = {self.program.equations[i].primitive for i in core}
                if names & _EXPONENTIALS:
                    found.setdefault(end, set()).update(core)
        return [sorted(core) for core in found.values()]

    def _passes(self, i: int) -> bool:
        """Whether a core may go on behind an equation."""
        name = self.program.equations[i].primitive
        return name not in HEAVY and name != "loop_carry"

    def _behind(self, start: int) -> set[int]:
        seen, stack = {start}, [start]
        while stack:
            i = stack.pop()
            if i == start or self._passes(i):
                for tensor in self.program.equations[i].results:
                    fresh = set(self.readers.get(tensor, ())) - seen
                    seen |= fresh
                    stack += fresh
        return seen

    def _before(self, end: int, within: set[int]) -> set[int]:
        writer = {t: i for i in within for t in self.program.equations[i].results}
        seen, stack = {end}, [end]
        while stack:
            for tensor in self.program.equations[stack.pop()].operands:
                maker = writer.get(tensor) if tensor is not None else None
                if maker is not None and maker not in seen and maker != end:
                    seen.add(maker)
                    stack += [maker] if self._passes(maker) else []
        return seen


# ---- in the jaxpr that holds the core


def _inputs(eqn: JaxprEqn) -> list[Any]:
    return [a for a in eqn.invars if not isinstance(a, Literal)]


def _between(jaxpr: Jaxpr, chosen: set[int]) -> set[int]:
    """The chosen equations and all on paths between them."""
    order = range(min(chosen), max(chosen) + 1)
    down: set[Any] = set()
    behind: set[int] = set()
    for i in order:
        if i in chosen or any(v in down for v in _inputs(jaxpr.eqns[i])):
            behind.add(i)
            down.update(jaxpr.eqns[i].outvars)
    up: set[Any] = set()
    found: set[int] = set()
    for i in reversed(order):
        if i in chosen or (i in behind and any(v in up for v in jaxpr.eqns[i].outvars)):
            found.add(i)
            up.update(_inputs(jaxpr.eqns[i]))
    return found


def _with_makers(jaxpr: Jaxpr, core: set[int]) -> set[int]:
    """The core with what only it reads, where that keeps fewer bytes.

    A checkpoint keeps its inputs. What is made of less (masks, dropout bits, position
    scores) is made again instead. Projections stay outside: of other products only
    what is as large as the scores is pulled in.
    """
    scores = max(_bytes(jaxpr.eqns[i].outvars) for i in core)
    found = frozenset(core)
    for var in sorted(_boundary(jaxpr, found), key=_size, reverse=True):
        found = min(_grown(jaxpr, found, var, scores), key=partial(_kept, jaxpr))
    return set(found)


def _grown(
    jaxpr: Jaxpr, core: frozenset[int], var: Any, scores: float
) -> Iterator[frozenset[int]]:
    """The core, and the core with more and more of what makes one of its inputs."""
    yield core
    grown, wanted = set(core), {var}
    for i in reversed(range(max(core))):
        eqn = jaxpr.eqns[i]
        if i in grown or wanted.isdisjoint(eqn.outvars):
            continue
        is_projection = eqn.primitive.name in HEAVY and _bytes(eqn.outvars) < scores
        if not is_projection and not _read_outside(jaxpr, grown, eqn):
            grown.add(i)
            wanted.update(_inputs(eqn))
            yield frozenset(grown)


def _read_outside(jaxpr: Jaxpr, equations: Set[int], maker: JaxprEqn) -> bool:
    """Whether others than some equations read what an equation makes."""
    made = set(maker.outvars)
    return not made.isdisjoint(_variables(jaxpr.outvars)) or any(
        not made.isdisjoint(_inputs(eqn))
        for i, eqn in enumerate(jaxpr.eqns)
        if i not in equations
    )


def _boundary(jaxpr: Jaxpr, equations: Set[int]) -> list[Any]:
    """What equations read and do not make."""
    inside = [jaxpr.eqns[i] for i in sorted(equations)]
    made = {v for eqn in inside for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in inside for v in _inputs(eqn))
    return [v for v in read if v not in made]


def _kept(jaxpr: Jaxpr, equations: Set[int]) -> float:
    """Bytes that a checkpoint of some equations keeps."""
    return _bytes(_boundary(jaxpr, equations))


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [a for a in atoms if not isinstance(a, Literal)]


def _bytes(variables: Iterable[Any]) -> float:
    return sum(map(_size, variables))


def _size(var: Any) -> float:
    return float(math.prod(var.aval.shape)) * getattr(var.aval.dtype, "itemsize", 1)
