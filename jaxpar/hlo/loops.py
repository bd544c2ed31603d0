"""How often the body of a `while` runs, found by running its counter."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpar.hlo.text import Computation, Instruction, Module

Path = tuple[int, ...]
"""A place in nested tuples; () for a scalar."""

_KNOWN = re.compile(r'"?known_trip_count"?:\{"n":"(\d+)"\}')
_DIRECTION = re.compile(r"\bdirection=(\w+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_INTEGER = re.compile(r"^[{ ]*(-?\d+)[} ]*$")
_FORWARDED = frozenset(
    {"bitcast", "broadcast", "convert", "copy", "copy-done", "copy-start", "reshape"}
)
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
}
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_MOST_TRIPS = 1_000_000


class _UnknownError(Exception):
    """A value depends on data."""


def no_argument(number: int, path: Path) -> int:
    """Of a computation whose parameters are data."""
    raise _UnknownError(number, path)


@dataclass
class Scope:
    """The integers inside one run of a computation, as far as they are constant.

    Attributes:
        module: The program.
        computation: What is run.
        argument: Value of a parameter, by its number and the place in it.
    """

    module: Module
    computation: Computation
    argument: Callable[[int, Path], int]
    _known: dict[tuple[str, Path], int] = field(default_factory=dict)

    def value(self, name: str, path: Path = ()) -> int:
        """The integer that an instruction gives."""
        key = name, path
        if key not in self._known:
            instruction = self.computation.instructions.get(name)
            if instruction is None:
                raise _UnknownError(name)
            self._known[key] = self._value(instruction, path)
        return self._known[key]

    def _value(self, instruction: Instruction, path: Path) -> int:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "parameter":
            return self.argument(int(instruction.arguments), path)
        if opcode == "get-tuple-element":
            return self.value(operands[0], (_index(instruction), *path))
        if opcode == "tuple" and path:
            return self.value(operands[path[0]], path[1:])
        if opcode in _FORWARDED:
            return self.value(operands[0])
        if opcode in ("fusion", "call"):
            inner = self.inside(instruction)
            return inner.value(inner.computation.root, path)
        return self._scalar(instruction)

    def _scalar(self, instruction: Instruction) -> int:
        if instruction.opcode == "constant":
            return _constant(instruction.arguments)
        direction = _DIRECTION.search(instruction.attributes)
        function = (
            _COMPARE.get(direction[1])
            if instruction.opcode == "compare" and direction
            else _BINARY.get(instruction.opcode)
        )
        if function is None:
            raise _UnknownError(instruction.opcode)
        return function(*(self.value(operand) for operand in instruction.operands))

    def inside(self, instruction: Instruction) -> "Scope":
        """The scope of what a fusion or a call runs."""
        (name,) = instruction.called.get("calls") or instruction.called["to_apply"]
        return Scope(
            self.module,
            self.module.computations[name],
            lambda number, path: self.value(instruction.operands[number], path),
        )

    def loop_body(self, loop: Instruction) -> "Scope":
        """The scope of a loop's body: known are the values that no trip changes."""
        body = self.module.computations[loop.called["body"][0]]

        def argument(number: int, path: Path) -> int:
            if not path or not _kept(body, path[0]):
                return no_argument(number, path)
            return self.value(loop.operands[0], path)

        return Scope(self.module, body, argument)

    def trip_count(self, loop: Instruction) -> int | None:
        """How often the body of a `while` runs, or None where data decide that.

        The compiler's own figure where it gives one; the TPU compiler does not.
        """
        known = _KNOWN.search(loop.attributes)
        if known:
            return int(known[1])
        try:
            return self._simulate(loop)
        except _UnknownError:
            return None

    def _simulate(self, loop: Instruction) -> int | None:
        condition = self.module.computations[loop.called["condition"][0]]
        body = self.module.computations[loop.called["body"][0]]
        state = _State(self, loop.operands[0])
        goes_on = _run(self.module, condition, state, ())
        known = 0
        while known < len(state):
            known = len(state)
            _advance(self.module, body, state)
        values: Mapping[Path, int] = dict(state)
        for count in range(_MOST_TRIPS):
            if not goes_on:
                return count
            values = _advance(self.module, body, values)
            goes_on = _run(self.module, condition, values, ())
        return None


class _State(dict[Path, int]):
    """First values of the loop's carry; holds those that were asked for."""

    def __init__(self, scope: Scope, operand: str):
        super().__init__()
        self._scope, self._operand = scope, operand

    def __missing__(self, path: Path) -> int:
        self[path] = self._scope.value(self._operand, path)
        return self[path]


def _run(
    module: Module, computation: Computation, state: Mapping[Path, int], path: Path
) -> int:
    scope = Scope(module, computation, lambda _, where: state[where])
    return scope.value(computation.root, path)


def _advance(
    module: Module, body: Computation, state: Mapping[Path, int]
) -> dict[Path, int]:
    return {path: _run(module, body, state, path) for path in list(state)}


def _kept(body: Computation, index: int) -> bool:
    """Whether the body returns an element of its carry as it was."""
    root = body.instructions[body.root]
    if root.opcode != "tuple" or index >= len(root.operands):
        return False
    found = body.instructions.get(root.operands[index])
    if found is None or found.opcode != "get-tuple-element":
        return False
    source = body.instructions[found.operands[0]]
    return source.opcode == "parameter" and _index(found) == index


def _index(instruction: Instruction) -> int:
    found = _INDEX.search(instruction.attributes)
    return int(found[1]) if found else 0


def _constant(text: str) -> int:
    if text in ("true", "false"):
        return text == "true"
    found = _INTEGER.match(text)
    if not found:
        raise _UnknownError(text)
    return int(found[1])
