"""Schedules: made by families, checked, written down and read."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_machine import made, wild

from jaxpar.errors import JaxparError, PlanError
from jaxpar.schedule import (
    Kind,
    Schedule,
    Task,
    check,
    from_csv,
    live_inputs,
    make_schedule,
    stash,
    to_csv,
)

WAVE = """\
schedule,1f1b wave
devices,3
chunks,1
microbatches,4
tick,0,1,2
0,0F0,,
1,0F1,1F0,
2,0F2,1F1,2F0 2B0
3,0F3,1F2 1B0,2F1 2B1
4,0B0,1F3 1B1,2F2 2B2
5,0B1,1B2,2F3 2B3
6,0B2,1B3,
7,0B3,,
"""
CLASSIC = """\
schedule,1f1b
devices,3
chunks,1
microbatches,4
tick,0,1,2
0,0F0,,
1,0F1,1F0,
2,0F2,1F1,2F0
3,,,2B0
4,,1B0,2F1
5,0B0,1F2,2B1
6,0F3,1B1,2F2
7,0B1,1F3,2B2
8,,1B2,2F3
9,0B2,,2B3
10,,1B3,
11,0B3,,
"""
ZERO_BUBBLE = """\
schedule,zero-bubble
devices,2
chunks,1
microbatches,3
tick,0,1
0,0F0,
1,0F1,1F0
2,,1B0
3,0B0,1F1
4,0W0,1B1
5,0F2,1W0
6,0B1,1F2
7,0W1,1B2
8,0B2,1W1
9,0W2,1W2
"""
INTERLEAVED = """\
schedule,interleaved wave
devices,2
chunks,2
microbatches,3
tick,0,1
0,0F0,
1,0F1,1F0
2,0F2,1F1
3,2F0,1F2
4,2F1,3F0 3B0
5,2F2 2B0,3F1 3B1
6,2B1,3F2 3B2
7,2B2,1B0
8,0B0,1B1
9,0B1,1B2
10,0B2,
"""


@pytest.mark.parametrize(
    ("text", "arguments", "wave"),
    [
        (WAVE, ("1f1b", 3, 4), True),
        (CLASSIC, ("1f1b", 3, 4), False),
        (ZERO_BUBBLE, ("zero-bubble", 2, 3), False),
        (INTERLEAVED, ("interleaved", 2, 3, 2), True),
    ],
)
def test_golden_tables(text, arguments, wave):
    schedule = make_schedule(*arguments, wave=wave)
    assert to_csv(schedule) == text
    assert from_csv(text) == schedule


@settings(max_examples=200, deadline=None)
@given(made(most=14))
def test_families_make_what_can_be_run(schedule):
    check(schedule)
    kinds = 3 if schedule.splits_backward else 2
    tasks = [place.task for place in schedule.places()]
    assert len(set(tasks)) == len(tasks)
    assert len(tasks) == kinds * schedule.stages * schedule.microbatches


@settings(max_examples=100, deadline=None)
@given(made() | wild(), st.text(min_size=0, max_size=8))
def test_text_and_back(schedule, name):
    if name.isprintable() and name == name.strip():
        schedule = replace(schedule, name=name)
    assert from_csv(to_csv(schedule)) == schedule


def test_text_by_hand_may_be_loose():
    loose = (
        WAVE.replace("\n2,", "\n,").replace(",,\n", "\n").replace("2F0 2", " 2F0  2")
    )
    assert from_csv("\n" + loose.replace("\n", "\r\n\r\n")) == from_csv(WAVE)


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("schedule,", "name,", ["row 1, column 1", "'name'", "'schedule'"]),
        ("devices,3", "devices,-3", ["row 2, column 2", "'-3'"]),
        ("devices,3", "devices,3,4", ["row 2, column 2", "'3,4'"]),
        ("chunks,1", "chunks,one", ["row 3, column 2", "'one'"]),
        ("chunks,1", "chunks,0", ["chunks is 0"]),
        ("microbatches,4", "microbatches,", ["row 4, column 2"]),
        ("tick,0,1,2\n", "", ["row 5, column 1", "'tick'"]),
        ("tick,0,1,2", "tick,0,1", ["row 5", "3 devices"]),
        ("\n4,0B0", "\n5,0B0", ["row 10, column 1", "'5'", "4"]),
        ("1F2 1B0", "1F2 1X0", ["row 9, column 3", "device 1", "'1X0'"]),
        ("1F2 1B0", "1F2-1B0", ["row 9, column 3", "'1F2-1B0'"]),
        ("1F2 1B0", "1F2 2B0", ["row 9, column 3", "2B0", "device 2"]),
        ("1F2 1B0", "1F4 1B0", ["row 9, column 3", "1F4", "microbatch 4", "4"]),
        ("1F2 1B0", "4F2 1B0", ["row 9, column 3", "4F2", "stage 4", "3"]),
        ("0,0F0,,", "0,0F0,,,1F0", ["row 6, column 5", "3 devices"]),
        ("0,0F0,,", '0,"0F0,,', ["row", "CSV"]),
    ],
)
def test_errors_of_text_name_row_and_column(old, new, where):
    with pytest.raises(PlanError) as caught:
        from_csv(WAVE.replace(old, new))
    assert all(part in str(caught.value) for part in where), str(caught.value)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, len(WAVE)), st.integers(0, len(WAVE)), st.text("0,FB\n\"\r5t\0 -'")
)
def test_broken_text_is_read_or_refused(start, stop, inserted):
    try:
        from_csv(WAVE[:start] + inserted + WAVE[max(start, stop) :])
    except JaxparError:
        pass


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        # What is there, and how often.
        ("7,0B3,,\n", "", ["0B3", "device 0", "7 ticks"]),
        ("6,0B2,1B3,", "6,0B2 0W0,1B3,", ["1W0", "device 1"]),
        ("3,0F3,1F2 1B0", "3,0F3,1F1 1B0", ["tick 3, device 1", "1F1", "tick 2"]),
        # One of each kind in a cell, in order.
        ("2F0 2B0", "2B0 2F0", ["tick 2, device 2", "2F0 after 2B0"]),
        ("0,0F0,,\n1,0F1,", "0,0F0 0F1,,\n1,,", ["tick 0, device 0", "0F1 after 0F0"]),
        # The order between stages, and within one.
        ("0,0F0,,\n1,0F1,1F0,", "0,0F0,1F0,\n1,0F1,,", ["tick 0, device 1", "1F0"]),
        ("1,0F1,1F0,\n2,0F2,1F1,", "1,0F1,1F1,\n2,0F2,1F0,", ["tick 1, device 1"]),
        ("3,0F3,1F2 1B0,2F1 2B1", "3,0F3,1F2 1B1,2F1 2B0", ["tick 2"]),
        ("6,0B2,1B3,\n7,0B3,,", "6,0B3,1B3,\n7,0B2,,", ["tick 6, device 0", "0B3"]),
        ("5,0B1,1B2,2F3 2B3\n6,0B2,1B3,", "5,0B1,1B3,2F3 2B3\n6,0B2,1B2,", ["1B3"]),
    ],
)
def test_errors_of_order_name_tick_device_and_task(old, new, where):
    text = WAVE.replace(old, new)
    assert text != WAVE
    with pytest.raises(PlanError) as caught:
        check(from_csv(text))
    assert all(part in str(caught.value) for part in where), str(caught.value)


def swap(schedule: Schedule, one: Task, other: Task) -> Schedule:
    """The schedule with two tasks in each other's place."""
    changed = {one: other, other: one}
    ticks = tuple(
        tuple(tuple(changed.get(t, t) for t in cell) for cell in cells)
        for cells in schedule.ticks
    )
    return replace(schedule, ticks=ticks)


@settings(max_examples=100, deadline=None)
@given(made() | wild(), st.data())
def test_no_task_may_trade_places_with_one_it_waits_for(schedule, data):
    places = list(schedule.places())
    waiting = [
        (p.task, need)
        for p in places
        for need in schedule.needs(p.task)
        if need.stage % schedule.devices == p.device
    ]
    with pytest.raises(PlanError, match=r"tick \d+, device \d+: "):
        check(swap(schedule, *data.draw(st.sampled_from(waiting))))


def test_a_stash_may_be_limited():
    schedule = make_schedule("1f1b", 3, 6, wave=False)
    check(schedule, 3)
    check(schedule, [3, 2, 1])
    with pytest.raises(
        PlanError, match=r"tick 2, device 0: task 0F2.* 3; it may hold 2"
    ):
        check(schedule, 2)
    with pytest.raises(
        PlanError, match=r"tick 2, device 1: task 1F1.* 2; it may hold 1"
    ):
        check(schedule, [3, 1, 1])
    with pytest.raises(PlanError, match="2 stash limits for 3 devices"):
        check(schedule, [3, 2])


@pytest.mark.parametrize("devices", [1, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
def test_what_is_stored(devices, chunks):
    """Closed forms per device, in stage inputs, the batch's included."""

    def held(family, chunks=1, wave=True):
        few, many = (
            stash(make_schedule(family, devices, n * devices, chunks, wave=wave))
            for n in (chunks + 3, 12)
        )
        assert few == many or family in ("gpipe", "circular")
        return list(many.devices)

    p, v = devices, chunks
    ahead = [p - 1 - d for d in range(p)]
    assert held("naive") == [1] * p
    assert held("gpipe") == [12 * p] * p
    assert held("circular", v) == [12 * p * v] * p
    assert held("1f1b", wave=False) == [a + 1 for a in ahead]
    assert held("1f1b") == [2 * a + 1 for a in ahead]
    assert held("interleaved", v, False) == [2 * a + (v - 1) * p + 1 for a in ahead]
    assert held("interleaved", v) == [2 * a + (v - 1) * p + 1 for a in ahead]
    assert held("zero-bubble", wave=False) == [p] * p
    assert held("zero-bubble") == [a + p for a in ahead]


@settings(max_examples=50, deadline=None)
@given(made() | wild())
def test_the_stash_counts_inputs_between_forward_and_last_use(schedule):
    order = [p.task for p in schedule.places()]
    last = Kind.WEIGHT if schedule.splits_backward else Kind.BACKWARD
    for n, (place, live) in enumerate(live_inputs(schedule)):
        opened = {
            (t.microbatch, t.stage) for t in order[: n + 1] if t.kind is Kind.FORWARD
        }
        closed = {(t.microbatch, t.stage) for t in order[:n] if t.kind is last}
        for chunk, count in enumerate(live):
            stage = chunk * schedule.devices + place.device
            assert count == sum(s == stage for _, s in opened - closed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "unknown schedule '2f2b'"),
        (("1f1b", 0, 2), "devices is 0"),
        (("gpipe", 2, 0), "microbatches is 0"),
        (("naive", 2, 2, -1), "chunks is -1"),
        (("zero-bubble", 2, 2, 2), "one chunk per device, not 2"),
    ],
)
def test_families_refuse_with_the_numbers(arguments, message):
    with pytest.raises(PlanError, match=message):
        make_schedule(*arguments, wave=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "two\nlines"}, "one plain line"),
        ({"devices": 2}, "tick 0: 3 cells for 2 devices"),
        ({"microbatches": 3}, "tick 3, device 0: task 0F3 is of microbatch 3"),
        ({"ticks": (((Task(Kind.FORWARD, 0, 1),), (), ()),)}, "belongs to device 1"),
        ({"ticks": (((Task(Kind.FORWARD, 0, -3),), (), ()),)}, "stage -3; there are 3"),
    ],
)
def test_a_schedule_is_well_formed(change, message):
    with pytest.raises(PlanError, match=message):
        replace(from_csv(WAVE), **change)
