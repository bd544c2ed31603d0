"""A traced loss as one flat list of equations that can be run in parts.

Calls that only name a piece of the program are inlined; loops, checkpoints and custom
derivatives stay single equations. Values have numbers, so that a part of the program
is the numbers that it starts from and those that it ends with.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import reduce
from operator import or_
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})


class Origin(Flag):
    """What a value is made of, constants aside."""

    NONE = 0
    PARAM = auto()
    STATE = auto()
    RNG = auto()
    BATCH = auto()


ORIGINS = {
    "param": Origin.PARAM,
    "state": Origin.STATE,
    "rng": Origin.RNG,
    "batch": Origin.BATCH,
}
"""By the role of a leaf."""


@dataclass(frozen=True)
class Equation:
    """One equation over numbered values.

    Attributes:
        source: As it was traced.
        reads: Per operand, the number of a value, or a literal.
        writes: Numbers of the results.
    """

    source: JaxprEqn
    reads: tuple[int | Literal, ...]
    writes: tuple[int, ...]

    @property
    def read_values(self) -> tuple[int, ...]:
        """Numbers that it reads."""
        return tuple(r for r in self.reads if isinstance(r, int))


@dataclass(frozen=True)
class Program:
    """Equations over numbered values.

    Attributes:
        avals: Type of each value.
        constants: Values that are known already.
        inputs: Numbers of the inputs.
        outputs: Per output, a number or a literal.
        equations: In program order.
        writer: Number -> index of the equation that writes it.
    """

    avals: tuple[Any, ...]
    constants: Mapping[int, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int | Literal, ...]
    equations: tuple[Equation, ...]
    writer: Mapping[int, int]

    def origins(self, inputs: Sequence[Origin]) -> list[Origin]:
        """What each value is made of, given that of the inputs."""
        found = [Origin.NONE] * len(self.avals)
        for number, origin in zip(self.inputs, inputs, strict=True):
            found[number] = origin
        for eqn in self.equations:
            read = [found[r] if isinstance(r, int) else Origin.NONE for r in eqn.reads]
            if eqn.source.primitive.name == "scan":
                made = _scan_origins(eqn.source.params, read)
            else:
                made = [reduce(or_, read, Origin.NONE)] * len(eqn.writes)
            for number, origin in zip(eqn.writes, made, strict=True):
                found[number] = origin
        return found

    def needed(
        self, wanted: Iterable[int | Literal], known: Iterable[int]
    ) -> list[int]:
        """Indices of the equations that lead from known values to wanted ones."""
        seen, stack = set(known), [w for w in wanted if isinstance(w, int)]
        found: set[int] = set()
        while stack:
            number = stack.pop()
            if number in seen or number not in self.writer:
                continue
            seen.add(number)
            index = self.writer[number]
            found.add(index)
            stack += self.equations[index].read_values
        return sorted(found)

    def leaves_read(
        self, wanted: Iterable[int | Literal], known: Iterable[int] = ()
    ) -> set[int]:
        """Positions of the inputs that wanted values are made of."""
        wanted = list(wanted)
        known = set(known)
        read = {w for w in wanted if isinstance(w, int)}
        for index in self.needed(wanted, known):
            read.update(self.equations[index].read_values)
        return {i for i, n in enumerate(self.inputs) if n in read - known}

    def run(
        self, wanted: Sequence[int | Literal], known: Mapping[int, Any]
    ) -> list[Any]:
        """Values of the wanted numbers; runs what is needed and no more.

        Args:
            wanted: Numbers or literals.
            known: Values by number; of inputs, at least those that are read.
        """
        values = dict(self.constants) | dict(known)
        for index in self.needed(wanted, known):
            eqn = self.equations[index]
            operands = [_value(r, values) for r in eqn.reads]
            values.update(zip(eqn.writes, _bind(eqn.source, operands), strict=True))
        return [_value(w, values) for w in wanted]


def _scan_origins(params: Mapping[str, Any], read: list[Origin]) -> list[Origin]:
    """What each result of a scan is made of: its carry grows until it is steady."""
    program = read_program(params["jaxpr"])
    first, count = params["num_consts"], params["num_carry"]
    while True:
        found = program.origins(read)
        made = [
            found[o] if isinstance(o, int) else Origin.NONE for o in program.outputs
        ]
        carry = read[first : first + count]
        grown = [a | b for a, b in zip(carry, made[:count], strict=True)]
        if grown == carry:
            return [*carry, *made[count:]]
        read = [*read[:first], *grown, *read[first + count :]]


def _value(read: int | Literal, values: Mapping[int, Any]) -> Any:
    return values[read] if isinstance(read, int) else read.val


def _bind(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Results of one equation on new operands."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*operands, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def read_program(closed: ClosedJaxpr) -> Program:
    """Numbers the values of a jaxpr and inlines its plain calls."""
    return _Reader().read(closed)


class _Reader:
    def __init__(self) -> None:
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.equations: list[Equation] = []

    def read(self, closed: ClosedJaxpr) -> Program:
        inputs = tuple(self.new(v) for v in closed.jaxpr.invars)
        outputs = self.body(closed.jaxpr, closed.consts, inputs)
        writer = {n: i for i, e in enumerate(self.equations) for n in e.writes}
        return Program(
            tuple(self.avals),
            self.constants,
            inputs,
            outputs,
            tuple(self.equations),
            writer,
        )

    def new(self, var: Any) -> int:
        self.avals.append(var.aval)
        return len(self.avals) - 1

    def body(
        self, jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[int | Literal]
    ) -> tuple[int | Literal, ...]:
        known: dict[Any, int | Literal] = {}
        known.update(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            number = self.new(var)
            known[var] = number
            self.constants[number] = value

        def at(atom: Any) -> int | Literal:
            return atom if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            reads = tuple(map(at, eqn.invars))
            if eqn.primitive.name in INLINED:
                inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                known.update(
                    zip(eqn.outvars, self.body(*_open(inner), reads), strict=True)
                )
                continue
            writes = tuple(self.new(v) for v in eqn.outvars)
            known.update(zip(eqn.outvars, writes, strict=True))
            self.equations.append(Equation(eqn, reads, writes))
        return tuple(map(at, jaxpr.outvars))


def _open(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()
