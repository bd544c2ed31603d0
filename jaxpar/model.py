"""Models and losses as users give them, behind one pure face."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax import nnx

from jaxpar.errors import ModelError
from jaxpar.model_linen import linen_model
from jaxpar.model_nnx import nnx_model
from jaxpar.pure import Annotation, Model, Tree, named_leaves

__all__ = ["Annotation", "Model", "make_model", "named_leaves"]


def make_model(
    model: Any,
    batch: Tree,
    loss: Callable[..., Any],
    *,
    init: Callable[..., Any] | None = None,
    wrt: Any = nnx.Param,
    mutable: str | tuple[str, ...] = (),
) -> Model:
    """Any supported model as pure functions of nested dicts of arrays.

    The model is traced once, with shapes only; no array of it is made.

    Args:
        model: NNX: a callable (nnx.Rngs) -> nnx.Module, or a ready nnx.Module, whose
            present values `init` then gives for every seed. Linen: the module.
        batch: The global batch, arrays or `jax.ShapeDtypeStruct`; read for Linen only.
        loss: NNX: loss(model, batch) or loss(model, batch, rngs). Linen: loss(module,
            variables, batch) or loss(module, variables, batch, rngs). Returns a
            floating-point scalar or (scalar, aux). `rngs` is new in every step:
            `nnx.Rngs`, or a dict of keys for "params" and "dropout".
        init: Linen only: (module, key, batch) -> variables. Without it, module.init
            is called with the batch, where the arguments' names tell how.
        wrt: What is trained. NNX: a filter. Linen: a collection ("params" unless
            given), or a predicate over the paths in "params".
        mutable: Linen only: collections that the loss updates; it then returns
            (scalar, collections) or (scalar, (aux, collections)).

    Raises:
        ModelError: if the arguments do not fit one another, or the model fails.
    """
    if isinstance(model, nn.Module):
        mutable = (mutable,) if isinstance(mutable, str) else tuple(mutable)
        return linen_model(
            model, batch, loss, init=init, wrt=_linen_wrt(wrt), mutable=mutable
        )
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ModelError(
            f"model is the Linen class {model.__name__}, not a module",
            hint=f"pass {model.__name__}(...)",
        )
    if not callable(model):
        raise ModelError(
            f"model is {type(model).__name__} {model!r:.60}",
            hint="pass a function of nnx.Rngs that returns an nnx.Module, an "
            "nnx.Module, or a Linen module",
        )
    if init is not None or mutable:
        raise ModelError(
            f"{'init' if init is not None else 'mutable'}= is for Linen modules; an "
            "NNX model builds and updates itself",
            hint="leave it out",
        )
    return nnx_model(model, loss, wrt)


def _linen_wrt(wrt: Any) -> Any:
    if wrt is nnx.Param:
        return "params"
    if isinstance(wrt, str) or (callable(wrt) and not isinstance(wrt, type)):
        return wrt
    raise ModelError(
        f"wrt={wrt!r:.60} selects nothing in a Linen module",
        hint="give the name of a collection, or a predicate over paths in 'params'",
    )
