"""Plans to test with: one of known content, and any valid one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from jaxpar.plan import (
    ActivationPlan,
    AxisNote,
    BatchPlan,
    CollectivePlan,
    Machine,
    MemoryPrediction,
    MeshTried,
    ParamPlan,
    Plan,
    Prediction,
    Replication,
    SearchReport,
    model_print,
)
from jaxpar.plan_parts import COLLECTIVES, PHASES

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
    times: dict[str, Any] = {
        name: NUMBERS for name in vars(PREDICTED) if name.endswith("_s")
    }
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
