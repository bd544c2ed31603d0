"""Loss and gradients of a training step, through a pipeline."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxpar.errors import ModelError
from jaxpar.pipeline.batches import is_split, retraced, rows_of
from jaxpar.pipeline.device import Device, Stages
from jaxpar.pipeline.execute import columns_of, run_schedule, slot_ids
from jaxpar.pipeline.program import Origin
from jaxpar.pipeline.split import Split, split
from jaxpar.schedule import Schedule, arrays
from jaxpar.stages.slots import LayerSlots
from jaxpar.trace import Traced

AXIS = "pipeline"


@dataclass(frozen=True, eq=False)
class Pipelined:
    """A loss and the way in which a pipeline derives it.

    Attributes:
        traced: The loss of the global batch.
        stages: What the devices run.
        mesh: With the pipeline axis.
        size: Examples in the global batch.
    """

    traced: Traced
    stages: Stages
    mesh: Mesh | AbstractMesh
    size: int

    def __call__(
        self, params: Any, model_state: Any, rngs: Any, batch: Any, step: Any
    ) -> tuple[tuple[Any, tuple[Any, Any, Any]], Any]:
        """((loss, (aux, model_state, rngs)), gradients)."""
        leaves = self.traced.flatten(params, model_state, rngs, batch, step)
        count = len(jax.tree.leaves(params))
        layered, weights, pull, frozen = self.layers(leaves, count)
        loss, d_weights, d_inside = self.program(weights, frozen, leaves)
        pairs = zip(d_weights, weights, strict=True)
        (found,) = pull([d.astype(w.dtype) for d, w in pairs])
        gradients = [jnp.zeros(x.shape, x.dtype) for x in leaves[:count]]
        for i, d in zip(layered, found, strict=True):
            gradients[i] = d
        for i, d in zip(self.stages.trained, d_inside, strict=True):
            gradients[i] = gradients[i] + d.astype(gradients[i].dtype)
        tree = jax.tree.structure(params)
        rest = self.rest(leaves)
        loss = loss.astype(self.traced.jaxpr.out_avals[0].dtype)
        return (loss, rest), tree.unflatten(gradients)

    def layers(self, leaves: list[Any], count: int) -> Any:
        """Weights of the blocks, stacked as devices hold them, and the way back."""
        part = self.stages.split
        layered = sorted(i for i in part.read_by_layers if i < count)
        trained = [i for i in part.stored_layers if part.trained_layer(i)]
        others = [i for i in part.stored_layers if not part.trained_layer(i)]

        def weights(chosen: list[Any]) -> list[Any]:
            found = list(leaves)
            for i, value in zip(layered, chosen, strict=True):
                found[i] = value
            return [self.placed(v) for v in part.layers(trained, found)]

        stacked, pull = jax.vjp(weights, [leaves[i] for i in layered])
        frozen = [self.placed(v) for v in part.layers(others, leaves)]
        return layered, stacked, pull, frozen

    def placed(self, value: Any) -> Any:
        """[layers, ...] as [chunks, devices, slots, ...]."""
        slots = self.stages.slots
        shape = (slots.chunks, slots.devices, slots.slots)
        if slots.waste:
            table = np.maximum(slot_ids(slots), 0)
            return jnp.take(value, table, axis=0)
        return value.reshape(*shape, *value.shape[1:])

    def program(
        self, weights: list[Any], frozen: list[Any], leaves: list[Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        """Runs the schedule on all devices."""
        stages = self.stages
        own, common = columns_of(stages.arrays)
        values = {
            "me": jnp.arange(stages.devices, dtype=jnp.int32),
            "part": jnp.arange(stages.parts, dtype=jnp.int32),
            "ids": jnp.asarray(slot_ids(stages.slots)),
            "own": {name: jnp.asarray(column) for name, column in own.items()},
            "common": {name: jnp.asarray(column) for name, column in common.items()},
            "weights": weights,
            "frozen": frozen,
            "leaves": {i: leaves[i] for i in self.read},
        }
        across, rows = PartitionSpec(None, AXIS), PartitionSpec(stages.batch_axes)
        specs = {
            "me": PartitionSpec(AXIS),
            "part": rows,
            "ids": across,
            "own": across,
            "common": PartitionSpec(),
            "weights": across,
            "frozen": across,
            "leaves": {
                i: rows if i in stages.batch else PartitionSpec() for i in self.read
            },
        }
        function = jax.shard_map(
            self.device,
            mesh=self.mesh,
            in_specs=(specs,),
            out_specs=(PartitionSpec(), across, PartitionSpec()),
            axis_names={AXIS, *stages.batch_axes},
            check_vma=False,
        )
        return function(values)

    @property
    def read(self) -> list[int]:
        """Positions of the leaves that are read inside."""
        stages = self.stages
        return sorted(stages.split.read_inside | stages.end.read_inside)

    def device(self, values: dict[str, Any]) -> tuple[Any, list[Any], list[Any]]:
        """What one device does with its parts of the values."""
        stages, count = self.stages, len(self.traced.leaves)
        leaves: list[Any] = [values["leaves"].get(i) for i in range(count)]
        for i in stages.batch:
            if leaves[i] is not None:
                shape = (stages.microbatches, -1, *leaves[i].shape[1:])
                leaves[i] = leaves[i].reshape(shape)
        device = Device(
            stages,
            me=values["me"][0],
            part=values["part"][0],
            weights=[w[:, 0] for w in values["weights"]],
            frozen=[w[:, 0] for w in values["frozen"]],
            ids=values["ids"][:, 0],
            leaves=leaves,
        )
        columns = {name: column[:, 0] for name, column in values["own"].items()}
        loss, d_weights, d_inside = run_schedule(device, columns | values["common"])
        everywhere = (stages.axis, *stages.batch_axes)
        if stages.batch_axes:
            d_weights = [jax.lax.psum(d, stages.batch_axes) for d in d_weights]
        return (
            jax.lax.psum(loss, everywhere),
            [d[:, None] for d in d_weights],
            [jax.lax.psum(d, everywhere) for d in d_inside],
        )

    def rest(self, leaves: list[Any]) -> tuple[Any, Any, Any]:
        """aux, model state and random state, none of which depends on the batch.

        A scan may make them beside what does: any batch will do, so it gets zeros.
        """
        part = self.stages.split
        known = part.known(leaves)
        for i in self.stages.batch:
            number = part.program.inputs[i]
            aval = part.program.avals[number]
            known[number] = jnp.zeros(aval.shape, aval.dtype)
        found = part.program.run(part.program.outputs[1:], known)
        return self.traced.out_tree.unflatten(found)


def pipelined(
    traced: Traced,
    mesh: Mesh | AbstractMesh,
    schedule: Schedule,
    size: int,
    *,
    batch_axes: tuple[str, ...] = (),
    remat: bool = True,
) -> Pipelined:
    """Prepares a loss for a pipeline.

    The loss must be a mean over examples: that of the microbatches' means is taken.

    Args:
        traced: The loss of the global batch.
        mesh: With an axis "pipeline" of `schedule.devices`.
        schedule: A wave table; forward and backward tasks.
        size: Examples in the global batch.
        batch_axes: Axes that split the batch.
        remat: Whether every layer is recomputed in the backward pass, and not only
            the stage.

    Raises:
        ModelError: if the loss cannot be cut.
        MeshError: if batch or layers do not divide.
    """
    parts = math.prod(mesh.shape[a] for a in batch_axes)
    rows = rows_of(size, schedule.microbatches, parts)
    whole = split(retraced(traced, size, rows))
    _check_rest(whole)
    divided = rows % schedule.devices == 0 and not whole.draws_at_the_end
    end = whole
    if divided and schedule.devices > 1:
        end = split(retraced(traced, size, rows // schedule.devices))
    roles, read = [leaf.role for leaf in traced.leaves], whole.read_inside
    shares = schedule.microbatches * parts * (schedule.devices if divided else 1)
    stages = Stages(
        split=whole,
        end=end,
        arrays=arrays(schedule),
        slots=LayerSlots(whole.chain.count, schedule.devices, schedule.chunks),
        microbatches=schedule.microbatches,
        axis=AXIS,
        batch_axes=batch_axes,
        parts=parts,
        divided=divided,
        weight=1 / shares,
        rngs=frozenset(i for i in read if roles[i] == "rng"),
        batch=frozenset(
            i
            for i, leaf in enumerate(traced.leaves)
            if leaf.role == "batch" and is_split(leaf, size)
        ),
        trained=tuple(i for i in sorted(read) if roles[i] == "param"),
        remat=remat,
    )
    return Pipelined(traced, stages, mesh, size)


def _check_rest(whole: Split) -> None:
    for output in whole.program.outputs[1:]:
        if isinstance(output, int) and Origin.BATCH in whole.origins[output]:
            raise ModelError(
                f"the loss returns {whole.program.avals[output]}, which depends on the "
                "batch, beside its value",
                hint="a pipeline keeps no statistics of the batch; leave the pipeline "
                "axis out",
            )
