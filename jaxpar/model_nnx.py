"""NNX constructors and modules as pure functions."""

import inspect
from collections.abc import Callable
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
    keyed_leaves,
    strong,
)
from jaxpar.user_code import (
    as_key,
    call_loss,
    check_aux,
    no_mesh,
    replay,
    rngs_parameter,
    signature_of,
    user_code,
)

_NAMES_KEYS = ("out_sharding", "sharding_names", "sharding")
"""Where NNX keeps sharding names in a variable's metadata: newest version first."""


def nnx_model(
    model: Callable[[nnx.Rngs], nnx.Module] | nnx.Module,
    loss: Callable[..., Any],
    wrt: nnx.filterlib.Filter,
) -> Model:
    """The pure face of an NNX model.

    Args:
        model: A constructor, called once, abstractly; or a ready module, which stays
            as it is.
        loss: loss(model, batch) or loss(model, batch, rngs) -> scalar or (scalar, aux).
        wrt: Filter of the trained variables.

    Raises:
        ModelError: if the model cannot be built, or `wrt` selects nothing or arrays
            that are not floating.
    """
    rngs_how = rngs_parameter(loss, ("model", "batch"))
    ready = isinstance(model, nnx.Module)
    make = None if ready else _maker(model)
    if make is None:
        graphdef, state = _split(nnx.clone(model))
        leaves = jax.tree.leaves(state)
    else:
        graphdef, state, leaves = *make[1], None
    layout = _layout(state, wrt)
    return _Nnx(graphdef, layout, loss, rngs_how).model(make, leaves, state)
