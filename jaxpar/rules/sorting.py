"""Sorting and selection: the sorted dim stays whole."""

from collections.abc import Mapping
from typing import Any

from jaxpar.rules.builder import RuleBuilder
from jaxpar.rules.rule import ArrayType, FactorRule, factor_rule


@factor_rule("sort")
def sort(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Operands that are all put into the order of the first."""
    build = RuleBuilder()
    dims = build.each(operands[0].shape, whole=(params["dimension"],))
    return build.rule((dims for _ in operands), (dims for _ in results))


@factor_rule("top_k", "approx_top_k")
def top_k(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """The greatest values along one dim, and their indices there."""
    rank = len(operands[0].shape)
    axis = params.get("axis", params.get("reduction_dimension", -1)) % rank
    build = RuleBuilder()
    operand, found = build.aligned((operands[0], results[0]), (axis,))
    return build.rule((operand, *(() for _ in operands[1:])), (found for _ in results))
