"""Ahead-of-time compilation for TPUs, and what is read from its dumps."""

import importlib.util
import math

import pytest

import jaxpar
from jaxpar.aot.process import TIERS, Compilation, compile_program
from jaxpar.aot.program import Program
from jaxpar.aot.reading import memory, out_of_memory, step_time
from jaxpar.aot.targets import GENERATIONS, clock_hz, compiler_arguments
from jaxpar.errors import MeshError, PlanError
from jaxpar.hlo.cycles import compiled_time
from jaxpar.topology import get_topology, topologies
from jaxpar.zoo import zoo

needs_libtpu = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("libtpu", "flatbuffers"))),
    reason="jaxpar[tpu] is not installed",
)

SCHEDULED = """HloModule m, num_partitions=4

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %work = f32[8] negate(%x), backend_config={"estimated_cycles":"100"}
  %sum = f32[8] all-reduce(%work), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %t = (s32[], f32[8]) tuple(%next, %sum)
}

%test (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %begin = (f32[8], f32[32]) all-gather-start(%x), replica_groups={{0,1,2,3}}
  %first = f32[8] negate(%x), backend_config={"estimated_cycles":"300"}
  %end = f32[32] all-gather-done(%begin)
  %init = (s32[], f32[8]) tuple(%zero, %first)
  %loop = (s32[], f32[8]) while(%init), condition=%test, body=%body
  ROOT %out = f32[8] get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("gather_s", "exposed_s"), [(100.0, 0.0), (300.0, 0.0), (450.0, 150.0)]
)
def test_the_schedule_is_played(gather_s, exposed_s):
    def seconds(found):
        return gather_s if found.kind == "all-gather" else 10.0

    time = compiled_time(SCHEDULED, 1.0, seconds)
    assert time.compute_s == 300 + 5 * 100
    assert time.synchronous_s == 5 * 10
    assert time.asynchronous_s == gather_s
    assert time.exposed_s == exposed_s
    assert time.step_s == 850 + exposed_s


def test_a_program_without_cycles_has_no_time():
    with pytest.raises(ValueError, match="no cycles"):
        compiled_time(SCHEDULED.replace("estimated_cycles", "x"), 1.0, lambda _: 0.0)
    early = Compilation("optimised", {"partitioned": SCHEDULED}, None, 1.0)
    with pytest.raises(PlanError, match="before cycles were known"):
        step_time(early, get_topology("tpu-v5e-2x2"), {"data": 4})


@pytest.mark.parametrize(
    ("text", "needed", "there"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, "
            "the total memory required for HLO temporaries (38.66G) exceeds available "
            "HBM (30.75G). HLO module: jit_step.",
            38.66,
            30.75,
        ),
        ("Ran out of memory. Used 18.5G of 15.75G hbm. Exceeded by 2.8G", 18.5, 15.75),
    ],
)
def test_out_of_memory_is_read(text, needed, there):
    found = out_of_memory(Compilation("full", {}, None, 1.0, text))
    assert found is not None
    assert found.needed_bytes == pytest.approx(needed * 2**30, abs=1)
    assert found.available_bytes == pytest.approx(there * 2**30, abs=1)


def test_other_refusals_are_errors():
    with pytest.raises(PlanError, match="refused the program: INTERNAL"):
        out_of_memory(Compilation("full", {}, None, 1.0, "INTERNAL: what"))
    assert out_of_memory(Compilation("full", {}, None, 1.0)) is None


def test_memory_is_read_from_the_assignment():
    buffers = """BufferAssignment:
allocation 0: size 512, page 0, thread-local:
allocation 1: size 1000, page 0, parameter 1, shape |f32[64]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 200, page 0, parameter 2, shape |f32[64]| at ShapeIndex {}:
allocation 3: size 7, page 0, constant:
allocation 4: size 30, page 0, output shape is |(f32[64])|, maybe-live-out:
allocation 5: size 4000, page 0, preallocated-temp:
allocation 6: size 99999, color 1, page 0, preallocated-temp:
"""  # noqa: E501
    found = memory(Compilation("optimised", {"buffers": buffers}, None, 1.0))
    assert found.arguments_bytes == 1200
    assert found.aliased_bytes == 1000
    assert found.outputs_bytes == 1030
    assert found.temporaries_bytes == 4000
    with pytest.raises(PlanError, match="before memory was assigned"):
        memory(Compilation("partitioned", {}, None, 1.0))


def test_every_tpu_has_a_target():
    tpus = [t for t in topologies() if t.name.startswith("tpu")]
    assert {t.chip.name for t in tpus} == GENERATIONS.keys()
    for topology in tpus:
        found = compiler_arguments(topology)
        dims = found["topology_name"].partition(":")[2].split("x")
        chips = math.prod(map(int, dims)) * found.get("num_slices", 1)
        assert topology.devices in (chips, 2 * chips)
        assert found["wrap"] == [
            *(link.wrap for link in topology.links if link.kind == "torus"),
            *[False] * (3 - len(dims)),
        ]
        assert 0.9e9 < clock_hz(topology) < 2.3e9


def test_other_machines_are_refused():
    program = Program(b"", 0, 8, "")
    with pytest.raises(MeshError, match="TPU compiler does not know"):
        compile_program(program, get_topology("dgx-a100-80g-8"), {"data": 8})
    with pytest.raises(PlanError, match="tier is 'all'"):
        compile_program(program, get_topology("tpu-v5e-2x2"), {"data": 4}, tier="all")


@needs_libtpu
def test_a_plan_is_compiled_for_a_tpu_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPAR_CACHE_DIR", str(tmp_path))
    given = zoo("gpt-tiny", layers=2, scan=True)
    plan = jaxpar.make_plan(**given, mesh="tpu-v5e-2x2")
    check = jaxpar.verify_plan(plan, **given, backend="tpu", tier="partitioned")
    assert check.stage == "partitioned"
    assert any(row.predicted == row.compiled for row in check.rows)
    assert not check.memory
    again = jaxpar.verify_plan(plan, **given, backend="tpu", tier="partitioned")
    assert again == check  # from the cache, seconds of compilation too
    assert list(tmp_path.rglob("summary.json"))
    assert list(TIERS) == ["partitioned", "optimised", "full"]


@needs_libtpu
@pytest.mark.slow
def test_memory_and_time_of_a_tpu(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXPAR_CACHE_DIR", str(tmp_path))
    given = zoo("gpt-tiny", layers=2, scan=True)
    plan = jaxpar.make_plan(**given, mesh="tpu-v5e-2x2")
    check = jaxpar.verify_plan(plan, **given, backend="tpu")
    assert check.memory[-1].compiled_bytes > plan.predicted.memory.parameters_bytes
    assert check.compiled_step_s is not None
    assert 0.1 < check.compiled_step_s / check.predicted_step_s < 10
