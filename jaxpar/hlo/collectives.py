"""The collectives of a compiled program, each counted as often as it runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxpar.hlo.folding import chains, joined
from jaxpar.hlo.groups import Groups, axes_crossed, axes_of, parse_groups
from jaxpar.hlo.loops import Scope, no_argument
from jaxpar.hlo.text import Computation, Instruction, elements, parse, shape_bytes

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_FUSED_REDUCE_SCATTER = "all-reduce-scatter"
_ASYNC_FUSION = '"async_collective_fusion_config"'
_ASYNC_START = 'custom_call_target="AsyncCollectiveStart"'


@dataclass(frozen=True)
class HloCollective:
    """One collective instruction. A combined one (of a tuple) is summed.

    Attributes:
        kind: One of `KINDS`.
        bytes: Per device and execution: of the result for an all-gather (and a
            broadcast), of the operand for all others.
        groups: Who takes part; pairs of source and target for a permutation.
        executions: Trip counts of the enclosing loops, multiplied.
        name: Of the instruction.
        op_name: Where it comes from in the JAX program, or "".
        exact: False if data decide how often it runs: a loop of unknown length
            counts as one trip, and of the branches of a conditional only the one
            that communicates most is listed.
    """

    kind: str
    bytes: int
    groups: Groups
    executions: int
    name: str
    op_name: str = ""
    exact: bool = True

    @property
    def group_size(self) -> int:
        """Devices in the largest group."""
        return max(len(group) for group in self.groups)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution, by ring algorithms.

        Thakur, Rabenseifner and Gropp 2005, for n devices: (n - 1) / n of `bytes`,
        and twice that for an all-reduce; a permutation or broadcast sends all.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            moves = any(len(set(group)) > 1 for group in self.groups)
            return float(self.bytes * moves)
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.bytes * (self.group_size - 1) / self.group_size

    @property
    def total_wire_bytes(self) -> float:
        """`wire_bytes` of all executions."""
        return self.wire_bytes * self.executions

    def axes(
        self, mesh_shape: Mapping[str, int], device_ids: Sequence[int] | None = None
    ) -> tuple[str, ...] | None:
        """The mesh axes it runs along; for a permutation those that it crosses.

        Arguments, errors and None as for `axes_of`.
        """
        find = axes_crossed if self.kind == "collective-permute" else axes_of
        return find(self.groups, mesh_shape, device_ids)


def collectives(text: str, *, folds: bool = False) -> tuple[HloCollective, ...]:
    """Lists the collectives of HLO text, in the order of the program.

    Takes text from any stage after the SPMD partitioner. CPU code differs from what
    other machines run: it turns bfloat16 all-reduces into float32 ones and never
    makes a reduce-scatter; the text right after the partitioner does not (see
    `partitioned_text`).

    An asynchronous pair counts once, and so does a TPU collective that several
    fusions share. A TPU fusion of an all-reduce and a slice is a reduce-scatter.

    Args:
        text: Of the program.
        folds: Whether all-reduces of all-reduces count as one over both groups.

    Raises:
        ValueError: if the text has no entry computation.
    """
    module = parse(text)
    entry = Scope(module, module.computations[module.entry], no_argument)
    return tuple(_in(entry, _Context(folds=folds)))


@dataclass(frozen=True)
class _Context:
    """How often a computation runs, the name of what runs it, and how to count."""

    executions: int = 1
    exact: bool = True
    op_name: str = ""
    folds: bool = False


def collectives_in(instruction: Instruction, scope: Scope) -> list[HloCollective]:
    """Those of one run of one instruction, and of what it calls."""
    return list(_of(instruction, scope, _Context()))


def _in(scope: Scope, context: _Context) -> Iterator[HloCollective]:
    before = chains(scope.computation) if context.folds else {}
    within = {name for names in before.values() for name in names}
    for name, instruction in scope.computation.instructions.items():
        if name in before:
            yield _folded(name, before[name], scope, context)
        elif name not in within:
            yield from _of(instruction, scope, context)


def _folded(
    name: str, before: Sequence[str], scope: Scope, context: _Context
) -> HloCollective:
    """The one sum that a chain of them is."""
    instructions = scope.computation.instructions
    parts = [
        part
        for member in (*before, name)
        for part in _collective(instructions[member], scope, context)
    ]
    return replace(parts[-1], groups=joined(part.groups for part in parts))


def _of(
    instruction: Instruction, scope: Scope, context: _Context
) -> Iterator[HloCollective]:
    opcode = instruction.opcode
    if opcode.removesuffix("-start") in KINDS:
        yield from _collective(instruction, scope, context)
    elif opcode == "while":
        yield from _in_loop(instruction, scope, context)
    elif opcode == "conditional":
        yield from _in_branches(instruction, scope, context)
    elif opcode in ("fusion", "call"):
        name = instruction.op_name or context.op_name
        yield from _in(scope.inside(instruction), replace(context, op_name=name))
    elif opcode == "async-start":
        yield from _in(_data_scope(scope, instruction, "calls"), context)


def _in_loop(
    loop: Instruction, scope: Scope, context: _Context
) -> Iterator[HloCollective]:
    trips = scope.trip_count(loop)
    inner = replace(
        context,
        executions=context.executions * (1 if trips is None else trips),
        exact=context.exact and trips is not None,
    )
    if trips != 0:
        yield from _in(scope.loop_body(loop), inner)
    tests = replace(inner, executions=context.executions * (1 + (trips or 0)))
    yield from _in(_data_scope(scope, loop, "condition"), tests)


def _in_branches(
    choice: Instruction, scope: Scope, context: _Context
) -> Iterator[HloCollective]:
    keys = ("branch_computations", "true_computation", "false_computation")
    names = [name for key in keys for name in choice.called.get(key, ())]
    inner = replace(context, exact=False)
    computations = scope.module.computations
    branches = [
        list(_in(Scope(scope.module, computations[name], no_argument), inner))
        for name in names
    ]
    yield from max(branches, key=lambda found: sum(c.total_wire_bytes for c in found))


def _data_scope(scope: Scope, instruction: Instruction, key: str) -> Scope:
    (name,) = instruction.called[key]
    return Scope(scope.module, scope.module.computations[name], no_argument)


def _collective(
    instruction: Instruction, scope: Scope, context: _Context
) -> Iterator[HloCollective]:
    if _is_clone(instruction, scope.computation):
        return
    kind = instruction.opcode.removesuffix("-start")
    groups = parse_groups(instruction.attributes, scope.module.devices)
    size = shape_bytes(_result(instruction, scope.computation))
    if kind == "reduce-scatter":
        size *= max(len(group) for group in groups)
    elif kind == "all-reduce" and scope.computation.name.startswith(
        _FUSED_REDUCE_SCATTER
    ):
        kind = "reduce-scatter"
    yield HloCollective(
        kind=kind,
        bytes=size,
        groups=groups,
        executions=context.executions,
        name=instruction.name,
        op_name=instruction.op_name or context.op_name,
        exact=context.exact,
    )


def _is_clone(instruction: Instruction, computation: Computation) -> bool:
    """Whether a TPU collective runs beside this fusion but started in another."""
    if _ASYNC_FUSION not in instruction.attributes:
        return False
    others = computation.instructions.values()
    return not any(_ASYNC_START in other.attributes for other in others)


def _result(instruction: Instruction, computation: Computation) -> str:
    """The type of what the collective gives; an asynchronous start gives more."""
    if not instruction.opcode.endswith("-start"):
        return instruction.shape
    done = instruction.opcode.removesuffix("start") + "done"
    for other in computation.instructions.values():
        if other.opcode == done and instruction.name in other.operands:
            return other.shape
    parts = elements(instruction.shape)
    return instruction.shape if instruction.opcode == "all-reduce-start" else parts[1]
