"""HLO text as computations and instructions.

Only what the other modules ask for is taken apart; the rest of a line stays text.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_NAME = r"%?([\w.\-]+)"
_TITLE = re.compile(r"^HloModule .*", re.MULTILINE)
_COUNT = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_HEADER = re.compile(rf"^(ENTRY )?{_NAME} *(?:\(.*\) *->.*)?\{{\s*$")
_INSTRUCTION = re.compile(rf"^\s*(ROOT )?{_NAME} = ")
_OPCODE = re.compile(r" *([a-z][\w\-]*)\(")
_PARENTHESIS = re.compile(r"[()]")
_BRACKET = re.compile(r"[()\[\]{},]")
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_BITS = re.compile(r"^(?:bf|f|s|u|c)(\d+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|called_computations"
    rf"|true_computation|false_computation)=(?:{_NAME}|\{{([^}}]*)\}})"
)
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Without the leading "%".
        opcode: Such as "all-reduce" or "fusion".
        shape: Text of the result type.
        arguments: Text between the parentheses.
        attributes: Text after them.
    """

    name: str
    opcode: str
    shape: str
    arguments: str
    attributes: str

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        text = _COMMENT.sub("", self.arguments)
        if "%" in text:
            return tuple(re.findall(r"%([\w.\-]+)", text))
        return tuple(part.split()[-1] for part in split(text) if part.strip())

    @cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations it runs, by attribute."""
        found = _CALLED.findall(self.attributes)
        return {
            key: (one,) if one else tuple(re.findall(_NAME, many))
            for key, one, many in found
        }

    @property
    def op_name(self) -> str:
        """Where the instruction comes from in the JAX program, or ""."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Computation:
    """A named list of instructions.

    Attributes:
        name: Without the leading "%".
        instructions: In the order of the text, by name.
        root: Name of the instruction that gives the result.
    """

    name: str
    instructions: dict[str, Instruction]
    root: str


@dataclass(frozen=True)
class Module:
    """A whole program.

    Attributes:
        computations: By name.
        entry: Name of the one that runs first.
        devices: Partitions times replicas.
    """

    computations: dict[str, Computation]
    entry: str
    devices: int


def parse(text: str) -> Module:
    """Reads HLO text as `compiled.as_text()` or an XLA dump gives it.

    Raises:
        ValueError: if there is no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    for header, lines in _bodies(text):
        computations[header[2]] = _computation(header[2], lines)
        entry = header[2] if header[1] else entry
    if not entry:
        raise ValueError("HLO text has no ENTRY computation")
    title = _TITLE.search(text)
    counts = _COUNT.findall(title[0] if title else "")
    return Module(computations, entry, math.prod(int(n) for n in counts))


def _bodies(text: str) -> Iterator[tuple[re.Match[str], list[str]]]:
    """Header and lines of every computation."""
    header: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if header is None:
            header, lines = _HEADER.match(line), []
        elif line.startswith("}"):
            yield header, lines
            header = None
        else:
            lines.append(line)


def _computation(name: str, lines: list[str]) -> Computation:
    instructions: dict[str, Instruction] = {}
    root = ""
    for line in lines:
        head = _INSTRUCTION.match(line)
        instruction = _instruction(head[2], line[head.end() :]) if head else None
        if head and instruction:
            instructions[head[2]] = instruction
            root = head[2] if head[1] or not root else root
    return Computation(name, instructions, root)


def _instruction(name: str, text: str) -> Instruction | None:
    end = _closing(text, 0) if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, end)
    if not opcode:
        return None
    close = _closing(text, opcode.end() - 1)
    return Instruction(
        name=name,
        opcode=opcode[1],
        shape=text[:end],
        arguments=text[opcode.end() : close - 1],
        attributes=text[close:],
    )


def _closing(text: str, start: int) -> int:
    """Just behind the parenthesis that closes the one at `start`."""
    depth = 0
    for found in _PARENTHESIS.finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.end()
    return len(text)


def split(text: str) -> list[str]:
    """Splits at the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for found in _BRACKET.finditer(text):
        if found[0] != ",":
            depth += 1 if found[0] in "([{" else -1
        elif not depth:
            parts.append(text[start : found.start()])
            start = found.end()
    return [*parts, text[start:]]


def elements(shape: str) -> list[str]:
    """Types of a tuple's elements; of an array the type itself."""
    return split(shape[1:-1]) if shape.startswith("(") else [shape]


def shape_bytes(shape: str) -> int:
    """Bytes of a type: of a tuple all its arrays together, without padding."""
    return sum(
        math.prod(int(n.lstrip("<= ")) for n in dims.split(",") if n) * _bits(kind) // 8
        for kind, dims in _ARRAY.findall(shape)
    )


def _bits(kind: str) -> int:
    """Bits of one element; numbers under a byte take a byte, tokens nothing."""
    if kind == "pred":
        return 8
    found = _BITS.match(kind)
    return max(8, int(found[1])) if found else 0
