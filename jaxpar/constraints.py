"""From chosen strategies to constraints on values, each with a stable name.

Weights are constrained where they are used, results of matrix multiplications,
look-ups and loops where they arise, and every value once more where it changes its
layout. Pointwise chains follow from these.
"""

from dataclasses import dataclass

from jaxpar.cost.problem import Link, MeshProblem
from jaxpar.cost.rates import State
from jaxpar.planner import Decision
from jaxpar.sharding import Spec, axes_of, fits, moves, without
from jaxpar.strategy import LeafStrategy, Strategy

FOLLOWS = frozenset({"pointwise", "view", "branch_join", "layer_stack"})
"""Kinds whose results follow from their operands."""


@dataclass(frozen=True)
class Constraint:
    """A value, or one use of it, and the layouts that it takes in order.

    Attributes:
        name: The tensor's name; for a use, with "-> operator" behind it.
        tensor: Index of the tensor.
        use: (operator, operand) if only that use is constrained, else None.
        specs: Layouts in order.
        executions: In one forward pass.
        reason: Why.
    """

    name: str
    tensor: int
    use: tuple[int, int] | None
    specs: tuple[Spec, ...]
    executions: int
    reason: str


def constraints(decision: Decision) -> tuple[Constraint, ...]:
    """All constraints of a decision, values first, in the order of the graph."""
    return _Constraints(decision).all()


class _Constraints:
    def __init__(self, decision: Decision):
        self.problem: MeshProblem = decision.problem
        self.graph = decision.problem.graph
        self.first = len(self.graph.leaves)
        self.chosen: list[Strategy | LeafStrategy] = [
            *decision.leaves,
            *decision.operators,
        ]
        self.links_from: dict[int, list[Link]] = {}
        for link in self.problem.links:
            self.links_from.setdefault(link.tensor, []).append(link)

    def all(self) -> tuple[Constraint, ...]:
        found: list[Constraint] = []
        for i, leaf in enumerate(self.graph.leaves):
            if leaf.role in ("param", "state", "batch"):
                found += self._of_tensor(leaf.tensor, i)
        for i, op in enumerate(self.graph.operators):
            if op.kind != "view":
                for result in op.results:
                    found += self._of_tensor(result.tensor, self.first + i)
        values = [c for c in found if c.use is None]
        return (*values, *(c for c in found if c.use is not None))

    def _of_tensor(self, tensor: int, writer: int) -> list[Constraint]:
        if not self.graph.tensors[tensor].shape:
            return []
        links = self.links_from.get(tensor, [])
        if not links:
            return []
        held, partial = self.problem.written(links[0], self.chosen[writer])
        views = [link for link in links if self._stands_for(link, links)]
        if views:
            others = [link for link in links if link not in views]
            found = self._behind_view(tensor, writer, (held, partial), views[0])
            return found + self._uses(others, (without(held, partial), ()))
        if writer < self.first:
            return self._uses(links, (held, ()), writer)
        kept = without(held, partial)
        wanted = [self._wanted(link) for link in links]
        if any(set(partial) & set(axes_of(w)) for w in wanted):
            return self._uses(links, (held, partial))
        moved = any(w != kept for w in wanted)
        found = self._value(tensor, writer, (kept,), moved=moved)
        return found + self._uses(links, (kept, ()))

    def _stored(self, writer: int) -> Spec:
        """The layout in which a leaf rests, without its layer dim."""
        chosen, leaf = self.chosen[writer], self.graph.leaves[writer]
        if not isinstance(chosen, LeafStrategy):
            raise TypeError("an operator stores nothing")
        return chosen.storage[1:] if leaf.stacked else chosen.storage

    def _stands_for(self, link: Link, links: list[Link]) -> bool:
        """Whether the value takes its reader's layout: a view, or loop state."""
        kind = self._operator(link).kind
        return kind == "view" or (kind == "loop_carry" and len(links) == 1)

    def _behind_view(
        self, tensor: int, writer: int, written: State, view: Link
    ) -> list[Constraint]:
        """A value that is moved once for all its readers."""
        seen, op = self._wanted(view), self._operator(view)
        links: list[Link] = []
        if op.kind == "view":
            links = self.links_from.get(op.results[0].tensor, [])
        held, partial = written
        kept = without(held, partial)
        moved = seen != kept or any(self._wanted(link) != seen for link in links)
        if writer < self.first:
            stored = self._stored(writer)
            if seen == kept:
                return self._uses(links, (kept, ()), writer)
            specs = (
                *self._way(tensor, (stored, ()), kept),
                *self._way(tensor, (kept, ()), seen),
            )
        elif set(partial) & set(axes_of(seen)):
            specs = self._way(tensor, written, seen)
        else:
            specs = (kept, *self._way(tensor, (kept, ()), seen))
        found = self._value(tensor, writer, specs, moved=moved)
        return found + self._uses(links, (seen, ()))

    def _value(
        self, tensor: int, writer: int, specs: tuple[Spec, ...], *, moved: bool
    ) -> list[Constraint]:
        """A constraint where the value arises, if its layout does not follow."""
        executions = 1
        if writer >= self.first:
            op = self.graph.operators[writer - self.first]
            executions = op.executions
            if not moved and op.kind in FOLLOWS:
                return []
        t = self.graph.tensors[tensor]
        reason = "value moves to another layout here" if moved else "as it is computed"
        return [Constraint(t.name, tensor, None, specs, executions, reason)]

    def _uses(
        self, links: list[Link], held: State, leaf: int | None = None
    ) -> list[Constraint]:
        """Constraints where a value is read in another layout than it is held in.

        A leaf that is stored otherwise is first brought to the layout `held`. Where its
        gradient is cut further than that, `held` is said too: on its way back the
        gradient then comes by it, not by a way of the compiler's own.
        """
        first = () if leaf is None else self._first(leaf, held[0])
        says_held = leaf is not None and not first and self._gradient_is_cut(leaf)
        found: dict[tuple[int, int], Constraint] = {}
        for link in links:
            tensor = self.graph.tensors[link.tensor]
            op = self._operator(link)
            is_weight = op.heavy and self._is_weight(link)
            way = self._way(link.tensor, held, self._wanted(link))
            if way and says_held:
                way = (held[0], *way)
            specs = (*first, *way)
            if not tensor.shape or not (is_weight or specs):
                continue
            use = (link.reader - self.first, link.operand)
            name = f"{tensor.name} -> {op.name}"
            reason = "weight as it is read" if is_weight else "moved for this use"
            specs = specs or (self._wanted(link),)
            found.setdefault(
                use, Constraint(name, link.tensor, use, specs, op.executions, reason)
            )
        return list(found.values())

    def _gradient_is_cut(self, leaf: int) -> bool:
        chosen = self.chosen[leaf]
        return isinstance(chosen, LeafStrategy) and chosen.optimizer != chosen.storage

    def _is_weight(self, link: Link) -> bool:
        if link.writer < self.first:
            return self.graph.leaves[link.writer].role in ("param", "state")
        return self.graph.operators[link.writer - self.first].parameter_only

    def _operator(self, link: Link):
        return self.graph.operators[link.reader - self.first]

    def _wanted(self, link: Link) -> Spec:
        chosen = self.chosen[link.reader]
        if isinstance(chosen, LeafStrategy):
            raise TypeError("a leaf reads nothing")
        return self.problem.wanted(link, chosen)[0]

    def _first(self, leaf: int, held: Spec) -> tuple[Spec, ...]:
        """From where a leaf is stored to where it is held."""
        tensor = self.graph.leaves[leaf].tensor
        return self._way(tensor, (self._stored(leaf), ()), held)

    def _way(self, tensor: int, held: State, wanted: Spec) -> tuple[Spec, ...]:
        """The layouts between two, the last included: one step at a time.

        Two axes that swap dims may pass through a layout that does not divide; it is
        left to the compiler.
        """
        (spec, partial), sizes = held, self.problem.rates.sizes
        grain = self.problem.grain(tensor)
        steps = moves(spec, partial, wanted, sizes, grain=grain)
        shape = self.graph.tensors[tensor].shape
        return tuple(s.layout for s in steps if fits(s.layout, shape, sizes))
