"""Plans: JSON round trip, errors with their key path, comparison, tables."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxpar.errors import PlanError
from jaxpar.plan import (
    ActivationPlan,
    AxisNote,
    BatchPlan,
    Change,
    CollectivePlan,
    Machine,
    MemoryPrediction,
    MeshTried,
    ParamPlan,
    Plan,
    Prediction,
    Replication,
    SearchReport,
    check_model,
    diff,
    load_plan,
    model_print,
)
from jaxpar.plan_parts import COLLECTIVES, PHASES
from jaxpar.report.group import groups
from jaxpar.report.table import print_diff, print_plan, print_table
from jaxpar.report.units import bytes_text, count_text, seconds_text, spec_text

MEMORY = MemoryPrediction(
    parameters_bytes=400,
    gradients_bytes=300,
    optimizer_bytes=800,
    model_state_bytes=4,
    residuals_bytes=0,
    transients_bytes=96,
    batch_bytes=50,
    limit_bytes=2000,
)
PREDICTED = Prediction(
    step_s=0.5,
    compute_s=0.4,
    communication_s={"data": 0.1, "data+tensor": 0.02},
    exposed_communication_s=0.05,
    optimizer_s=0.05,
    mfu=0.4,
    memory=MEMORY,
)
SEARCH = SearchReport(
    method="elimination",
    status="optimal",
    objective_s=0.5,
    lower_bound_s=0.4,
    candidates=1234,
    seconds=0.25,
    meshes_tried=(
        MeshTried(mesh={"data": 8}, refused="needs 4 KiB of 2 KiB"),
        MeshTried(mesh={"data": 2, "tensor": 4}, objective_s=0.5),
    ),
)


def make_plan(layers: int = 3, **changes: Any) -> Plan:
    """A plan of a model with some equal layers and an embedding."""
    kernel = ParamPlan(
        shape=(8, 16),
        dtype="float32",
        storage=(("data",), ("tensor",)),
        compute=((), ("tensor",)),
        optimizer=(("data",), ("tensor",)),
        bytes_per_device=64,
        reason="gathered for use",
    )
    params = {f"blocks/{i}/up/kernel": kernel for i in range(layers)}
    whole: Any = ((), ())
    params["embed/embedding"] = replace(
        kernel, storage=whole, compute=whole, optimizer=whole, reason="pinned"
    )
    shapes = {path: param.shape for path, param in params.items()}
    parts: dict[str, Any] = {
        "topology": Machine(name="cpu-8", devices=8, chip="CPU", memory_bytes=2000),
        "mesh": {"data": 2, "tensor": 4},
        "axes": {"data": AxisNote(role="batch", link="memory")},
        "model": model_print(shapes, {"drop/rngs/key": ()}),
        "batch": {
            "tokens": BatchPlan(shape=(4, 7), dtype="int32", spec=(("data",), ()))
        },
        "predicted": PREDICTED,
        "search": SEARCH,
        "notes": ("logical name 'emebd' is used by no rule",),
        "params": params,
        "state": {"drop/rngs/key": ()},
        "activations": {
            f"blocks/{i}/residual": ActivationPlan(
                shape=(4, 8, 16),
                dtype="bfloat16",
                specs=((("data",), (), ()), (("data",), ("tensor",), ())),
            )
            for i in range(layers)
        },
        "replicated": {"embed/embedding": Replication(bytes=512, reason="pinned")},
        "collectives": tuple(
            CollectivePlan(
                kind="all-gather",
                axes=("data",),
                bytes=64,
                executions=2,
                phase="forward",
                where=f"blocks/{i}/up/kernel",
            )
            for i in range(layers)
        ),
    }
    return Plan(**parts | changes)


# ---- round trip

TEXTS = st.text('ab01_/ "\\é[].:*\n', max_size=6)
SPECS = ("storage", "compute", "optimizer")
NAMES = TEXTS.filter(bool)
NUMBERS = st.floats(min_value=0, max_value=1e300) | st.integers(0, 9).map(float)
COUNTS = st.integers(0, 2**63)


@st.composite
def specs(draw: st.DrawFn, mesh: Mapping[str, int], shape: tuple[int, ...]):
    """A sharding that divides the shape."""
    dims: list[tuple[str, ...]] = [() for _ in shape]
    for axis in draw(st.permutations(list(mesh))):
        i = draw(st.integers(0, len(shape)))
        if i < len(shape):
            held = 1
            for other in dims[i]:
                held *= mesh[other]
            if shape[i] % (held * mesh[axis]) == 0:
                dims[i] += (axis,)
    return tuple(dims)


@st.composite
def arrays(
    draw: st.DrawFn, kind: type, mesh: Mapping[str, int], names: tuple[str, ...]
):
    """A record with a shape and specs that fit it."""
    shape = draw(st.lists(st.sampled_from([0, 1, 6, 8, 24]), max_size=3).map(tuple))
    fitting = specs(mesh, shape)
    fields: dict[str, Any] = {name: fitting for name in names}
    if kind is ActivationPlan:
        fields = {
            "specs": st.lists(fitting, max_size=2).map(tuple),
            "executions": COUNTS,
        }
    if kind is ParamPlan:
        fields |= {"bytes_per_device": COUNTS, "stage": st.none(), "reason": TEXTS}
    return draw(st.builds(kind, shape=st.just(shape), dtype=NAMES, **fields))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any valid plan."""
    mesh = draw(st.dictionaries(NAMES, st.integers(1, 4), max_size=3))
    axes = st.lists(st.sampled_from(list(mesh)), unique=True) if mesh else st.just([])

    def table(item: Any) -> Any:
        return st.dictionaries(TEXTS, item, max_size=2)

    collective = st.builds(
        CollectivePlan,
        kind=st.sampled_from(COLLECTIVES),
        phase=st.sampled_from(PHASES),
        axes=axes.map(tuple),
        where=TEXTS,
        bytes=COUNTS,
        executions=COUNTS,
    )
    memory = {name: COUNTS for name in vars(MEMORY)}
    times = {name: NUMBERS for name in vars(PREDICTED) if name.endswith("_s")}
    times["communication_s"] = axes.map(lambda keys: dict.fromkeys(keys, 0.25))
    return make_plan(
        mesh=mesh,
        topology=Machine(name="m", devices=64, chip="c", memory_bytes=draw(COUNTS)),
        axes={axis: AxisNote(role=draw(TEXTS)) for axis in mesh},
        batch=draw(table(arrays(BatchPlan, mesh, ("spec",)))),
        params=draw(table(arrays(ParamPlan, mesh, SPECS))),
        state=draw(table(specs(mesh, (24, 24)))),
        activations=draw(table(arrays(ActivationPlan, mesh, ()))),
        replicated=draw(table(st.builds(Replication, bytes=COUNTS))),
        collectives=draw(st.lists(collective, max_size=3).map(tuple)),
        predicted=draw(
            st.builds(Prediction, memory=st.builds(MemoryPrediction, **memory), **times)
        ),
        search=draw(
            st.builds(
                SearchReport,
                method=TEXTS,
                status=TEXTS,
                objective_s=NUMBERS,
                lower_bound_s=st.none() | NUMBERS,
                candidates=COUNTS,
                seconds=NUMBERS,
                meshes_tried=st.just((MeshTried(mesh=mesh),)),
            )
        ),
        notes=draw(st.lists(TEXTS, max_size=3).map(tuple)),
    )


@settings(max_examples=30, deadline=None)
@given(plans())
def test_json_round_trip(plan: Plan):
    text = plan.dumps()
    assert Plan.from_json(json.loads(text)) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(json.loads(text)).dumps() == text


@settings(max_examples=10, deadline=None)
@given(plans(), st.booleans())
def test_any_plan_prints(plan: Plan, verbose: bool):
    print_plan(plan, Console(file=io.StringIO(), width=100), verbose=verbose)


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


# ---- errors

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


def test_plan_that_contradicts_itself_cannot_be_made():
    with pytest.raises(PlanError, match=r"mesh: 64 devices, but topology\.dev"):
        make_plan(mesh={"data": 64, "tensor": 1})


def test_plan_that_could_not_be_read_is_not_written(tmp_path):
    plan = make_plan(predicted=replace(PREDICTED, step_s=float("inf")))
    with pytest.raises(PlanError, match=r"predicted\.step_s: expected a finite"):
        plan.save(tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


# ---- models


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


# ---- comparison


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
    text = printed(print_diff, found)
    assert 'params."blocks/1/up/kernel".storage' in text
    assert "500 ms" in text and "+50.0%" in text and "256 B" in text


# ---- tables


def printed(
    show: Callable[..., None], *args: Any, width: int = 140, **more: Any
) -> str:
    """What a function prints on a console of some width."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    show(*args, console=console, **more)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


def cells(text: str, first: str) -> list[str]:
    """The words of the line that starts with some text."""
    return next(line for line in text.splitlines() if line.startswith(first)).split()


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [40, 80, 140])
def test_plan_prints_at_any_width(width: int, verbose: bool):
    text = printed(print_plan, make_plan(), width=width, verbose=verbose)
    for section in ("step", "memory per", "parameters", "activations", "collectives"):
        assert section in text
    assert ("needs 4" in text) is verbose


def test_plan_table():
    text = printed(print_plan, make_plan(layers=32))
    assert "cpu-8: 8 x CPU, 1.95 KiB each" in text
    assert "data=2 tensor=4" in text and "data: batch; memory" in text
    assert "step 500 ms, 40.0% MFU, 1.61 KiB per device" in text
    assert "tokens int32 4x7: data, ·" in text
    assert cells(text, "compute ")[:3] == ["compute", "400", "ms"]
    assert cells(text, "communication data+tensor")[1:4] == [
        "data+tensor",
        "20.0",
        "ms",
    ]
    assert cells(text, "blocks/*/up")[1:7] == [
        "32",
        "8x16",
        "data,",
        "tensor",
        "·,",
        "tensor",
    ]
    assert cells(text, "blocks/*/res")[1:3] == ["32", "4x8x16"]
    assert cells(text, "embed/embedding")[1:4] == ["1", "8x16", "whole"]
    assert cells(text, "all-gather over data")[3:8] == ["64", "64", "B", "4.00", "KiB"]
    assert "note logical name 'emebd' is used by no rule" in text
    assert "elimination: optimal, 500 ms (lower bound 400 ms, gap 20.0%)" in text


def test_layers_that_differ_are_told_apart():
    params = dict(make_plan(layers=8).params)
    for i in (2, 3, 7):
        path = f"blocks/{i}/up/kernel"
        params[path] = replace(params[path], compute=((), ()))
    text = printed(print_plan, make_plan(params=params))
    assert cells(text, "blocks/2-3,7/up/kernel")[1] == "3"
    assert cells(text, "blocks/0-1,4-6/up/kernel")[1] == "5"


def test_groups_keep_what_does_not_vary():
    names = ["a/0/b_1/w8", "a/1/b_1/w8", "x", "a/0/b_2", "10"]
    labels = [(g.label, len(g.names)) for g in groups(names, lambda _: 0)]
    assert labels == [("a/*/b_1/w8", 2), ("x", 1), ("a/0/b_2", 1), ("10", 1)]


def test_summary_says_what_it_leaves_out():
    params = {
        f"layer{'abcdefghijklmnopqrstuvwxyz'[i]}": param
        for i, param in enumerate(list(make_plan(26).params.values())[:26])
    }
    text = printed(print_plan, make_plan(params=params))
    assert "and 2 more rows" in text
    assert "more rows" not in printed(
        print_plan, make_plan(params=params), verbose=True
    )


def test_names_are_no_markup():
    plan = make_plan(notes=("[red]x[/red] :boom:",))
    assert "note [red]x[/red] :boom:" in printed(print_plan, plan)
    text = printed(print_table, "[bold]", ("a", "count"), [("[/x] :boom:", "1")])
    assert "[bold]" in text and "[/x] :boom:" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(1.5 * 2**30), "1.50 GiB"),
        (bytes_text(12.3 * 2**20), "12.3 MiB"),
        (seconds_text(0), "0 s"),
        (seconds_text(3e-9), "3 ns"),
        (seconds_text(1.234e-5), "12.3 µs"),
        (seconds_text(0.4123), "412 ms"),
        (seconds_text(83), "1 min 23 s"),
        (count_text(8.03e9), "8.03 B"),
        (count_text(12), "12"),
        (spec_text(((), ("a", "b"), ("c",))), "·, a+b, c"),
        (spec_text(((), ())), "whole"),
        (spec_text(()), "whole"),
    ],
)
def test_units(text: str, expected: str):
    assert text == expected
