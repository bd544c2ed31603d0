"""The chain of equal blocks in a program: the body of a scan, or an unrolled run."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxpar.errors import ModelError
from jaxpar.pipeline.program import Equation, Origin, Program, read_program

Body = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], list[Any]]
"""(values that all blocks share, values of this block, carry) -> carry."""

LEAST_PERIOD = 2
PERIODS_TRIED = 24
ROTATIONS_TRIED = 8


@dataclass(frozen=True)
class Chain:
    """A run of blocks, each of which reads what the one before it made.

    Attributes:
        count: Blocks.
        start: Values that enter the first block.
        shared: Values that all blocks read.
        layers: Per value of its own that a block has: the numbers per block, or one
            number of a value with a leading dim of blocks.
        final: Values that leave the last block, in the order of `start`.
        body: One block.
    """

    count: int
    start: tuple[int, ...]
    shared: tuple[int, ...]
    layers: tuple[tuple[int, ...] | int, ...]
    final: tuple[int, ...]
    body: Body

    def layer_numbers(self, layer: tuple[int, ...] | int) -> tuple[int, ...]:
        """All numbers of one entry of `layers`."""
        return (layer,) if isinstance(layer, int) else layer


def find_chain(program: Program, origins: Sequence[Origin]) -> Chain:
    """The chain that covers most of a program.

    Args:
        program: The loss of one microbatch.
        origins: Of its values.

    Raises:
        ModelError: if there is none; says what was found in its place.
    """
    finder = _Finder(program, origins)
    found = [*finder.scans(), *finder.runs()]
    if found:
        return max(found, key=lambda pair: pair[0])[1]
    reasons = "; ".join(dict.fromkeys(finder.reasons[:3])) or (
        "no scan over layers, and no equal blocks that follow one another"
    )
    raise ModelError(
        f"the model has no chain of equal blocks to cut into stages: {reasons}",
        hint="a pipeline needs layers of one structure, scanned or in a loop; leave "
        "the pipeline axis out for other models",
    )


class _Finder:
    def __init__(self, program: Program, origins: Sequence[Origin]):
        self.program, self.origins = program, origins
        self.reasons: list[str] = []
        live = program.needed(program.outputs[:1], ())
        self.equations = [program.equations[i] for i in live]
        self.place = {
            n: (i, k)
            for i, eqn in enumerate(self.equations)
            for k, n in enumerate(eqn.writes)
        }

    def of_batch(self, number: int) -> bool:
        return Origin.BATCH in self.origins[number]

    # ---- scans

    def scans(self) -> Iterator[tuple[int, Chain]]:
        for eqn in self.equations:
            if eqn.source.primitive.name == "scan" and self.is_chain(eqn):
                params, reads = eqn.source.params, eqn.read_values
                first = params["num_consts"]
                stacked = first + params["num_carry"]
                chain = Chain(
                    count=params["length"],
                    start=reads[first:stacked],
                    shared=reads[:first],
                    layers=reads[stacked:],
                    final=eqn.writes[: params["num_carry"]],
                    body=_scan_body(params["jaxpr"], params["num_carry"]),
                )
                yield chain.count * len(params["jaxpr"].jaxpr.eqns), chain

    def is_chain(self, eqn: Equation) -> bool:
        """Whether a scan runs over layers, and what is wrong if it nearly does."""
        params = eqn.source.params
        first, carry = params["num_consts"], params["num_carry"]
        start, xs = eqn.reads[first : first + carry], eqn.reads[first + carry :]
        passes = any(isinstance(n, int) and self.of_batch(n) for n in start)
        if params["reverse"] or params["length"] < 2 or not passes:
            return False
        problem = None
        if any(isinstance(x, int) and self.of_batch(x) for x in xs):
            problem = "a scan runs over the batch or the sequence"
        elif any(self.of_batch(y) and self.read_after(y) for y in eqn.writes[carry:]):
            problem = "the scan over layers gives results of every layer to the loss"
        elif len(eqn.read_values) < len(eqn.reads):
            problem = "a scan over layers reads a literal"
        if problem:
            self.reasons.append(problem)
        return problem is None

    def read_after(self, number: int) -> bool:
        readers = any(number in eqn.read_values for eqn in self.equations)
        return readers or number in self.program.outputs[:1]

    # ---- unrolled runs

    def runs(self) -> Iterator[tuple[int, Chain]]:
        codes = self.codes()
        for period in _periods(codes):
            for first, length in _stretches(codes, period):
                if length < period:
                    continue
                for start in self.rotations(first, length, period):
                    blocks = (first + length + period - start) // period
                    chain = self.run(start, period, blocks)
                    if chain is not None:
                        yield chain.count * period, chain
                        break

    def codes(self) -> list[int]:
        """Equations that compute the same have the same number."""
        known: dict[Any, int] = {}
        return [
            known.setdefault(self.identity(eqn), len(known)) for eqn in self.equations
        ]

    def identity(self, eqn: Any) -> Any:
        avals = self.program.avals
        operands = tuple(
            str(avals[r]) if isinstance(r, int) else ("literal", str(r.val))
            for r in eqn.reads
        )
        results = tuple(str(avals[w]) for w in eqn.writes)
        return (
            eqn.source.primitive.name,
            _hashable(eqn.source.params),
            operands,
            results,
            any(self.of_batch(w) for w in eqn.writes),
        )

    def rotations(self, first: int, length: int, period: int) -> list[int]:
        """Where blocks may begin, those first between which least is passed on."""
        last_read: dict[int, int] = {}
        for index in range(first, first + length + period):
            for number in self.equations[index].read_values:
                last_read[number] = index
        passed = []
        for offset in range(min(period, length - period + 1)):
            border = first + offset + period
            size = sum(
                self.bytes(n)
                for index in range(max(first, border - period), border)
                for n in self.equations[index].writes
                if self.of_batch(n) and last_read.get(n, -1) >= border
            )
            passed.append((size, first + offset))
        return [start for _, start in sorted(passed)[:ROTATIONS_TRIED]]

    def bytes(self, number: int) -> int:
        aval = self.program.avals[number]
        return int(aval.size) * aval.dtype.itemsize

    def run(self, start: int, period: int, blocks: int) -> Chain | None:
        """The chain of a run whose dataflow repeats, or None."""
        while blocks >= 2:
            made = _Run(self, start, period, blocks)
            if made.chain is not None:
                return made.chain
            if made.good < 2:
                # The first block may read what the others do not.
                start, blocks = start + period, blocks - 1
                continue
            blocks = made.good
        return None


class _Run:
    """Blocks of an unrolled run, compared operand by operand."""

    def __init__(self, finder: _Finder, start: int, period: int, blocks: int):
        self.finder, self.start = finder, start
        self.period, self.blocks = period, blocks
        self.good, self.chain = 0, None
        pattern = self.pattern()
        if pattern is not None and self.good == blocks:
            self.chain = self.build(pattern)
            if self.chain is None:
                self.good = 0

    def source(self, block: int, operand: Any) -> Any:
        """Where an operand comes from, in words that all blocks share."""
        if not isinstance(operand, int):
            return "literal"
        index, slot = self.finder.place.get(operand, (-1, 0))
        if index < self.start:
            return "outside"
        at, j = divmod(index - self.start, self.period)
        if at == block:
            return "local", j, slot
        if at == block - 1:
            return "carry", j, slot
        return "far", index, slot

    def sources(self, block: int) -> list[Any]:
        first = self.start + block * self.period
        return [
            self.source(block, r)
            for eqn in self.finder.equations[first : first + self.period]
            for r in eqn.reads
        ]

    def pattern(self) -> list[Any] | None:
        wanted = self.sources(1)
        if any(isinstance(s, tuple) and s[0] == "far" for s in wanted):
            return None
        for a, b in zip(self.sources(0), wanted, strict=True):
            if a != b and not (a == "outside" and b[0] == "carry"):
                return None
        self.good = 2
        for block in range(2, self.blocks):
            if self.sources(block) != wanted:
                return wanted
            self.good = block + 1
        return wanted

    def operands(self, block: int) -> list[Any]:
        first = self.start + block * self.period
        eqns = self.finder.equations[first : first + self.period]
        return [r for eqn in eqns for r in eqn.reads]

    def written(self, block: int, j: int, slot: int) -> int:
        eqn = self.finder.equations[self.start + block * self.period + j]
        return eqn.writes[slot]

    def build(self, pattern: list[Any]) -> Chain | None:
        columns = list(
            zip(*(self.operands(b) for b in range(self.blocks)), strict=True)
        )
        carried: dict[tuple[int, int], int] = {}
        shared: dict[int, None] = {}
        layers: dict[tuple[int, ...], None] = {}
        for source, column in zip(pattern, columns, strict=True):
            if isinstance(source, tuple) and source[0] == "carry":
                if carried.setdefault(source[1:], column[0]) != column[0]:
                    return None
            elif source == "outside":
                if len(set(column)) == 1:
                    shared[column[0]] = None
                else:
                    layers[column] = None
        final = tuple(self.written(self.blocks - 1, *at) for at in carried)
        if not carried or not self.closed(set(final)):
            return None
        if any(self.finder.of_batch(n) for column in layers for n in column):
            return None
        start = tuple(carried.values())
        firsts = [*shared, *(c[0] for c in layers), *start]
        leaves = tuple(self.written(0, *at) for at in carried)
        if len(set(firsts)) < len(firsts):
            return None
        body = _run_body(self.finder.program, firsts, leaves)
        return Chain(self.blocks, start, tuple(shared), tuple(layers), final, body)

    def closed(self, final: set[int]) -> bool:
        """Whether nothing else that the blocks made of the batch is read after them."""
        stop = self.start + self.period * self.blocks
        made = {
            n
            for eqn in self.finder.equations[self.start : stop]
            for n in eqn.writes
            if self.finder.of_batch(n)
        }
        later = {n for eqn in self.finder.equations[stop:] for n in eqn.read_values} | {
            n for n in self.finder.program.outputs[:1] if isinstance(n, int)
        }
        if made & later - final:
            self.finder.reasons.append(
                "what equal blocks make is read behind the block that follows them"
            )
            return False
        return True


def _scan_body(closed: Any, carry: int) -> Body:
    program = read_program(closed)

    def body(
        shared: Sequence[Any], layer: Sequence[Any], state: Sequence[Any]
    ) -> list[Any]:
        known = zip(program.inputs, (*shared, *state, *layer), strict=True)
        return program.run(program.outputs[:carry], dict(known))

    return body


def _run_body(program: Program, firsts: Sequence[int], results: Sequence[int]) -> Body:
    def body(
        common: Sequence[Any], layer: Sequence[Any], state: Sequence[Any]
    ) -> list[Any]:
        known = dict(zip(firsts, (*common, *layer, *state), strict=True))
        return program.run(results, known)

    return body


def _hashable(params: Any) -> Any:
    items = tuple(params.items())
    try:
        hash(items)
    except TypeError:
        return tuple((k, repr(v)) for k, v in items)
    return items


def _periods(codes: Sequence[int]) -> list[int]:
    """Distances between equal equations, the likely ones."""
    places: dict[int, list[int]] = {}
    for i, code in enumerate(codes):
        places.setdefault(code, []).append(i)
    votes: Counter[int] = Counter()
    for found in places.values():
        for step in range(1, 9):
            for a, b in zip(found, found[step:], strict=False):
                votes[b - a] += b - a
        for a, b in pairwise(found):
            votes[b - a] += b - a
    likely = [p for p, _ in votes.most_common(PERIODS_TRIED) if p >= LEAST_PERIOD]
    return sorted(likely)


def _stretches(codes: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    """Start and length of every stretch that equals what is a period later."""
    length = 0
    for i in range(len(codes) - period):
        if codes[i] == codes[i + period]:
            length += 1
        elif length:
            yield i - length, length
            length = 0
    if length:
        yield len(codes) - period - length, length
