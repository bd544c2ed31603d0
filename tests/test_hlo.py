"""Collectives and memory of programs compiled here, against figures worked by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.hlo import HloCollective, collectives, memory_of, partitioned_text

SIZES = {"data": 2, "model": 4}
BATCH, WIDTH, LAYERS = 16, 32, 5
HIDDEN = BATCH // 2 * WIDTH * 4
"""Bytes of an activation [batch, width] whose batch lies over "data"."""


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    devices = np.array(jax.devices()).reshape(tuple(SIZES.values()))
    return Mesh(devices, tuple(SIZES), axis_types=(AxisType.Auto,) * 2)


def array(mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.float32):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compiled_collectives(
    function: Callable, *arguments: Any
) -> tuple[HloCollective, ...]:
    return collectives(jax.jit(function).lower(*arguments).compile().as_text())


def summary(found: tuple[HloCollective, ...]) -> list[Any]:
    return sorted((c.kind, c.bytes, c.axes(SIZES), c.executions) for c in found)


def stack(mesh: Mesh, *, scan: bool) -> Callable:
    """Layers of two matrices, sharded as Megatron does."""

    def layer(x, weights):
        up, down = weights
        x = x + jnp.tanh(x @ up) @ down
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P("data"))), None

    def run(x, up, down):
        if scan:
            return lax.scan(layer, x, (up, down))[0]
        for i in range(LAYERS):
            x, _ = layer(x, (up[i], down[i]))
        return x

    return run


def stack_arguments(mesh: Mesh) -> tuple[Any, ...]:
    return (
        array(mesh, (BATCH, WIDTH), "data"),
        array(mesh, (LAYERS, WIDTH, 4 * WIDTH), None, None, "model"),
        array(mesh, (LAYERS, 4 * WIDTH, WIDTH), None, "model"),
    )


def test_all_reduce_in_a_scan_runs_once_a_layer(mesh: Mesh):
    found = compiled_collectives(stack(mesh, scan=True), *stack_arguments(mesh))
    assert summary(found) == [("all-reduce", HIDDEN, ("model",), LAYERS)]
    assert found[0].exact
    assert found[0].wire_bytes == 2 * HIDDEN * 3 / 4
    assert found[0].op_name.endswith("dot_general")


def test_all_reduce_unrolled_is_listed_once_a_layer(mesh: Mesh):
    found = compiled_collectives(stack(mesh, scan=False), *stack_arguments(mesh))
    assert summary(found) == [("all-reduce", HIDDEN, ("model",), 1)] * LAYERS


def test_nested_loops_multiply(mesh: Mesh):
    def run(x, up, down):
        again = stack(mesh, scan=True)
        return lax.fori_loop(0, 3, lambda _, x: again(x, up, down), x)

    found = compiled_collectives(run, *stack_arguments(mesh))
    assert summary(found) == [("all-reduce", HIDDEN, ("model",), 3 * LAYERS)]


def test_loop_whose_length_depends_on_data(mesh: Mesh):
    def run(x, up, down):
        def goes_on(x):
            return x.sum() < 0

        return lax.while_loop(goes_on, lambda x: stack(mesh, scan=True)(x, up, down), x)

    found = compiled_collectives(run, *stack_arguments(mesh))
    assert not any(c.exact for c in found)
    assert ("all-reduce", HIDDEN, ("model",), LAYERS) in summary(found)
    assert ("all-reduce", 4, ("data",), 1) in summary(found)


def test_of_two_branches_the_dearer_is_listed(mesh: Mesh):
    def run(flag, x, up, down):
        one, all_layers = stack(mesh, scan=False), stack(mesh, scan=True)
        return lax.cond(
            flag,
            lambda: all_layers(x, up, down),
            lambda: one(x, up, down) * 0 + x,
        )

    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    found = compiled_collectives(run, flag, *stack_arguments(mesh))
    assert sum(c.bytes * c.executions for c in found) == LAYERS * HIDDEN
    assert not any(c.exact for c in found)


RESHARDS = [
    (("model",), (), "all-gather", 64 * 64 * 4, ("model",)),
    ((("data", "model"),), (), "all-gather", 64 * 64 * 4, ("data", "model")),
    ((("data", "model"),), ("data",), "all-gather", 32 * 64 * 4, ("model",)),
    (("model",), (None, "model"), "all-to-all", 16 * 64 * 4, ("model",)),
    (("data", "model"), ("model", "data"), "collective-permute", None, None),
]


@pytest.mark.parametrize(("before", "after", "kind", "size", "axes"), RESHARDS)
def test_resharding(mesh: Mesh, before, after, kind, size, axes):
    def run(x):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*after)))

    found = compiled_collectives(run, array(mesh, (64, 64), *before))
    assert kind in [c.kind for c in found]
    if size is not None:
        assert summary(found) == [(kind, size, axes, 1)]


def test_permutation_and_reduce_scatter_by_hand(mesh: Mesh):
    def run(x):
        x = lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)])
        return lax.psum_scatter(x, "model", scatter_dimension=1, tiled=True)

    spec = P("data", "model")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    found = compiled_collectives(mapped, array(mesh, (16, 64), *spec))
    local = 8 * 16 * 4
    assert summary(found) == [
        ("collective-permute", local, ("model",), 1),
        ("reduce-scatter", local, ("model",), 1),
    ]
    assert [c.wire_bytes for c in found] == [local, local * 3 / 4]


def test_combined_collectives_are_summed(mesh: Mesh):
    def run(x, y):
        return x.sum(axis=0), (y * 2).sum(axis=0)

    x, y = (array(mesh, (64, n), ("data", "model")) for n in (8, 24))
    found = compiled_collectives(run, x, y)
    assert sum(c.bytes for c in found) == (8 + 24) * 4
    assert {c.axes(SIZES) for c in found} == {("data", "model")}


def test_partitioned_text_keeps_the_types_of_the_program(mesh: Mesh):
    def run(x, w):
        return x @ w

    x = array(mesh, (16, 64), "data", "model", dtype=jnp.bfloat16)
    w = array(mesh, (64, 32), "model", dtype=jnp.bfloat16)
    lowered = jax.jit(run).lower(x, w)
    early = collectives(partitioned_text(lowered))
    late = collectives(lowered.compile().as_text())
    assert summary(early) == [("all-reduce", 8 * 32 * 2, ("model",), 1)]
    assert summary(late) == [("all-reduce", 8 * 32 * 4, ("model",), 1)]


def test_program_of_one_device_has_no_partitioned_text():
    lowered = jax.jit(jnp.sin).lower(jnp.ones(3))
    with pytest.raises(ValueError, match="one device"):
        partitioned_text(lowered)


def test_memory_of_a_donated_update(mesh: Mesh):
    def run(x, y):
        return x + y.sum(), y * 2

    x, y = array(mesh, (16, 64), "data"), array(mesh, (16, 64), "data", "model")
    memory = memory_of(jax.jit(run, donate_argnums=0).lower(x, y).compile())
    whole, part = 8 * 64 * 4, 8 * 16 * 4
    assert memory.arguments_bytes == whole + part
    assert memory.outputs_bytes >= whole + part
    assert memory.aliased_bytes == whole
    assert memory.total_bytes == (
        memory.arguments_bytes
        + memory.outputs_bytes
        - whole
        + memory.temporaries_bytes
        + memory.code_bytes
    )


def test_memory_that_a_backend_does_not_report():
    class Silent:
        def memory_analysis(self) -> None:
            return None

    with pytest.raises(ValueError, match="reports no memory"):
        memory_of(Silent())
