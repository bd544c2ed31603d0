"""Calls of primitives, for the tests of factor rules: at least one for each.

Dims that may be split have even sizes, so that halves can be compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.extend.core.primitives as extended
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxpar.rules import ArrayType, FactorRule, rule_for
from jaxpar.rules.pointwise import ARITHMETIC, TRANSCENDENTAL


@dataclass(frozen=True, eq=False)
class Case:
    """A call with an equation of the primitive under test, named `name`."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Bound:
    """An equation with the values of its operands, and its rule."""

    equation: JaxprEqn
    operands: tuple[Any, ...]
    rule: FactorRule

    @property
    def primitive(self) -> str:
        return self.equation.primitive.name

    def run(
        self, operands: tuple[Any, ...], params: dict[str, Any] | None = None
    ) -> list[Any]:
        """The results of the primitive on other operands."""
        primitive = self.equation.primitive
        found = primitive.bind(*operands, **(params or self.equation.params))
        return list(found) if primitive.multiple_results else [found]


def bound(case: Case) -> Bound:
    """Evaluates a call up to the equation under test, which it returns."""
    closed = jax.make_jaxpr(case.call)(*case.inputs)
    values: dict[Any, Any] = dict(zip(closed.jaxpr.invars, case.inputs, strict=True))
    values |= zip(closed.jaxpr.constvars, closed.consts, strict=True)

    def read(eqn: JaxprEqn) -> tuple[Any, ...]:
        return tuple(
            _array(v.val if isinstance(v, Literal) else values[v], v.aval.dtype)
            for v in eqn.invars
        )

    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == case.name:
            return Bound(eqn, read(eqn), rule_of(eqn))
        found = eqn.primitive.bind(*read(eqn), **eqn.params)
        results = found if eqn.primitive.multiple_results else [found]
        values |= zip(eqn.outvars, results, strict=True)
    raise ValueError(f"{case.name} not in {closed}")


def _array(value: Any, dtype: Any) -> Any:
    """A NumPy array, which is cut without a compiler; keys stay what they are."""
    return (
        value
        if jnp.issubdtype(dtype, jax.dtypes.extended)
        else np.asarray(value, dtype)
    )


def rule_of(eqn: JaxprEqn) -> FactorRule:
    """The factor rule of an equation."""
    operands, results = (
        tuple(ArrayType(v.aval.shape, v.aval.dtype) for v in variables)
        for variables in (eqn.invars, eqn.outvars)
    )
    return rule_for(eqn.primitive.name, operands, results, eqn.params)


def reals(*shape: int, low: float = 0.1, high: float = 0.9) -> jax.Array:
    """Random numbers, the same ones for the same shape."""
    rng = np.random.default_rng(shape)
    return jnp.asarray(rng.uniform(low, high, shape), jnp.float32)


def integers(high: int, *shape: int) -> jax.Array:
    """Random integers from 0 to below `high`."""
    rng = np.random.default_rng((high, *shape))
    return jnp.asarray(rng.integers(0, high, shape), jnp.int32)


def truths(*shape: int) -> jax.Array:
    """Random truth values."""
    return integers(2, *shape) > 0


def primitive(name: str) -> Any:
    """A primitive of JAX by its name."""
    found = getattr(extended, f"{name}_p", None)
    return getattr(lax, f"{name}_p") if found is None else found


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
_ARITY = dict.fromkeys(
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


def _cases(
    name: str, *calls: tuple[Callable[..., Any], *tuple[Any, ...]]
) -> list[Case]:
    return [Case(name, call, tuple(inputs)) for call, *inputs in calls]


NOT_RUN = frozenset(
    """polygamma zeta igamma igammac igamma_grad_a regularized_incomplete_beta
    add_any copy_p name sharding_constraint reshard layout_constraint zeros_like
    shard_alike device_put""".split()
)
"""Pointwise ones that compile slowly, or that have no function of their own."""

X = reals(4, 6)
KEY = jax.random.key(0)

POINTWISE = [
    *(
        _pointwise(name)
        for name in (*ARITHMETIC, *TRANSCENDENTAL)
        if name not in ("select_n", "clamp", *NOT_RUN)
    ),
    *_cases(
        "select_n",
        (lax.select_n, truths(4, 6), X, -X),
        (lax.select_n, jnp.asarray(True), X, -X),
    ),
    *_cases("clamp", (lax.clamp, 0.2, X, 0.5), (lax.clamp, X / 2, X, X / 3 + 0.4)),
    *_cases("mul", (lambda x: x * 2.0, X), (lax.mul, reals(1, 6), reals(1, 6))),
    *_cases("convert_element_type", (lambda x: x.astype(jnp.bfloat16), X)),
    *_cases("reduce_precision", (lambda x: lax.reduce_precision(x, 8, 7), X)),
    *_cases("copy", (jnp.copy, X)),
    *_cases("stop_gradient", (lax.stop_gradient, X)),
    *_cases(
        "threefry2x32",
        (primitive("threefry2x32").bind, *(integers(9, 4, 2).astype("uint32"),) * 4),
    ),
    *_cases(
        "optimization_barrier",
        (lambda x, y: lax.optimization_barrier((x, y)), X, reals(2)),
    ),
]

CONTRACTIONS = [
    *_cases(
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
    *_cases(
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
    *_cases(
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
    *_cases("reduce_window_sum", (_window(lax.add, 0.0), _IMAGE)),
    *_cases("reduce_window_max", (_window(lax.max, -jnp.inf), _IMAGE)),
    *_cases("reduce_window_min", (_window(lax.min, jnp.inf), _IMAGE)),
    *_cases("reduce_window", (_window(_distance, 0.0), _IMAGE)),
    *_cases("select_and_scatter_add", (_scattered, reals(2, 6, 4), reals(2, 3, 4))),
    *_cases("select_and_gather_add", (_gathered, reals(2, 6, 4), reals(2, 6, 4))),
]

REDUCTIONS = [
    *_cases(
        "reduce_sum",
        (lambda x: lax.reduce_sum(x, (1,)), reals(4, 6, 2)),
        (lambda x: lax.reduce_sum(x, (0, 1)), X),
    ),
    *_cases("reduce_prod", (lambda x: lax.reduce_prod(x, (0,)), X)),
    *_cases("reduce_max", (lambda x: lax.reduce_max(x, (0,)), X)),
    *_cases("reduce_min", (lambda x: lax.reduce_min(x, (1,)), X)),
    *_cases("reduce_and", (lambda x: lax.reduce_and(x, (1,)), truths(4, 6))),
    *_cases(
        "reduce_or",
        (lambda x: lax.reduce_or(x, (1,)), truths(4, 6)),
        (lambda x: lax.reduce_or(x, (1,)), integers(9, 4, 6)),
    ),
    *_cases("reduce_xor", (lambda x: lax.reduce_xor(x, (1,)), integers(9, 4, 6))),
    *_cases("reduce", (lambda x: lax.reduce(x, 0.0, _distance, (1,)), X)),
    *_cases("argmax", (lambda x: lax.argmax(x, 1, jnp.int32), X)),
    *_cases("argmin", (lambda x: lax.argmin(x, 0, jnp.int32), X)),
    *(
        case
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
        for case in _cases(name, (partial(getattr(lax, name), axis=1), X))
    ),
]

SHAPES = [
    *_cases(
        "reshape",
        (lambda x: x.reshape(24), X),
        (lambda x: x.reshape(3, 8), reals(6, 4)),
        (lambda x: x.reshape(2, 4, 2, 3), reals(2, 4, 6)),
        (lambda x: x.reshape(8, 1, 6), reals(1, 2, 4, 6)),
        (lambda x: x.reshape(4, 4, 6), reals(4, 2, 2, 6)),
        (lambda x: x.reshape(4, 3), reals(3, 4)),
        (lambda x: lax.reshape(x, (2, 12), (1, 0, 2)), reals(4, 2, 3)),
    ),
    *_cases(
        "broadcast_in_dim",
        (lambda x: lax.broadcast_in_dim(x, (2, 4, 6), (1, 2)), X),
        (lambda x: lax.broadcast_in_dim(x, (4, 2, 6), (0, 2)), reals(1, 6)),
        (lambda x: lax.broadcast_in_dim(x, (4, 6), ()), jnp.asarray(2.0)),
    ),
    *_cases("transpose", (lambda x: lax.transpose(x, (2, 0, 1)), reals(2, 4, 6))),
    *_cases("squeeze", (lambda x: lax.squeeze(x, (1,)), reals(4, 1, 6))),
    *_cases("rev", (lambda x: lax.rev(x, (1,)), X)),
    *_cases(
        "bitcast_convert_type",
        (lambda x: lax.bitcast_convert_type(x, jnp.int32), X),
        (lambda x: lax.bitcast_convert_type(x, jnp.int16), X),
        (
            lambda x: lax.bitcast_convert_type(x, jnp.float32),
            integers(9, 4, 2).astype("int16"),
        ),
    ),
    *_cases("iota", (lambda: lax.broadcasted_iota(jnp.int32, (4, 6), 1),)),
]

SLICES = [
    *_cases(
        "slice",
        (lambda x: lax.slice(x, (0, 1, 0), (4, 5, 2)), reals(4, 6, 2)),
        (lambda x: lax.slice(x, (0, 0), (4, 6), (1, 2)), X),
    ),
    *_cases(
        "concatenate", (lambda x, y: lax.concatenate((x, y), 1), X, reals(4, 6) + 1)
    ),
    *_cases("split", (lambda x: lax.split(x, (2, 4), 1), X)),
    *_cases("stack", (lambda x: primitive("stack").bind(x, x + 1, axis=1), X)),
    *_cases("unstack", (lambda x: jnp.unstack(x, axis=1), X)),
    *_cases("tile", (lambda x: lax.tile(x, (1, 2)), X)),
    *_cases("pad", (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 1))), X)),
    *_cases("dynamic_slice", (lambda x: lax.dynamic_slice(x, (0, 1), (4, 3)), X)),
    *_cases(
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
    *_cases(
        "gather",
        (_rows, _TABLE, _PLACES),
        (_batched_lookup, X, integers(6, 4, 2)),
        (_grid_lookup, reals(4, 2, 6), integers(2, 4, 2)),
        (_windows, _TABLE, integers(7, 4)),
    ),
    *(
        case
        for name in ("", "_add", "_sub", "_mul", "_min", "_max")
        for case in _cases(
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
    *_cases(
        "sort",
        (lambda x: lax.sort(x, dimension=1), X),
        (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), X, reals(4, 6)),
    ),
    *_cases("top_k", (lambda x: lax.top_k(x, 2), X)),
    *_cases("approx_top_k", (lambda x: lax.approx_max_k(x, 2), X)),
]

_SQUARE = reals(2, 4, 4)
_POSITIVE = _SQUARE @ _SQUARE.mT + jnp.eye(4)
LINEAR_ALGEBRA = [
    *_cases(
        "cholesky", (partial(lax.linalg.cholesky, symmetrize_input=False), _POSITIVE)
    ),
    *_cases("eigh", (partial(lax.linalg.eigh, symmetrize_input=False), _POSITIVE)),
    *_cases("lu", (lax.linalg.lu, _SQUARE)),
    *_cases("svd", (partial(lax.linalg.svd, compute_uv=False), reals(2, 6, 4))),
    *_cases(
        "triangular_solve",
        (
            partial(lax.linalg.triangular_solve, left_side=True),
            _POSITIVE,
            reals(2, 4, 6),
        ),
    ),
    *_cases(
        "tridiagonal_solve",
        (
            lax.linalg.tridiagonal_solve,
            reals(2, 4),
            reals(2, 4) + 3,
            reals(2, 4),
            reals(2, 4, 6),
        ),
    ),
    *_cases(
        "lu_pivots_to_permutation",
        (
            partial(lax.linalg.lu_pivots_to_permutation, permutation_size=4),
            jnp.asarray([[1, 1, 2, 3], [0, 3, 2, 3]]),
        ),
    ),
    *_cases(
        "fft",
        (
            partial(primitive("fft").bind, fft_type=lax.FftType.RFFT, fft_lengths=(6,)),
            X,
        ),
    ),
]

RANDOM = [
    *_cases("random_bits", (lambda k: jax.random.bits(k, (4, 6)), KEY)),
    *_cases("random_split", (lambda k: jax.random.split(k, 2), KEY)),
    *_cases("random_fold_in", (lambda k: jax.random.fold_in(k, 3), KEY)),
    *_cases(
        "rng_bit_generator",
        (lambda k: lax.rng_bit_generator(k, (4, 6)), integers(9, 4).astype("uint32")),
    ),
]

CASES = [
    *POINTWISE,
    *CONTRACTIONS,
    *CONVOLUTIONS,
    *WINDOWS,
    *REDUCTIONS,
    *SHAPES,
    *SLICES,
    *INDEXING,
    *SORTING,
    *LINEAR_ALGEBRA,
    *RANDOM,
]
