"""Calls of the primitives that compute.

Dims that may be split have even sizes, so that halves can be compared.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from rule_calls import Case, X, cases, integers, primitive, reals, truths

from jaxpar.rules.pointwise import ARITHMETIC, TRANSCENDENTAL

_INTEGERS = frozenset(
    """and or not xor population_count clz mulhi rem shift_left
    shift_right_arithmetic shift_right_logical""".split()
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "not": lax.bitwise_not,
    "xor": lax.bitwise_xor,
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "real": lambda x: lax.real(lax.complex(x, x)),
    "imag": lambda x: lax.imag(lax.complex(x, x)),
    "conj": lambda x: lax.conj(lax.complex(x, x)),
}
_ARITY: dict[str, int] = dict.fromkeys(
    """add sub mul mulhi div rem max min nextafter and or xor pow atan2 complex
    shift_left shift_right_arithmetic shift_right_logical eq ne lt le gt ge eq_to lt_to
    le_to""".split(),
    2,
)


def _pointwise(name: str) -> Case:
    call = _FUNCTIONS.get(name) or getattr(lax, name, None) or primitive(name).bind
    x = integers(9, 4) if name in _INTEGERS else reals(4)
    x = x + 1.0 if name == "acosh" else x
    return Case(name, call, (x,) * _ARITY.get(name, 1))


NOT_RUN = frozenset(
    """polygamma zeta igamma igammac igamma_grad_a regularized_incomplete_beta
    add_any copy_p name sharding_constraint reshard layout_constraint zeros_like
    shard_alike device_put""".split()
)
"""Pointwise ones that compile slowly, or that have no function of their own."""


POINTWISE = [
    *(
        _pointwise(name)
        for name in (*ARITHMETIC, *TRANSCENDENTAL)
        if name not in ("select_n", "clamp", *NOT_RUN)
    ),
    *cases(
        "select_n",
        (lax.select_n, truths(4, 6), X, -X),
        (lax.select_n, jnp.asarray(True), X, -X),
    ),
    *cases("clamp", (lax.clamp, 0.2, X, 0.5), (lax.clamp, X / 2, X, X / 3 + 0.4)),
    *cases("mul", (lambda x: x * 2.0, X), (lax.mul, reals(1, 6), reals(1, 6))),
    *cases("convert_element_type", (lambda x: x.astype(jnp.bfloat16), X)),
    *cases("reduce_precision", (lambda x: lax.reduce_precision(x, 8, 7), X)),
    *cases("copy", (jnp.copy, X)),
    *cases("stop_gradient", (lax.stop_gradient, X)),
    *cases(
        "threefry2x32",
        (primitive("threefry2x32").bind, *(integers(9, 4, 2).astype("uint32"),) * 4),
    ),
    *cases(
        "optimization_barrier",
        (lambda x, y: lax.optimization_barrier((x, y)), X, reals(2)),
    ),
]

CONTRACTIONS = [
    *cases(
        "dot_general",
        (lax.dot, X, reals(6, 2)),
        (lax.dot, reals(6), reals(6)),
        (partial(jnp.einsum, "bmk,bkn->bmn"), reals(2, 4, 6), reals(2, 6, 8)),
        (
            lambda x, y: lax.dot_general(x, y, (((3, 0), (1, 2)), ((1,), (3,)))),
            reals(2, 4, 1, 6),
            reals(8, 6, 2, 4),
        ),
    ),
    *cases(
        "ragged_dot_general",
        (lax.ragged_dot, reals(8, 6), reals(4, 6, 2), jnp.asarray([3, 0, 4, 1])),
        (
            jax.vmap(lax.ragged_dot),
            reals(2, 8, 6),
            reals(2, 4, 6, 2),
            jnp.asarray([[3, 0, 4, 1], [2, 2, 2, 2]]),
        ),
    ),
]


def _conv(
    strides: tuple[int, ...], padding: Any, layout: tuple[str, str, str], **options: Any
) -> Callable[..., Any]:
    return partial(
        lax.conv_general_dilated,
        window_strides=strides,
        padding=padding,
        dimension_numbers=layout,
        **options,
    )


_NHWC = ("NHWC", "HWIO", "NHWC")
_KERNEL = reals(3, 3, 4, 8)
CONVOLUTIONS = [
    *cases(
        "conv_general_dilated",
        (_conv((1, 1), "SAME", _NHWC), reals(2, 6, 6, 4), _KERNEL),
        (
            _conv((2,), "VALID", ("NCH", "OIH", "NCH"), rhs_dilation=(2,)),
            reals(2, 4, 8),
            reals(6, 4, 3),
        ),
        (_conv((1, 1), "VALID", _NHWC), reals(2, 4, 6, 4), reals(1, 1, 4, 8)),
        (
            _conv((1, 1), ((1, 2), (1, 2)), _NHWC, lhs_dilation=(2, 2)),
            reals(2, 4, 4, 4),
            _KERNEL,
        ),
        (
            _conv((1, 1), "SAME", _NHWC, feature_group_count=4),
            reals(2, 6, 6, 8),
            reals(3, 3, 2, 12),
        ),
        (
            _conv((1, 1), "SAME", _NHWC, feature_group_count=8),
            reals(2, 6, 6, 8),
            reals(3, 3, 1, 8),
        ),
        (
            _conv((1, 1), "SAME", _NHWC, batch_group_count=4),
            reals(8, 6, 6, 4),
            _KERNEL,
        ),
    )
]


def _window(operator: Any, start: Any) -> Callable[..., Any]:
    return lambda x: lax.reduce_window(
        x, start, operator, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"
    )


_POOL = {
    "window_dimensions": (1, 2, 1),
    "window_strides": (1, 2, 1),
    "padding": ((0, 0), (0, 0), (0, 0)),
}


def _distance(x: jax.Array, y: jax.Array) -> jax.Array:
    return lax.sqrt(x * x + y * y)


def _scattered(x: jax.Array, source: jax.Array) -> jax.Array:
    """The gradient of a pooling, as JAX has it."""
    return primitive("select_and_scatter_add").bind(
        source, x, select_prim=lax.ge_p, **_POOL
    )


def _gathered(tangents: jax.Array, x: jax.Array) -> jax.Array:
    """The derivative of a pooling, as JAX has it."""
    dilations = {"base_dilation": (1, 1, 1), "window_dilation": (1, 1, 1)}
    return primitive("select_and_gather_add").bind(
        tangents, x, select_prim=lax.ge_p, **_POOL, **dilations
    )


_IMAGE = reals(2, 6, 6, 4)
WINDOWS = [
    *cases("reduce_window_sum", (_window(lax.add, 0.0), _IMAGE)),
    *cases("reduce_window_max", (_window(lax.max, -jnp.inf), _IMAGE)),
    *cases("reduce_window_min", (_window(lax.min, jnp.inf), _IMAGE)),
    *cases("reduce_window", (_window(_distance, 0.0), _IMAGE)),
    *cases("select_and_scatter_add", (_scattered, reals(2, 6, 4), reals(2, 3, 4))),
    *cases("select_and_gather_add", (_gathered, reals(2, 6, 4), reals(2, 6, 4))),
]

REDUCTIONS = [
    *cases(
        "reduce_sum",
        (lambda x: lax.reduce_sum(x, (1,)), reals(4, 6, 2)),
        (lambda x: lax.reduce_sum(x, (0, 1)), X),
    ),
    *cases("reduce_prod", (lambda x: lax.reduce_prod(x, (0,)), X)),
    *cases("reduce_max", (lambda x: lax.reduce_max(x, (0,)), X)),
    *cases("reduce_min", (lambda x: lax.reduce_min(x, (1,)), X)),
    *cases("reduce_and", (lambda x: lax.reduce_and(x, (1,)), truths(4, 6))),
    *cases(
        "reduce_or",
        (lambda x: lax.reduce_or(x, (1,)), truths(4, 6)),
        (lambda x: lax.reduce_or(x, (1,)), integers(9, 4, 6)),
    ),
    *cases("reduce_xor", (lambda x: lax.reduce_xor(x, (1,)), integers(9, 4, 6))),
    *cases("reduce", (lambda x: lax.reduce(x, 0.0, _distance, (1,)), X)),
    *cases("argmax", (lambda x: lax.argmax(x, 1, jnp.int32), X)),
    *cases("argmin", (lambda x: lax.argmin(x, 0, jnp.int32), X)),
    *(
        case
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
        for case in cases(name, (partial(getattr(lax, name), axis=1), X))
    ),
]

COMPUTING = [*CONTRACTIONS, *CONVOLUTIONS, *WINDOWS, *REDUCTIONS]
