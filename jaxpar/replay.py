"""What a checkpoint computes again: only what the backward pass goes on to read."""

from collections.abc import Iterator

from jaxpar.quotient import Node, Quotient
from jaxpar.residuals import SAVES_INDICES, SAVES_NOTHING, SAVES_RESULT

_BILINEAR = frozenset(
    "mul dot_general conv_general_dilated ragged_dot ragged_dot_general".split()
)
"""The derivative by one operand is a function of the others."""
_COMPARES = frozenset({"max", "min"})
"""Their derivative asks which operand won."""


def mark_replayed(graph: Quotient, active: frozenset[int]) -> None:
    """Sets `Node.replayed` and `Node.reread` of all nodes.

    A node within a checkpoint runs again if the derivative of a node of the same
    checkpoint needs its result, or another one that runs again reads it; unless the
    policy of the checkpoint keeps it. The last matrix multiplication of a block, say,
    runs once.

    Args:
        graph: The nodes.
        active: Tensors through which gradients flow.
    """
    for i, node in enumerate(graph.nodes):
        if node.equation.recomputed and any(t in active for t in node.results):
            if node.equation.primitive in SAVES_RESULT:
                _run(graph, i)
            for slot in _needed(node, active):
                _read(graph, i, slot)


def _run(graph: Quotient, start: int) -> None:
    """A node runs again, and what it reads."""
    node = graph.nodes[start]
    if not node.replayed:
        node.replayed = True
        for slot in range(len(node.reads)):
            _read(graph, start, slot)


def _read(graph: Quotient, reader: int, slot: int) -> None:
    """An operand is read again; what makes it runs again, unless it is kept."""
    stack = [(reader, slot)]
    while stack:
        i, k = stack.pop()
        node = graph.nodes[i]
        if k in node.reread:
            continue
        node.reread.add(k)
        for tensor in node.reads[k]:
            j = graph.writer.get(tensor)
            if j is None or not _in_reach(graph, j, i):
                continue
            maker = graph.nodes[j]
            if not (maker.replayed or maker.equation.saveable):
                maker.replayed = True
                stack += [(j, s) for s in range(len(maker.reads))]


def _in_reach(graph: Quotient, maker: int, reader: int) -> bool:
    """Whether both stand in one checkpoint of one block.

    What stands behind its reader was made by the block before, with which it is
    folded into one.
    """
    a, b = graph.nodes[maker].equation, graph.nodes[reader].equation
    return a.recomputed and a.region == b.region and maker <= reader


def _needed(node: Node, active: frozenset[int]) -> Iterator[int]:
    """Operands that the derivative of a node reads."""
    name = node.equation.primitive
    if name in SAVES_RESULT or (name in SAVES_NOTHING and name not in _COMPARES):
        return
    slots = enumerate(node.reads)
    moving = {slot for slot, read in slots if any(t in active for t in read)}
    for slot in range(len(node.reads)):
        others = moving - {slot} if name in _BILINEAR else moving
        reads_it = name not in SAVES_INDICES or (slot == 0) == (name == "select_n")
        if others and reads_it:
            yield slot
