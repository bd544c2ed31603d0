"""Operators that only lay elements out anew, or make them out of nothing."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpar.rules.builder import RuleBuilder
from jaxpar.rules.rule import ArrayType, Dims, FactorRule, factor_rule


@factor_rule("reshape")
def reshape(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Dims that are merged or cut: only the major part of both sides may be split.

    (batch, heads, width) -> (batch, heads * width): heads is split on both sides,
    width stays whole. The parts that (6, 4) and (3, 8) have in common are 3.
    """
    before, after = operands[0].shape, results[0].shape
    order = params.get("dimensions") or range(len(before))
    build = RuleBuilder()
    source: dict[int, int | None] = {}
    target: dict[int, int | None] = {}
    for left, right in _groups([before[d] for d in order], after):
        minor = len(left) > 1 or len(right) > 1
        first, second = order[left[0]], right[0]
        major = build.add(math.gcd(before[first], after[second]))
        source[first] = build.whole(before[first]) if major is None else major
        target[second] = build.whole(after[second]) if major is None else major
        if minor:
            source |= {order[d]: build.whole(before[order[d]]) for d in left[1:]}
            target |= {d: build.whole(after[d]) for d in right[1:]}
    return build.rule(
        (tuple(source.get(d) for d in range(len(before))),),
        (tuple(target.get(d) for d in range(len(after))),),
    )


def _groups(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """The shortest runs of dims that hold the same elements; without dims of 1."""
    if 0 in before:
        return
    left = [d for d, n in enumerate(before) if n > 1]
    right = [d for d, n in enumerate(after) if n > 1]
    while left:
        i = j = 1
        while (a := math.prod(before[d] for d in left[:i])) != (
            b := math.prod(after[d] for d in right[:j])
        ):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        yield left[:i], right[:j]
        left, right = left[i:], right[j:]


@factor_rule("broadcast_in_dim")
def broadcast_in_dim(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """New and expanded dims have factors that the operand lacks."""
    build = RuleBuilder()
    dims = build.each(results[0].shape)
    source = zip(operands[0].shape, params["broadcast_dimensions"], strict=True)
    return build.rule((tuple(dims[d] if n > 1 else None for n, d in source),), (dims,))


@factor_rule("transpose")
def transpose(
    operands: tuple[ArrayType, ...],
    _results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """The same factors in another order."""
    build = RuleBuilder()
    dims = build.each(operands[0].shape)
    return build.rule((dims,), (tuple(dims[d] for d in params["permutation"]),))


@factor_rule("squeeze")
def squeeze(
    operands: tuple[ArrayType, ...],
    _results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Dims of 1 go, the others stay."""
    build = RuleBuilder()
    dims = build.each(operands[0].shape)
    gone = params["dimensions"]
    return build.rule((dims,), (tuple(f for d, f in enumerate(dims) if d not in gone),))


@factor_rule("rev")
def rev(
    operands: tuple[ArrayType, ...],
    _results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """A reversed dim would have to change places between devices."""
    build = RuleBuilder()
    dims = build.each(operands[0].shape, whole=params["dimensions"])
    return build.rule((dims,), (dims,))


@factor_rule("bitcast_convert_type", "to_edtype", "from_edtype")
def reinterpret(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
) -> FactorRule:
    """Elements of another size: the wider side has its parts in minor dims."""
    build = RuleBuilder()
    before, after = operands[0].shape, results[0].shape
    shared = build.each(before[: len(after)])

    def whole(shape: tuple[int, ...]) -> Dims:
        return build.unsplit(shape[len(shared) :])

    return build.rule(((*shared, *whole(before)),), ((*shared, *whole(after)),))


@factor_rule("iota", "empty", "empty2")
def out_of_nothing(
    _operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
) -> FactorRule:
    """Each device makes its own part."""
    build = RuleBuilder()
    return build.rule((), (build.each(results[0].shape),))
