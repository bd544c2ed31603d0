"""What schedules cost, against closed forms and a second clock."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_machine import made, wild

from jaxpar.errors import PlanError
from jaxpar.schedule import Kind, Schedule, make_schedule, simulate

FORWARD_S, BACKWARD_S, WEIGHT_S = 1.0, 2.25, 1.0
sizes = st.tuples(st.integers(1, 6), st.integers(0, 14), st.integers(1, 4))


def run(schedule: Schedule, lockstep: bool = False):
    return simulate(schedule, FORWARD_S, BACKWARD_S, WEIGHT_S, lockstep=lockstep)


@settings(max_examples=100, deadline=None)
@given(sizes, st.booleans())
def test_gpipe_and_1f1b_waste_p_minus_1_over_m_v(size, wave):
    p, more, v = size
    m = p + more  # any number that fills the ring; p need not divide it
    for family in ("1f1b", "gpipe"):
        schedule = make_schedule(family, p, m, v, wave=wave)
        found = run(schedule)
        whole = (m * v + p - 1) * (FORWARD_S + BACKWARD_S)
        assert found.total_s == pytest.approx(whole)
        assert found.overhead == pytest.approx((p - 1) / (m * v))
        assert found.bubble == pytest.approx((p - 1) / (m * v + p - 1))
        if wave:
            assert run(schedule, lockstep=True).total_s == pytest.approx(whole)


@given(st.integers(1, 6), st.integers(1, 6))
def test_one_chunk_needs_no_full_ring(p, m):
    for family in ("1f1b", "gpipe"):
        for wave in (True, False):
            found = run(make_schedule(family, p, m, wave=wave))
            assert found.overhead == pytest.approx((p - 1) / m)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_naive_keeps_one_device_busy(p, m, v):
    found = run(make_schedule("naive", p, m, v))
    assert found.total_s == pytest.approx(m * p * v * (FORWARD_S + BACKWARD_S))
    assert found.bubble == pytest.approx(1 - 1 / p)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 12))
def test_zero_bubble_h1_fills_the_wait_with_weight_gradients(p, more):
    m = p + more
    one = FORWARD_S + BACKWARD_S
    wait = FORWARD_S + (BACKWARD_S - WEIGHT_S) - WEIGHT_S
    found = run(make_schedule("zero-bubble", p, m, wave=False))
    assert found.total_s == pytest.approx(m * one + (p - 1) * wait)
    waves = run(make_schedule("zero-bubble", p, m), lockstep=True)
    no_weight = FORWARD_S + BACKWARD_S - WEIGHT_S
    assert waves.total_s == pytest.approx(m * one + (p - 1) * no_weight)


@pytest.mark.parametrize(
    ("family", "chunks", "wave", "alone", "together"),
    [
        ("gpipe", 1, False, 0.086, 0.086),
        ("1f1b", 1, False, 0.086, 0.513),
        ("1f1b", 1, True, 0.086, 0.086),
        ("interleaved", 2, True, 0.045, 0.045),
        ("interleaved", 4, True, 0.023, 0.023),
        ("zero-bubble", 1, False, 0.030, 0.655),
        ("zero-bubble", 1, True, 0.030, 0.059),
    ],
)
def test_one_program_wants_wave_tables(family, chunks, wave, alone, together):
    """Four devices, 32 microbatches, B = 2F: bubble with and without lockstep."""
    schedule = make_schedule(family, 4, 32, chunks, wave=wave)
    assert simulate(schedule, 1, 2, 1).bubble == pytest.approx(alone, abs=5e-4)
    found = simulate(schedule, 1, 2, 1, lockstep=True)
    assert found.bubble == pytest.approx(together, abs=5e-4)


times = st.floats(0, 4).map(lambda x: round(x, 2))


@st.composite
def costed(draw):
    """A schedule and times of every stage and boundary."""
    schedule = draw(made(most=5) | wild())

    def each(count):
        return draw(st.lists(times, min_size=count, max_size=count))

    forward, first, weight = (each(schedule.stages) for _ in range(3))
    backward = [b + w for b, w in zip(first, weight, strict=True)]
    return schedule, forward, backward, weight, each(schedule.stages - 1)


def seconds(costs, task):
    _, forward, backward, weight, _ = costs
    if task.kind is Kind.FORWARD:
        return forward[task.stage]
    if task.kind is Kind.WEIGHT:
        return weight[task.stage]
    split = costs[0].splits_backward
    return backward[task.stage] - (weight[task.stage] if split else 0)


def hop(costs, one, other):
    schedule, transfer = costs[0], costs[-1]
    if one.stage % schedule.devices == other.stage % schedule.devices:
        return 0
    return transfer[min(one.stage, other.stage)]


@settings(max_examples=100, deadline=None)
@given(costed())
def test_every_task_starts_as_early_as_it_can(costs):
    """Starts are pushed later until every rule holds; nothing more is pushed."""
    schedule = costs[0]
    rules = [
        (need, p.task, hop(costs, need, p.task))
        for p in schedule.places()
        for need in schedule.needs(p.task)
    ]
    for device in range(schedule.devices):
        mine = [p.task for p in schedule.places() if p.device == device]
        rules += [(a, b, 0) for a, b in pairwise(mine)]
    starts = {p.task: 0.0 for p in schedule.places()}
    moved = True
    while moved:
        moved = False
        for before, task, wait in rules:
            earliest = starts[before] + seconds(costs, before) + wait
            if earliest > starts[task] + 1e-12:
                starts[task], moved = earliest, True
    found = simulate(*costs)
    for timed in found.timeline:
        assert timed.start_s == pytest.approx(starts[timed.task], abs=1e-9)
        assert timed.end_s - timed.start_s == pytest.approx(
            seconds(costs, timed.task), abs=1e-9
        )
    assert found.total_s == pytest.approx(
        max(t + seconds(costs, task) for task, t in starts.items()), abs=1e-9
    )


@settings(max_examples=100, deadline=None)
@given(costed(), st.booleans())
def test_the_critical_path_is_the_total(costs, lockstep):
    found = simulate(*costs, lockstep=lockstep)
    path = found.critical_path
    total = sum(seconds(costs, task) for task in path)
    if not lockstep:
        total += sum(hop(costs, a, b) for a, b in pairwise(path))
        assert total == pytest.approx(found.total_s, abs=1e-9)
        return
    schedule = costs[0]
    for cells in schedule.ticks:
        tasks = [task for cell in cells for task in cell]
        sent = [(t, schedule.receiver(t)) for t in tasks]
        total += max((hop(costs, a, b) for a, b in sent if b), default=0)
    assert total == pytest.approx(found.total_s, abs=1e-9)
    per_tick = sum(
        max((seconds(costs, t) for c in cells for t in c if t.kind is kind), default=0)
        for cells in schedule.ticks
        for kind in Kind
    )
    assert sum(seconds(costs, task) for task in path) == pytest.approx(per_tick)


@settings(max_examples=100, deadline=None)
@given(costed(), st.booleans(), st.data())
def test_slower_parts_never_make_it_faster(costs, lockstep, data):
    schedule, forward, backward, weight, transfer = costs
    base = simulate(*costs, lockstep=lockstep)
    busiest = max(base.busy_s)
    assert busiest <= base.total_s + 1e-9
    assert math.fsum(base.busy_s) == pytest.approx(
        sum(seconds(costs, p.task) for p in schedule.places()), abs=1e-9
    )
    assert simulate(*costs).total_s <= simulate(*costs, lockstep=True).total_s + 1e-9
    stage = data.draw(st.integers(0, schedule.stages - 1))
    slower = [f + (s == stage) for s, f in enumerate(forward)]
    later = simulate(schedule, slower, backward, weight, transfer, lockstep=lockstep)
    assert later.total_s >= base.total_s - 1e-9
    longer = [t + 0.5 for t in transfer]
    later = simulate(schedule, forward, backward, weight, longer, lockstep=lockstep)
    assert later.total_s >= base.total_s - 1e-9


def test_transfers_delay_the_first_and_the_last():
    """One microbatch: there and back over every boundary."""
    found = simulate(make_schedule("1f1b", 4, 1), 1, 2, transfer_s=[0.1, 0.2, 0.3])
    assert found.total_s == pytest.approx(4 * 3 + 2 * 0.6)
    assert simulate(make_schedule("1f1b", 1, 5, 3), 1, 2, transfer_s=9).total_s == 45


def test_a_slow_stage_sets_the_pace():
    """The last of 3 stages takes twice as long; it is on the path all the time."""
    m, schedule = 10, make_schedule("1f1b", 3, 10)
    found = simulate(schedule, [1, 1, 2], [2, 2, 4])
    assert found.total_s == pytest.approx(2 * 3 + m * 6)
    assert sum(task.stage == 2 for task in found.critical_path) == 2 * m
    assert found.busy_s == (30, 30, 60)
    assert found.bubble == pytest.approx(1 - 120 / (3 * 66))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 2), "weight_s is not given"),
        (([1, 1], 2, 1), "forward_s has 2 numbers, for 3"),
        ((1, -2, 1), r"backward_s\[0\] is -2"),
        ((1, math.nan, 1), r"backward_s\[0\] is nan"),
        ((1, [2, 2, 1], [1, 1, 2]), r"backward_s - weight_s\[2\] is -1"),
        ((1, 2, 1, [0.1] * 3), "transfer_s has 3 numbers, for 2"),
    ],
)
def test_times_are_checked(arguments, message):
    with pytest.raises(PlanError, match=message):
        simulate(make_schedule("zero-bubble", 3, 4), *arguments)
