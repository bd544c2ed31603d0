"""Plan files with mistakes: every error names the key path."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from plan_examples import make_plan

from jaxpar.errors import PlanError
from jaxpar.plan import (
    Plan,
    load_plan,
)

KERNEL = 'params."blocks/0/up/kernel"'


def kernel(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """Edits the first kernel."""
    return lambda data: data["params"]["blocks/0/up/kernel"].update(changes)


def edit(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """Sets one value of the JSON."""

    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = to

    return change


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Takes one value out of the JSON."""

    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


ERRORS = {
    "no version": (drop("version"), "missing key 'version'"),
    "other version": (edit("version", to=2), "version: 2, but this jaxpar reads 1"),
    "version of another type": (edit("version", to="1"), 'version: "1", but'),
    "missing section": (drop("params"), "missing key 'params'"),
    "missing key": (drop("topology", "chip"), "topology: missing key 'chip'"),
    "missing key of a row": (
        drop("params", "blocks/0/up/kernel", "storage"),
        f"{KERNEL}: missing key 'storage'",
    ),
    "unknown section": (edit("parms", to={}), "unknown key 'parms'; keys are version"),
    "unknown key": (
        kernel(storge=[None, None]),
        f"{KERNEL}: unknown key 'storge'; keys are shape, dtype, storage, compute, "
        "optimizer, bytes_per_device, stage, reason\n  hint: did you mean 'storage'?",
    ),
    "unknown axis": (
        kernel(storage=["data", "tensr"]),
        f"{KERNEL}.storage[1]: unknown axis 'tensr'; axes are data, tensor\n"
        "  hint: did you mean 'tensor'?",
    ),
    "axis twice": (
        kernel(compute=["data", ["tensor", "data"]]),
        f"{KERNEL}.compute[1]: axis 'data' is used twice",
    ),
    "axis twice in a dim": (
        kernel(compute=[["data", "data"], None]),
        f"{KERNEL}.compute[0]: an axis is there twice: data, data",
    ),
    "spec too short": (
        kernel(optimizer=["data"]),
        f"{KERNEL}.optimizer: 1 dims, but shape [8, 16] has 2",
    ),
    "indivisible": (
        kernel(shape=[8, 18]),
        f"{KERNEL}.storage[1]: tensor (4) does not divide 18",
    ),
    "indivisible by two": (
        kernel(shape=[12, 16], compute=[["data", "tensor"], None]),
        f"{KERNEL}.compute[0]: data (2) x tensor (4) does not divide 12",
    ),
    "indivisible batch": (
        edit("batch", "tokens", "shape", to=[3, 7]),
        "batch.tokens.spec[0]: data (2) does not divide 3",
    ),
    "activation": (
        edit("activations", "blocks/1/residual", "specs", 1, to=["x", None, None]),
        "activations.\"blocks/1/residual\".specs[1][0]: unknown axis 'x'",
    ),
    "state": (
        edit("state", "drop/rngs/key", to=["x"]),
        "state.\"drop/rngs/key\"[0]: unknown axis 'x'",
    ),
    "spec of another type": (
        kernel(storage="data"),
        f'{KERNEL}.storage: expected a list with an entry per dim, found "data"',
    ),
    "entry of another type": (
        kernel(storage=[None, 3]),
        f"{KERNEL}.storage[1]: expected null, an axis name or a list of axis names, "
        "found 3",
    ),
    "axis of another type": (
        kernel(storage=[None, [None]]),
        f"{KERNEL}.storage[1]: expected null, an axis name or a list of axis names, "
        "found null",
    ),
    "object expected": (edit("params", to=[]), "params: expected an object, found []"),
    "list expected": (edit("notes", to="x"), 'notes: expected a list, found "x"'),
    "text expected": (
        edit("notes", 0, to=7),
        "notes[0]: expected text, found 7",
    ),
    "number expected": (
        edit("predicted", "step_s", to="fast"),
        'predicted.step_s: expected a number, found "fast"',
    ),
    "truth is no number": (
        edit("predicted", "step_s", to=True),
        "predicted.step_s: expected a number, found true",
    ),
    "null is no number": (
        edit("predicted", "step_s", to=None),
        "predicted.step_s: expected a number, found null",
    ),
    "whole number expected": (
        kernel(shape=[8, 16.5]),
        f"{KERNEL}.shape[1]: expected a whole number, found 16.5",
    ),
    "negative number": (
        edit("predicted", "memory", "residuals_bytes", to=-1),
        "predicted.memory.residuals_bytes: must not be negative, found -1",
    ),
    "negative stage": (kernel(stage=-1), f"{KERNEL}.stage: must not be negative"),
    "not finite": (
        edit("search", "seconds", to=float("nan")),
        "search.seconds: expected a finite number, found NaN",
    ),
    "beyond all numbers": (
        edit("search", "seconds", to=10**400),
        "search.seconds: expected a finite number, found 1000",
    ),
    "stage without a pipeline": (
        kernel(stage=1),
        f"{KERNEL}.stage: 1, but the mesh has no axis 'pipeline'",
    ),
    "empty axis": (edit("mesh", "data", to=0), "mesh.data: size must be at least 1"),
    "too many devices": (
        edit("mesh", "data", to=4),
        "mesh: 16 devices, but topology.devices is 8",
    ),
    "note on no axis": (
        edit("axes", "fsdp", to={"role": "x"}),
        "axes: unknown axis 'fsdp'",
    ),
    "time of no axis": (
        edit("predicted", "communication_s", "data+x", to=1),
        "predicted.communication_s: unknown axis 'x'",
    ),
    "collective over no axis": (
        edit("collectives", 2, "axes", to=["data", "x"]),
        "collectives[2].axes: unknown axis 'x'",
    ),
    "collective over one axis twice": (
        edit("collectives", 2, "axes", to=["data", "data"]),
        "collectives[2].axes: an axis is there twice: data, data",
    ),
    "kind of collective": (
        edit("collectives", 1, "kind", to="allgather"),
        "collectives[1].kind: unknown word 'allgather'; words are all-reduce, "
        "all-gather, reduce-scatter, all-to-all, collective-permute\n"
        "  hint: did you mean 'all-gather'?",
    ),
    "phase": (
        edit("collectives", 1, "phase", to="backwards"),
        "collectives[1].phase: unknown word 'backwards'",
    ),
    "wrong sum": (
        edit("predicted", "memory", "total_bytes", to=1),
        "predicted.memory.total_bytes: 1, but the values beside it make 1650",
    ),
    "wrong gap": (
        edit("search", "gap", to=None),
        "search.gap: null, but the values beside it make 0.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_names_the_key_path(name: str, tmp_path):
    change, message = ERRORS[name]
    data = make_plan().to_json()
    change(data)
    with pytest.raises(PlanError) as caught:
        Plan.from_json(data)
    assert str(caught.value).startswith(message)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError) as caught:
        load_plan(file)
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n  3}", "line 2, column 3: not JSON"),
        ("[" * 100_000, "not JSON"),
        ("", "line 1, column 1: not JSON"),
        ("[]", "expected an object, found []"),
        ("null", "expected an object, found null"),
        ('{"version": 1, "mesh": 1, "mesh": 2}', "key 'mesh' is there twice"),
    ],
)
def test_text_that_is_no_plan(text: str, message: str, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(PlanError) as caught:
        load_plan(file)
    assert str(caught.value).startswith(f"{file}: {message}")


def test_key_that_is_there_twice_inside(tmp_path):
    file = tmp_path / "plan.json"
    text = make_plan().dumps()
    file.write_text(text.replace('"blocks/1/up/kernel": {', '"blocks/0/up/kernel": {'))
    with pytest.raises(PlanError, match="params: key 'blocks/0/up/kernel' is there tw"):
        load_plan(file)


def test_file_that_cannot_be_read(tmp_path):
    with pytest.raises(PlanError, match=r"none\.json: cannot be read"):
        load_plan(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan(tmp_path / "binary")
