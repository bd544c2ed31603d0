"""Calls of the primitives that move elements, look them up or make them.

Dims that may be split have even sizes, so that halves can be compared.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rule_calls import X, cases, integers, primitive, reals

KEY = jax.random.key(0)

SHAPES = [
    *cases(
        "reshape",
        (lambda x: x.reshape(24), X),
        (lambda x: x.reshape(3, 8), reals(6, 4)),
        (lambda x: x.reshape(2, 4, 2, 3), reals(2, 4, 6)),
        (lambda x: x.reshape(8, 1, 6), reals(1, 2, 4, 6)),
        (lambda x: x.reshape(4, 4, 6), reals(4, 2, 2, 6)),
        (lambda x: x.reshape(4, 3), reals(3, 4)),
        (lambda x: lax.reshape(x, (2, 12), (1, 0, 2)), reals(4, 2, 3)),
    ),
    *cases(
        "broadcast_in_dim",
        (lambda x: lax.broadcast_in_dim(x, (2, 4, 6), (1, 2)), X),
        (lambda x: lax.broadcast_in_dim(x, (4, 2, 6), (0, 2)), reals(1, 6)),
        (lambda x: lax.broadcast_in_dim(x, (4, 6), ()), jnp.asarray(2.0)),
    ),
    *cases("transpose", (lambda x: lax.transpose(x, (2, 0, 1)), reals(2, 4, 6))),
    *cases("squeeze", (lambda x: lax.squeeze(x, (1,)), reals(4, 1, 6))),
    *cases("rev", (lambda x: lax.rev(x, (1,)), X)),
    *cases(
        "bitcast_convert_type",
        (lambda x: lax.bitcast_convert_type(x, jnp.int32), X),
        (lambda x: lax.bitcast_convert_type(x, jnp.int16), X),
        (
            lambda x: lax.bitcast_convert_type(x, jnp.float32),
            integers(9, 4, 2).astype("int16"),
        ),
    ),
    *cases("iota", (lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1),)),
]

SLICES = [
    *cases(
        "slice",
        (lambda x: lax.slice(x, (0, 1, 0), (4, 5, 2)), reals(4, 6, 2)),
        (lambda x: lax.slice(x, (0, 0), (4, 6), (1, 2)), X),
    ),
    *cases(
        "concatenate", (lambda x, y: lax.concatenate((x, y), 1), X, reals(4, 6) + 1)
    ),
    *cases("split", (lambda x: lax.split(x, (2, 4), 1), X)),
    *cases("stack", (lambda x: primitive("stack").bind(x, x + 1, axis=1), X)),
    *cases("unstack", (lambda x: jnp.unstack(x, axis=1), X)),
    *cases("tile", (lambda x: lax.tile(x, (1, 2)), X)),
    *cases("pad", (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 1))), X)),
    *cases("dynamic_slice", (lambda x: lax.dynamic_slice(x, (0, 1), (4, 3)), X)),
    *cases(
        "dynamic_update_slice",
        (lambda x, y: lax.dynamic_update_slice(x, y, (0, 1)), X, reals(4, 2)),
    ),
]

_TABLE = reals(8, 6)
_PLACES = integers(8, 4, 2)


def _batched_lookup(x: jax.Array, i: jax.Array) -> jax.Array:
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    return lax.gather(x, i[..., None], numbers, (1, 1))


def _windows(x: jax.Array, i: jax.Array) -> jax.Array:
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)
    )
    return lax.gather(x, i[:, None], numbers, (2, 6))


def _grid_lookup(x: jax.Array, i: jax.Array) -> jax.Array:
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0, 1), start_index_map=(0, 1)
    )
    return lax.gather(x, i, numbers, (1, 1, 6))


def _rows(x: jax.Array, i: jax.Array) -> jax.Array:
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lax.gather(x, i[..., None], numbers, (1, x.shape[1]))


_ROW_UPDATES = lax.ScatterDimensionNumbers(
    update_window_dims=(1,),
    inserted_window_dims=(0,),
    scatter_dims_to_operand_dims=(0,),
)
_BATCHED_UPDATES = lax.ScatterDimensionNumbers(
    update_window_dims=(),
    inserted_window_dims=(1,),
    scatter_dims_to_operand_dims=(1,),
    operand_batching_dims=(0,),
    scatter_indices_batching_dims=(0,),
)


def _scattering(function: Callable[..., Any], numbers: Any) -> Callable[..., Any]:
    return lambda x, i, u: function(x, i[..., None], u, numbers)


INDEXING = [
    *cases(
        "gather",
        (_rows, _TABLE, _PLACES),
        (_batched_lookup, X, integers(6, 4, 2)),
        (_grid_lookup, reals(4, 2, 6), integers(2, 4, 2)),
        (_windows, _TABLE, integers(7, 4)),
    ),
    *(
        case
        for name in ("", "_add", "_sub", "_mul", "_min", "_max")
        for case in cases(
            f"scatter{name.replace('_', '-')}",
            (
                _scattering(getattr(lax, f"scatter{name}"), _ROW_UPDATES),
                _TABLE,
                jnp.asarray([1, 7, 1, 2]) if name else jnp.asarray([1, 7, 3, 2]),
                reals(4, 6),
            ),
            (
                _scattering(getattr(lax, f"scatter{name}"), _BATCHED_UPDATES),
                X,
                jnp.asarray([[0, 1], [2, 1], [5, 3], [0, 5]]),
                reals(4, 2),
            ),
        )
    ),
]

SORTING = [
    *cases(
        "sort",
        (lambda x: lax.sort(x, dimension=1), X),
        (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), X, reals(4, 6)),
    ),
    *cases("top_k", (lambda x: lax.top_k(x, 2), X)),
    *cases("approx_top_k", (lambda x: lax.approx_max_k(x, 2), X)),
]

_SQUARE = reals(2, 4, 4)
_POSITIVE = _SQUARE @ _SQUARE.mT + jnp.eye(4)
LINEAR_ALGEBRA = [
    *cases(
        "cholesky", (partial(lax.linalg.cholesky, symmetrize_input=False), _POSITIVE)
    ),
    *cases("eigh", (partial(lax.linalg.eigh, symmetrize_input=False), _POSITIVE)),
    *cases("lu", (lax.linalg.lu, _SQUARE)),
    *cases("svd", (partial(lax.linalg.svd, compute_uv=False), reals(2, 6, 4))),
    *cases(
        "triangular_solve",
        (
            partial(lax.linalg.triangular_solve, left_side=True),
            _POSITIVE,
            reals(2, 4, 6),
        ),
    ),
    *cases(
        "tridiagonal_solve",
        (
            lax.linalg.tridiagonal_solve,
            reals(2, 4),
            reals(2, 4) + 3,
            reals(2, 4),
            reals(2, 4, 6),
        ),
    ),
    *cases(
        "lu_pivots_to_permutation",
        (
            partial(lax.linalg.lu_pivots_to_permutation, permutation_size=4),
            jnp.asarray([[1, 1, 2, 3], [0, 3, 2, 3]]),
        ),
    ),
    *cases(
        "fft",
        (
            partial(primitive("fft").bind, fft_type=lax.FftType.RFFT, fft_lengths=(6,)),
            X,
        ),
    ),
]

RANDOM = [
    *cases("random_bits", (lambda k: jax.random.bits(k, (4, 6)), KEY)),
    *cases("random_split", (lambda k: jax.random.split(k, 2), KEY)),
    *cases("random_fold_in", (lambda k: jax.random.fold_in(k, 3), KEY)),
    *cases(
        "rng_bit_generator",
        (lambda k: lax.rng_bit_generator(k, (4, 6)), integers(9, 4).astype("uint32")),
    ),
]

MOVING = [*SHAPES, *SLICES, *INDEXING, *SORTING, *LINEAR_ALGEBRA, *RANDOM]
