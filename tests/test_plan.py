"""Plans: JSON round trip, files for people, comparison, whose model it is."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from plan_examples import MEMORY, PREDICTED, SEARCH, make_plan, plans

from jaxpar.errors import PlanError
from jaxpar.plan import (
    Change,
    Plan,
    check_model,
    diff,
    load_plan,
    model_print,
)


@settings(max_examples=30, deadline=None)
@given(plans())
def test_json_round_trip(plan: Plan):
    text = plan.dumps()
    assert Plan.from_json(json.loads(text)) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(json.loads(text)).dumps() == text


def test_file_round_trip(tmp_path):
    plan = make_plan()
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert list(loaded.mesh.items()) == [("data", 2), ("tensor", 4)]
    assert loaded.params["blocks/0/up/kernel"].compute == ((), ("tensor",))


def test_file_is_for_people():
    lines = make_plan().dumps().splitlines()
    assert '  "mesh": {"data": 2, "tensor": 4},' in lines
    row = next(line for line in lines if '"blocks/1/up/kernel": {"shape"' in line)
    assert '"storage": ["data", "tensor"], "compute": [null, "tensor"]' in row
    assert '      "total_bytes": 1650' in lines


def test_a_thousand_leaves_take_a_thousand_lines():
    small, large = (make_plan(layers).dumps().count("\n") for layers in (1, 1001))
    assert large - small == 3 * 1000  # parameter, activation, collective


def test_hand_written_plan_needs_only_what_has_no_default():
    data = make_plan().to_json()
    for key in ("jaxpar_version", "axes", "state", "activations", "notes"):
        del data[key]
    del data["predicted"]["memory"]["total_bytes"], data["search"]["gap"]
    data["params"] = {
        "w": {
            "shape": [8, 16.0],
            "dtype": "float32",
            "storage": [["data", "tensor"], []],
            "compute": [None, "tensor"],
            "optimizer": [["data"], None],
            "bytes_per_device": 2e3,
        }
    }
    param = Plan.from_json(data).params["w"]
    assert param.shape == (8, 16) and param.bytes_per_device == 2000
    assert param.storage == (("data", "tensor"), ())
    assert param.compute == ((), ("tensor",)) and param.optimizer == (("data",), ())


def test_derived_numbers():
    assert MEMORY.total_bytes == 1650
    assert SEARCH.gap == pytest.approx(0.2)
    assert replace(SEARCH, lower_bound_s=None).gap is None
    assert replace(SEARCH, lower_bound_s=0.6).gap == 0.0
    assert make_plan().collectives[0].total_bytes == 128


def test_numbers_of_numpy_are_written_as_plain_ones():
    numpy = pytest.importorskip("numpy")
    plan = make_plan(
        mesh={"data": numpy.int64(2), "tensor": 4},
        predicted=replace(PREDICTED, step_s=numpy.float32(0.5)),
    )
    assert Plan.from_json(json.loads(plan.dumps())) == plan


def test_plans_need_no_jax():
    code = (
        "import sys, jaxpar.plan, jaxpar.report.table; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plan_that_contradicts_itself_cannot_be_made():
    with pytest.raises(PlanError, match=r"mesh: 64 devices, but topology\.dev"):
        make_plan(mesh={"data": 64, "tensor": 1})


def test_plan_that_could_not_be_read_is_not_written(tmp_path):
    plan = make_plan(predicted=replace(PREDICTED, step_s=float("inf")))
    with pytest.raises(PlanError, match=r"predicted\.step_s: expected a finite"):
        plan.save(tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


def test_model_print():
    shapes = {"a": (2, 3), "b": ()}
    one = model_print(shapes, {"count": ()})
    assert (one.parameters, one.leaves) == (7, 3)
    assert one == model_print(dict(reversed(shapes.items())), {"count": ()})
    assert one.digest != model_print(shapes | {"a": (3, 2)}, {"count": ()}).digest


def test_plan_of_another_model():
    plan = make_plan()
    shapes = {path: param.shape for path, param in plan.params.items()}
    state = dict.fromkeys(plan.state, ())
    check_model(plan, shapes, state)
    for params, found in (
        (
            shapes | {"embed/embedding": (8, 8)},
            'params."embed/embedding" is [8, 16] in the plan, [8, 8] in the model',
        ),
        (shapes | {"head": (8,)}, "params.head is not in the plan"),
        ({}, "is not in the model; and 1 more"),
    ):
        with pytest.raises(PlanError) as caught:
            check_model(plan, params, state)
        assert found in str(caught.value)
    with pytest.raises(PlanError, match=r"state\.mean is not in the plan"):
        check_model(plan, shapes, state | {"mean": ()})


def test_diff_of_equal_plans_is_empty():
    assert not diff(make_plan(), make_plan())
    assert not diff(make_plan(), make_plan(notes=(), search=replace(SEARCH, seconds=9)))


def test_diff():
    before = make_plan()
    params = dict(before.params)
    del params["embed/embedding"]
    params["blocks/1/up/kernel"] = replace(
        params["blocks/1/up/kernel"], storage=((), ()), reason="changed"
    )
    after = make_plan(
        mesh={"tensor": 4, "data": 2},
        params=params,
        predicted=replace(PREDICTED, step_s=0.75),
        collectives=before.collectives[:2],
    )
    found = diff(before, after)
    assert found.setup == (
        Change("mesh", {"data": 2, "tensor": 4}, {"tensor": 4, "data": 2}),
    )
    assert found.params[0] == Change(
        'params."blocks/1/up/kernel".storage', ["data", "tensor"], [None, None]
    )
    assert found.params[1].where == 'params."embed/embedding"'
    assert found.params[1].after is None and len(found.params) == 2
    assert found.collectives == (
        Change('collectives."all-gather over data"', 384, 256),
    )
    assert found.predicted == (Change("predicted.step_s", 0.5, 0.75),)
