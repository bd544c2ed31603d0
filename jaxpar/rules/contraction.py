"""Matrix multiplications: batch, rows, columns, and what is summed over."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.rules.builder import RuleBuilder, elements
from jaxpar.rules.rule import ArrayType, Dims, FactorRule, factor_rule


class _Product:
    """The factors of lhs x rhs, summed over the contracted dims.

    Attributes:
        lhs: Factors of the dims of the left operand.
        rhs: Factors of the dims of the right operand.
        result: Factors of batch dims, free dims of lhs, free dims of rhs.
        summed: Product of the lengths of the contracted dims.
    """

    def __init__(
        self,
        build: RuleBuilder,
        lhs: ArrayType,
        rhs: ArrayType,
        numbers: tuple[
            tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
        ],
        group: Sequence[int] = (),
    ):
        (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = numbers
        batch = [build.add(lhs.shape[d]) for d in lhs_batch]
        left = [d for d in range(len(lhs.shape)) if d not in (*lhs_batch, *lhs_summed)]
        right = [
            d
            for d in range(len(rhs.shape))
            if d not in (*rhs_batch, *rhs_summed, *group)
        ]
        rows = [build.add(lhs.shape[d]) for d in left]
        columns = [build.add(rhs.shape[d]) for d in right]
        summed = [build.reduced(lhs.shape[d]) for d in lhs_summed]
        groups = [build.reduced(rhs.shape[d]) for d in group]
        self.lhs = _placed((lhs_batch, batch), (left, rows), (lhs_summed, summed))
        self.rhs = _placed(
            (rhs_batch, batch), (right, columns), (rhs_summed, summed), (group, groups)
        )
        self.result: Dims = (*batch, *rows, *columns)
        self.summed = math.prod(lhs.shape[d] for d in lhs_summed)


def _placed(*parts: tuple[Sequence[int], Sequence[int | None]]) -> Dims:
    """Factors in the order of the dims that they stand on."""
    factors = {d: f for dims, found in parts for d, f in zip(dims, found, strict=True)}
    return tuple(factors[d] for d in range(len(factors)))


@factor_rule("dot_general")
def dot_general(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Batch dims, free dims of lhs and of rhs pass; contracted dims are summed."""
    build = RuleBuilder()
    lhs, rhs = operands
    product = _Product(build, lhs, rhs, params["dimension_numbers"])
    flops = 2.0 * elements(results[0]) * product.summed
    return build.rule((product.lhs, product.rhs), (product.result,), flops)


@factor_rule("ragged_dot", "ragged_dot_general")
def ragged_dot(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """A matrix product whose rows are in groups, each with a weight of its own.

    A device that holds some groups' weights computes zeros for the rows of the
    others, so the groups are summed over. Where it holds some rows, it knows from
    the sizes of all groups which weights they need. Groups that the product makes
    (its ragged dim is contracted) stay whole. The TPU compiler splits neither rows
    nor groups and gathers both.
    """
    lhs, rhs, group_sizes = operands
    numbers = params["ragged_dot_dimension_numbers"]
    contraction = numbers.dot_dimension_numbers
    build = RuleBuilder()
    product = _Product(build, lhs, rhs, contraction, numbers.rhs_group_dimensions)
    made = len(results[0].shape) - len(product.result)
    tied = () if made else product.result[: len(group_sizes.shape) - 1]
    sizes = (*tied, *build.unsplit(group_sizes.shape[len(tied) :]))
    result = (*build.unsplit(results[0].shape[:made]), *product.result)
    flops = 2.0 * elements(results[0]) * product.summed
    if made:
        flops /= results[0].shape[0]
    return build.rule((product.lhs, product.rhs, sizes), (result,), flops)
