"""Resharding: the collectives listed really lead from one layout to the other."""

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.sharding import Collective, axes_of, reshard, shards, without

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
def test_bytes_of_every_step_lead_from_source_to_target(source, target):
    local = 1 / shards(source, SIZES)
    kept = set(axes_of(source)) & set(axes_of(target))
    sliced = set(axes_of(target)) - set(axes_of(source))
    local /= math.prod(SIZES[a] for a in sliced)
    for step in reshard(source, (), target, SIZES):
        if step.kind == "all-gather":
            local *= math.prod(SIZES[a] for a in step.axes)
            assert not kept & set(step.axes)
        assert math.isclose(step.bytes, local)
    assert math.isclose(local, 1 / shards(target, SIZES))


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
    assert kinds == ["all-gather", "collective-permute"]
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
