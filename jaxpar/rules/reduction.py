"""Reductions over dims, and scans along one."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.rules.builder import RuleBuilder, elements
from jaxpar.rules.rule import ArrayType, Dims, FactorKind, FactorRule, factor_rule


def _reduction(
    operands: Sequence[ArrayType],
    results: Sequence[ArrayType],
    axes: Sequence[int],
    kind: FactorKind,
) -> FactorRule:
    """The first operands, one per result, lose the axes; the others are scalars."""
    build = RuleBuilder()
    shape = operands[0].shape
    dims: Dims = tuple(
        build.add(n, kind if d in axes else FactorKind.PASS)
        for d, n in enumerate(shape)
    )
    kept = tuple(f for d, f in enumerate(dims) if d not in axes)
    starts = ((),) * (len(operands) - len(results))
    return build.rule(
        (*(dims for _ in results), *starts),
        (kept for _ in results),
        elements(operands[0]),
    )


@factor_rule(
    *("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "argmax", "argmin")
)
def reduction(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Parts are combined; those of an argmax with the index of each part's best."""
    return _reduction(operands, results, params["axes"], FactorKind.REDUCE)


@factor_rule("reduce_and", "reduce_or")
def logical_reduction(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Truth values only: not every backend combines the bits of integers."""
    boolean = str(operands[0].dtype) == "bool"
    kind = FactorKind.REDUCE if boolean else FactorKind.WHOLE
    return _reduction(operands, results, params["axes"], kind)


@factor_rule("reduce_xor")
def parity(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Not every backend has this collective."""
    return _reduction(operands, results, params["axes"], FactorKind.WHOLE)


@factor_rule("reduce")
def generic_reduction(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """By a function of the user, for which there is no collective."""
    return _reduction(operands, results, params["dimensions"], FactorKind.WHOLE)


@factor_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def scan_along(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Each element needs all before it."""
    build = RuleBuilder()
    dims = build.each(results[0].shape, whole=(params["axis"],))
    return build.rule((dims,), (dims,), elements(operands[0]))
