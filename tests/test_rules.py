"""Factor rules: what they say, and that splitting as they say changes no result."""

import itertools
import math
from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
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
Operands = tuple[Any, ...]
Combination = Callable[[Bound, int, int, Operands], list[Any]]
OTHERS = range(len(POINTWISE), len(CASES))
NAMES = [
    f"{name}-{k}"
    for name, cases in itertools.groupby(CASES, lambda case: case.name)
    for k, _ in enumerate(cases)
]


@cache
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

    result = bound.equation.outvars[0].aval.shape
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


def whole_and_parts(bound: Bound, operands: Operands) -> dict[str, list[Any]]:
    """The results as they are, and from the parts along each factor."""
    found = {"whole": bound.run(operands)}
    for f in shardable(bound.rule):
        size = bound.rule.factors[f].size
        count = next(n for n in range(2, size + 1) if size % n == 0)
        found[f"parts of {f}"] = combination(bound, f)(bound, f, count, operands)
    return found


def assert_same(found: dict[str, list[Any]]) -> None:
    expected = found.pop("whole")
    for parts in found.values():
        for a, b in zip(parts, expected, strict=True):
            assert_equal(a, b)


def assert_equal(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(
        np.asarray(found, np.complex128),
        np.asarray(expected, np.complex128),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("index", OTHERS, ids=[NAMES[i] for i in OTHERS])
def test_parts_make_the_whole(index: int) -> None:
    bound = bound_case(index)
    if bound.primitive in BY_PLACE:
        assert all(f is None for dims in bound.rule.operands for f in dims)
        return
    program = jax.jit(lambda operands: whole_and_parts(bound, operands))
    assert_same(program(bound.operands))


def test_parts_of_pointwise_operators_make_the_whole() -> None:
    bounds = [bound_case(i) for i in range(len(POINTWISE))]
    program = jax.jit(
        lambda inputs: [
            whole_and_parts(b, operands)
            for b, operands in zip(bounds, inputs, strict=True)
        ]
    )
    for found in program([b.operands for b in bounds]):
        assert_same(found)


@pytest.mark.parametrize("index", OTHERS, ids=[NAMES[i] for i in OTHERS])
def test_compiler_splits_all_factors_at_once(index: int) -> None:
    bound = bound_case(index)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("x", "y", "z"))
    split = [f for f in shardable(bound.rule) if bound.rule.factors[f].size % 2 == 0]

    def shardings(
        sides: tuple[Dims, ...], axes: dict[int | None, str]
    ) -> list[NamedSharding]:
        specs = (PartitionSpec(*map(axes.get, dims)) for dims in sides)
        return [NamedSharding(mesh, spec) for spec in specs]

    for some in (split[:3], split[3:6]):
        if not some:
            continue
        axes = dict(zip(some, mesh.axis_names, strict=False))
        program = jax.jit(
            lambda *operands: bound.run(operands),
            in_shardings=shardings(bound.rule.operands, axes),
            out_shardings=shardings(bound.rule.results, axes),
        )
        results = program(*bound.operands)
        for found, expected in zip(results, bound.run(bound.operands), strict=True):
            assert_equal(found, expected)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of as many elements."""
    primes = draw(st.lists(st.sampled_from((1, 2, 2, 3)), max_size=6))

    def shape(factors: list[int]) -> tuple[int, ...]:
        cuts = draw(st.sets(st.integers(1, max(1, len(factors) - 1))))
        edges = [0, *sorted(cuts), len(factors)]
        return tuple(math.prod(factors[a:b]) for a, b in itertools.pairwise(edges))

    return shape(primes), shape(draw(st.permutations(primes)))


@hypothesis.given(reshapes())
def test_reshape_keeps_parts_together(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    before, after = shapes
    float32 = np.dtype("float32")
    rule = rule_for(
        "reshape", (ArrayType(before, float32),), (ArrayType(after, float32),), {}
    )
    (source,), (target,) = rule.operands, rule.results
    values = np.arange(math.prod(before)).reshape(before)
    for f, factor in enumerate(rule.factors):
        assert factor.kind is (PASS if f in source and f in target else WHOLE)
        if factor.kind is WHOLE:
            continue
        for count in (n for n in range(2, factor.size + 1) if factor.size % n == 0):
            d = target.index(f)
            part_shape = (*after[:d], after[d] // count, *after[d + 1 :])
            parts = np.split(values, count, source.index(f))
            whole = np.concatenate([p.reshape(part_shape) for p in parts], d)
            assert (whole == values.reshape(after)).all()


@hypothesis.given(reshapes())
def test_reshape_splits_the_leading_dims_as_far_as_possible(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    float32 = np.dtype("float32")
    before, after = (ArrayType(shape, float32) for shape in shapes)
    rule = rule_for("reshape", (before,), (after,), {})
    first, second = (next((n for n in shape if n > 1), 1) for shape in shapes)
    passed = [factor.size for factor in rule.factors if factor.kind is PASS]
    expected = math.gcd(first, second)
    assert passed[:1] == [expected] if expected > 1 else first == 1 or PASS


# What is refused, and what users add.


def test_unknown_primitive_is_refused_by_name() -> None:
    operand = ArrayType((4, 6), np.dtype("float32"))
    with pytest.raises(RuleError, match=r"'my_kernel' \(float32\[4, 6\]\) at blocks/0"):
        rule_for("my_kernel", (operand,), (operand,), {}, "blocks/0")


@pytest.mark.parametrize(
    "rule",
    [
        FactorRule((Factor(4),), ((0,),), ((0, None),)),
        FactorRule((Factor(4), Factor(5)), ((0, 1),), ((0, 1),)),
        FactorRule((Factor(4),), (), ((0, None),)),
    ],
    ids=["rank", "size", "operands"],
)
def test_rule_that_contradicts_the_shapes_is_refused(
    rule: FactorRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpar.rules.rule._RULES", {})
    factor_rule("my_kernel")(lambda *_: rule)
    operand = ArrayType((4, 6), np.dtype("float32"))
    with pytest.raises(RuleError, match="factor rule of primitive 'my_kernel'"):
        rule_for("my_kernel", (operand,), (operand,), {})


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (-1, None)])
def test_rule_that_contradicts_itself_is_refused(dims: Dims) -> None:
    with pytest.raises(RuleError):
        FactorRule((Factor(4),), (dims,), ())


def test_registered_rule_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpar.rules.rule._RULES", {})
    rule = FactorRule((Factor(4), Factor(6, WHOLE)), ((0, 1),), ((0, 1),))
    factor_rule("my_kernel", "my_other_kernel")(lambda *_: rule)
    operand = ArrayType((4, 6), np.dtype("float32"))
    assert known_primitives() == {"my_kernel", "my_other_kernel"}
    assert rule_for("my_other_kernel", (operand,), (operand,), {}) is rule


@pytest.mark.parametrize("heads_first", [False, True])
def test_fused_attention_splits_batch_and_heads(heads_first: bool) -> None:
    def array(*shape: int) -> ArrayType:
        if heads_first and len(shape) == 4:
            shape = (shape[0], shape[2], shape[1], shape[3])
        return ArrayType(shape, np.dtype("float32"))

    query, key = array(2, 16, 8, 4), array(2, 32, 4, 4)
    bias = ArrayType((1, 8, 16, 32), np.dtype("float32"))
    unused = array(0)
    rule = rule_for(
        "dot_product_attention_fwd_wrapper",
        (query, key, key, bias, array(2), array(2), *(unused,) * 4),
        (query, array(2, 8, 16)),
        {"layout": int(heads_first)},
    )
    heads = 1 if heads_first else 2
    passed = [f for f in rule.factors if f.kind is PASS]
    assert passed == [Factor(2), Factor(4)]
    for dims in (*rule.operands[:3], rule.results[0]):
        assert (dims[0], dims[heads]) == (0, 1)
    assert rule.operands[3][:2] == (None, 1)
    assert rule.operands[4:6] == ((0,), (0,))
    assert rule.results[1][:2] == (0, 1)
    assert rule.flops == 4 * (2 * 16 * 32) * 8 * 4
