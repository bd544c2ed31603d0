"""Runs a schedule: one program for all devices, driven by the schedule's arrays.

Manual over the pipeline axis and the axes of the batch; other axes are left to the
partitioner. Control flow is the same on every device: each runs every slot of a tick,
on garbage where the schedule gives it nothing to do, and keeps nothing of that.
Where only one stage has something to do at the ends of the model, all devices do it
together: the rows of that microbatch are split over the pipeline axis.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.pipeline.device import Arrays, Device, Stages
from jaxpar.schedule import Kind, ScheduleArrays
from jaxpar.stages.slots import LayerSlots


@jax.tree_util.register_dataclass
@dataclass
class _Held:
    """What a device holds from tick to tick.

    Attributes:
        inputs: Stage inputs, [rows + 1, ...] each; the last row takes what is not kept.
        gradients: Of stage outputs, the same.
        weights: Sums of gradients, [chunks, slots, ...].
        shared: Sums of gradients.
        loss: Sum.
    """

    inputs: Arrays
    gradients: Arrays
    weights: Arrays
    shared: Arrays
    loss: Any


def run_schedule(device: Device, columns: dict[str, Any]) -> tuple[Any, Arrays, Arrays]:
    """What one device does: all ticks of the schedule.

    Args:
        device: Its view.
        columns: Of `columns_of`, [ticks] each.

    Returns:
        Its part of the loss, and of the gradients of weights and shared leaves.
    """
    held = _start(device)
    for start, stop, kinds in device.stages.arrays.runs:
        if kinds:
            rows = {name: column[start:stop] for name, column in columns.items()}
            held, _ = lax.scan(partial(_tick, device, kinds), held, rows)
    return held.loss, held.weights, held.shared


def columns_of(arrays: ScheduleArrays) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of the schedule per device, [ticks, devices], and of all, [ticks]."""
    own: dict[str, Any] = {
        "input_arrival": arrays.input_arrival,
        "gradient_arrival": arrays.gradient_arrival,
    }
    common: dict[str, Any] = {}
    for name, slot in (("forward", arrays.forward), ("backward", arrays.backward)):
        for field in ("microbatch", "chunk", "input_row", "gradient_row"):
            own[f"{name}/{field}"] = getattr(slot, field)
        for field in ("first", "last"):
            common[f"{name}/{field}"] = getattr(slot, field)
    return own, common


def _start(device: Device) -> _Held:
    stages = device.stages
    x = [stages.split.program.avals[n] for n in stages.split.chain.start]

    def buffer(rows: int, aval: Any) -> Any:
        return jnp.zeros((rows + 1, *aval.shape), aval.dtype)

    return _Held(
        inputs=[buffer(stages.arrays.input_rows, a) for a in x],
        gradients=[buffer(stages.arrays.gradient_rows, a) for a in x if _floats(a)],
        weights=[jnp.zeros(w.shape, _wide(w.dtype)) for w in device.weights],
        shared=[jnp.zeros(s.shape, _wide(s.dtype)) for s in device.shared()],
        loss=jnp.zeros((), _wide(stages.split.program.avals[_loss(stages)].dtype)),
    )


def _loss(stages: Stages) -> int:
    number = stages.split.program.outputs[0]
    assert isinstance(number, int)
    return number


def _floats(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _wide(dtype: Any) -> Any:
    """In which sums are kept: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def _tick(
    device: Device, kinds: Sequence[Kind], held: _Held, row: dict[str, Any]
) -> tuple[_Held, None]:
    y = dx = None
    if Kind.FORWARD in kinds:
        y = _forward(device, held, row)
    if Kind.BACKWARD in kinds:
        held, dx = _backward(device, held, row)
    n = device.stages.devices
    if y is not None and device.stages.arrays.input_rows:
        came = _shift(y, device.stages.axis, [(i, (i + 1) % n) for i in range(n)])
        held = _put(held, "inputs", row["input_arrival"], came)
    if dx is not None and device.stages.arrays.gradient_rows:
        came = _shift(dx, device.stages.axis, [((i + 1) % n, i) for i in range(n)])
        held = _put(held, "gradients", row["gradient_arrival"], came)
    return held, None


def _shift(values: Arrays, axis: str, pairs: Any) -> Arrays:
    return [lax.ppermute(v, axis, pairs) for v in values]


def _put(held: _Held, name: str, row: Any, values: Arrays) -> _Held:
    """Writes what has arrived; row -1 is the last one, which nobody reads."""
    buffers = [
        lax.dynamic_update_index_in_dim(
            b, v, jnp.where(row < 0, b.shape[0] - 1, row), 0
        )
        for b, v in zip(getattr(held, name), values, strict=True)
    ]
    fields = dict(vars(held)) | {name: buffers}
    return _Held(**fields)


def _take(buffers: Arrays, row: Any) -> Arrays:
    return [
        lax.dynamic_index_in_dim(b, jnp.maximum(row, 0), 0, keepdims=False)
        for b in buffers
    ]


def _entering(
    device: Device, held: _Held, row: dict[str, Any], slot: str
) -> tuple[Arrays, Any]:
    """The stage's input, and whether it is that of the model's first stage."""
    first = row[f"{slot}/first"]
    x = _take(held.inputs, row[f"{slot}/input_row"])
    begin = lax.cond(
        first >= 0,
        lambda: device.begin(device.shared(), jnp.maximum(first, 0)),
        lambda: [jnp.zeros(v.shape, v.dtype) for v in x],
    )
    opens = (device.me == 0) & (row[f"{slot}/chunk"] == 0) & (first >= 0)
    return [jnp.where(opens, a, b) for a, b in zip(begin, x, strict=True)], opens


def _forward(device: Device, held: _Held, row: dict[str, Any]) -> Arrays:
    x, _ = _entering(device, held, row, "forward")
    chunk = row["forward/chunk"]
    microbatch = jnp.maximum(row["forward/microbatch"], 0)
    weights = _chunk(device.weights, chunk)
    return device.stage(chunk, microbatch, weights, device.shared(), x)


def _chunk(weights: Arrays, chunk: Any) -> Arrays:
    return [lax.dynamic_index_in_dim(w, chunk, 0, keepdims=False) for w in weights]


def _backward(device: Device, held: _Held, row: dict[str, Any]) -> tuple[_Held, Arrays]:
    stages = device.stages
    x, opens = _entering(device, held, row, "backward")
    chunk, microbatch = row["backward/chunk"], row["backward/microbatch"]
    on = microbatch >= 0
    floats, join = _by_gradient(x)

    def stage(weights: Arrays, shared: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        y = device.stage(chunk, jnp.maximum(microbatch, 0), weights, shared, join(x))
        return [v for v in y if _floats(v)], y

    inside = device.shared()
    _, pull, y = jax.vjp(
        stage, _chunk(device.weights, chunk), inside, floats, has_aux=True
    )
    loss, shared, dy_end = _end(device, held, row, y)
    last = (device.me == stages.devices - 1) & (chunk == stages.slots.chunks - 1)
    last &= row["backward/last"] >= 0
    dy = [
        jnp.where(last, a, b)
        for a, b in zip(
            dy_end, _take(held.gradients, row["backward/gradient_row"]), strict=True
        )
    ]
    d_weights, d_inside, dx = pull(dy)
    weights = [
        _add_chunk(total, chunk, jnp.where(on, d, jnp.zeros_like(d)))
        for total, d in zip(held.weights, d_weights, strict=True)
    ]
    shared = [
        total + jnp.where(on, d, jnp.zeros_like(d)).astype(total.dtype)
        for total, d in zip(shared, d_inside, strict=True)
    ]
    shared = _beginning(device, row, shared, opens, dx)
    return _Held(held.inputs, held.gradients, weights, shared, loss), dx


def _by_gradient(x: Arrays) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
    """The floating-point ones, and a function that puts the others back."""
    floats = [v for v in x if _floats(v)]

    def join(found: Arrays) -> Arrays:
        values = iter(found)
        return [next(values) if _floats(v) else v for v in x]

    return floats, join


def _add_chunk(total: Any, chunk: Any, gradient: Any) -> Any:
    gradient = gradient.astype(total.dtype)
    if total.shape[0] == 1:
        return total + gradient[None]
    now = lax.dynamic_index_in_dim(total, chunk, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, now + gradient, chunk, 0)


def _end(
    device: Device, held: _Held, row: dict[str, Any], y: Arrays
) -> tuple[Any, Arrays, Arrays]:
    """Loss and gradients of the end of the model, in ticks in which it is reached."""
    last = row["backward/last"]

    def reached() -> tuple[Any, Arrays, Arrays]:
        return _ending(device, held, last, y)

    def elsewhere() -> tuple[Any, Arrays, Arrays]:
        nothing = [jnp.zeros(v.shape, v.dtype) for v in y if _floats(v)]
        return held.loss, held.shared, nothing

    return lax.cond(last >= 0, reached, elsewhere)


def _ending(
    device: Device, held: _Held, last: Any, y: Arrays
) -> tuple[Any, Arrays, Arrays]:
    stages = device.stages
    here = device.me == stages.devices - 1
    dims = _row_dims(stages)
    if stages.divided:
        pairs = zip(y, dims, strict=True)
        y = [_scatter(stages, jnp.where(here, v, 0), d) for v, d in pairs]
    floats, join = _by_gradient(y)

    def finish(shared: Arrays, found: Arrays) -> Any:
        return device.finish(shared, last, join(found))

    value, pull = jax.vjp(finish, device.shared(), floats)
    d_shared, dy = pull(jnp.ones((), value.dtype))
    if not stages.divided:
        value = jnp.where(here, value, 0)
        d_shared = [jnp.where(here, d, 0) for d in d_shared]
    else:
        float_dims = [d for v, d in zip(y, dims, strict=True) if _floats(v)]
        dy = [_gather(stages, v, d) for v, d in zip(dy, float_dims, strict=True)]
    shared = [t + d.astype(t.dtype) for t, d in zip(held.shared, d_shared, strict=True)]
    return held.loss + value.astype(held.loss.dtype), shared, dy


def _row_dims(stages: Stages) -> list[int | None]:
    """The dim of rows of each value that leaves the blocks, or None."""
    found: list[int | None] = []
    for a, b in zip(stages.split.chain.final, stages.end.chain.final, strict=True):
        whole, part = stages.split.program.avals[a], stages.end.program.avals[b]
        pairs = enumerate(zip(whole.shape, part.shape, strict=True))
        found.append(next((i for i, (m, n) in pairs if m != n), None))
    return found


def _scatter(stages: Stages, value: Any, dim: int | None) -> Any:
    """From the last device to all: their rows, or all of it where it has none."""
    if dim is None:
        return lax.psum(value, stages.axis)
    return lax.psum_scatter(value, stages.axis, scatter_dimension=dim, tiled=True)


def _gather(stages: Stages, gradient: Any, dim: int | None) -> Any:
    """The way back of `_scatter`."""
    if dim is None:
        return lax.psum(gradient, stages.axis)
    return lax.all_gather(gradient, stages.axis, axis=dim, tiled=True)


def _beginning(
    device: Device, row: dict[str, Any], shared: Arrays, opens: Any, dx: Arrays
) -> Arrays:
    """Adds the gradients of the beginning of the model, where it is reached."""
    first = row["backward/first"]

    def reached() -> Arrays:
        def begin(shared: Arrays) -> Arrays:
            found = device.begin(shared, first)
            return [v for v in found if _floats(v)]

        _, pull = jax.vjp(begin, device.shared())
        (found,) = pull([jnp.where(opens, d, 0) for d in dx])
        return [t + d.astype(t.dtype) for t, d in zip(shared, found, strict=True)]

    return lax.cond(first >= 0, reached, lambda: shared)


def slot_ids(slots: LayerSlots) -> np.ndarray:
    """Layer in each slot, or -1; [chunks, devices, slots]."""
    return slots.table.astype(np.int32)
