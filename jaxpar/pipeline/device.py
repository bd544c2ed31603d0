"""What one device of a pipeline knows, and the parts of the model that it runs."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.pipeline.batches import draw
from jaxpar.pipeline.split import Split
from jaxpar.schedule import ScheduleArrays
from jaxpar.stages.slots import LayerSlots

Arrays = list[Any]
Leaves = list[Any]


@dataclass(frozen=True, eq=False)
class Stages:
    """What the devices of a pipeline run, and on what.

    Attributes:
        split: The loss of one microbatch.
        end: The loss of the rows of it that one device has at the end of the model:
            of `1/devices` of them, or of all.
        arrays: The schedule.
        slots: Which layers each stage has.
        microbatches: On one part of the batch axes.
        axis: The pipeline axis.
        batch_axes: Axes that split the batch.
        parts: Devices along them together.
        divided: Whether the end's rows are split over the pipeline axis.
        weight: Of the loss of one device's rows at the end.
        rngs: Positions of the leaves that are random state.
        batch: Positions of the leaves that are split into microbatches.
        trained: Positions of the leaves read inside that have gradients.
        remat: Whether every layer, and not just the stage, is recomputed.
    """

    split: Split
    end: Split
    arrays: ScheduleArrays
    slots: LayerSlots
    microbatches: int
    axis: str
    batch_axes: tuple[str, ...]
    parts: int
    divided: bool
    weight: float
    rngs: frozenset[int]
    batch: frozenset[int]
    trained: tuple[int, ...]
    remat: bool

    @property
    def devices(self) -> int:
        """Along the pipeline axis."""
        return self.slots.devices


@dataclass(frozen=True, eq=False)
class Device:
    """One device's view while the program is traced.

    Attributes:
        stages: What runs.
        me: Position along the pipeline axis.
        part: Position along the batch axes together.
        weights: Trained values of its layers, [chunks, slots, ...].
        frozen: Other stored values of its layers.
        ids: Layer in each slot, or -1; [chunks, slots].
        leaves: Of the loss; microbatches in front of those of the batch.
    """

    stages: Stages
    me: Any
    part: Any
    weights: Arrays
    frozen: Arrays
    ids: Any
    leaves: Leaves

    # ---- leaves

    def shared(self) -> Arrays:
        """Leaves that ends and stages read and that have gradients."""
        return [self.leaves[i] for i in self.stages.trained]

    def leaves_of(self, microbatch: Any, shared: Arrays, rows: int | None = None):
        """Leaves as one microbatch sees them; `rows` of it, or all."""
        stages = self.stages
        found = list(self.leaves)
        for i, value in zip(stages.trained, shared, strict=True):
            found[i] = value
        number = microbatch * stages.parts + self.part
        for i, leaf in enumerate(found):
            if leaf is None:
                continue
            if i in stages.rngs:
                found[i] = draw(leaf, number)
            elif i in stages.batch:
                one = lax.dynamic_index_in_dim(leaf, microbatch, 0, keepdims=False)
                if rows is not None:
                    one = lax.dynamic_slice_in_dim(one, self.me * rows, rows)
                found[i] = one
        return found

    # ---- parts of the model

    def begin(self, shared: Arrays, microbatch: Any) -> Arrays:
        """What enters the first stage."""
        return self.stages.split.prologue(self.leaves_of(microbatch, shared))

    def stage(
        self, chunk: Any, microbatch: Any, weights: Arrays, shared: Arrays, x: Arrays
    ) -> Arrays:
        """One stage on one microbatch."""
        split = self.stages.split
        leaves = self.leaves_of(microbatch, shared)
        context = split.context(leaves)
        pick = partial(lax.dynamic_index_in_dim, index=chunk, axis=0, keepdims=False)
        ids = pick(self.ids)
        drawn = [
            jnp.take(v, jnp.maximum(ids, 0), axis=0)
            for v in split.layers(split.drawn_layers, leaves)
        ]
        stored = self._stored(weights, [pick(v) for v in self.frozen])
        layers = _in_order(split, stored, drawn)
        full = self.stages.slots.waste == 0

        def block(carry: Arrays, slot: Any) -> tuple[Arrays, None]:
            layer, number = slot
            out = split.chain.body(context, layer, carry)
            if full:
                return out, None
            pairs = zip(out, carry, strict=True)
            return [jnp.where(number >= 0, a, b) for a, b in pairs], None

        if self.stages.remat:
            block = jax.checkpoint(block, prevent_cse=False)
        return lax.scan(block, x, (layers, ids))[0]

    def _stored(self, weights: Arrays, frozen: Arrays) -> Arrays:
        split = self.stages.split
        trained, others = iter(weights), iter(frozen)
        return [
            next(trained) if split.trained_layer(i) else next(others)
            for i in split.stored_layers
        ]

    def finish(self, shared: Arrays, microbatch: Any, y: Arrays) -> Any:
        """The loss of this device's rows at the end of the model, weighted."""
        rows = None
        if self.stages.divided:
            rows = _rows(self.stages, self.leaves)
        leaves = self.leaves_of(microbatch, shared, rows)
        return self.stages.end.epilogue(leaves, y) * self.stages.weight


def _rows(stages: Stages, leaves: Leaves) -> int:
    first = next(leaves[i] for i in stages.batch if leaves[i] is not None)
    return first.shape[1] // stages.devices


def _in_order(split: Split, stored: Arrays, drawn: Arrays) -> Arrays:
    found = dict(zip(split.stored_layers, stored, strict=True))
    found |= dict(zip(split.drawn_layers, drawn, strict=True))
    return [found[i] for i in range(len(found))]
