"""Which parameter each leaf of an optimizer's state belongs to.

The state of any optax transformation repeats the paths of the parameters it keeps
numbers for, behind prefixes of its own. So a leaf belongs to the parameter whose
path is the longest suffix of the leaf's path, and its shape tells which dims of the
parameter it still has.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax
import optax

from jaxpar.errors import ModelError
from jaxpar.pure import keyed_leaves, path_of
from jaxpar.sharding import Spec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OptimizerLeaf:
    """One array of an optimizer's state.

    Attributes:
        path: `/`-joined keys.
        shape: Its shape.
        dtype: Its dtype.
        parameter: Path of the parameter that it belongs to, or None.
        dims: Per dim, the dim of the parameter that it is laid out like, or None
            where it stays whole.
    """

    path: str
    shape: Shape
    dtype: Any
    parameter: str | None
    dims: tuple[int | None, ...]

    def spec(self, specs: Mapping[str, Spec]) -> Spec:
        """Its spec, given those of the parameters (or of their gradients)."""
        if self.parameter is None:
            return ((),) * len(self.shape)
        owner = specs[self.parameter]
        return tuple(() if d is None else owner[d] for d in self.dims)


def optimizer_leaves(
    abstract_opt_state: Any, shapes: Mapping[str, Shape]
) -> tuple[OptimizerLeaf, ...]:
    """The leaves of an optimizer's state, in the order of `jax.tree.leaves`.

    Args:
        abstract_opt_state: `jax.eval_shape(optimizer.init, params)`.
        shapes: Shape per path of a parameter.
    """
    leaves = jax.tree_util.tree_leaves_with_path(abstract_opt_state)
    return tuple(_leaf(keys, leaf, shapes) for keys, leaf in leaves)


def optimizer_specs(
    abstract_opt_state: Any, params: Mapping[str, tuple[Shape, Spec]]
) -> Any:
    """A tree like the optimizer's state, with a spec for every leaf.

    A leaf of its parameter's shape gets the parameter's spec. One that lacks dims
    (factored moments) keeps the axes of the dims it has, one with a dim in front
    (histories) leaves that dim whole. Where equal sizes make it unclear which dims
    it has, those stay whole, as do leaves without a parameter.

    Args:
        abstract_opt_state: `jax.eval_shape(optimizer.init, params)`.
        params: Per path of a parameter, its shape and the spec to follow.
    """
    leaves = optimizer_leaves(abstract_opt_state, {p: v[0] for p, v in params.items()})
    specs = {path: spec for path, (_, spec) in params.items()}
    tree = jax.tree.structure(abstract_opt_state)
    return jax.tree.unflatten(tree, [leaf.spec(specs) for leaf in leaves])


@dataclass(frozen=True)
class StateBytes:
    """Bytes of an optimizer's state.

    Attributes:
        owned: Per group of parameters, bytes of what is laid out like them.
        unowned: Bytes of all else, which no axis splits.
    """

    owned: tuple[float, ...]
    unowned: float


def state_bytes(
    optimizer: optax.GradientTransformation,
    params: Any,
    groups: Sequence[Sequence[str]],
) -> StateBytes:
    """Bytes of the optimizer's state, by group of parameters.

    Of a group, the first and the last parameter are looked at. All are if those two
    are not treated alike, if the optimizer insists on the whole tree, or if it keeps
    arrays that belong to no single parameter.

    Args:
        optimizer: An optax transformation.
        params: Nested dicts of structs.
        groups: Paths of parameters of one shape, such as those of equal layers.

    Raises:
        ModelError: if the optimizer's init fails on the parameters.
    """
    ends = {path for paths in groups for path in (paths[0], paths[-1])}
    if len(ends) < sum(map(len, groups)):
        found = _bytes_from_ends(optimizer, params, groups, ends)
        if found is not None:
            return found
    try:
        state = jax.eval_shape(optimizer.init, params)
    except Exception as problem:
        raise ModelError(
            f"the optimizer's init fails on the parameters: {problem}",
            hint="it gets nested dicts of arrays",
        ) from problem
    owned, unowned, loose = _count(state, params)
    return StateBytes(
        tuple(sum(owned.get(p, 0.0) for p in paths) for paths in groups),
        sum(unowned.values()) + sum(loose),
    )


def _bytes_from_ends(
    optimizer: optax.GradientTransformation,
    params: Any,
    groups: Sequence[Sequence[str]],
    ends: Collection[str],
) -> StateBytes | None:
    some = _only(params, ends)
    try:
        state = jax.eval_shape(optimizer.init, some)
    except Exception:  # masks and labels may be written for the whole tree
        return None
    owned, unowned, loose = _count(state, some)
    one = max((leaf.dtype.itemsize for leaf in jax.tree.leaves(state)), default=0)
    alike = all(
        found.get(paths[0]) == found.get(paths[-1])
        for paths in groups
        for found in (owned, unowned)
    )
    if not alike or any(size > one for size in loose):
        return None
    return StateBytes(
        tuple(owned.get(paths[0], 0.0) * len(paths) for paths in groups),
        sum(unowned.get(paths[0], 0.0) * len(paths) for paths in groups) + sum(loose),
    )


def _only(params: Any, wanted: Collection[str]) -> dict[Any, Any]:
    """The same nested dicts with some of the parameters only."""
    tree: dict[Any, Any] = {}
    for keys, leaf in keyed_leaves(params):
        if path_of(keys) in wanted:
            inner = tree
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = leaf
    return tree


def _count(
    state: Any, params: Any
) -> tuple[dict[str, float], dict[str, float], list[float]]:
    """Bytes laid out like a parameter, others by parameter, and others still."""
    shapes = {path_of(keys): tuple(x.shape) for keys, x in keyed_leaves(params)}
    owned: dict[str, float] = {}
    unowned: dict[str, float] = {}
    loose: list[float] = []
    for leaf in optimizer_leaves(state, shapes):
        size = float(math.prod(leaf.shape) * leaf.dtype.itemsize)
        owner = _owner(leaf.path, shapes)
        if owner is None:
            loose.append(size)
            continue
        found = owned if any(d is not None for d in leaf.dims) else unowned
        found[owner] = found.get(owner, 0.0) + size
    return owned, unowned, loose


def _leaf(keys: tuple[Any, ...], leaf: Any, shapes: Mapping[str, Shape]) -> Any:
    path = jax.tree_util.keystr(keys, simple=True, separator="/")
    parameter = _owner(path, shapes)
    shape = tuple(leaf.shape)
    dims = _dims(shape, shapes[parameter]) if parameter else None
    if dims is None:
        return OptimizerLeaf(path, shape, leaf.dtype, None, (None,) * len(shape))
    return OptimizerLeaf(path, shape, leaf.dtype, parameter, dims)


def _owner(path: str, parameters: Collection[str]) -> str | None:
    """The parameter whose path is the longest suffix of a leaf's path."""
    names = path.split("/")
    suffixes = ("/".join(names[start:]) for start in range(len(names)))
    return next((suffix for suffix in suffixes if suffix in parameters), None)


def _dims(shape: Shape, owner: Shape) -> tuple[int | None, ...] | None:
    """Per dim of `shape` the dim of `owner` that it is, as far as sizes can tell."""
    if shape[1:] == owner and len(shape) == len(owner) + 1:
        return (None, *range(len(owner)))
    ways = [
        dims
        for dims in combinations(range(len(owner)), len(shape))
        if tuple(owner[d] for d in dims) == shape
    ]
    if not ways:
        return None
    return tuple(d[0] if len(set(d)) == 1 else None for d in zip(*ways, strict=True))
