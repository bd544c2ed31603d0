"""Splitting an operator as its factor rule says changes no result."""

from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rule_calls import Bound, bound, names
from rule_cases_computing import COMPUTING, POINTWISE
from rule_cases_moving import MOVING

from jaxpar.rules import Dims, FactorKind, FactorRule

REDUCE, WHOLE = FactorKind.REDUCE, FactorKind.WHOLE
Operands = tuple[Any, ...]
Combination = Callable[[Bound, int, int, Operands], list[Any]]
CASES = [*COMPUTING, *MOVING]


@cache
def bound_case(index: int) -> Bound:
    return bound(CASES[index])


def shardable(rule: FactorRule) -> list[int]:
    return [f for f, factor in enumerate(rule.factors) if factor.kind is not WHOLE]


def part(value: Any, dims: Dims, factor: int, index: int, count: int) -> Any:
    """One of several equal parts of an array along the dim of a factor."""
    if factor not in dims:
        return value
    return jnp.split(value, count, axis=dims.index(factor))[index]


def only(value: Any, dims: Dims, factor: int, index: int, count: int) -> Any:
    """An array that is zero but in one of several equal parts."""
    d = dims.index(factor)
    place = np.indices(value.shape)[d] // (value.shape[d] // count)
    return jnp.where(place == index, value, jnp.zeros_like(value))


def part_params(bound: Bound, factor: int, count: int) -> dict[str, Any]:
    """Parameters that name sizes, as one part has them."""
    rule, params = bound.rule, dict(bound.equation.params)

    def smaller(sizes: tuple[int, ...], dims: Dims) -> tuple[int, ...]:
        return tuple(
            n // count if f == factor else n for n, f in zip(sizes, dims, strict=True)
        )

    result = bound.result_shape
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
            table = bound.operands[0].shape
            sizes = zip(params["slice_sizes"], table, rule.operands[0], strict=True)
            params["slice_sizes"] = tuple(
                n // count if f == factor and n == full else n for n, full, f in sizes
            )
        case "conv_general_dilated":
            out = rule.operands[1][params["dimension_numbers"].rhs_spec[0]]
            for name in ("feature_group_count", "batch_group_count"):
                if out == factor and params[name] > 1:
                    params[name] //= count
    return params


def run_parts(bound: Bound, factor: int, count: int, operands: Operands) -> list[Any]:
    """The results of the primitive on each part of its operands."""
    params = part_params(bound, factor, count)
    pairs = list(zip(operands, bound.rule.operands, strict=True))
    return [
        bound.run(tuple(part(x, dims, factor, k, count) for x, dims in pairs), params)
        for k in range(count)
    ]


def combine_argument(
    bound: Bound, factor: int, count: int, operands: Operands
) -> list[Any]:
    """Each part's best, and of these the best."""
    axis = bound.rule.operands[0].index(factor)
    parts = jnp.split(operands[0], count, axis)
    size = parts[0].shape[axis]
    places = [bound.run((p,))[0] + k * size for k, p in enumerate(parts)]
    pick, best = jnp.argmax, jnp.max
    if bound.primitive == "argmin":
        pick, best = jnp.argmin, jnp.min
    winner = pick(jnp.stack([best(p, axis) for p in parts]), axis=0)
    return [jnp.take_along_axis(jnp.stack(places), winner[None], axis=0)[0]]


def combine_masked(
    bound: Bound, factor: int, count: int, operands: Operands
) -> list[Any]:
    """Each device holds a part of the table or weights, and sees zeros else."""
    slot = {"gather": 0, "ragged_dot_general": 1}[bound.primitive]
    dims = bound.rule.operands[slot]
    total = jnp.zeros(())
    for k in range(count):
        held = only(operands[slot], dims, factor, k, count)
        total += bound.run((*operands[:slot], held, *operands[slot + 1 :]))[0]
    return [total]


def combine_scatters(
    bound: Bound, factor: int, count: int, operands: Operands
) -> list[Any]:
    """The array is counted once; the other parts start from the neutral element."""
    array, *rest = operands
    neutral, combine = {
        "scatter-add": (0.0, jnp.add),
        "scatter-sub": (0.0, jnp.add),
        "scatter-mul": (1.0, jnp.multiply),
        "scatter-min": (jnp.inf, jnp.minimum),
        "scatter-max": (-jnp.inf, jnp.maximum),
    }[bound.primitive]
    pairs = list(zip(rest, bound.rule.operands[1:], strict=True))
    total = jnp.full_like(array, neutral)
    for k in range(count):
        start = array if k == 0 else jnp.full_like(array, neutral)
        parts = (part(x, dims, factor, k, count) for x, dims in pairs)
        total = combine(total, bound.run((start, *parts))[0])
    return [total]


def combine_rows(
    bound: Bound, factor: int, count: int, operands: Operands
) -> list[Any]:
    """Each device finds out how much of each group lies in its rows."""
    lhs, rhs, sizes = operands
    axis = bound.rule.operands[0].index(factor)
    ends = jnp.cumsum(sizes, axis=-1)
    found: list[Any] = []
    for k, rows in enumerate(jnp.split(lhs, count, axis)):
        first, last = k * rows.shape[axis], (k + 1) * rows.shape[axis]
        own = jnp.clip(ends, first, last) - jnp.clip(ends - sizes, first, last)
        found += bound.run((rows, rhs, own))
    return [jnp.concatenate(found, axis=axis)]


def combine_plain(
    bound: Bound, factor: int, count: int, operands: Operands
) -> list[Any]:
    """Passed factors: parts side by side. Reduced ones: parts combined."""
    parts = run_parts(bound, factor, count, operands)
    if bound.rule.factors[factor].kind is REDUCE:
        reducer = REDUCERS.get(bound.primitive, jnp.add)
        return [reduce(reducer, column) for column in zip(*parts, strict=True)]
    columns = zip(bound.rule.results, zip(*parts, strict=True), strict=True)
    return [
        jnp.concatenate(column, dims.index(factor)) if factor in dims else column[-1]
        for dims, column in columns
    ]


REDUCERS = {
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_prod": jnp.multiply,
    "reduce_and": jnp.logical_and,
    "reduce_or": jnp.logical_or,
}
BY_PLACE = ("iota", "random_bits")
"""Made by each device for its own place: nothing to cut."""


def combination(bound: Bound, factor: int) -> Combination:
    """How parts make the whole."""
    kind = bound.rule.factors[factor].kind
    if bound.primitive == "ragged_dot_general":
        lhs, rhs, sizes = bound.rule.operands
        if factor in rhs and factor not in lhs and kind is REDUCE:
            return combine_masked
        if factor in lhs and factor not in rhs and factor not in sizes:
            return combine_rows
    if kind is REDUCE and bound.primitive.startswith("scatter"):
        return combine_scatters
    if kind is REDUCE:
        special = {
            "gather": combine_masked,
            "argmax": combine_argument,
            "argmin": combine_argument,
        }
        return special.get(bound.primitive, combine_plain)
    return combine_plain


def whole_and_parts(bound: Bound, operands: Operands) -> list[list[Any]]:
    """The results as they are, then from the parts along each factor."""
    found = [bound.run(operands)]
    if bound.primitive in BY_PLACE:
        return found
    for f in shardable(bound.rule):
        size = bound.rule.factors[f].size
        count = next(n for n in range(2, size + 1) if size % n == 0)
        found.append(combination(bound, f)(bound, f, count, operands))
    return found


@cache
def computed(index: int) -> list[list[Any]]:
    bound = bound_case(index)
    return jax.jit(partial(whole_and_parts, bound))(bound.operands)


def assert_same(whole: list[Any], *others: list[Any]) -> None:
    for other in others:
        for a, b in zip(other, whole, strict=True):
            assert_equal(a, b)


def assert_equal(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(
        np.asarray(found, np.complex128),
        np.asarray(expected, np.complex128),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("index", range(len(CASES)), ids=names(CASES))
def test_parts_make_the_whole(index: int) -> None:
    assert_same(*computed(index))


def test_parts_of_pointwise_operators_make_the_whole() -> None:
    """All in one program, which compiles much faster."""
    bounds = [bound(case) for case in POINTWISE]
    program = jax.jit(lambda inputs: [*map(whole_and_parts, bounds, inputs)])
    for found in program([b.operands for b in bounds]):
        assert_same(*found)


@pytest.mark.parametrize("index", range(len(CASES)), ids=names(CASES))
def test_compiler_splits_all_factors_at_once(index: int) -> None:
    bound = bound_case(index)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("x", "y", "z"))
    split = [f for f in shardable(bound.rule) if bound.rule.factors[f].size % 2 == 0]

    def shardings(
        sides: tuple[Dims, ...], axes: dict[int | None, str]
    ) -> list[NamedSharding]:
        specs = (PartitionSpec(*map(axes.get, dims)) for dims in sides)
        return [NamedSharding(mesh, spec) for spec in specs]

    for some in filter(None, (split[:3], split[3:6])):
        axes: dict[int | None, str] = dict(zip(some, "xyz", strict=False))
        program = jax.jit(
            lambda *operands: bound.run(operands),
            in_shardings=shardings(bound.rule.operands, axes),
            out_shardings=shardings(bound.rule.results, axes),
        )
        assert_same(computed(index)[0], program(*bound.operands))
