"""Sums of sums: all-reduces that compilers fold into one.

The partitioner adds up a contraction dim by dim, so a sum over two mesh axes that
split different dims becomes two all-reduces in a row. XLA's all-reduce folder, which
runs on accelerators, makes one of them; on CPU they stay apart.
"""

from collections import Counter
from collections.abc import Iterable

from jaxpar.hlo.groups import Groups
from jaxpar.hlo.text import Computation

_SUM = "all-reduce"


def chains(computation: Computation) -> dict[str, tuple[str, ...]]:
    """Per last all-reduce of a chain, the ones before it that nobody else reads."""
    instructions = computation.instructions
    readers = Counter(o for found in instructions.values() for o in found.operands)
    before: dict[str, tuple[str, ...]] = {}
    for name, found in instructions.items():  # operands stand before their readers
        if found.opcode != _SUM or len(found.operands) != 1:
            continue
        (operand,) = found.operands
        source = instructions.get(operand)
        if source is not None and source.opcode == _SUM and readers[operand] == 1:
            before[name] = (*before.pop(operand, ()), operand)
    return before


def joined(found: Iterable[Groups]) -> Groups:
    """The groups of one sum that does what sums over some groups do in a row."""
    group_of: dict[int, set[int]] = {}
    for groups in found:
        for group in groups:
            together = set().union(*(group_of.get(d, {d}) for d in group))
            group_of.update(dict.fromkeys(together, together))
    unique = {min(group): tuple(sorted(group)) for group in group_of.values()}
    return tuple(unique[least] for least in sorted(unique))
