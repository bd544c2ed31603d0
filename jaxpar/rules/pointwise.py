"""Pointwise operators: every dim passes through, scalars run over none."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxpar.rules.builder import RuleBuilder, elements
from jaxpar.rules.rule import ArrayType, Dims, FactorRule, factor_rule

ARITHMETIC = (
    *("abs", "add", "add_any", "sub", "mul", "mulhi", "div", "rem", "neg", "sign"),
    *("max", "min", "floor", "ceil", "round", "clamp", "square", "integer_pow"),
    *("nextafter", "is_finite", "and", "or", "not", "xor", "population_count", "clz"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical", "select_n"),
    *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"),
    *("real", "imag", "complex", "conj"),
)
"""About one operation per element."""

TRANSCENDENTAL = (
    *("exp", "exp2", "expm1", "log", "log1p", "pow", "sqrt", "rsqrt", "cbrt"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2"),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("logistic", "erf", "erfc", "erf_inv", "lgamma", "digamma", "polygamma", "zeta"),
    *("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta"),
    *("bessel_i0e", "bessel_i1e"),
)
"""A polynomial or a short iteration per element."""

MOVING = (
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "name"),
    *("stop_gradient", "sharding_constraint", "reshard", "layout_constraint"),
    *("zeros_like", "shard_alike", "threefry2x32"),
)
"""No floating-point operation."""

INDEPENDENT = ("optimization_barrier", "device_put")
"""Any number of operands that have nothing to do with each other."""

TRANSCENDENTAL_FLOPS = 10.0
"""Of one element: the order of a minimax polynomial."""


def _pointwise(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
    *,
    flops: float,
) -> FactorRule:
    build = RuleBuilder()
    dims = build.each(results[0].shape)
    return build.rule(
        (_shared(operand, dims) for operand in operands),
        (_shared(result, dims) for result in results),
        flops * elements(results[0]),
    )


def _shared(array: ArrayType, dims: Dims) -> Dims:
    """The dims of a result as an operand has them that is as large, or a scalar."""
    if not array.shape:
        return ()
    return tuple(f if n > 1 else None for n, f in zip(array.shape, dims, strict=True))


factor_rule(*ARITHMETIC)(partial(_pointwise, flops=1.0))
factor_rule(*TRANSCENDENTAL)(partial(_pointwise, flops=TRANSCENDENTAL_FLOPS))
factor_rule(*MOVING)(partial(_pointwise, flops=0.0))


@factor_rule(*INDEPENDENT)
def independent(
    operands: tuple[ArrayType, ...],
    _results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
) -> FactorRule:
    """Operand i becomes result i."""
    build = RuleBuilder()
    dims = tuple(build.each(operand.shape) for operand in operands)
    return build.rule(dims, dims)
