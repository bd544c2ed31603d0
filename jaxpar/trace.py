"""The loss as one jaxpr, with a name for everything that goes in."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxpar.errors import ModelError
from jaxpar.pure import (
    ROLES,
    Model,
    Parts,
    Tree,
    keyed_leaves,
    named_leaves,
    path_of,
)
from jaxpar.user_code import no_mesh

STEP = jax.ShapeDtypeStruct((), jnp.int32)


@dataclass(frozen=True)
class Leaf:
    """One array that the loss reads.

    Attributes:
        path: '/'-joined keys: "blocks/0/up/kernel" (no "params/" before a parameter),
            "batch_stats/bn0/mean", "drop/rngs/key", "tokens". "" where the whole
            batch is one array.
        shape: Of the whole array.
        dtype: As JAX sees it; a key type for random keys.
        role: "param", "state", "rng" or "batch".
        names: Sharding names as the model gives them, one per dim or fewer or more;
            None where it gives none.
        names_kind: "logical", "physical" (see `Annotation`) or None.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    role: str
    names: tuple[str | tuple[str, ...] | None, ...] | None = None
    names_kind: str | None = None


@dataclass(frozen=True)
class Traced:
    """A loss and what surrounds it.

    Attributes:
        jaxpr: Inputs: the leaves, in order. Outputs: the loss, then the leaves of
            (aux, model_state, rngs).
        leaves: Of params, model_state, rngs, batch and step, in this order.
        model: The model.
        batch: The batch as structs.
        in_tree: Structure of (params, model_state, rngs, batch, step).
        out_tree: Structure of (aux, model_state, rngs).
    """

    jaxpr: ClosedJaxpr
    leaves: tuple[Leaf, ...]
    model: Model
    batch: Tree
    in_tree: Any
    out_tree: Any

    @property
    def batch_tree(self) -> Any:
        """Structure of the batch."""
        return jax.tree.structure(self.batch)

    def flatten(
        self, params: Tree, model_state: Tree, rngs: Tree, batch: Tree, step: Any
    ) -> list[Any]:
        """Arguments for the jaxpr.

        Raises:
            ModelError: if they have not the structure that was traced.
        """
        arguments = (params, model_state, rngs, batch, step)
        leaves, tree = jax.tree.flatten(arguments)
        if tree != self.in_tree:
            raise ModelError(self._difference(arguments))
        return leaves

    def _difference(self, arguments: tuple[Tree, ...]) -> str:
        parts = (*self.model.abstract, self.batch, STEP)
        words = ("params", "model_state", "rngs", "batch", "step")
        for word, found, wanted in zip(words, arguments, parts, strict=True):
            if jax.tree.structure(found) != jax.tree.structure(wanted):
                odd = named_leaves(found).keys() ^ named_leaves(wanted).keys()
                where = f" at {min(odd)}" if odd else ""
                return f"{word} has not the structure that was traced{where}"
        return "the arguments have not the structure that was traced"

    def unflatten(self, results: list[Any]) -> tuple[Any, Parts]:
        """(loss, (aux, model_state, rngs)) from the results of the jaxpr."""
        loss, *rest = results
        return loss, self.out_tree.unflatten(rest)


def trace(model: Model, batch: Tree) -> Traced:
    """Traces the loss once, with shapes only, under no mesh.

    Args:
        model: From `make_model`.
        batch: The global batch: arrays, Python or numpy scalars, or
            `jax.ShapeDtypeStruct`; None and empty containers pass through.

    Raises:
        ModelError: if the loss fails or returns no floating-point scalar, or the batch
            holds something that is not an array.
    """
    structs = batch_structs(batch)
    arguments = (*model.abstract, structs, STEP)
    with no_mesh():
        make = jax.make_jaxpr(model.loss, return_shape=True)
        jaxpr, (_, results) = make(*arguments)
    return Traced(
        jaxpr=jaxpr,
        leaves=_leaves(model, structs),
        model=model,
        batch=structs,
        in_tree=jax.tree.structure(arguments),
        out_tree=jax.tree.structure(results),
    )


def batch_structs(batch: Tree) -> Tree:
    """The batch with a `jax.ShapeDtypeStruct` for every leaf.

    Raises:
        ModelError: if a leaf is not an array.
    """
    try:
        keyed = keyed_leaves(batch)
    except ValueError as error:
        raise ModelError(
            f"the batch cannot be flattened: {error}",
            hint="a dict may not mix keys of several types",
        ) from error
    structs = [_struct(path_of(keys), leaf) for keys, leaf in keyed]
    return jax.tree.structure(batch).unflatten(structs)


def _struct(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    try:
        kind = jax.typeof(leaf)
    except TypeError as error:
        raise ModelError(
            f"batch leaf {path or '(the batch itself)'} is {type(leaf).__name__} "
            f"{leaf!r:.60}, which is not an array",
            hint="a batch holds arrays and numbers; give other things to the loss by "
            "functools.partial",
        ) from error
    weak = getattr(kind, "weak_type", False)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=weak)


def _leaves(model: Model, batch: Tree) -> tuple[Leaf, ...]:
    leaves = []
    for role, tree in zip((*ROLES, "batch"), (*model.abstract, batch), strict=True):
        for keys, struct in keyed_leaves(tree):
            path = path_of(keys)
            given = model.names.get((role, path))
            annotation = (given.names, given.kind) if given else (None, None)
            leaves.append(Leaf(path, struct.shape, struct.dtype, role, *annotation))
    return (*leaves, Leaf("step", STEP.shape, STEP.dtype, "rng"))
