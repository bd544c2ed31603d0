"""Arrays of a schedule, run by a machine that knows nothing else."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_machine import Machine, Toy, made, wild

from jaxpar.errors import PlanError
from jaxpar.schedule import Kind, Run, Schedule, arrays, make_schedule


def run(schedule: Schedule):
    toy = Toy(schedule.stages, schedule.microbatches)
    return toy, Machine(arrays(schedule), toy, schedule.devices).run()


@settings(max_examples=150, deadline=None)
@given(made() | wild())
def test_arrays_compute_the_loss_and_every_gradient(schedule):
    toy, found = run(schedule)
    for one, other in zip(found, toy.direct(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def most_at_once(schedule: Schedule, kind: Kind) -> int:
    """Received arrays that a device holds at once, counted tick by tick."""
    tick_of = {p.task: p.tick for p in schedule.places()}
    last = Kind.WEIGHT if schedule.splits_backward else Kind.BACKWARD
    most = 0
    for device in range(schedule.devices):
        for tick in range(len(schedule.ticks)):
            held = 0
            for task, sent in tick_of.items():
                to = schedule.receiver(task)
                if to and to.kind is kind and to.stage % schedule.devices == device:
                    end = next(
                        t
                        for task, t in tick_of.items()
                        if task.kind is last
                        and (task.microbatch, task.stage) == (to.microbatch, to.stage)
                    )
                    held += sent < tick <= end
            most = max(most, held)
    return most


@settings(max_examples=25, deadline=None)
@given(made(most=4) | wild())
def test_buffers_have_no_row_too_many(schedule):
    lowered = arrays(schedule)
    assert lowered.input_rows == most_at_once(schedule, Kind.FORWARD)
    assert lowered.gradient_rows == most_at_once(schedule, Kind.BACKWARD)


@pytest.mark.parametrize("devices", [1, 2, 4, 7])
def test_rows_of_a_wave_are_those_of_its_shape(devices):
    def rows(family, chunks=1):
        few, many = (
            arrays(make_schedule(family, devices, n * devices, chunks))
            for n in (chunks + 2, 20)
        )
        # Not one row more for 20 rounds of microbatches than for a few.
        assert few.input_rows == many.input_rows
        assert few.gradient_rows == many.gradient_rows
        return many.input_rows, many.gradient_rows

    # Device d holds 2(p-1-d)+1 inputs, device 0 none: its stage reads the batch.
    one_way = 2 * (devices - 2) + 1 if devices > 1 else 0
    assert rows("1f1b") == (one_way, min(1, devices - 1))
    for chunks in (2, 3):
        second = devices * (chunks + 1) - 3 if devices > 1 else 0
        first = devices * (chunks - 1)
        assert rows("interleaved", chunks)[0] == max(second, first)
    # Until the weight gradients: 2p-1-d inputs, and d+1 gradients but for the last.
    assert rows("zero-bubble") == (max(0, 2 * devices - 2), devices - 1)


def test_gpipe_keeps_every_microbatch():
    lowered = arrays(make_schedule("gpipe", 4, 23))
    assert (lowered.input_rows, lowered.gradient_rows) == (23, 1)


def test_runs_of_a_wave_are_three():
    both = (Kind.FORWARD, Kind.BACKWARD)
    assert arrays(make_schedule("1f1b", 4, 9)).runs == (
        Run(0, 3, (Kind.FORWARD,)),
        Run(3, 12, both),
        Run(12, 15, (Kind.BACKWARD,)),
    )
    first_backward = 4 * 2 - 1
    assert arrays(make_schedule("interleaved", 4, 12, 2)).runs == (
        Run(0, first_backward, (Kind.FORWARD,)),
        Run(first_backward, 2 * 12 + 3, both),
        Run(2 * 12 + 3, first_backward + 2 * 12 + 3, (Kind.BACKWARD,)),
    )


@settings(max_examples=50, deadline=None)
@given(made() | wild())
def test_runs_cover_all_ticks_and_are_as_long_as_can_be(schedule):
    lowered = arrays(schedule)
    ends = [0]
    for start, stop, kinds in lowered.runs:
        assert start == ends[-1] < stop
        ends.append(stop)
        for cells in schedule.ticks[start:stop]:
            used = {task.kind for cell in cells for task in cell}
            assert kinds == tuple(kind for kind in Kind if kind in used)
    assert ends[-1] == len(schedule.ticks)
    kinds = [r.kinds for r in lowered.runs]
    assert all(a != b for a, b in pairwise(kinds))


@settings(max_examples=50, deadline=None)
@given(made(), st.sampled_from(["forward", "backward", "weight"]))
def test_every_device_knows_who_is_in_the_first_and_the_last_stage(schedule, name):
    slot = getattr(arrays(schedule), name)
    stage = slot.chunk * schedule.devices + np.arange(schedule.devices)
    for ends, where in ((slot.first, 0), (slot.last, schedule.stages - 1)):
        there = np.where((stage == where) & (slot.microbatch >= 0), slot.microbatch, -1)
        np.testing.assert_array_equal(ends, there.max(axis=1))


def test_a_table_that_makes_no_sense_has_no_arrays():
    schedule = make_schedule("1f1b", 2, 2)
    with pytest.raises(PlanError, match="0B1"):
        arrays(Schedule("short", 2, 1, 2, schedule.ticks[:-1]))
