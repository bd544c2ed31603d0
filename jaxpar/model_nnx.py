"""NNX constructors and modules as pure functions."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxpar.errors import ModelError
from jaxpar.pure import (
    LOSS_KEY,
    PARAM,
    RNG,
    STATE,
    Annotation,
    Keys,
    Layout,
    Model,
    Parts,
    Tree,
    key_struct,
    keyed_leaves,
    path_of,
    strong,
)
from jaxpar.user_code import (
    call_loss,
    check_aux,
    no_mesh,
    replay,
    rngs_parameter,
    signature_of,
    user_code,
)

_NAMES_KEYS = ("out_sharding", "sharding_names", "sharding")
"""Where a variable's metadata holds its sharding names; the newest Flax first."""

_Leaves = Callable[[jax.Array], list[jax.Array]]


def nnx_model(
    model: Callable[[nnx.Rngs], nnx.Module] | nnx.Module,
    loss: Callable[..., Any],
    wrt: Any,
) -> Model:
    """The pure face of an NNX model.

    Args:
        model: A constructor, called once and abstractly; or a ready module, which is
            left as it is.
        loss: loss(model, batch) or loss(model, batch, rngs) -> scalar or (scalar, aux).
        wrt: NNX filter of the trained variables.

    Raises:
        ModelError: if the model cannot be built, or `wrt` selects nothing, or arrays
            that are not floating.
    """
    how = rngs_parameter(loss, ("model", "batch"))
    ready = isinstance(model, nnx.Module)
    graphdef, state, make = _take_apart(model) if ready else _trace_maker(model)
    layout = Layout.of(state, _placing(state, wrt))
    init, abstract = layout.initialiser(make, loss_key=how is not None)
    functions = _Functions(graphdef, layout, loss, how)
    return Model(
        kind="nnx",
        init=init,
        loss=functions.loss,
        merge=functions.merge,
        abstract=abstract,
        names=layout.annotate(_annotations(state)),
        values=init(0) if ready and _is_concrete(state) else None,
    )


@dataclass(frozen=True)
class _Functions:
    """What `Model` needs beside `init`."""

    graphdef: Any
    layout: Layout
    user_loss: Callable[..., Any]
    how: str | None

    def merge(self, params: Tree, model_state: Tree, rngs: Tree) -> nnx.Module:
        state = self.layout.join(params, model_state, rngs)
        with nnx.use_eager_sharding(False):
            return nnx.merge(self.graphdef, state, copy=True)

    def loss(
        self, params: Tree, model_state: Tree, rngs: Tree, batch: Tree, step: Any
    ) -> tuple[jax.Array, Parts]:
        module = self.merge(params, model_state, rngs)
        with nnx.use_eager_sharding(False):
            keys = None
            if self.how is not None:
                keys = nnx.Rngs(jax.random.fold_in(rngs[LOSS_KEY], step))
            arguments = (module, batch)
            value, aux = call_loss(self.user_loss, arguments, self.how, keys)
            nnx.pop(module, nnx.Intermediate)
            leaves = self.layout.conform(nnx.state(module))
        _, model_state, own_rngs = self.layout.split(leaves)
        return value, (check_aux(aux), model_state, rngs | own_rngs)


def _take_apart(module: nnx.Module) -> tuple[Any, nnx.State, _Leaves]:
    """Graph, state and values of a ready module."""
    with user_code("nnx.split of the module"):
        module = nnx.clone(module)
        nnx.pop(module, nnx.Intermediate)
        graphdef, state = nnx.split(module)
    leaves = jax.tree.leaves(state)
    return graphdef, state, lambda _key: [jnp.copy(leaf) for leaf in leaves]


def _trace_maker(
    constructor: Callable[[nnx.Rngs], nnx.Module],
) -> tuple[Any, nnx.State, _Leaves]:
    """Graph, abstract state and the traced making of its leaves."""
    rngs_name = "rngs" if _rngs_by_keyword(constructor) else ""

    def build(key: jax.Array) -> tuple[Any, nnx.State]:
        with nnx.use_eager_sharding(False):
            rngs = nnx.Rngs(key)
            with user_code("building the model"):
                module = constructor(**{rngs_name: rngs}) if rngs_name else constructor(rngs)
            if not isinstance(module, nnx.Module):
                raise ModelError(
                    f"the model function returns {type(module).__name__}, not an nnx.Module",
                    hint="model= is a function of nnx.Rngs that returns the module",
                )
            nnx.pop(module, nnx.Intermediate)
            _declare_arrays(module)
            graphdef, state = nnx.split(module)
        leaves = [strong(leaf, f"variable {path_of(k)}") for k, leaf in keyed_leaves(state)]
        return graphdef, jax.tree.structure(state).unflatten(leaves)

    with no_mesh():
        traced, (graphdef, state) = jax.make_jaxpr(build, return_shape=True)(key_struct())
    return graphdef, state, replay(traced)
