"""Resharding: the collectives listed really lead from one layout to the other."""

import itertools
import math
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.sharding import (
    Collective,
    axes_of,
    fits,
    grain_of,
    moves,
    reshard,
    shards,
    without,
)

SIZES = {"a": 2, "b": 2, "c": 3}
SHAPE = (12, 12, 12)


@st.composite
def specs(draw, axes=tuple(SIZES)):
    held = [[] for _ in SHAPE]
    for axis in draw(st.permutations(axes)):
        dim = draw(st.sampled_from([None, 0, 1, 2]))
        if dim is not None:
            held[dim].append(axis)
    return tuple(tuple(sorted(dim)) for dim in held)


@given(specs(), specs())
@settings(max_examples=200, deadline=None)
def test_every_step_leads_on_to_the_target(source, target):
    held = source
    for move in moves(source, (), target, SIZES):
        before, after = shards(held, SIZES), shards(move.layout, SIZES)
        step, held = move.collective, move.layout
        if step is None:
            assert after > before
        elif step.kind == "all-gather":
            assert math.isclose(step.bytes, 1 / after)
            assert set(step.axes).isdisjoint(axes_of(target))
        else:
            assert math.isclose(step.bytes, 1 / before)
            assert before == after
    assert held == target


@given(specs(axes=("a", "c")), specs(axes=("a", "c")))
@settings(max_examples=200, deadline=None)
def test_the_way_back_is_the_same_way(source, target):
    """A cotangent takes the steps of its value in reverse."""

    def exchanges(here, there):
        steps = reshard(here, (), there, SIZES)
        return Counter((s.kind, s.bytes) for s in steps if s.kind != "all-gather")

    assert exchanges(source, target) == exchanges(target, source)


SMALL = (2, 6, 12)


@given(specs(), specs())
@settings(max_examples=300, deadline=None)
def test_no_dim_is_split_further_than_it_divides(source, target):
    """But for axes that swap their dims, of which one must come first."""
    if not (fits(source, SMALL, SIZES) and fits(target, SMALL, SIZES)):
        return
    steps = moves(source, (), target, SIZES, grain=grain_of(SMALL, 12))
    swaps = any(s.collective and s.collective.kind == "all-to-all" for s in steps)
    assert swaps or all(fits(step.layout, SMALL, SIZES) for step in steps)
    assert not steps or steps[-1].layout == target


def test_one_axis_goes_before_another_comes_where_both_do_not_divide():
    early = moves((("c",),), (), (("b",),), SIZES, grain=grain_of((12,), 12))
    late = moves((("a",),), (), (("b",),), SIZES, grain=grain_of((6,), 12))
    assert early[0].layout == (("c", "b"),)
    assert [s.layout for s in late] == [((),), (("b",),)]


@given(specs())
@settings(max_examples=50, deadline=None)
def test_staying_costs_nothing(spec):
    assert reshard(spec, (), spec, SIZES) == ()


@given(specs(axes=("a", "b")), specs(axes=("a", "b", "c")))
@settings(max_examples=200, deadline=None)
def test_partial_sums_are_reduced_exactly_once(source, target):
    steps = reshard(source, ("c",), target, SIZES)
    reducing = [s for s in steps if s.kind in ("all-reduce", "reduce-scatter")]
    assert [s.axes for s in reducing] == [("c",)]
    wanted = "reduce-scatter" if "c" in axes_of(target) else "all-reduce"
    assert reducing[0].kind == wanted


def test_without_reduce_scatter_a_partial_sum_is_reduced_whole():
    target = (("c",), (), ())
    steps = reshard(((), (), ()), ("c",), target, SIZES, reduce_scatter=False)
    assert steps == (Collective("all-reduce", ("c",), 1.0),)


def test_a_gathered_axis_in_front_turns_the_rest():
    source, target = (("a", "b"), (), ()), (("b",), (), ())
    kinds = [s.kind for s in reshard(source, (), target, SIZES)]
    assert kinds == ["collective-permute", "all-gather"]
    source = (("b", "a"), (), ())
    assert [s.kind for s in reshard(source, (), target, SIZES)] == ["all-gather"]


def test_moving_an_axis_between_dims_is_an_all_to_all():
    steps = reshard((("a",), (), ()), (), ((), ("a",), ()), SIZES)
    assert steps == (Collective("all-to-all", ("a",), 0.5),)


def _blocks(array, spec, place):
    """The part of an array that the device at `place` holds."""
    index = []
    for n, dim in zip(array.shape, spec, strict=True):
        part = 0
        for axis in dim:
            part = part * SIZES[axis] + place[axis]
        width = n // math.prod(SIZES[a] for a in dim)
        index.append(slice(part * width, (part + 1) * width))
    return array[tuple(index)]


@given(specs(), st.sampled_from(list(SIZES)))
@settings(max_examples=30, deadline=None)
def test_parts_over_an_axis_make_up_the_whole(spec, axis):
    array = np.arange(math.prod(SHAPE)).reshape(SHAPE)
    places = [
        dict(zip(SIZES, at, strict=True))
        for at in itertools.product(*map(range, SIZES.values()))
    ]
    cells = {int(x) for p in places for x in _blocks(array, spec, p).flat}
    assert cells == set(range(array.size))
    assert axis not in axes_of(without(spec, (axis,)))
