"""Factor rules: what they say, what is refused, and what users add."""

import itertools
import math
from collections.abc import Sequence
from functools import cache

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from rule_calls import Bound, bound, names
from rule_cases_computing import COMPUTING, POINTWISE
from rule_cases_moving import MOVING

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
CASES = [*POINTWISE, *COMPUTING, *MOVING]
NAMES = names(CASES)


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


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of as many elements."""
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 3]), max_size=6))

    def shape(factors: Sequence[int]) -> tuple[int, ...]:
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
    common = math.gcd(first, second)
    if common > 1:
        assert rule.factors[0] == Factor(common)


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
