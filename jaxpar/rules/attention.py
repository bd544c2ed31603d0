"""Fused attention of cuDNN: split over batch and heads, never within a sequence."""

from collections.abc import Mapping
from math import gcd
from typing import Any

from jaxpar.rules.builder import RuleBuilder, elements
from jaxpar.rules.rule import ArrayType, Dims, FactorRule, factor_rule

_HEADS_FIRST = 1
"""The primitive's layout number for (batch, heads, length, width)."""


@factor_rule("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd")
def attention(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Query, key, value; then a bias, lengths and offsets per sequence, page tables.

    Where heads share keys, the heads of the keys are the most that may be split.
    """
    query, key = operands[:2]
    heads_dim = 1 if params["layout"] == _HEADS_FIRST else 2
    build = RuleBuilder()
    batch = build.add(query.shape[0])
    heads = build.add(gcd(query.shape[heads_dim], key.shape[heads_dim]))

    def split(array: ArrayType, by_dim: Mapping[int, int | None]) -> Dims:
        return tuple(
            by_dim[d] if d in by_dim and n > 1 else build.whole(n)
            for d, n in enumerate(array.shape)
        )

    def per_sequence(array: ArrayType) -> Dims:
        alike = array.shape[:1] == query.shape[:1]
        return split(array, {0: batch} if alike else {})

    layout = {0: batch, heads_dim: heads}
    bias = split(operands[3], {0: batch, 1: heads} if operands[3].shape else {})
    statistics = [split(r, {0: batch, 1: heads}) for r in results[1:]]
    width, length = query.shape[3], key.shape[3 - heads_dim]
    scores = elements(query) // width * length
    return build.rule(
        (
            *(split(operand, layout) for operand in operands[:3]),
            bias,
            *(per_sequence(operand) for operand in operands[4:]),
        ),
        (split(results[0], layout), *statistics),
        4.0 * scores * width,
    )
