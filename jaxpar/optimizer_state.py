"""Which parameter each leaf of an optimizer's state belongs to.

The state of any optax transformation repeats the paths of the parameters it keeps
numbers for, behind prefixes of its own. So a leaf belongs to the parameter whose
path is the longest suffix of the leaf's path, and its shape tells which dims of the
parameter it still has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import jax

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


def _leaf(keys: tuple[Any, ...], leaf: Any, shapes: Mapping[str, Shape]) -> Any:
    path = jax.tree_util.keystr(keys, simple=True, separator="/")
    names = path.split("/")
    suffixes = ("/".join(names[start:]) for start in range(len(names)))
    parameter = next((suffix for suffix in suffixes if suffix in shapes), None)
    shape = tuple(leaf.shape)
    dims = _dims(shape, shapes[parameter]) if parameter else None
    if dims is None:
        return OptimizerLeaf(path, shape, leaf.dtype, None, (None,) * len(shape))
    return OptimizerLeaf(path, shape, leaf.dtype, parameter, dims)


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
