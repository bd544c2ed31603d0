"""A pipelined step has the loss and the gradients of one device."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxpar.errors import MeshError, ModelError
from jaxpar.model import make_model
from jaxpar.pipeline.batches import draw
from jaxpar.pipeline.derive import Pipelined, pipelined
from jaxpar.pure import named_leaves
from jaxpar.schedule import make_schedule
from jaxpar.trace import Traced, trace
from jaxpar.zoo.build import zoo

BATCH, LENGTH = 32, 8
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("circular", 2))
SIZES = {
    "vocab": 64,
    "d_model": 16,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 8,
    "d_ff": 32,
    "max_seq": LENGTH,
}


def decoder(**overrides: Any) -> Traced:
    options = SIZES | {"layers": 4, "scan": True} | overrides
    made = zoo("gpt-tiny", batch=BATCH, seq=LENGTH, **options)
    model = make_model(made["model"], made["batch"], made["loss"])
    return trace(model, made["batch"])


def pipeline(
    traced: Traced,
    family: str,
    stages: int,
    microbatches: int,
    chunks: int,
    **axes: int,
) -> Pipelined:
    sizes = {"pipeline": stages} | axes
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: math.prod(sizes.values())],
    )
    schedule = make_schedule(family, stages, microbatches, chunks)
    batch_axes = tuple(a for a in axes if a in ("data", "fsdp"))
    return pipelined(traced, mesh, schedule, BATCH, batch_axes=batch_axes)


def tokens() -> dict[str, Any]:
    values = np.random.default_rng(0).integers(0, 64, (BATCH, LENGTH + 1))
    return {"tokens": values.astype(np.int32)}


def errors(traced: Traced, found: Pipelined) -> dict[str, float]:
    """Of loss and gradients against one device, by the largest gradient of all."""
    params, state, rngs = jax.jit(traced.model.init)(0)
    arguments = (params, state, rngs, tokens(), jnp.int32(0))
    (loss, _), gradients = jax.jit(found)(*arguments)
    derive = jax.value_and_grad(traced.model.loss, has_aux=True)
    (wanted_loss, _), wanted = jax.jit(derive)(*arguments)
    pairs = {
        path: (np.asarray(x), np.asarray(named_leaves(gradients)[path]))
        for path, x in named_leaves(wanted).items()
    }
    scale = max(float(np.max(np.abs(x))) for x, _ in pairs.values())
    result = {p: float(np.max(np.abs(x - y))) / scale for p, (x, y) in pairs.items()}
    return result | {"loss": abs(float(loss) - float(wanted_loss)) / float(wanted_loss)}


def check(traced: Traced, found: Pipelined, most: float = 1e-5) -> None:
    wrong = {k: e for k, e in errors(traced, found).items() if not e <= most}
    assert not wrong


@pytest.mark.parametrize(("family", "chunks"), SCHEDULES)
def test_every_schedule_has_the_gradients_of_one_device(
    family: str, chunks: int
) -> None:
    traced = decoder()
    check(traced, pipeline(traced, family, 2, 4, chunks, data=2))


@pytest.mark.parametrize(
    "options",
    [{"scan": False}, {"remat": "full"}, {"tied": False}, {"layers": 10}],
    ids=["unrolled", "remat", "untied", "ten layers on four stages"],
)
def test_models(options: dict[str, Any]) -> None:
    traced = decoder(**options)
    check(traced, pipeline(traced, "1f1b", 4, 4, 1))


def test_a_tensor_axis_beside_the_pipeline() -> None:
    traced = decoder()
    check(traced, pipeline(traced, "1f1b", 2, 4, 1, tensor=2))


@pytest.mark.parametrize("scan", [True, False])
def test_dropout_has_keys_for_each_microbatch_and_layer(scan: bool) -> None:
    traced, parts = decoder(dropout=0.3, scan=scan), 4
    params, state, rngs = jax.jit(traced.model.init)(0)

    def loss(params: Any) -> Any:
        rows, total = BATCH // parts, 0.0
        for n in range(parts):
            batch = {"tokens": tokens()["tokens"][n * rows : (n + 1) * rows]}
            drawn = jax.tree.map(lambda leaf, n=n: draw(leaf, n), rngs)
            total += traced.model.loss(params, state, drawn, batch, jnp.int32(0))[0]
        return total / parts

    wanted_loss, wanted = jax.jit(jax.value_and_grad(loss))(params)
    found = pipeline(traced, "1f1b", 2, parts, 1)
    arguments = (params, state, rngs, tokens(), jnp.int32(0))
    (value, (_, _, counts)), gradients = jax.jit(found)(*arguments)
    np.testing.assert_allclose(value, wanted_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)
    assert jax.tree.structure(counts) == jax.tree.structure(rngs)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("axes", [{}, {"data": 2}, {"fsdp": 2}, {"tensor": 2}], ids=str)
@pytest.mark.parametrize("microbatches", [4, 8, 16])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(("family", "chunks"), SCHEDULES)
def test_the_whole_product(
    family: str,
    chunks: int,
    stages: int,
    microbatches: int,
    axes: dict[str, int],
    scan: bool,
) -> None:
    traced = decoder(scan=scan, layers=8)
    check(traced, pipeline(traced, family, stages, microbatches, chunks, **axes))


def temporary_bytes(family: str, chunks: int, microbatches: int) -> int:
    """Of the compiled step, for microbatches of one size."""
    batch = 4 * microbatches
    made = zoo("gpt-tiny", batch=batch, seq=LENGTH, **SIZES, layers=8, scan=True)
    traced = trace(
        make_model(made["model"], made["batch"], made["loss"]), made["batch"]
    )
    mesh = jax.make_mesh(
        (4,), ("pipeline",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
    )
    found = pipelined(
        traced, mesh, make_schedule(family, 4, microbatches, chunks), batch
    )
    step = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = jax.jit(found).lower(*traced.model.abstract, traced.batch, step)
    memory: Any = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes


@pytest.mark.parametrize(
    ("family", "chunks"),
    [("1f1b", 1), pytest.param("interleaved", 2, marks=pytest.mark.slow)],
)
def test_memory_does_not_grow_with_the_microbatches(family: str, chunks: int) -> None:
    few, many = (temporary_bytes(family, chunks, n) for n in (8, 32))
    assert many == pytest.approx(few, rel=0.02)


def scan_lengths(jaxpr: Any) -> list[int]:
    """Lengths of the outermost loops inside of a shard_map."""
    found: list[int] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            inner = eqn.params["jaxpr"]
            loops = [e for e in inner.eqns if e.primitive.name == "scan"]
            found += [e.params["length"] for e in loops]
    return found


@pytest.mark.parametrize(("family", "chunks"), SCHEDULES)
def test_the_program_has_the_ticks_of_the_schedule(family: str, chunks: int) -> None:
    traced = decoder(layers=8)
    found = pipeline(traced, family, 4, 8, chunks)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(found)(*traced.model.abstract, traced.batch, step)
    ticks = len(make_schedule(family, 4, 8, chunks).ticks)
    assert sum(scan_lengths(jaxpr.jaxpr)) == ticks


def test_uneven_microbatches_are_refused() -> None:
    with pytest.raises(MeshError, match="batch of 32 does not divide into 5"):
        pipeline(decoder(), "1f1b", 2, 5, 1)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(MeshError, match="2 layers cannot fill 4"):
        pipeline(decoder(layers=2), "1f1b", 4, 4, 1)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="no chain of equal blocks"):
        pipeline(decoder(layers=1, scan=False), "1f1b", 2, 4, 1)
