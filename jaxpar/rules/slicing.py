"""Cutting and joining: dims that are cut, joined or padded are never split."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.rules.builder import RuleBuilder
from jaxpar.rules.rule import ArrayType, FactorRule, factor_rule


def _resized(a: ArrayType, b: ArrayType) -> list[int]:
    """Dims of two arrays of one rank that differ in size."""
    sizes = zip(a.shape, b.shape, strict=True)
    return [d for d, (m, n) in enumerate(sizes) if m != n]


def _cut(
    operands: Sequence[ArrayType], results: Sequence[ArrayType], touched: Sequence[int]
) -> FactorRule:
    """Operands and results that share all dims but the touched ones."""
    build = RuleBuilder()
    dims = build.aligned((*operands, *results), touched)
    return build.rule(dims[: len(operands)], dims[len(operands) :])


@factor_rule("slice")
def slice_(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
) -> FactorRule:
    """Dims that are taken in full pass through."""
    return _cut(operands, results, _resized(operands[0], results[0]))


@factor_rule("concatenate")
def concatenate(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Parts of the joined dim would lie on other devices than before."""
    return _cut(operands, results, (params["dimension"],))


@factor_rule("split")
def split(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """The reverse of concatenate."""
    return _cut(operands, results, (params["axis"],))


@factor_rule("stack")
def stack(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """The new dim is never split: every device has all that is stacked."""
    build = RuleBuilder()
    result = build.each(results[0].shape, whole=(params["axis"],))
    part = tuple(f for d, f in enumerate(result) if d != params["axis"])
    return build.rule((part for _ in operands), (result,))


@factor_rule("unstack")
def unstack(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """The reverse of stack."""
    build = RuleBuilder()
    operand = build.each(operands[0].shape, whole=(params["axis"],))
    part = tuple(f for d, f in enumerate(operand) if d != params["axis"])
    return build.rule((operand,), (part for _ in results))


@factor_rule("tile")
def tile(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
) -> FactorRule:
    """Dims that are repeated are never split."""
    return _cut(operands, results, _resized(operands[0], results[0]))


@factor_rule("pad")
def pad(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """The second operand is the scalar to pad with."""
    build = RuleBuilder()
    padded = [d for d, config in enumerate(params["padding_config"]) if any(config)]
    operand, result = build.aligned((operands[0], *results), padded)
    return build.rule((operand, ()), (result,))


@factor_rule("dynamic_slice")
def dynamic_slice(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
) -> FactorRule:
    """An array, then the scalars where the slice starts."""
    build = RuleBuilder()
    touched = _resized(operands[0], results[0])
    operand, result = build.aligned((operands[0], *results), touched)
    starts = (build.unsplit(start.shape) for start in operands[1:])
    return build.rule((operand, *starts), (result,))


@factor_rule("dynamic_update_slice")
def dynamic_update_slice(
    operands: tuple[ArrayType, ...],
    _results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
) -> FactorRule:
    """An array, its new part, then the scalars where the part goes."""
    build = RuleBuilder()
    array, part = operands[:2]
    array_dims, part_dims = build.aligned((array, part), _resized(array, part))
    starts = (build.unsplit(start.shape) for start in operands[2:])
    return build.rule((array_dims, part_dims, *starts), (array_dims,))
