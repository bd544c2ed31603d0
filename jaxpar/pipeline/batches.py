"""Microbatches: their shapes, and the random keys that each has of its own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.errors import MeshError
from jaxpar.trace import Traced, trace


def is_split(leaf: Any, size: int) -> bool:
    """Whether an array of the batch has one row per example."""
    return bool(leaf.shape) and leaf.shape[0] == size


def retraced(traced: Traced, size: int, rows: int) -> Traced:
    """The same loss for a batch of `rows` examples in place of `size`."""

    def part(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not is_split(struct, size):
            return struct
        shape = (rows, *struct.shape[1:])
        weak = getattr(struct, "weak_type", False)
        return jax.ShapeDtypeStruct(shape, struct.dtype, weak_type=weak)

    found = trace(traced.model, jax.tree.map(part, traced.batch))
    pairs = zip(found.leaves, traced.leaves, strict=True)
    return replace(found, leaves=tuple(replace(a, names=b.names) for a, b in pairs))


def rows_of(size: int, microbatches: int, parts: int) -> int:
    """Examples of one microbatch on one device.

    Raises:
        MeshError: if they do not come out even.
    """
    if microbatches < 1 or size % (microbatches * parts):
        raise MeshError(
            f"global batch of {size} does not divide into {microbatches} microbatches "
            f"on {parts} devices of the batch axes ({microbatches * parts} parts)",
            hint="use a batch that is a multiple of both together",
        )
    return size // (microbatches * parts)


def draw(leaf: Any, number: Any) -> Any:
    """A leaf of the random state as the microbatch of this number sees it.

    Keys take the number in; counts stay.
    """
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    fold: Callable[[Any], Any] = partial(_fold, number=number)
    for _ in leaf.shape:
        fold = jax.vmap(fold)
    return fold(leaf)


def _fold(key: Any, number: Any) -> Any:
    return jax.random.fold_in(key, number)
