"""Configurations in closed form: relations, published figures, known errors."""

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest

from benchmarks.published import ROWS, records
from benchmarks.published_gates import CHOSEN_ON, gates
from benchmarks.published_runs import RefusedError, predict, read_run
from jaxpar.configurations import Shape, evaluate, kernels, layouts, space
from jaxpar.errors import MeshError
from jaxpar.topology import get_topology

GPT_22B = Shape(48, 6144, 64, 64, 96, 24576, 51200, 2048)
GPT_175B = Shape(96, 12288, 96, 96, 128, 49152, 51200, 2048)
NODE = get_topology("dgx-a100-80g-8")
CLUSTER = get_topology("dgx-a100-80g-64")
SLICE = get_topology("tpu-v5p-4x4x4")
SMALL = space(GPT_22B, 8, 8)
GIB = 2**30


def step(rows, topology=NODE, shape=GPT_22B, **changes):
    constants = replace(kernels(topology), **changes)
    return evaluate(shape, rows, topology, kernels=constants).seconds.step


def faster(topology, kind, factor=2.0):
    """The same machine with faster links of one kind."""
    links = tuple(
        replace(link, bytes_per_s=factor * link.bytes_per_s)
        if link.kind == kind
        else link
        for link in topology.links
    )
    return replace(topology, links=links)


def test_rows_do_not_influence_each_other():
    whole = evaluate(GPT_22B, SMALL, NODE)
    for i in range(0, len(SMALL), len(SMALL) // 40):
        one = evaluate(GPT_22B, SMALL[i : i + 1], NODE)
        assert one.seconds.step[0] == whole.seconds.step[i]
        assert one.memory.total[0] == whole.memory.total[i]
        assert one.fits[0] == whole.fits[i]


def test_shapes_may_differ_by_row():
    shapes = [GPT_22B, GPT_175B]
    both = Shape(
        **{
            f.name: np.array([getattr(s, f.name) for s in shapes])
            for f in fields(Shape)
        }
    )
    rows = layouts(tensor=8, microbatch=[1, 1], microbatches=8)
    together = step(rows, shape=both)
    apart = [step(rows[i : i + 1], shape=s)[0] for i, s in enumerate(shapes)]
    np.testing.assert_allclose(together, apart)


def test_parts_are_not_negative_and_add_up():
    seconds = evaluate(GPT_22B, SMALL, NODE).seconds
    parts = [getattr(seconds, f.name) for f in fields(seconds)]
    assert all(np.all(part >= 0) for part in parts)
    np.testing.assert_allclose(sum(parts), seconds.step)


@pytest.mark.parametrize("kind", ["switch", "network"])
def test_faster_links_are_never_slower(kind):
    rows = space(GPT_175B, 64, 64, most_tensor=16)[::97]
    before = step(rows, CLUSTER, GPT_175B)
    after = step(rows, faster(CLUSTER, kind), GPT_175B)
    assert np.all(after <= before)
    assert np.any(after < before)


@pytest.mark.parametrize("field", ["matmul_efficiency", "hbm_efficiency"])
def test_faster_kernels_are_faster(field):
    better = {field: 1.1 * getattr(kernels(NODE), field)}
    assert np.all(step(SMALL, **better) < step(SMALL))


def test_more_overlap_is_never_slower():
    plain, some, all_ = (
        step(layouts(tensor=8, microbatch=4, tensor_overlap=level))
        for level in range(3)
    )
    assert all_ < some < plain
    cluster = {"fsdp": 64, "zero": [0, 1, 2], "microbatch": 1}
    behind = step(layouts(**cluster, data_overlap=True), CLUSTER)
    assert np.all(behind < step(layouts(**cluster), CLUSTER))


@pytest.mark.parametrize(
    "stages, chunks, many", list(product([4, 8], [1, 2, 3], [8, 32]))
)
def test_bubble_is_that_of_the_closed_form(stages, chunks, many):
    # (p-1)/(v m) of the ideal time (2104.04473, sec. 2.2), with even stages.
    shape = replace(GPT_175B, vocab=0)
    rows = layouts(
        pipeline=stages,
        tensor=8,
        data=8 // stages,
        interleave=chunks,
        microbatch=1,
        microbatches=many,
    )
    seconds = evaluate(shape, rows, CLUSTER).seconds
    ideal = seconds.compute + seconds.recompute + seconds.tensor + seconds.ends
    ideal = ideal + seconds.pipeline / chunks
    bubble = seconds.bubble / ideal
    np.testing.assert_allclose(bubble, (stages - 1) / (chunks * many), rtol=2e-3)


def test_memory_of_a_class_falls_with_the_stage_that_splits_it():
    found = evaluate(
        GPT_175B, layouts(fsdp=8, tensor=8, zero=[0, 1, 2, 3]), CLUSTER
    ).memory
    for held, stage in ((found.optimizer, 1), (found.gradients, 2), (found.params, 3)):
        np.testing.assert_allclose(held[stage] * 8, held[0])
        np.testing.assert_allclose(held[stage - 1], held[0])
    halved = evaluate(
        GPT_175B,
        layouts(fsdp=[2, 4], data=[4, 2], tensor=8, zero=3),
        CLUSTER,
    ).memory
    assert halved.params[1] * 2 == halved.params[0]


@pytest.mark.parametrize(
    "remat, parallel, gib", [(0, False, 66.84), (1, True, 12.35)], ids=["none", "both"]
)
def test_activations_are_those_published(remat, parallel, gib):
    # 2205.05198, Fig. 7, 175B: 8 stages, 3 chunks, tensor 8.
    rows = layouts(
        tensor=8,
        pipeline=8,
        interleave=3,
        microbatches=64,
        remat=remat,
        sequence_parallel=parallel,
    )
    found = evaluate(GPT_175B, rows, CLUSTER).memory.activations[0] / GIB
    assert found == pytest.approx(gib, rel=0.01)


def test_model_flops_are_those_of_the_paper():
    # 72 B s l h^2 (1 + s/(6h) + V/(12 l h)), 2205.05198, appendix A.
    b, s, h, n, v = 64, 2048, 12288, 96, 51200
    paper = 72 * b * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))
    assert GPT_175B.model_flops(b) == pytest.approx(paper)


def test_products_are_paid_in_tiles_and_waves():
    chip = kernels(NODE)
    full = chip.matmul_s(256 * 12, 128 * 9, 8192)  # 108 tiles: one wave
    one_more = chip.matmul_s(256 * 12, 128 * 9 + 1, 8192)
    assert one_more > 1.3 * full
    assert chip.matmul_s(4096, 4096, 108) > 1.5 * chip.matmul_s(4096, 4096, 112)


def test_small_products_wait_for_memory_or_the_host():
    tiny = Shape(4, 256, 4, 4, 64, 1024, 512, 128)
    rows = layouts(data=8, microbatch=1)
    slower = step(rows, shape=tiny, matmul_efficiency=0.4)
    np.testing.assert_allclose(slower, step(rows, shape=tiny), rtol=0.01)
    assert step(rows, shape=tiny) > step(rows, shape=tiny, dispatch_s=0.0)


def test_space_is_valid_and_has_no_duplicates():
    columns = [getattr(SMALL, f.name) for f in fields(SMALL)]
    rows = np.stack([np.asarray(column, float) for column in columns], axis=1)
    assert len(np.unique(rows, axis=0)) == len(SMALL)
    assert np.all(SMALL.batch == 8)
    assert np.all(SMALL.devices == 8)
    assert np.all(GPT_22B.layers % (SMALL.pipeline * SMALL.interleave) == 0)


def test_a_torus_needs_no_node():
    rows = layouts(fsdp=[64, 16], tensor=[1, 4], zero=3, microbatch=[1, 4])
    found = evaluate(GPT_22B, rows, SLICE)
    assert np.all(found.mfu < found.hfu + 1e-9)
    assert np.all((found.mfu > 0.2) & (found.mfu < 1))


def test_errors_say_what_to_do():
    with pytest.raises(MeshError, match="no tensr"):
        layouts(tensr=8)
    with pytest.raises(MeshError, match="do not agree"):
        layouts(tensor=[1, 2], data=[1, 2, 3])
    with pytest.raises(MeshError, match="needs 16 devices"):
        evaluate(GPT_22B, layouts(tensor=16), NODE)
    with pytest.raises(MeshError, match="kernels of 'cpu' are not known"):
        evaluate(GPT_22B, layouts(data=8), get_topology("cpu-8"))


def test_chips_keep_to_the_rows_they_were_chosen_on():
    runs = [read_run(record) for record in records([str(ROWS)])]
    chosen = [run for run in runs if run.name in CHOSEN_ON]
    seconds = [run.seconds for run in chosen]
    np.testing.assert_allclose(predict(chosen), seconds, rtol=0.01)


def test_runs_that_cannot_be_expressed_say_why():
    record = next(records([str(ROWS)]))
    for part, key, value, why in (
        ("model", "experts", 8, "mixture of experts"),
        ("model", "vocab", None, "does not give vocab"),
        ("hardware", "chip", "V100", "no constants for chip V100"),
        ("parallel", "global_batch", None, "does not give the batch"),
        ("measured", "iteration_s", None, "no time or rate"),
    ):
        changed = record | {part: record[part] | {key: value}}
        with pytest.raises(RefusedError, match=why):
            read_run(changed)


def test_rows_of_papers_keep_their_gates():
    runs = [read_run(record) for record in records([str(ROWS)])]
    checked = [gate for gate in gates(runs, predict(runs)) if gate.runs]
    assert len(checked) == 5
    assert not [gate for gate in checked if not gate.holds]
