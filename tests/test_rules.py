"""Factor rules: what they say, and that splitting as they say changes no result."""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rule_cases import CASES, POINTWISE, Bound, bound

from jaxpar.errors import RuleError
from jaxpar.rules import (
    ArrayType,
    Dims,
    Factor,
    FactorKind,
    FactorRule,
    factor_rule,
    known_primitives,
    rule_for,
)

PASS, REDUCE, WHOLE = FactorKind.PASS, FactorKind.REDUCE, FactorKind.WHOLE
MARKS = {PASS: "", REDUCE: "+", WHOLE: "!"}
NAMES = [
    f"{name}-{k}"
    for name, cases in itertools.groupby(CASES, lambda case: case.name)
    for k, _ in enumerate(cases)
]


@lru_cache(maxsize=None)
def bound_case(index: int) -> Bound:
    return bound(CASES[index])


def text(rule: FactorRule) -> str:
    """A rule as einsum has it; "+" marks reduced factors, "!" whole ones."""

    def written(dims: Dims) -> str:
        return " ".join(
            "." if f is None else chr(ord("a") + f) + MARKS[rule.factors[f].kind]
            for f in dims
        )

    sides = (", ".join(map(written, side)) for side in (rule.operands, rule.results))
    return " -> ".join(sides).strip()


# What the rules say.

GOLDEN = {
    "select_n-1": (", a b, a b -> a b", (4, 6)),
    "clamp-0": (", a b,  -> a b", (4, 6)),
    "mul-1": (". a, . a -> . a", (6,)),
    "optimization_barrier-0": ("a b, c -> a b, c", (4, 6, 2)),
    "dot_general-0": ("a c+, c+ b -> a b", (4, 2, 6)),
    "dot_general-2": ("a b d+, a d+ c -> a b c", (2, 4, 8, 6)),
    "dot_general-3": ("d+ a . c+, b c+ d+ a -> a . b", (4, 8, 6, 2)),
    "ragged_dot_general-0": ("a c+, d+ c+ b, e! -> a b", (8, 2, 6, 4, 4)),
    "ragged_dot_general-1": ("a b d+, a e+ d+ c, a f! -> a b c", (2, 8, 2, 6, 4, 4)),
    "conv_general_dilated-0": (
        "a d! g! c+, e! h! c+ b -> a f! i! b",
        (2, 8, 4, 6, 3, 6, 6, 3, 6),
    ),
    "conv_general_dilated-2": ("a d e c+, . . c+ b -> a d e b", (2, 8, 4, 4, 6)),
    "reduce_sum-0": ("a b+ c -> a c", (4, 6, 2)),
    "argmax-0": ("a b+ -> a", (4, 6)),
    "cumsum-0": ("a b! -> a b!", (4, 6)),
    "reduce_window_max-0": ("a c! d! b -> a e! f! b", (2, 4, 6, 6, 3, 3)),
    "reshape-0": ("a b! -> a", (4, 6)),
    "reshape-1": ("a b! -> a c!", (3, 4, 8)),
    "reshape-2": ("a b c -> a b c d!", (2, 4, 2, 3)),
    "reshape-3": (". a b! c -> a . c", (2, 4, 6)),
    "reshape-5": ("a! c! -> b! d!", (3, 4, 4, 3)),
    "broadcast_in_dim-0": ("b c -> a b c", (2, 4, 6)),
    "broadcast_in_dim-1": (". c -> a b c", (4, 2, 6)),
    "concatenate-0": ("a b!, a c! -> a d!", (4, 6, 6, 12)),
    "stack-0": ("a c, a c -> a b! c", (4, 2, 6)),
    "pad-0": ("a b!,  -> a c!", (4, 6, 14)),
    "dynamic_slice-0": ("a b!, ,  -> a c!", (4, 6, 3)),
    "dynamic_update_slice-0": ("a b!, a c!, ,  -> a b!", (4, 6, 2)),
    "gather-0": ("c+ d, a b . -> a b d", (4, 2, 8, 6)),
    "gather-1": ("a c+, a b . -> a b", (4, 2, 6)),
    "gather-2": ("c+ d+ e, a b! -> a e", (4, 2, 4, 2, 6)),
    "gather-3": ("b! d, a . -> a c! d", (4, 8, 2, 6)),
    "scatter-0": ("b! c, a! ., a! c -> b! c", (4, 8, 6)),
    "scatter-add-0": ("b! c, a+ ., a+ c -> b! c", (4, 8, 6)),
    "scatter-add-1": ("a c!, a b+ ., a b+ -> a c!", (4, 2, 6)),
    "sort-1": ("a! b, a! b -> a! b, a! b", (4, 6)),
    "top_k-0": ("a b! -> a c!, a c!", (4, 6, 2)),
    "lu-0": ("a b! c! -> a d! e!, a f!, a g!", (2, 4, 4, 4, 4, 4, 4)),
    "fft-0": ("a b! -> a c!", (4, 6, 4)),
    "random_bits-0": ("-> a b", (4, 6)),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_rule_is_as_written_by_hand(name: str) -> None:
    rule = bound_case(NAMES.index(name)).rule
    sizes = tuple(factor.size for factor in rule.factors)
    assert (text(rule), sizes) == GOLDEN[name]


FLOPS = {
    "add-0": 4,
    "exp-0": 4 * 10,
    "dot_general-2": 2 * (2 * 4 * 8) * 6,
    "ragged_dot_general-0": 2 * (8 * 2) * 6,
    "conv_general_dilated-0": 2 * (2 * 6 * 6 * 8) * (3 * 3) * 4,
    "conv_general_dilated-5": 2 * (2 * 6 * 6 * 8) * (3 * 3) * 1,
    "reduce_sum-0": 4 * 6 * 2,
    "cumsum-0": 4 * 6,
    "reduce_window_sum-0": (2 * 3 * 3 * 4) * (2 * 2),
    "gather-0": 0,
    "reshape-0": 0,
    "cholesky-0": 2 * 4**3 / 3,
    "fft-0": 5 * (4 * 6) * math.log2(6),
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops_are_counted_by_hand(name: str) -> None:
    assert bound_case(NAMES.index(name)).rule.flops == pytest.approx(FLOPS[name])


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_factors_stand_where_their_kind_says(index: int) -> None:
    rule = bound_case(index).rule
    read = set(itertools.chain.from_iterable(rule.operands))
    written = set(itertools.chain.from_iterable(rule.results))
    for f, factor in enumerate(rule.factors):
        assert factor.size > 1
        assert f in read | written
        if factor.kind is REDUCE:
            assert f in read - written
        if factor.kind is PASS:
            assert f in written


# Splitting as they say changes no result.


def shardable(bound: Bound) -> Iterator[int]:
    for f, factor in enumerate(bound.rule.factors):
        if factor.kind is not WHOLE:
            yield f


SPLITS = [(i, f) for i in range(len(CASES)) for f in shardable(bound_case(i))]
SPLIT_NAMES = [f"{NAMES[i]}-{'abcdefgh'[f]}" for i, f in SPLITS]


def part(value: Any, dims: Dims, factor: int, index: int, count: int) -> Any:
    """One of several equal parts of an array along the dim of a factor."""
    for d, f in enumerate(dims):
        if f == factor:
            return np.split(value, count, axis=d)[index]
    return value


def only(value: Any, dims: Dims, factor: int, index: int, count: int) -> Any:
    """An array that is zero but in one of several equal parts."""
    d = dims.index(factor)
    place = np.indices(value.shape)[d] // (value.shape[d] // count)
    return np.where(place == index, value, np.zeros_like(value))


def part_params(bound: Bound, factor: int, count: int) -> dict[str, Any]:
    """Parameters that name sizes, as one part has them."""
    rule, params = bound.rule, dict(bound.equation.params)

    def smaller(sizes: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        return tuple(
            n // count if f == factor else n for n, f in zip(sizes, dims, strict=True)
        )

    result = bound.equation.outvars[0].aval.shape
    table = bound.operands[0].shape if bound.operands else ()
    match bound.primitive:
        case "reshape":
            params["new_sizes"] = smaller(result, rule.results[0])
        case "broadcast_in_dim":
            params["shape"] = smaller(result, rule.results[0])
        case "dynamic_slice":
            params["slice_sizes"] = smaller(params["slice_sizes"], rule.operands[0])
        case "slice":
            params["limit_indices"] = smaller(params["limit_indices"], rule.operands[0])
        case "gather":
            sizes = zip(params["slice_sizes"], table, rule.operands[0], strict=True)
            params["slice_sizes"] = tuple(
                n // count if f == factor and n == full > 1 else n
                for n, full, f in sizes
            )
        case "conv_general_dilated":
            numbers = params["dimension_numbers"]
            out = rule.operands[1][numbers.rhs_spec[0]]
            for name in ("feature_group_count", "batch_group_count"):
                if out == factor and params[name] > 1:
                    params[name] //= count
    return params


def run_parts(bound: Bound, factor: int, count: int) -> list[list[Any]]:
    """The results of the primitive on each part of its operands."""
    params = part_params(bound, factor, count)
    return [
        bound.run(
            tuple(
                part(value, dims, factor, index, count)
                for value, dims in zip(bound.operands, bound.rule.operands, strict=True)
            ),
            params,
        )
        for index in range(count)
    ]


def combine_argument(bound: Bound, factor: int, count: int) -> list[Any]:
    """Each part's best, and of these the best."""
    (value,), (dims,) = bound.operands, bound.rule.operands
    axis = dims.index(factor)
    size = value.shape[axis] // count
    pick, best = {
        "argmax": (np.argmax, np.max), "argmin": (np.argmin, np.min)
    }[bound.primitive]
    parts = [part(value, dims, factor, k, count) for k in range(count)]
    places = [
        bound.run((p,))[0] + k * size for k, p in enumerate(parts)
    ]
    winner = pick(np.stack([best(p, axis) for p in parts]), axis=0)
    return [np.choose(winner, places)]


def combine_lookups(bound: Bound, factor: int, count: int) -> list[Any]:
    """Each device looks up what it holds, and zeros else."""
    table, indices = bound.operands
    dims = bound.rule.operands[0]
    masked = [only(table, dims, factor, k, count) for k in range(count)]
    return [sum(bound.run((m, indices))[0] for m in masked)]


def combine_scatters(bound: Bound, factor: int, count: int) -> list[Any]:
    """The array is counted once; the other parts start from the neutral element."""
    array, *rest = bound.operands
    neutral, combine = {
        "scatter-add": (0.0, np.add),
        "scatter-sub": (0.0, np.add),
        "scatter-mul": (1.0, np.multiply),
        "scatter-min": (np.inf, np.minimum),
        "scatter-max": (-np.inf, np.maximum),
    }[bound.primitive]
    found = None
    for k in range(count):
        start = array if k == 0 else np.full_like(array, neutral)
        parts = (
            part(value, dims, factor, k, count)
            for value, dims in zip(rest, bound.rule.operands[1:], strict=True)
        )
        (result,) = bound.run((start, *parts))
        found = result if found is None else combine(found, result)
    return [found]


def combine_groups(bound: Bound, factor: int, count: int) -> list[Any]:
    """Each device holds the weights of some groups, and zeros for the others."""
    lhs, rhs, sizes = bound.operands
    dims = bound.rule.operands[1]
    masked = [only(rhs, dims, factor, k, count) for k in range(count)]
    return [sum(bound.run((lhs, m, sizes))[0] for m in masked)]


def combine_rows(bound: Bound, factor: int, count: int) -> list[Any]:
    """Each device finds out how much of each group lies in its rows."""
    lhs, rhs, sizes = bound.operands
    dims = bound.rule.operands[0]
    axis = dims.index(factor)
    rows = lhs.shape[axis] // count
    ends = np.cumsum(sizes, axis=-1)
    found = [
        bound.run(
            (
                part(lhs, dims, factor, k, count),
                rhs,
                np.clip(ends, k * rows, (k + 1) * rows)
                - np.clip(ends - sizes, k * rows, (k + 1) * rows),
            )
        )[0]
        for k in range(count)
    ]
    return [np.concatenate(found, axis=axis)]


Combination = Callable[[Bound, int, int], list[Any]]
SPECIAL: dict[tuple[str, FactorKind], Combination] = {
    ("argmax", REDUCE): combine_argument,
    ("argmin", REDUCE): combine_argument,
    ("gather", REDUCE): combine_lookups,
    **{
        (f"scatter-{name}", REDUCE): combine_scatters
        for name in ("add", "sub", "mul", "min", "max")
    },
}
REDUCERS = {
    "reduce_max": np.maximum,
    "reduce_min": np.minimum,
    "reduce_prod": np.multiply,
    "reduce_and": np.logical_and,
    "reduce_or": np.logical_or,
}
BY_PLACE = ("iota", "random_bits")
"""Made by each device for its own place: nothing to cut."""


def special(bound: Bound, factor: int) -> Combination | None:
    if bound.primitive == "ragged_dot_general":
        lhs, rhs, sizes = bound.rule.operands
        if factor in rhs and factor not in lhs and factor not in bound.rule.results[0]:
            return combine_groups
        if factor in lhs and factor not in rhs and factor not in sizes:
            return combine_rows
    return SPECIAL.get((bound.primitive, bound.rule.factors[factor].kind))


def combined(bound: Bound, factor: int, count: int) -> list[Any]:
    """The results of all parts, put together as the kind of the factor says."""
    if combination := special(bound, factor):
        return combination(bound, factor, count)
    parts = run_parts(bound, factor, count)
    if bound.rule.factors[factor].kind is REDUCE:
        reducer = REDUCERS.get(bound.primitive, np.add)
        first, *others = parts
        for other in others:
            first = [reducer(a, b) for a, b in zip(first, other, strict=True)]
        return first
    found = []
    for dims, column in zip(bound.rule.results, zip(*parts, strict=True), strict=True):
        if factor in dims:
            found.append(np.concatenate(column, axis=dims.index(factor)))
        else:
            for other in column[1:]:
                assert_equal(other, column[0])
            found.append(column[0])
    return found


def assert_equal(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(
        np.asarray(found, np.complex128), np.asarray(expected, np.complex128), rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(("index", "factor"), SPLITS, ids=SPLIT_NAMES)
def test_parts_make_the_whole(index: int, factor: int) -> None:
    bound = bound_case(index)
    if bound.primitive in BY_PLACE:
        assert not any(factor in dims for dims in bound.rule.operands)
        return
    size = bound.rule.factors[factor].size
    count = next(n for n in range(2, size + 1) if size % n == 0)
    whole = bound.run(bound.operands)
    for found, expected in zip(combined(bound, factor, count), whole, strict=True):
        assert found.shape == expected.shape
        assert_equal(found, expected)


COMPILED = [
    (name, index, factor)
    for name, (index, factor) in zip(SPLIT_NAMES, SPLITS, strict=True)
    if bound_case(index).rule.factors[factor].size % 2 == 0
    and (CASES[index] not in POINTWISE or bound_case(index).primitive in ("exp", "add"))
]


@pytest.mark.parametrize(
    ("index", "factor"),
    [split for _, *split in COMPILED],
    ids=[name for name, *_ in COMPILED],
)
def test_compiler_accepts_the_split(index: int, factor: int) -> None:
    bound = bound_case(index)
    mesh = jax.make_mesh(
        (2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )

    def shardings(sides: tuple[Dims, ...]) -> list[NamedSharding]:
        specs = ([("x" if f == factor else None) for f in dims] for dims in sides)
        return [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]

    def call(*operands: Any) -> list[Any]:
        return bound.run(operands)

    inputs, outputs = shardings(bound.rule.operands), shardings(bound.rule.results)
    compiled = jax.jit(call, in_shardings=inputs, out_shardings=outputs)
    whole = bound.run(bound.operands)
    for found, expected in zip(compiled(*bound.operands), whole, strict=True):
        assert_equal(found, expected)


