"""The timeline: sums without overlap, bounds, closed forms, real plans."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import jaxpar
from jaxpar.errors import PlanError
from jaxpar.machine import on_topology
from jaxpar.plan import TaskPlan, load_plan
from jaxpar.report.timeline import print_timeline, save_figure
from jaxpar.timeline import pace, play, run_of, timeline_of
from jaxpar.timeline.tasks import streams
from jaxpar.topology import get_topology
from jaxpar.zoo import zoo

STREAMS = ("ici data", "ici tensor", "network")


def computation(
    seconds: float, phase: str = "forward", block: int = 0, rounds: int = 1
):
    return TaskPlan(name="op", phase=phase, block=block, rounds=rounds, seconds=seconds)


def collective(
    seconds: float,
    when: str = "here",
    slack: int = 1,
    *,
    stream: str = "ici data",
    phase: str = "forward",
    block: int = 0,
    rounds: int = 1,
):
    return TaskPlan(
        name="x",
        phase=phase,
        block=block,
        rounds=rounds,
        seconds=seconds,
        kind="all-gather",
        axes=("data",),
        streams=(stream,),
        when=when,
        slack=slack,
    )


@st.composite
def steps(draw):
    """Random tasks: blocks forward, the same blocks backward, an update."""
    seconds = st.integers(0, 9).map(float)
    rounds = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    found = []
    orders = [("forward", list(enumerate(rounds))), ("backward", [])]
    orders[1] = ("backward", list(enumerate(rounds))[::-1])
    for phase, blocks in [*orders, ("update", [(len(rounds), 1)])]:
        for block, times in blocks:
            place = {"phase": phase, "block": block, "rounds": times}
            for _ in range(draw(st.integers(1, 4))):
                if draw(st.booleans()):
                    found.append(computation(draw(seconds), **place))
                    continue
                when = draw(st.sampled_from(("here", "before", "after")))
                used = draw(st.lists(st.sampled_from(STREAMS), min_size=1, unique=True))
                task = collective(draw(seconds), when, draw(st.integers(0, 2)), **place)
                found.append(replace(task, streams=tuple(used), axes=("a", "b")[:1]))
    return found


def total(tasks) -> float:
    return sum(task.seconds * task.rounds for task in tasks)


@given(steps())
def test_without_overlap_the_step_is_the_sum(tasks):
    found = play(tasks, overlap=False)
    assert found.step_s == total(tasks)
    assert found.exposed_s == found.communication_s


@given(steps())
def test_bounds(tasks):
    found = play(tasks)
    busy = {stream: 0.0 for stream in STREAMS}
    for task in tasks:
        for stream in task.streams:
            busy[stream] += task.seconds * task.rounds
    exposed, sent = sum(found.exposed_s.values()), sum(found.communication_s.values())
    assert exposed <= sent
    assert found.step_s == found.compute_s + exposed
    assert max(found.compute_s, *busy.values()) <= found.step_s <= total(tasks)


@given(steps(), st.data())
def test_a_faster_task_never_makes_a_longer_step(tasks, data):
    i = data.draw(st.integers(0, len(tasks) - 1))
    faster = replace(tasks[i], seconds=tasks[i].seconds / 2)
    assert play([*tasks[:i], faster, *tasks[i + 1 :]]).step_s <= play(tasks).step_s


@given(steps())
def test_a_stream_carries_one_task_at_a_time(tasks):
    ends: dict[str, float] = {}
    for span in play(tasks).spans:
        assert span.start_s >= ends.get(span.stream, 0.0)
        ends[span.stream] = span.end_s


@pytest.mark.parametrize("gather", [1.0, 2.0, 5.0])
def test_gathers_are_fetched_while_the_block_before_computes(gather):
    """The first is exposed, later ones hide: g + (n - 1) max(g, c) + c."""
    n, c = 4, 2.0
    tasks = [collective(gather, "before", rounds=n), computation(c, rounds=n)]
    assert play(tasks).step_s == gather + (n - 1) * max(gather, c) + c


@pytest.mark.parametrize("gather", [1.0, 2.0, 5.0])
def test_in_a_loop_gathers_wait_for_their_round(gather):
    n, c = 4, 2.0
    tasks = [collective(gather, "before", 0, rounds=n), computation(c, rounds=n)]
    assert play(tasks).step_s == n * (gather + c)


@pytest.mark.parametrize("reduce", [1.0, 2.0, 5.0])
def test_gradients_are_added_while_earlier_layers_compute(reduce):
    """Only the last is exposed, or all but one computation: b + ... + r."""
    n, b = 4, 2.0
    place = {"phase": "backward", "rounds": n}
    tasks = [
        computation(b, **place),
        collective(reduce, "after", **place),
        computation(1.0, "update", 1),
    ]
    assert play(tasks).step_s == b + (n - 1) * max(b, reduce) + reduce + 1.0


def test_activations_wait_and_other_links_do_not():
    other = collective(3.0, "before", stream="ici tensor")
    tasks = [computation(2.0), collective(3.0), other, computation(1.0)]
    assert play(tasks).step_s == 2.0 + 3.0 + 1.0
    same = [*tasks[:2], replace(other, streams=("ici data",)), tasks[3]]
    assert play(same).step_s == 3.0 + 3.0 + 1.0  # one after the other, from 0 on


def test_links_of_a_machine():
    mesh = jaxpar.mesh.logical_mesh
    torus = mesh(get_topology("tpu-v5e-4x4"), {"data": 4, "tensor": 4})
    assert streams(torus, ["data"]) == ("ici data",)
    assert streams(torus, ["data", "tensor"]) == ("ici data", "ici tensor")
    nodes = mesh(get_topology("dgx-h100-16"), {"data": 2, "tensor": 8})
    fast, slow = streams(nodes, ["tensor"]), streams(nodes, ["data"])
    assert len(fast) == len(slow) == 1
    assert set(fast).isdisjoint(slow)


# ---- plans


@pytest.fixture(scope="module")
def plans():
    found = {}
    for scan in (False, True):
        for axes in ({"data": 8}, {"fsdp": 8}, {"data": 2, "tensor": 4}):
            mesh = on_topology(get_topology("tpu-v5e-2x4"), axes)
            given = zoo("gpt-tiny", layers=3, scan=scan)
            found[scan, *axes] = jaxpar.make_plan(**given, mesh=mesh)
    return found


def test_tasks_of_a_plan_add_up_to_its_figures(plans):
    for plan in plans.values():
        predicted, alone = plan.predicted, timeline_of(plan, overlap=False)
        assert math.isclose(alone.step_s, predicted.step_s)
        assert alone.communication_s.keys() == predicted.communication_s.keys()
        for axes, seconds in alone.communication_s.items():
            assert math.isclose(seconds, predicted.communication_s[axes])
        both = predicted.overlapped
        assert both is not None
        assert math.isclose(timeline_of(plan).step_s, both.step_s)
        assert predicted.compute_s < both.step_s <= predicted.step_s * (1 + 1e-9)


def test_what_may_overlap_is_up_to_the_compiler():
    """On GPUs gradients hide behind the backward pass; on TPUs only gathers do."""
    given = zoo("gpt-tiny", layers=3, batch=512, d_model=1024, d_ff=4096)

    def played(name, sizes, **options):
        mesh = on_topology(get_topology(name), sizes)
        return timeline_of(jaxpar.make_plan(**given, mesh=mesh, **options))

    gpu, tpu = (played(n, {"data": 8}) for n in ("dgx-h100-8", "tpu-v5e-2x4"))
    assert gpu.exposed_s["data"] < 0.7 * gpu.communication_s["data"]
    assert tpu.exposed_s["data"] == pytest.approx(tpu.communication_s["data"])
    fsdp = played("tpu-v5e-2x4", {"fsdp": 8}, zero=3)
    assert fsdp.exposed_s["fsdp"] < 0.9 * fsdp.communication_s["fsdp"]
    for name in ("dgx-h100-8", "tpu-v5e-2x4"):
        tensor = played(name, {"data": 2, "tensor": 4})
        waits = tensor.exposed_s["tensor"]
        assert waits > 0.9 * tensor.communication_s["tensor"]


def test_faster_links_never_make_a_longer_step(plans):
    for plan in plans.values():
        last = timeline_of(plan).step_s
        for speed in (2.0, 8.0, 1e6):
            tasks = [
                replace(t, seconds=t.seconds / speed) if t.axes else t
                for t in plan.tasks
            ]
            step = play(tasks).step_s
            assert step <= last
            last = step
        predicted = plan.predicted
        assert math.isclose(
            last, predicted.compute_s + predicted.optimizer_s, rel_tol=1e-3
        )


def test_a_plan_file_keeps_its_tasks(plans, tmp_path):
    plan = plans[True, "fsdp"]
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").tasks == plan.tasks
    data = plan.to_json()
    data["tasks"][0]["when"] = "befor"
    with pytest.raises(PlanError, match=r"tasks\[0\].when: unknown word 'befor'"):
        jaxpar.Plan.from_json(data)
    with pytest.raises(PlanError, match="lists none"):
        timeline_of(replace(plan, tasks=()))


def test_the_cost_of_a_run(plans):
    plan = plans[True, "data"]
    timeline = timeline_of(plan)
    rates = pace(plan, timeline)
    tokens = 16 * 129  # of the batch, as the plan counts them
    assert math.isclose(rates.tokens_per_s or 0.0, tokens / timeline.step_s)
    run = run_of(plan, rates, tokens * 1000.0, price=2.0)
    assert math.isclose(run.steps, 1000.0)
    assert math.isclose(run.hours, 1000 * timeline.step_s / 3600)
    assert math.isclose(run.price or 0.0, run.hours * 8 * 2.0)
    with pytest.raises(PlanError, match="a run of -1 tokens"):
        run_of(plan, rates, -1.0)


def test_remat_computes_more_than_the_model():
    mesh = on_topology(get_topology("tpu-v5e-2x4"), {"data": 8})
    given = zoo("gpt-tiny", layers=2, scan=True, remat="full")
    found = jaxpar.make_plan(**given, mesh=mesh).predicted.overlapped
    assert found is not None
    assert found.mfu is not None
    assert found.hfu is not None
    assert found.mfu < found.hfu <= found.mfu * 4 / 3


def test_pictures(plans, tmp_path):
    plan = plans[True, "fsdp"]
    console = Console(record=True, width=80)
    both = timeline_of(plan), timeline_of(plan, overlap=False)
    rates = pace(plan, both[0])
    print_timeline(plan, both, rates, run_of(plan, rates, 1e9), console)
    text = console.export_text()
    assert "ici fsdp" in text
    assert "1.00 B tokens" in text
    save_figure(plan, both[0], tmp_path / "step.svg")
    assert (tmp_path / "step.svg").stat().st_size > 1000


def test_the_command(plans, tmp_path, capsys):
    plan = plans[True, "data"]
    path = tmp_path / "plan.json"
    plan.save(path)
    from jaxpar.cli import app  # noqa: PLC0415

    command = ["simulate", str(path), "--tokens", "1e9", "--price", "1.2", "--json"]
    app(command, standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert plan.predicted.overlapped is not None
    assert math.isclose(found["step_s"], plan.predicted.overlapped.step_s)
    assert math.isclose(found["run"]["price"], found["run"]["device_hours"] * 1.2)
    app([*command[:2], "--no-overlap"], standalone_mode=False)
    assert "one step" in capsys.readouterr().out
    with pytest.raises(PlanError, match="--price needs --tokens"):
        app([*command[:2], "--price", "1"], standalone_mode=False)
