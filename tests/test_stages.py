"""Cuts of chains, against every cut there is."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import InfeasibleError, MeshError, ModelError
from jaxpar.schedule import make_schedule, simulate, stash
from jaxpar.stages import Block, Cut, LayerSlots, cut, shared


def layers(count: int, **sizes: float) -> list[Block]:
    each = {"forward_s": 0.1, "backward_s": 0.2, "transfer_s": 0.01, **sizes}
    return [Block(name=f"layers/{n}", **each) for n in range(count)]


# Whole numbers, few of them: many ties, and sums without rounding.
numbers = st.integers(0, 6).map(float)
blocks = st.builds(
    Block,
    name=st.just("block"),
    forward_s=numbers,
    backward_s=numbers,
    state_bytes=numbers,
    stash_bytes=st.integers(0, 3).map(float),
    input_bytes=st.integers(0, 3).map(float),
    transfer_s=numbers,
)


@st.composite
def problems(draw, most_chunks: int):
    """A chain, and what it is to be cut into; the limit is near where it binds."""
    chunks = draw(st.integers(1, most_chunks))
    devices = draw(st.integers(1, 4 // chunks if chunks > 1 else 4))
    stages = devices * chunks
    chain = draw(st.lists(blocks, min_size=stages, max_size=stages + 4))
    counts = draw(st.lists(st.integers(0, 4), min_size=stages, max_size=stages))
    whole = sum(b.state_bytes for b in chain) / devices
    limit = draw(st.just(math.inf) | st.integers(0, 40).map(lambda n: whole + n))
    return chain, devices, chunks, counts, limit


def every_cut(chain, devices, chunks, counts):
    """All cuts, each with what is minimised and its fullest device."""
    stages = devices * chunks
    for inner in itertools.combinations(range(1, len(chain)), stages - 1):
        bounds = (0, *inner, len(chain))
        slowest, transfers, squares = 0.0, 0.0, 0.0
        held = [0.0] * devices
        for s, (i, j) in enumerate(itertools.pairwise(bounds)):
            part = chain[i:j]
            transfer = part[-1].transfer_s if s + 1 < stages else 0.0
            time = max(sum(b.forward_s + b.backward_s for b in part), transfer)
            slowest, transfers = max(slowest, time), transfers + transfer
            squares += time**2
            held[s % devices] += sum(
                b.state_bytes + counts[s] * b.stash_bytes for b in part
            )
            held[s % devices] += counts[s] * part[0].input_bytes
        yield bounds, (slowest, transfers, squares), max(held)


def check_against_all(problem):
    chain, devices, chunks, counts, limit = problem
    known = {b: (cost, held) for b, cost, held in every_cut(*problem[:-1])}
    fitting = [cost for cost, held in known.values() if held <= limit]

    def made():
        return cut(chain, devices, chunks=chunks, memory_bytes=limit, in_flight=counts)

    if not fitting:
        with pytest.raises(InfeasibleError, match="no cut of") as caught:
            made()
        assert f"{len(chain)} blocks into {devices * chunks} stages" in str(
            caught.value
        )
        return
    found = made()
    cost, held = known[found.bounds]
    assert cost == min(fitting)
    assert found.optimal
    assert found.bottleneck_s == cost[0]
    assert max(found.memory_bytes) == held <= limit


@settings(max_examples=300, deadline=None)
@given(problems(most_chunks=1))
def test_one_stage_per_device_is_cut_as_well_as_can_be(problem):
    check_against_all(problem)


@settings(max_examples=200, deadline=None)
@given(problems(most_chunks=4))
def test_stages_that_share_a_device_are_cut_as_well_as_can_be(problem):
    check_against_all(problem)


@settings(max_examples=200, deadline=None)
@given(problems(most_chunks=4))
def test_a_search_that_gives_up_says_so(problem):
    """Only prices and moves of single blocks; what they claim has to be true."""
    chain, devices, chunks, counts, limit = problem
    fitting = [cost for _, cost, held in every_cut(*problem[:-1]) if held <= limit]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "PARTIAL_CUTS", 0)
        try:
            found = cut(
                chain, devices, chunks=chunks, memory_bytes=limit, in_flight=counts
            )
        except InfeasibleError as error:
            assert not fitting or "was found to fit" in str(error)
            return
    assert max(found.memory_bytes) <= limit
    assert found.bottleneck_s >= min(fitting)[0]
    assert not found.optimal or found.bottleneck_s == min(fitting)[0]


def test_a_chain_too_long_to_search_is_cut_within_the_limit():
    """96 layers, 4 stages on each of 8 devices, a limit between even and least."""
    chain = layers(96, state_bytes=10, stash_bytes=1, input_bytes=0.5)
    found = cut(chain, 8, chunks=4, memory_bytes=260)
    assert max(found.memory_bytes) <= 260 < max(cut(chain, 8, chunks=4).memory_bytes)
    assert not found.optimal


@settings(max_examples=100, deadline=None)
@given(problems(most_chunks=1))
def test_a_refusal_says_how_much_would_do(problem):
    chain, devices, chunks, counts, _ = problem
    least = min(held for _, _, held in every_cut(chain, devices, chunks, counts))
    if not least:
        return
    with pytest.raises(InfeasibleError, match=f"at least {math.ceil(least)} bytes"):
        cut(chain, devices, memory_bytes=least * 0.999, in_flight=counts)
    cut(chain, devices, memory_bytes=least, in_flight=counts)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 3), st.floats(0.01, 9))
def test_blocks_that_are_alike_differ_by_one(count, devices, chunks, seconds):
    count += devices * chunks
    found = cut(layers(count, forward_s=seconds / 3), devices, chunks=chunks)
    sizes = [len(stage) for stage in found.stages]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60, deadline=None)
@given(problems(most_chunks=1), st.integers(1, 40))
def test_total_time_is_the_least_for_its_slowest_stage(problem, microbatches):
    chain, devices, chunks, counts, _ = problem
    found = cut(chain, devices, in_flight=counts)
    others = [
        Cut(tuple(chain), devices, bounds, tuple(counts))
        for bounds, _, _ in every_cut(chain, devices, chunks, counts)
    ]
    same = [c for c in others if c.bottleneck_s == found.bottleneck_s]
    least = min(c.total_s(microbatches) for c in same)
    assert found.total_s(microbatches) == pytest.approx(least)


def test_a_cut_goes_straight_into_the_simulation():
    """The formula is exact for GPipe-like waves with stages that are alike."""
    found = cut(layers(8, transfer_s=0), 4)
    schedule = make_schedule("1f1b", 4, 12)
    run = simulate(schedule, found.forward_s, found.backward_s, None, found.transfer_s)
    assert run.total_s == pytest.approx(found.total_s(12))


def test_embedding_and_head_take_layers_from_their_stages():
    chain = [
        Block(name="embed", forward_s=0.05, backward_s=0.05),
        *layers(12),
        Block(name="head", forward_s=0.3, backward_s=0.6),
    ]
    found = cut(chain, 4)
    assert [len(stage) for stage in found.stages] == [4, 4, 4, 2]
    assert found.stages[-1][-1].name == "head"


def test_early_stages_hold_more_microbatches():
    """1F1B: stage s of 4 holds 4 - s, so a tight limit moves layers to the end."""
    chain = layers(16, state_bytes=1, stash_bytes=1)
    free, tight = cut(chain, 4), cut(chain, 4, memory_bytes=17)
    assert free.in_flight == (4, 3, 2, 1)
    assert [len(stage) for stage in free.stages] == [4] * 4
    assert free.memory_bytes == (20, 16, 12, 8)
    assert [len(stage) for stage in tight.stages] == [3, 4, 4, 5]
    assert max(tight.memory_bytes) <= 17
    gpipe = stash(make_schedule("gpipe", 4, 8)).stages
    with pytest.raises(InfeasibleError, match=r"at least 36 bytes .* 17 bytes .* 8, 8"):
        cut(chain, 4, memory_bytes=17, in_flight=gpipe)


def test_chunks_of_a_device_make_up_for_each_other():
    """Device 0 begins with a block that leaves little room for its second stage."""
    chain = layers(9, state_bytes=1)
    chain[0] = replace(chain[0], state_bytes=4)
    free = cut(chain, 2, chunks=2, in_flight=[0] * 4)
    assert free.memory_bytes == (7, 5)
    tight = cut(chain, 2, chunks=2, in_flight=[0] * 4, memory_bytes=6)
    assert tight.memory_bytes == (6, 6)
    assert tight.optimal
    assert tight.bottleneck_s == free.bottleneck_s
    with pytest.raises(InfeasibleError, match="at least 6 bytes"):
        cut(chain, 2, chunks=2, in_flight=[0] * 4, memory_bytes=5)


@pytest.mark.parametrize(
    ("count", "devices", "chunks"), [(3, 4, 1), (7, 4, 2), (3, 0, 1)]
)
def test_more_stages_than_blocks_are_refused_with_the_numbers(count, devices, chunks):
    numbers = rf"{count} \w+ cannot fill {devices * chunks} pipeline stages"
    with pytest.raises(MeshError, match=numbers):
        cut(layers(count), devices, chunks=chunks)
    with pytest.raises(MeshError, match=numbers):
        LayerSlots(count, devices, chunks)


def test_inputs_are_checked():
    with pytest.raises(MeshError, match="3 counts of microbatches for 4 stages"):
        cut(layers(8), 4, in_flight=[1, 1, 1])
    with pytest.raises(ModelError, match="'layers/0': forward_s is -1"):
        layers(1, forward_s=-1)
    with pytest.raises(ModelError, match="stash_bytes is nan"):
        layers(1, stash_bytes=math.nan)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 4))
def test_alike_layers_fill_equal_slots(extra, devices, chunks):
    stages = devices * chunks
    slots = LayerSlots(stages + extra - 1, devices, chunks)
    assert max(slots.sizes) - min(slots.sizes) <= 1
    assert slots.table.shape == (chunks, devices, slots.slots)
    # Along the stages every layer comes once, in order; a stage's layers come first.
    order = slots.table[slots.table >= 0]
    assert order.tolist() == list(range(slots.layers))
    there = slots.table.reshape(stages, -1) >= 0
    assert there.sum(axis=1).tolist() == list(slots.sizes)
    assert not (np.diff(there.astype(int), axis=1) > 0).any()
    assert slots.waste == pytest.approx(1 - there.mean())


def test_ten_layers_on_four_stages():
    slots = LayerSlots(10, 4)
    assert slots.sizes == (2, 3, 3, 2)
    assert slots.table.tolist() == [[[0, 1, -1], [2, 3, 4], [5, 6, 7], [8, 9, -1]]]
    assert slots.waste == pytest.approx(1 / 6)
