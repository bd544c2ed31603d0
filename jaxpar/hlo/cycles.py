"""How long a scheduled program takes, from the compiler's own cycles.

The TPU compiler says per fusion how many cycles it expects, but nothing of
collectives: those are priced by the caller. Instructions run in the order of the
text, which is the compiler's schedule; an asynchronous collective runs beside them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxpar.hlo.collectives import HloCollective, collectives_in
from jaxpar.hlo.loops import Scope, no_argument
from jaxpar.hlo.text import Instruction, parse

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_START = 'custom_call_target="AsyncCollectiveStart"'
_DONE = 'custom_call_target="AsyncCollectiveDone"'


@dataclass
class CompiledTime:
    """Seconds of one run of a program on one device.

    Attributes:
        compute_s: Cycles of all instructions, loops multiplied out.
        synchronous_s: Collectives that everything waits for.
        asynchronous_s: Collectives that run beside others.
        exposed_s: What of the asynchronous ones nothing hides.
        unknown_loops: Loops whose length data decide, counted as one trip.
    """

    compute_s: float = 0.0
    synchronous_s: float = 0.0
    asynchronous_s: float = 0.0
    exposed_s: float = 0.0
    unknown_loops: int = 0

    @property
    def step_s(self) -> float:
        """The whole program."""
        return self.compute_s + self.synchronous_s + self.exposed_s

    def wait_until(self, time_s: float) -> None:
        """Idles until a moment, if it is not past."""
        self.exposed_s += max(0.0, time_s - self.step_s)

    def add(self, other: "CompiledTime", times: int = 1) -> None:
        """Adds another run, or several."""
        self.compute_s += other.compute_s * times
        self.synchronous_s += other.synchronous_s * times
        self.asynchronous_s += other.asynchronous_s * times
        self.exposed_s += other.exposed_s * times
        self.unknown_loops += other.unknown_loops


def compiled_time(
    text: str, clock_hz: float, seconds_of: Callable[[HloCollective], float]
) -> CompiledTime:
    """Plays a scheduled program.

    Args:
        text: HLO after code generation.
        clock_hz: Cycles per second.
        seconds_of: Price of one execution of a collective.

    Raises:
        ValueError: if the text has no entry computation or no cycles.
    """
    if not _CYCLES.search(text):
        raise ValueError("the program has no cycles: it was not compiled to the end")
    module = parse(text)
    scope = Scope(module, module.computations[module.entry], no_argument)
    return _Player(clock_hz, seconds_of).play(scope)


@dataclass
class _Player:
    clock_hz: float
    seconds_of: Callable[[HloCollective], float]

    def play(self, scope: Scope) -> CompiledTime:
        """One run of a computation."""
        total, pending = CompiledTime(), _Pending()
        for instruction in scope.computation.instructions.values():
            opcode = instruction.opcode
            if opcode == "while":
                self._loop(instruction, scope, total)
            elif opcode == "conditional":
                self._branches(instruction, scope, total)
            elif opcode == "call":
                total.add(self.play(scope.inside(instruction)))
            else:
                self._run(instruction, scope, pending, total)
        for end in pending.ends.values():
            total.wait_until(end)
        return total

    def _run(
        self,
        instruction: Instruction,
        scope: Scope,
        pending: "_Pending",
        total: CompiledTime,
    ) -> None:
        found = _CYCLES.search(instruction.attributes)
        seconds = sum(map(self.seconds_of, collectives_in(instruction, scope)))
        pending.follow(instruction)
        if seconds and _is(instruction, scope, "-start", _START):
            pending.start(instruction.name, seconds, now_s=total.step_s)
            total.asynchronous_s += seconds
        else:
            total.synchronous_s += seconds
        total.compute_s += int(found[1]) / self.clock_hz if found else 0.0
        if _is(instruction, scope, "-done", _DONE):
            total.wait_until(pending.end_of(instruction.name))

    def _loop(self, loop: Instruction, scope: Scope, total: CompiledTime) -> None:
        trips = scope.trip_count(loop)
        total.unknown_loops += trips is None
        if trips != 0:
            total.add(self.play(scope.loop_body(loop)), trips or 1)

    def _branches(self, choice: Instruction, scope: Scope, total: CompiledTime) -> None:
        keys = ("branch_computations", "true_computation", "false_computation")
        names = [name for key in keys for name in choice.called.get(key, ())]
        computations = scope.module.computations
        runs = [
            self.play(Scope(scope.module, computations[name], no_argument))
            for name in names
        ]
        total.add(max(runs, key=lambda run: run.step_s))


@dataclass
class _Pending:
    """Asynchronous collectives on their way; one network carries them in turn.

    Attributes:
        ends: When each is done.
        source: Which of them a value belongs to: what starts one gives a context
            that goes through tuples and fusions to what ends it.
        free_s: When the network has nothing more to do.
    """

    ends: dict[str, float] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    free_s: float = 0.0

    def follow(self, instruction: Instruction) -> None:
        """Passes the context on from operands to results."""
        known = [self.source[o] for o in instruction.operands if o in self.source]
        if known:
            self.source[instruction.name] = known[0]

    def start(self, name: str, seconds: float, *, now_s: float) -> None:
        """Puts a collective on the network."""
        self.free_s = max(self.free_s, now_s) + seconds
        self.ends[name], self.source[name] = self.free_s, name

    def end_of(self, name: str) -> float:
        """When the collective is done that a value belongs to; 0 if there is none."""
        return self.ends.pop(self.source.pop(name, ""), 0.0)


def _is(instruction: Instruction, scope: Scope, suffix: str, call: str) -> bool:
    """Whether it starts, or ends, an asynchronous collective."""
    if instruction.opcode != "fusion":
        return instruction.opcode.endswith(suffix)
    inner = scope.inside(instruction).computation.instructions.values()
    return any(call in other.attributes for other in inner)
