"""What a cluster of equations keeps from its forward for its backward pass.

Compilers fuse pointwise chains into the backward pass as well, so of a cluster they
keep what they cannot cheaply make again: what it reads, results of transcendental
functions, and sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpar.quotient import Node, Quotient
from jaxpar.rules.rule import FactorKind

SAVES_NOTHING = frozenset(
    """add add_any sub neg reshape transpose broadcast_in_dim convert_element_type
    reduce_sum slice concatenate pad squeeze expand_dims copy copy_p cumsum rev
    stop_gradient name sharding_constraint real imag split stack unstack
    loop_carry branch_join layer_stack layer_slice
    dynamic_slice reduce_precision optimization_barrier iota eq ne lt le gt ge not
    and or xor is_finite sign floor ceil round argmax argmin max min""".split()
)
"""Linear or piecewise constant: the backward pass needs none of their values."""
SAVES_RESULT = frozenset("exp exp2 tanh logistic rsqrt sqrt tan erf_inv".split())
"""Functions whose derivative is a function of their own result."""
SAVES_INDICES = frozenset({"gather", "select_n", "scatter", "scatter-add"})


@dataclass
class Kept:
    """Values kept.

    Attributes:
        inside: Tensors made in the cluster.
        slots: (node, operand slot) pairs that read what is kept from outside.
    """

    inside: set[int] = field(default_factory=set)
    slots: set[tuple[int, int]] = field(default_factory=set)


def kept_values(nodes: Sequence[int], graph: Quotient, active: frozenset[int]) -> Kept:
    """What the backward pass of a cluster needs, as far as it is not made again.

    Between the two loops of a scan nothing can be made again: there every value
    that a derivative reads is kept.
    """
    walk = _Walk(nodes, graph, fused=not graph.nodes[nodes[0]].equation.looped)
    for i in nodes:
        node = graph.nodes[i]
        if not any(t in active for t in node.results):
            continue
        name = node.equation.primitive
        if name in SAVES_RESULT:
            walk.kept.inside.update(node.results)
        elif name not in SAVES_NOTHING and not _scales(node):
            for slot in range(len(node.reads)):
                if _needs(name, slot):
                    walk.need(i, slot)
    return walk.kept


def _scales(node: Node) -> bool:
    """Whether a value is only multiplied or divided by a constant."""
    name, reads = node.equation.primitive, node.reads
    if name == "mul":
        return not all(reads)
    return name == "div" and not reads[1]


def _needs(name: str, slot: int) -> bool:
    if name in SAVES_INDICES:
        return (slot == 0) == (name == "select_n")
    return True


class _Walk:
    """Follows needed values back to what is kept."""

    def __init__(self, nodes: Sequence[int], graph: Quotient, *, fused: bool):
        self.graph, self.kept, self.fused = graph, Kept(), fused
        self.writer = {t: i for i in nodes for t in graph.nodes[i].results}
        self.seen: set[tuple[int, int]] = set()

    def need(self, node: int, slot: int) -> None:
        """Marks what makes one operand of a node."""
        stack = [(node, slot)]
        while stack:
            place = stack.pop()
            if place in self.seen:
                continue
            self.seen.add(place)
            i, k = place
            for tensor in self.graph.nodes[i].reads[k]:
                if tensor not in self.writer:
                    self.kept.slots.add(place)
                    continue
                maker = self.writer[tensor]
                if not self.fused or _dear(self.graph.nodes[maker]):
                    self.kept.inside.add(tensor)
                else:
                    slots = range(len(self.graph.nodes[maker].reads))
                    stack += [(maker, s) for s in slots]


def _dear(node: Node) -> bool:
    """Whether a value costs more to make again than to keep."""
    sums = any(f.kind is FactorKind.REDUCE for f in node.rule.factors)
    return sums or node.equation.primitive in SAVES_RESULT
