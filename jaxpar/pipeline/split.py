"""A loss in three parts: before the chain of blocks, the blocks, and behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ModelError
from jaxpar.pipeline.chain import Chain, find_chain
from jaxpar.pipeline.program import ORIGINS, Origin, Program, read_program
from jaxpar.trace import Traced

Leaves = Sequence[Any]
"""Inputs of the traced loss, in order; None where nothing reads one."""


@dataclass(frozen=True)
class Split:
    """The loss of one microbatch, cut at its chain of blocks.

    Attributes:
        program: The loss.
        origins: Of its values.
        chain: Its blocks.
    """

    program: Program
    origins: Sequence[Origin]
    chain: Chain

    @cached_property
    def stored_layers(self) -> tuple[int, ...]:
        """Entries of `chain.layers` that do not depend on random state."""
        return tuple(
            i
            for i, layer in enumerate(self.chain.layers)
            if Origin.RNG not in self._origin(layer)
        )

    @cached_property
    def drawn_layers(self) -> tuple[int, ...]:
        """Entries of `chain.layers` that do: another one for each microbatch."""
        stored = set(self.stored_layers)
        return tuple(i for i in range(len(self.chain.layers)) if i not in stored)

    def _origin(self, layer: tuple[int, ...] | int) -> Origin:
        found = Origin.NONE
        for number in self.chain.layer_numbers(layer):
            found |= self.origins[number]
        return found

    def trained_layer(self, entry: int) -> bool:
        """Whether an entry of `chain.layers` has a gradient."""
        layer = self.chain.layers[entry]
        aval = self.program.avals[self.chain.layer_numbers(layer)[0]]
        floating = jnp.issubdtype(aval.dtype, jnp.floating)
        return bool(floating and Origin.PARAM in self._origin(layer))

    def known(self, leaves: Leaves) -> dict[int, Any]:
        """Inputs by number."""
        return dict(zip(self.program.inputs, leaves, strict=True))

    def layers(self, entries: Sequence[int], leaves: Leaves) -> list[Any]:
        """Entries of `chain.layers` with a leading dim of blocks."""
        chosen = [self.chain.layers[i] for i in entries]
        numbers = [n for layer in chosen for n in self.chain.layer_numbers(layer)]
        values = iter(self.program.run(numbers, self.known(leaves)))
        return [
            next(values)
            if isinstance(layer, int)
            else jnp.stack([next(values) for _ in layer])
            for layer in chosen
        ]

    def prologue(self, leaves: Leaves) -> list[Any]:
        """What enters the first block."""
        return self.program.run(self.chain.start, self.known(leaves))

    def context(self, leaves: Leaves) -> list[Any]:
        """What all blocks read."""
        return self.program.run(self.chain.shared, self.known(leaves))

    def epilogue(self, leaves: Leaves, final: Sequence[Any]) -> Any:
        """The loss, from what leaves the last block."""
        known = self.known(leaves) | dict(zip(self.chain.final, final, strict=True))
        return self.program.run(self.program.outputs[:1], known)[0]

    @cached_property
    def read_by_layers(self) -> set[int]:
        """Positions of the leaves that stored layers are made of."""
        return self.program.leaves_read(
            n
            for i in self.stored_layers
            for n in self.chain.layer_numbers(self.chain.layers[i])
        )

    @cached_property
    def read_inside(self) -> set[int]:
        """Positions of the leaves that a stage, or either end, reads."""
        drawn = (
            n
            for i in self.drawn_layers
            for n in self.chain.layer_numbers(self.chain.layers[i])
        )
        begin = (*self.chain.start, *self.chain.shared, *drawn)
        return self.program.leaves_read(begin) | self.program.leaves_read(
            self.program.outputs[:1], self.chain.final
        )

    @cached_property
    def draws_at_the_end(self) -> bool:
        """Whether what follows the blocks draws random numbers."""
        read = self.program.leaves_read(self.program.outputs[:1], self.chain.final)
        rng = [i for i, n in enumerate(self.program.inputs) if self._is_rng(n)]
        return bool(read & set(rng))

    def _is_rng(self, number: int) -> bool:
        return Origin.RNG in self.origins[number]


def split(traced: Traced) -> Split:
    """Cuts the loss of one microbatch.

    Raises:
        ModelError: if it has no chain of blocks, or one that cannot be cut.
    """
    program = read_program(traced.jaxpr)
    origins = program.origins([ORIGINS[leaf.role] for leaf in traced.leaves])
    found = Split(program, origins, find_chain(program, origins))
    _check(found)
    return found


def _check(found: Split) -> None:
    program, chain = found.program, found.chain
    for number in chain.start:
        aval = program.avals[number]
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            raise ModelError(
                "blocks pass a random key on to the next block",
                hint="split the key into one per layer before the layers run",
            )
    for number in chain.shared:
        origin = found.origins[number]
        if Origin.BATCH in origin and Origin.PARAM in origin:
            raise ModelError(
                f"all blocks read {program.avals[number]}, which is made of the batch "
                "and of parameters",
                hint="every stage would have to make it again; leave the pipeline axis "
                "out",
            )
    for entry in found.drawn_layers:
        if found.trained_layer(entry):
            raise ModelError(
                "a weight of the blocks is mixed with random numbers before the blocks",
                hint="draw them within the block",
            )
