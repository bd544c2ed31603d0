"""Linen modules as pure functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze

from jaxpar.errors import ModelError
from jaxpar.pure import (
    LOSS_KEY,
    PARAM,
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
    required_parameters,
    rngs_parameter,
    user_code,
)

_Init = Callable[[nn.Module, Any, Any], Mapping[str, Any]]


def linen_model(
    module: nn.Module,
    batch: Tree,
    loss: Callable[..., Any],
    *,
    init: _Init | None,
    wrt: str | Callable[[str], bool],
    mutable: tuple[str, ...],
) -> Model:
    """The pure face of a Linen module.

    Args:
        module: The module.
        batch: Arrays, or structs, which `init` then sees as zeros.
        loss: loss(module, variables, batch[, rngs]) -> scalar or (scalar, aux); with
            `mutable`, (scalar, collections) or (scalar, (aux, collections)).
        init: (module, key, batch) -> variables, in metadata boxes or not.
        wrt: The collection that is trained, or which paths of "params" are.
        mutable: Collections that the loss updates.

    Raises:
        ModelError: if the variables cannot be made, or do not suit `wrt` or `mutable`.
    """
    how = rngs_parameter(loss, ("module", "variables", "batch"))
    boxed, make = _trace_init(module, batch, init or _default_init(module, batch))
    trained = wrt if isinstance(wrt, str) else "params"
    _check_collections(boxed, trained, mutable)
    selected = _everything if isinstance(wrt, str) else wrt

    def place(keys: Keys) -> tuple[int, Keys]:
        if keys[0] == trained and selected(path_of(keys[1:])):
            return PARAM, keys[1:]
        return STATE, keys

    with no_mesh():
        layout = Layout.of(nn.meta.unbox(boxed), place)
    start, abstract = layout.initialiser(make, loss_key=how is not None)
    functions = _Functions(module, layout, loss, how, mutable)
    return Model(
        kind="linen",
        init=start,
        loss=functions.loss,
        merge=layout.join,
        abstract=abstract,
        names=layout.annotate(_annotations(boxed)),
    )


def _everything(_path: str) -> bool:
    return True


@dataclass(frozen=True)
class _Functions:
    """What a `Model` needs beside `init` and `merge`."""

    module: nn.Module
    layout: Layout
    user_loss: Callable[..., Any]
    how: str | None
    mutable: tuple[str, ...]

    def loss(
        self, params: Tree, model_state: Tree, rngs: Tree, batch: Tree, step: Any
    ) -> tuple[jax.Array, Parts]:
        variables = self.layout.join(params, model_state, rngs)
        keys = None
        if self.how is not None:
            both = jax.random.split(jax.random.fold_in(rngs[LOSS_KEY], step))
            # Flax draws every other stream from "params".
            keys = {"params": both[0], "dropout": both[1]}
        arguments = (self.module, dict(variables), batch)
        value, rest = call_loss(self.user_loss, arguments, self.how, keys)
        aux, updated = self._aux_and_collections(rest, variables)
        leaves = self.layout.conform(variables | updated)
        _, model_state, _ = self.layout.split(leaves)
        return value, (check_aux(aux), model_state, rngs)

    def _aux_and_collections(
        self, rest: Any, variables: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """What came with the loss, sorted out."""
        if not self.mutable:
            lost = isinstance(rest, Mapping) and sorted(rest.keys() & variables.keys())
            if lost:
                raise ModelError(
                    f"the loss returns collection {lost[0]!r}, which nothing keeps",
                    hint=f"pass mutable=({lost[0]!r},) to carry it from step to step",
                )
            return rest, {}
        aux, updated = (
            rest if isinstance(rest, tuple) and len(rest) > 1 else (None, rest)
        )
        if not isinstance(updated, Mapping) or not set(updated) & set(self.mutable):
            found = sorted(updated) if isinstance(updated, Mapping) else type(updated)
            raise ModelError(
                f"with mutable={self.mutable} the loss must return (scalar, "
                f"collections) or (scalar, (aux, collections)); its second is {found}",
                hint="module.apply(..., mutable=[...]) returns the collections",
            )
        updated = nn.meta.unbox(unfreeze(dict(updated)))
        return aux, {name: updated[name] for name in self.mutable if name in updated}


def _trace_init(
    module: nn.Module, batch: Tree, init: _Init
) -> tuple[dict[str, Any], Callable[[jax.Array], list[jax.Array]]]:
    """Abstract variables in their boxes, and the traced making of their leaves.

    Arrays of the batch stay concrete, so that an init that reads their values may;
    where none does, as is usual, they are dropped with the rest of the dead work.
    """

    def build(key: jax.Array) -> dict[str, Any]:
        with user_code("init of the module"):
            variables = init(module, key, jax.tree.map(_zeros_for_struct, batch))
        if not isinstance(variables, Mapping):
            raise ModelError(
                f"init returns {type(variables).__name__}, not the variables",
                hint="init=lambda module, rngs, batch: module.init(rngs, ...)",
            )
        variables = unfreeze(dict(variables))
        keyed = keyed_leaves(variables)
        leaves = [strong(leaf, f"variable {path_of(keys)}") for keys, leaf in keyed]
        return jax.tree.structure(variables).unflatten(leaves)

    with no_mesh():
        traced, boxed = jax.make_jaxpr(build, return_shape=True)(key_struct())
    return boxed, replay(traced)


def _zeros_for_struct(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return leaf


def _default_init(module: nn.Module, batch: Tree) -> _Init:
    """module.init on the batch, where it is plain which of it the module reads."""
    required = required_parameters(module.__call__)
    if isinstance(batch, Mapping) and required and set(required) <= set(batch):
        return lambda module, key, batch: module.init(
            key, **{name: batch[name] for name in required}
        )
    leaves = jax.tree.leaves(batch)
    if len(leaves) == 1 and len(required or ("",)) == 1:
        return lambda module, key, batch: module.init(key, *jax.tree.leaves(batch))
    raise ModelError(
        f"{type(module).__name__} is called with ({', '.join(required or ('?',))}); "
        "which parts of the batch are these?",
        hint="pass init=lambda module, rngs, batch: module.init(rngs, batch[...])",
    )


def _check_collections(
    boxed: Mapping[str, Any], trained: str, mutable: tuple[str, ...]
) -> None:
    found = ", ".join(map(repr, boxed)) or "none"
    if trained not in boxed:
        raise ModelError(
            f"init gives no collection {trained!r} to train; it gives {found}",
            hint="init must return the whole of module.init(...)",
        )
    for name in mutable:
        if name not in boxed or name == trained:
            why = "is trained" if name == trained else "is not among the variables"
            raise ModelError(
                f"mutable collection {name!r} {why} (collections: {found})",
                hint="name the collections of init that the loss updates; return what "
                "it merely reports as aux",
            )


def _annotations(boxed: Tree) -> dict[Keys, Annotation]:
    def is_box(x: Any) -> bool:
        return isinstance(x, nn.meta.AxisMetadata)

    return {
        keys: Annotation(tuple(box.names), _kind(box))
        for keys, box in keyed_leaves(boxed, is_box)
        if isinstance(box, nn.Partitioned)
    }


def _kind(box: nn.Partitioned[Any]) -> str:
    return "logical" if isinstance(box, nn.LogicallyPartitioned) else "physical"
