"""A model as pure functions of nested dicts of arrays, whichever API it came in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import ModelError

Tree = Any
Keys = tuple[Any, ...]
Parts = tuple[Tree, Tree, Tree]
"""Params, model state and random state: nested dicts whose leaves are arrays."""

PARAM, STATE, RNG = range(3)
ROLES = ("param", "state", "rng")
LOSS_KEY = "loss_key"
"""Path of the random key that the loss's own `rngs` come from."""


@dataclass(frozen=True)
class Annotation:
    """Sharding names of one array, as the model gives them.

    Attributes:
        names: Per dim a name, several, or None; may be shorter or longer than the rank.
        kind: "logical" where only rules give the names a mesh axis, else "physical".
            NNX does not tell the two apart, so a physical name may be a logical one
            there: rules that know it come first.
    """

    names: tuple[str | tuple[str, ...] | None, ...]
    kind: str


@dataclass(frozen=True)
class Model:
    """NNX and Linen behind one face. All functions are pure and may be jitted.

    Attributes:
        kind: "nnx" or "linen".
        init: Seed (an int or a typed key) -> parts. Equals `Model(nnx.Rngs(seed))` or
            `module.init(jax.random.key(seed), ...)` as built under jit. For a ready
            NNX module: copies of its present values, whatever the seed;
            `init(seed, values)` takes them as arguments, so that jit need not
            compile them into the program.
        loss: (params, model_state, rngs, batch, step) -> (scalar loss, (aux,
            model_state, rngs)). What the loss does to params beside reading them is
            dropped.
        merge: Parts -> the NNX module, or the Linen variables.
        abstract: Parts of `jax.ShapeDtypeStruct`.
        names: (role, path) -> annotation, for annotated arrays only.
        values: Arrays of a ready NNX module, for `init`; else None.
    """

    kind: str
    init: Callable[..., Parts]
    loss: Callable[[Tree, Tree, Tree, Tree, Any], tuple[jax.Array, Parts]]
    merge: Callable[[Tree, Tree, Tree], Any]
    abstract: Parts
    names: Mapping[tuple[str, str], Annotation] = field(default_factory=dict)
    values: tuple[jax.Array, ...] | None = None


def keyed_leaves(
    tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> list[tuple[Keys, Any]]:
    """Leaves by their keys, without the attribute that variables and boxes add."""
    value = jax.tree_util.GetAttrKey("value")
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf)[0]
    return [
        (tuple(_bare(k) for k in path if k != value), leaf) for path, leaf in leaves
    ]


def _bare(key: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def path_of(keys: Keys) -> str:
    """Keys joined by "/"."""
    return "/".join(map(str, keys))


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Leaves by '/'-joined path: "blocks/0/up/kernel".

    A tree that is one leaf has the path "".
    """
    return {path_of(keys): leaf for keys, leaf in keyed_leaves(tree)}


def as_key(seed: int | jax.Array) -> jax.Array:
    """A typed random key; passes one through."""
    dtype = getattr(seed, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.asarray(seed)
    return jax.random.key(seed)


def key_struct() -> jax.ShapeDtypeStruct:
    """Type of a random key of the default kind."""
    return jax.eval_shape(jax.random.key, 0)


@dataclass(frozen=True)
class Layout:
    """Where each leaf of a model's own tree lies among the parts.

    Attributes:
        treedef: Of the model's own tree (NNX state, Linen variables).
        sources: Per leaf, its keys in that tree.
        places: Per leaf, its part and its keys there.
        structs: Per leaf, shape and dtype.
    """

    treedef: Any
    sources: tuple[Keys, ...]
    places: tuple[tuple[int, Keys], ...]
    structs: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, tree: Tree, place: Callable[[Keys], tuple[int, Keys]]) -> "Layout":
        """Lays out a tree of arrays or structs.

        Raises:
            ModelError: if nothing is trained, if a trained leaf is not floating, or if
                two leaves have the same path.
        """
        leaves = keyed_leaves(tree)
        sources = tuple(keys for keys, _ in leaves)
        structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in leaves)
        treedef = jax.tree.structure(tree)
        layout = cls(treedef, sources, tuple(map(place, sources)), structs)
        layout._check()
        return layout

    def _check(self) -> None:
        seen = set()
        for (part, keys), struct in zip(self.places, self.structs, strict=True):
            path = path_of(keys)
            if part == PARAM and not jnp.issubdtype(struct.dtype, jnp.floating):
                raise ModelError(
                    f"trained parameter {path} is {show_array(struct)}; only "
                    "floating-point arrays have gradients",
                    hint="leave it out by wrt=, or make it a variable of another kind",
                )
            if (part, path) in seen:
                raise ModelError(
                    f"two arrays of the model have the path {path}",
                    hint="names within a model may not contain '/'",
                )
            seen.add((part, path))
        if not any(part == PARAM for part, _ in self.places):
            found = ", ".join(map(path_of, self.sources[:8])) or "none"
            raise ModelError(
                f"the model has no trained parameter (its arrays: {found})",
                hint="wrt= selects what is trained",
            )

    def split(self, leaves: Sequence[Any]) -> Parts:
        """Leaves, in the order of the model's own tree, as nested dicts."""
        parts: Parts = ({}, {}, {})
        for (part, keys), leaf in zip(self.places, leaves, strict=True):
            node = parts[part]
            for key in keys[:-1]:
                node = node.setdefault(key, {})
            node[keys[-1]] = leaf
        return parts

    def join(self, *parts: Tree) -> Tree:
        """The model's own tree from its parts."""
        leaves = []
        for part, keys in self.places:
            node = parts[part]
            for key in keys:
                node = node[key]
            leaves.append(node)
        return self.treedef.unflatten(leaves)

    def conform(self, tree: Tree) -> list[jax.Array]:
        """Leaves of a later version of the same tree.

        Raises:
            ModelError: if a leaf is new or lost, or state that is not trained has
                another shape or dtype.
        """
        leaves = dict(keyed_leaves(tree))
        for word, odd in (
            ("adds", leaves.keys() - set(self.sources)),
            ("removes", set(self.sources) - leaves.keys()),
        ):
            if odd:
                raise ModelError(
                    f"the loss {word} {sorted(map(path_of, odd))[0]}, so a step would "
                    "not give back the state that it took",
                    hint="make every variable when the model is built, and take out "
                    "what the loss sows before it returns",
                )
        triples = zip(self.sources, self.places, self.structs, strict=True)
        return [
            leaves[keys] if part == PARAM else _same_type(keys, leaves[keys], struct)
            for keys, (part, _), struct in triples
        ]

    def initialiser(
        self, make: Callable[[jax.Array], Sequence[Any]], *, loss_key: bool
    ) -> tuple[Callable[[Any], Parts], Parts]:
        """`Model.init` and `Model.abstract`.

        Args:
            make: Typed random key -> leaves in the order of the model's own tree.
            loss_key: Whether random keys for the loss are kept beside the model's.
        """

        def init(
            seed: int | jax.Array, values: Sequence[jax.Array] | None = None
        ) -> Parts:
            key = as_key(seed)
            leaves = make(key) if values is None else map(jnp.copy, values)
            params, model_state, rngs = self.split(list(leaves))
            if loss_key:
                rngs = rngs | {LOSS_KEY: jax.random.fold_in(key, 1)}
            return params, model_state, rngs

        params, model_state, rngs = self.split(self.structs)
        if LOSS_KEY in rngs:
            raise ModelError(
                f"the model keeps random state under {LOSS_KEY!r}, which is taken",
                hint="give that attribute another name",
            )
        if loss_key:
            rngs = rngs | {LOSS_KEY: key_struct()}
        return init, (params, model_state, rngs)

    def annotate(
        self, annotations: Mapping[Keys, Annotation]
    ) -> dict[tuple[str, str], Annotation]:
        """From keys in the model's own tree to role and path."""
        pairs = zip(self.sources, self.places, strict=True)
        return {
            (ROLES[part], path_of(keys)): annotations[source]
            for source, (part, keys) in pairs
            if source in annotations
        }


def _same_type(keys: Keys, leaf: Any, struct: jax.ShapeDtypeStruct) -> jax.Array:
    array = strong(leaf, path_of(keys))
    if array.shape != struct.shape or array.dtype != struct.dtype:
        raise ModelError(
            f"the loss turns {path_of(keys)} from {show_array(struct)} "
            f"into {show_array(array)}",
            hint="give it the same shape and dtype when the model is built",
        )
    return array


def show_array(x: Any) -> str:
    """Dtype and shape: "float32[8,4]"."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def strong(leaf: Any, what: str) -> jax.Array:
    """The leaf as an array of no weak type, as a state must be to stay itself.

    Raises:
        ModelError: if it is no array; `what` names it.
    """
    try:
        kind = jax.typeof(leaf)
    except TypeError as error:
        raise ModelError(
            f"{what} holds {type(leaf).__name__} {leaf!r:.60}, which is not an array",
            hint="keep what is not an array in plain (static) attributes",
        ) from error
    if isinstance(leaf, jax.Array) and not getattr(kind, "weak_type", False):
        return leaf
    return jax.lax.convert_element_type(jnp.asarray(leaf), kind.dtype)
