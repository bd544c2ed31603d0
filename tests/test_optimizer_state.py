"""Optimizer state follows its parameters, whatever the optimizer."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

from jaxpar.optimizer_state import optimizer_leaves, optimizer_specs, state_bytes
from jaxpar.pure import named_leaves
from jaxpar.sharding import Spec, axes_of, fits

SIZES = {"fsdp": 4, "tensor": 2}
F, T = ("fsdp",), ("tensor",)
PARAMETERS: dict[str, tuple[tuple[int, ...], Spec]] = {
    "embed/embedding": ((512, 128), (T, F)),
    "blocks/0/up/kernel": ((128, 256), (F, T)),
    "blocks/0/up/bias": ((256,), (T,)),
    "blocks/0/square/kernel": ((128, 128), (F, T)),
    "blocks/1/heads/kernel": ((256, 8, 128), (F, T, ())),
    "kernel": ((64, 8), ((), T)),
    "scale": ((), ()),
}


def tree(leaf: Callable[[str], Any]) -> Any:
    """Nested dicts with int and str keys; a leaf per path."""
    root: dict[Any, Any] = {}
    for path in PARAMETERS:
        *parents, last = (int(k) if k.isdigit() else k for k in path.split("/"))
        node = root
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf(path)
    return root


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def label(params: Any) -> Any:
    return jax.tree.map(lambda x: "adam" if x.ndim > 1 else "sgd", params)


OPTIMIZERS: Mapping[str, Any] = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-3),
    "clip, schedule, adamw": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
    ),
    "amsgrad": optax.amsgrad(1e-3),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-3),
    "rmsprop": optax.rmsprop(0.1, momentum=0.9),
    "adafactor": optax.adafactor(1e-2),
    "adafactor with momentum": optax.adafactor(1e-2, momentum=0.9),
    "MultiSteps": optax.MultiSteps(optax.adafactor(1e-2), 2).gradient_transformation(),
    "multi_transform": optax.multi_transform(
        {"adam": optax.adam(1e-3), "sgd": optax.sgd(0.1)}, label
    ),
    "masked": optax.masked(optax.adam(1e-3), is_matrix),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(1e-3),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "schedule_free": contrib.schedule_free_adamw(1e-3),
    "ema": optax.chain(optax.adam(1e-3), optax.ema(0.9)),
    "muon": contrib.muon(1e-3),
    "prodigy": contrib.prodigy(1.0),
    "sm3": optax.sm3(0.1),
    "lbfgs": optax.lbfgs(),
}


def state_of(optimizer: Any) -> Any:
    params = tree(lambda path: jax.ShapeDtypeStruct(PARAMETERS[path][0], jnp.bfloat16))
    return jax.eval_shape(optimizer.init, params)


def specs_by_path(state: Any) -> dict[str, tuple[tuple[int, ...], Spec]]:
    specs = jax.tree.structure(state).flatten_up_to(optimizer_specs(state, PARAMETERS))
    shapes = named_leaves(state)
    pairs = zip(shapes.items(), specs, strict=True)
    return {path: (leaf.shape, spec) for (path, leaf), spec in pairs}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_spec_is_legal(name: str) -> None:
    for path, (shape, spec) in specs_by_path(state_of(OPTIMIZERS[name])).items():
        assert len(spec) == len(shape), path
        assert fits(spec, shape, SIZES), path
        assert len(set(axes_of(spec))) == len(axes_of(spec)), path


def owner(path: str) -> str | None:
    owners = [p for p in PARAMETERS if f"/{path}".endswith(f"/{p}")]
    return max(owners, key=len, default=None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_leaves_of_a_parameters_shape_have_its_spec(name: str) -> None:
    found = {
        path: spec
        for path, (shape, spec) in specs_by_path(state_of(OPTIMIZERS[name])).items()
        if (p := owner(path)) and PARAMETERS[p][0] == shape
    }
    assert found == {path: PARAMETERS[owner(path) or ""][1] for path in found}
    # What is made per parameter elementwise is found in full.
    per_parameter = {
        "adam": 2,
        "amsgrad": 3,
        "lion": 1,
        "momentum": 1,
        "schedule_free": 2,
    }
    if name in per_parameter:
        assert len(found) == per_parameter[name] * len(PARAMETERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_large_leaves_without_a_parameter_do_not_exist(name: str) -> None:
    shapes = {path: shape for path, (shape, _) in PARAMETERS.items()}
    longest = max(n for shape in shapes.values() for n in shape)
    for leaf in optimizer_leaves(state_of(OPTIMIZERS[name]), shapes):
        assert leaf.parameter or math.prod(leaf.shape) <= longest, leaf


def test_factored_moments_keep_the_axes_of_the_dims_they_have() -> None:
    specs = specs_by_path(state_of(optax.adafactor(1e-2)))
    assert specs["0/v_row/blocks/0/up/kernel"] == ((128,), (F,))
    assert specs["0/v_col/blocks/0/up/kernel"] == ((256,), (T,))
    assert specs["0/v_row/embed/embedding"] == ((128,), (F,))
    assert specs["0/v_row/blocks/1/heads/kernel"] == ((8, 128), (T, ()))
    assert specs["0/v_col/blocks/1/heads/kernel"] == ((256, 8), (F, T))
    assert specs["0/v/blocks/0/up/kernel"] == ((1,), ((),))
    assert specs["0/v/kernel"] == PARAMETERS["kernel"]


def test_equal_dims_stay_whole_only_where_they_cannot_be_told_apart() -> None:
    square = jax.ShapeDtypeStruct((128,), jnp.float32)
    stacked = jax.ShapeDtypeStruct((6, 128), jnp.float32)
    params = {"w": ((128, 128), (F, T)), "s": ((6, 128, 128), (("tensor",), F, ()))}
    specs = optimizer_specs({"v": {"w": square, "s": stacked}}, params)
    assert specs == {"v": {"w": ((),), "s": (T, ())}}


def test_histories_leave_their_own_dim_whole() -> None:
    specs = specs_by_path(state_of(optax.scale_by_lbfgs(memory_size=4)))
    shape, spec = PARAMETERS["blocks/0/up/kernel"]
    path = "diff_params_memory/blocks/0/up/kernel"
    assert specs[path] == ((4, *shape), ((), *spec))


def test_the_longest_path_wins() -> None:
    state = state_of(optax.adam(1e-3))
    shapes = {path: shape for path, (shape, _) in PARAMETERS.items()}
    owners = {leaf.path: leaf.parameter for leaf in optimizer_leaves(state, shapes)}
    assert owners["0/mu/blocks/0/up/kernel"] == "blocks/0/up/kernel"
    assert owners["0/mu/kernel"] == "kernel"
    assert owners["0/count"] is None


def test_parameters_that_are_not_optimized_have_no_state() -> None:
    state = state_of(optax.masked(optax.adam(1e-3), is_matrix))
    shapes = {path: shape for path, (shape, _) in PARAMETERS.items()}
    owners = {leaf.parameter for leaf in optimizer_leaves(state, shapes)} - {None}
    assert owners == {path for path, shape in shapes.items() if len(shape) > 1}


def test_no_state() -> None:
    assert optimizer_leaves((), {}) == ()
    assert optimizer_specs((), {}) == ()


def equal_layers(layers: int = 5) -> Any:
    """Structs of a few equal layers and one parameter beside them."""
    kernel = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    blocks = {i: {"kernel": kernel} for i in range(layers)}
    return {"blocks": blocks, "head": {"kernel": kernel}}


def first_layers_only(params: Any) -> Any:
    """Nothing is kept for the last two layers."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: getattr(keys[1], "key", None) not in (3, 4), params
    )


WHOLE_TREE = jax.tree.map(lambda _: True, equal_layers())


@pytest.mark.parametrize(
    "optimizer",
    [
        *OPTIMIZERS.values(),
        optax.masked(optax.adam(1e-3), first_layers_only),
        optax.masked(optax.adam(1e-3), WHOLE_TREE),
        optax.flatten(optax.adam(1e-3)),
    ],
)
def test_state_bytes_are_those_of_the_whole_state(optimizer):
    params = equal_layers()
    kernels = tuple(f"blocks/{i}/kernel" for i in range(5))
    groups = (kernels, ("head/kernel",))
    found = state_bytes(optimizer, params, groups)
    state = jax.eval_shape(optimizer.init, params)
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)]
    assert sum(found.owned) + found.unowned == sum(sizes)
    apart = state_bytes(optimizer, params, [(p,) for p in (*kernels, "head/kernel")])
    assert found.owned == (sum(apart.owned[:5]), apart.owned[5])
