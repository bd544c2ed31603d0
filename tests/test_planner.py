"""Plans of small models: known layouts, limits, refusals, and exactness."""

import re
from dataclasses import replace

import numpy as np
import optax
import pytest
from planning import decide, mlp, storage, tables

from jaxpar.errors import InfeasibleError, MeshError
from jaxpar.ledger import compute_seconds, entries
from jaxpar.search.problem import evaluate, solve
from jaxpar.subject import prepare
from jaxpar.topology import get_topology
from jaxpar.zoo import zoo

MESHES = [
    {"data": 8},
    {"fsdp": 8},
    {"data": 2, "tensor": 4},
    {"fsdp": 4, "tensor": 2},
    {"x": 2, "y": 4},
]


@pytest.fixture(scope="module")
def decoder():
    made = zoo("gpt-tiny", layers=2, batch=16, seq=32)
    return prepare(made["model"], optax.adamw(1e-3), made["loss"], made["batch"])


def test_megatron_is_found_where_weights_outweigh_activations():
    wide = {"d_model": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "d_ff": 2048}
    made = zoo("gpt-tiny", layers=2, batch=4, seq=16, **wide)
    subject = prepare(made["model"], optax.adamw(1e-3), made["loss"], made["batch"])
    found = storage(decide(subject, {"data": 2, "tensor": 4}))
    assert found["layers/0/mlp/up/kernel"] == ((), ("tensor",))
    assert found["layers/0/mlp/down/kernel"] == (("tensor",), ())
    assert found["layers/1/attn/query/kernel"] == ((), ("tensor",), ())
    assert found["layers/1/attn/out/kernel"] == (("tensor",), (), ())


def test_an_fsdp_axis_stores_every_matrix(decoder):
    found = storage(decide(decoder, {"fsdp": 8}))
    matrices = [s for p, s in found.items() if p.endswith(("kernel", "embedding"))]
    assert matrices and all(("fsdp",) in spec for spec in matrices)


def test_shrinking_memory_stores_parameters_in_parts():
    subject = mlp(batch=2048, width=512)
    free = decide(subject)
    limit = int(free.memory.total_bytes) - 100_000
    tight = decide(subject, memory=limit)
    assert tight.solution.objective_s > free.solution.objective_s
    assert tight.memory.total_bytes <= limit

    def at_rest(memory):
        return memory.parameters_bytes + memory.optimizer_bytes

    assert at_rest(tight.memory) < at_rest(free.memory)


def test_looser_memory_never_costs_more():
    subject = mlp(batch=2048, width=512)
    most = decide(subject).memory.total_bytes
    seconds = [
        decide(subject, memory=int(most * share)).solution.objective_s
        for share in (1.0, 0.99, 0.98, 0.97)
    ]
    assert seconds == sorted(seconds)


def test_a_model_that_cannot_fit_is_refused_with_numbers(decoder):
    with pytest.raises(InfeasibleError) as refused:
        decide(decoder, memory=50_000)
    text = str(refused.value)
    for word in ("parameters", "gradients", "optimizer", "residuals", "50000 bytes"):
        assert word in text
    assert re.search(r"fits with .*devices", text)


def test_an_uneven_batch_is_refused_with_both_numbers():
    with pytest.raises(MeshError, match=r"batch of 10 .*data=4"):
        decide(mlp(batch=10), {"data": 4}, "cpu-4")


def test_a_batch_that_no_mesh_divides_still_gets_a_plan():
    found = decide(mlp(batch=7))
    assert found.problem.mesh.sizes == {"tensor": 8}


def test_devices_share_work_however_cheap_repeating_it_is():
    found = decide(mlp(batch=7, width=8), topology="cpu-7")
    assert found.problem.mesh.sizes == {"data": 7}


@pytest.mark.parametrize("axis", ["sequence", "expert"])
def test_an_axis_without_a_dim_is_refused(axis):
    with pytest.raises(MeshError, match=rf"{axis}.*\(8\)"):
        decide(mlp(), {axis: 8})


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("share", [None, 0.7, 0.4])
def test_elimination_equals_the_ilp_on_models(sizes, share):
    free = tables(mlp(), sizes)
    limit = np.inf if share is None else solve(free).memory_bytes * share
    problem = replace(free, memory_limit_bytes=limit)
    fast, exact = solve(problem), solve(problem, "ilp")
    assert fast.status == exact.status
    if fast.choice is not None:
        assert fast.status == "optimal"
        assert fast.gap == 0
        assert fast.objective_s == pytest.approx(exact.objective_s, rel=1e-6)


def test_elimination_equals_the_ilp_on_a_decoder(decoder):
    problem = tables(decoder, {"fsdp": 2, "tensor": 4})
    fast, exact = solve(problem), solve(problem, "ilp")
    assert fast.objective_s == pytest.approx(exact.objective_s, rel=1e-6)
    assert evaluate(problem, fast.choice)[0] == pytest.approx(fast.objective_s)


def test_the_parts_add_up_to_the_objective(decoder):
    found = decide(decoder, {"fsdp": 2, "tensor": 4})
    communication = sum(e.seconds for e in entries(found))
    parts = compute_seconds(found) + communication
    assert parts <= found.solution.objective_s * (1 + 1e-9)
    update = found.solution.objective_s - parts
    assert 0 < update < found.solution.objective_s / 2


def test_more_bandwidth_is_never_slower(decoder):
    machine = get_topology("cpu-8")
    seconds = []
    for factor in (1, 4, 16):
        links = tuple(
            replace(link, bytes_per_s=link.bytes_per_s * factor)
            for link in machine.links
        )
        faster = replace(machine, links=links)
        seconds.append(decide(decoder, topology=faster).solution.objective_s)
    assert seconds == sorted(seconds, reverse=True)


def test_only_data_crosses_slices():
    machine = get_topology("cpu-8").with_limits(slices=2)
    found = decide(mlp(batch=64), topology=machine)
    assert found.problem.mesh.sizes["data"] % 2 == 0
    assert found.problem.mesh.slow_axis == "data"


def test_inference_has_no_gradients(decoder):
    made = zoo("gpt-tiny", layers=2, batch=16, seq=32)
    subject = prepare(made["model"], None, made["loss"], made["batch"])
    found = decide(subject, {"data": 2, "tensor": 4})
    assert found.memory.gradients_bytes == found.memory.optimizer_bytes == 0
    assert all(e.phase == "forward" for e in entries(found))
    trained = decide(decoder, {"data": 2, "tensor": 4})
    assert found.solution.objective_s < trained.solution.objective_s / 2
