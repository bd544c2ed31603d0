"""From a decision to the tasks of its step, in the order of computation.

What repeats in the graph, the layers of a model, makes a block that runs in rounds:
forward in the order of the graph, backward in reverse. Where the compiler overlaps
such collectives, a weight is gathered before its block needs it, and gradients are
added up while others are computed: within one round where the layers are scanned,
since a loop waits for all that its body started; else from the round before, and
until the update. Moves of activations are waited for where they stand.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxpar.cost.operators import compute_s
from jaxpar.ledger import Entry
from jaxpar.mesh import LogicalMesh
from jaxpar.plan_parts import TaskPlan
from jaxpar.planner import Decision

UPDATE = "optimizer"


@dataclass(frozen=True)
class _Block:
    """Operators that stand together and run equally often."""

    number: int
    rounds: int
    operators: tuple[int, ...]


def tasks(
    decision: Decision, ledger: Sequence[Entry], optimizer_s: float
) -> tuple[TaskPlan, ...]:
    """All tasks of one step.

    Args:
        decision: What was chosen.
        ledger: Its collectives.
        optimizer_s: Time of the update, collectives aside.
    """
    return tuple(t for t in _Tasks(decision, ledger).all(optimizer_s) if t.seconds > 0)


def streams(mesh: LogicalMesh, axes: Sequence[str]) -> tuple[str, ...]:
    """The classes of links behind some axes.

    An axis along a torus has its own links; switches and networks are shared.
    """
    found = [
        f"{level.link} {axis}" if level.kind == "torus" else level.link
        for axis in axes
        for level in mesh.link(axis).levels
    ]
    return tuple(dict.fromkeys(found))


class _Tasks:
    def __init__(self, decision: Decision, ledger: Sequence[Entry]):
        self.problem = decision.problem
        self.graph = decision.problem.graph
        self.strategies = decision.operators
        self.places = _places(decision)
        self.entries: dict[int, list[Entry]] = {}
        self.update: list[Entry] = []
        for entry in ledger:
            if entry.operator is None:
                self.update.append(entry)
            else:
                found = self.entries.setdefault(self.places[entry.operator], [])
                found.append(entry)

    def all(self, optimizer_s: float) -> Iterator[TaskPlan]:
        blocks = self.blocks()
        for block in blocks:
            for i in block.operators:
                yield from self.forward(i, block)
        if not self.problem.training:
            return
        for block in reversed(blocks):
            for i in reversed(block.operators):
                yield from self.backward(i, block)
        last = _Block(len(blocks), 1, ())
        ends = [self.task(e, last, 1.0) for e in self.update]
        yield from (t for t in ends if t.kind != "all-gather")
        yield TaskPlan(
            name=UPDATE, phase="update", block=last.number, seconds=optimizer_s
        )
        yield from (t for t in ends if t.kind == "all-gather")

    def blocks(self) -> list[_Block]:
        """Stretches of operators that repeat, and those between them."""
        found: list[list[int]] = []
        for i, op in enumerate(self.graph.operators):
            if op.kind == "view":
                continue
            last = self.graph.operators[found[-1][-1]] if found else None
            if last is None or (last.executions > 1) != (op.executions > 1):
                found.append([])
            found[-1].append(i)
        return [
            _Block(
                n, min(self.graph.operators[i].executions for i in members), (*members,)
            )
            for n, members in enumerate(found)
        ]

    def forward(self, i: int, block: _Block) -> Iterator[TaskPlan]:
        """Moves of operands, the operator, and sums of its results."""
        before, behind = self.sorted(i, "forward")
        share = 0.5 if self.again(i) else 1.0
        yield from (self.task(e, block, share) for e in before)
        yield self.compute(i, block, self.forward_s(i), "forward")
        yield from (self.task(e, block, share) for e in behind)

    def backward(self, i: int, block: _Block) -> Iterator[TaskPlan]:
        """What is computed once more, the derivatives, and moves of cotangents."""
        if self.again(i):
            before, behind = self.sorted(i, "forward")
            for entry in (*before, *behind):
                task = self.task(entry, block, 0.5)
                yield replace(task, phase="backward")
        yield self.compute(i, block, self.step_s(i) - self.forward_s(i), "backward")
        before, behind = self.sorted(i, "backward")
        yield from (self.task(e, block, 1.0) for e in (*before, *behind))

    def again(self, i: int) -> bool:
        """Whether the backward pass runs an operator once more."""
        return self.problem.training and self.graph.operators[i].replayed

    def sorted(self, i: int, phase: str) -> tuple[list[Entry], list[Entry]]:
        """Collectives of operands, and of sums inside of the operator."""
        found = [e for e in self.entries.get(i, ()) if e.phase == phase]
        name = self.graph.operators[i].name
        return (
            [e for e in found if e.where != name],
            [e for e in found if e.where == name],
        )

    def forward_s(self, i: int) -> float:
        """Seconds of all forward executions."""
        return self.step_s(i, training=False)

    def step_s(self, i: int, *, training: bool = True) -> float:
        """Seconds of all executions."""
        return compute_s(
            self.graph,
            self.graph.operators[i],
            self.strategies[i],
            self.problem.chip,
            self.problem.rates.sizes,
            training=training,
        )

    def compute(self, i: int, block: _Block, seconds: float, phase: str) -> TaskPlan:
        return TaskPlan(
            name=self.graph.operators[i].name,
            phase=phase,
            block=block.number,
            rounds=block.rounds,
            seconds=seconds / block.rounds,
        )

    def task(self, entry: Entry, block: _Block, share: float) -> TaskPlan:
        """The task of a collective; `share` of it falls into this phase."""
        when = "here"
        if entry.weight and entry.collective.kind in self.problem.chip.overlaps:
            when = "after" if entry.phase == "backward" else "before"
        axes = entry.collective.axes
        return TaskPlan(
            name=entry.where,
            phase=entry.phase,
            block=block.number,
            rounds=block.rounds,
            seconds=entry.seconds * share / block.rounds,
            kind=entry.collective.kind,
            axes=axes,
            streams=streams(self.problem.mesh, axes),
            when=when,
            slack=0 if self.scanned else 1,
        )

    @property
    def scanned(self) -> bool:
        """Whether layers run in a loop of the program."""
        return any(leaf.stacked for leaf in self.graph.leaves)


def _places(decision: Decision) -> list[int]:
    """Per operator the one at which its collectives run: views have their readers'."""
    graph = decision.problem.graph
    readers: dict[int, int] = {}
    for i, op in enumerate(graph.operators):
        for operand in op.operands:
            for use in operand.uses:
                readers[use.tensor] = min(i, readers.get(use.tensor, i))
    return [
        readers.get(op.results[0].tensor, i) if op.kind == "view" else i
        for i, op in enumerate(graph.operators)
    ]
