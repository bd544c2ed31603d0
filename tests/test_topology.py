"""Topologies: packaged tables, names, users' files, and devices."""

import math
import re
from types import SimpleNamespace

import pytest

from jaxpar.errors import MeshError
from jaxpar.topology import (
    get_topology,
    load_topology,
    physical_order,
    topologies,
    topology_of_devices,
)

GIB = 2**30

FILE = """
[topology]
name = "lab"
slices = 2
shape = [4, 2]
devices = 16
links = ["ring", "board"]
wrap = [true, false]

[chip]
name = "Lab chip"
reduce_scatter = true
merges_partial_sums = false
overlaps = ["all-gather"]

[chip.compute]
peak_tflops_per_s = { bfloat16 = 100, float32 = 50 }
matmul_efficiency = 0.9
matmul_tile = [8, 128, 128]
overhead_us = 1
source = "measured"

[chip.memory]
hbm_gib = 16
usable_gib = 15
bandwidth_gb_per_s = 800
efficiency = 0.8
layout_tile = [8, 128]
source = "measured"

[links.ring]
kind = "torus"
one_way_gbit_per_s = 400
latency_us = 1
efficiency = 0.5
source = "measured"

[links.board]
kind = "switch"
one_way_gb_per_s = 100
latency_ns = 500
efficiency = 1.0
source = "measured"

[network]
name = "ethernet"
one_way_gb_per_s = 1
latency_us = 50
efficiency = 1.0
source = "measured"
"""


def load(tmp_path, text):
    path = tmp_path / "lab.toml"
    path.write_text(text)
    return load_topology(path)


def test_every_packaged_topology_is_whole():
    found = topologies()
    families = {re.sub(r"-[\dx]+$", "", topology.name) for topology in found}
    assert families == {
        "cpu", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu7x",
        "dgx-a100-40g", "dgx-a100-80g", "dgx-h100", "dgx-h200", "dgx-b200",
    }  # fmt: skip
    for topology in found:
        chip = topology.chip
        assert get_topology(topology.name) == topology
        assert hash(topology) == hash(get_topology(topology.name))
        assert topology.devices == topology.slices * math.prod(topology.shape)
        assert 0 < topology.memory_bytes == chip.usable_bytes <= chip.hbm_bytes
        assert chip.source
        assert all(link.source for link in (*topology.links, topology.network))
        speeds = [link.effective_bytes_per_s for link in topology.links]
        assert topology.network.effective_bytes_per_s <= min(speeds)


@pytest.mark.parametrize(
    ("name", "slices", "shape", "wraps"),
    [
        ("cpu-8", 1, (8,), (False,)),
        ("cpu-2x4", 2, (4,), (False,)),
        ("tpu-v3-4x4", 1, (4, 4, 2), (False, False, False)),
        ("tpu-v3-16x32", 1, (16, 32, 2), (False, True, False)),
        ("tpu-v5e-4x4", 1, (4, 4), (False, False)),
        ("tpu-v5e-8x16", 1, (8, 16), (False, True)),
        ("tpu-v5e-2x16x16", 2, (16, 16), (True, True)),
        ("tpu-v4-2x2x4", 1, (2, 2, 4), (False, False, False)),
        ("tpu-v4-2x12x16x16", 2, (12, 16, 16), (True, True, True)),
        ("tpu-v5p-4x4x4", 1, (4, 4, 4), (True, True, True)),
        ("tpu7x-2x2x1", 1, (2, 2, 1, 2), (False,) * 4),
        ("tpu-v7x-4x4x8", 1, (4, 4, 8, 2), (True, True, True, False)),
        ("dgx-h100-4", 1, (4,), (False,)),
        ("dgx-a100-80g-64", 1, (8, 8), (False, False)),
        ("dgx-a100-80g-2x32", 2, (4, 8), (False, False)),
    ],
)
def test_names(name, slices, shape, wraps):
    topology = get_topology(name)
    assert (topology.slices, topology.shape) == (slices, shape)
    assert tuple(link.wrap for link in topology.links) == wraps


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpu-8", "unknown topology 'gpu-8'"),
        ("tpu-v5e", "lacks a size"),
        ("tpu-v5e-4", "takes 2, or 3 with the number of slices first"),
        ("tpu-v5e-2x2x4x4", "has 4 dims"),
        ("tpu-v5e-32x16", "larger than the pod of 16x16"),
        ("tpu-v5e-0x4", "at least 1"),
        ("tpu-v5e-0x4x4", "no slices"),
        ("dgx-h100-12", "12 devices are not whole nodes of 8"),
    ],
)
def test_wrong_names(name, said):
    with pytest.raises(MeshError, match=re.escape(said)):
        get_topology(name)


def test_figures_are_per_device_in_si():
    v5e, v3 = get_topology("tpu-v5e-4x4"), get_topology("tpu-v3-4x4")
    assert v5e.memory_bytes == 15.75 * GIB
    assert v5e.chip.flops_per_s("bfloat16") == 197e12
    assert v5e.links[0].bytes_per_s == 45e9
    assert v5e.network.bytes_per_s == 25e9 / 8
    assert v3.devices == 32
    assert v3.chip.hbm_bytes == 16 * GIB


def test_peaks_of_dtypes_that_a_chip_does_not_list():
    v5e, h100 = get_topology("tpu-v5e-4x4").chip, get_topology("dgx-h100-8").chip
    assert v5e.flops_per_s("float8_e4m3fn") == v5e.flops_per_s("bfloat16")
    assert v5e.flops_per_s("int4") == v5e.flops_per_s("int8") == 393e12
    assert h100.flops_per_s("float8_e5m2") == 1979e12
    assert h100.flops_per_s("float16") == 989e12
    assert h100.flops_per_s("int32") == h100.flops_per_s("float32")


def test_compilers():
    cpu, tpu = get_topology("cpu-8").chip, get_topology("tpu-v6e-2x4").chip
    assert (cpu.reduce_scatter, cpu.merges_partial_sums) == (False, False)
    assert (tpu.reduce_scatter, tpu.merges_partial_sums) == (True, True)


def test_with_limits():
    cpu = get_topology("cpu-8").with_limits(memory_bytes=1000)
    assert cpu.memory_bytes == 1000
    assert cpu.with_limits() == cpu == cpu.with_limits(slices=1)
    cut = cpu.with_limits(slices=2)
    assert (cut.name, cut.slices, cut.shape) == ("cpu-2x4", 2, (4,))
    assert cut.memory_bytes == 1000
    assert cut.with_limits(slices=2) == cut
    with pytest.raises(MeshError, match="8 devices of cpu-8 do not make 3 equal"):
        cpu.with_limits(slices=3)
    with pytest.raises(MeshError, match="has 2 slices, 4 asked for"):
        cut.with_limits(slices=4)
    with pytest.raises(MeshError, match="memory_bytes is 0"):
        cpu.with_limits(memory_bytes=0)


def test_cutting_a_torus_opens_it():
    whole = get_topology("tpu-v5e-16x16")
    cut = whole.with_limits(slices=32)
    assert (cut.name, cut.shape) == ("tpu-v5e-32x1x8", (1, 8))
    assert not any(link.wrap for link in cut.links)
    assert whole.with_limits(slices=2).links[1].wrap
    with pytest.raises(MeshError, match="12x16x16 does not cut into 16"):
        get_topology("tpu-v4-12x16x16").with_limits(slices=16)
    assert get_topology("dgx-h100-64").with_limits(slices=2).shape == (4, 8)


def test_a_file_of_ones_own(tmp_path):
    lab = load(tmp_path, FILE)
    assert (lab.name, lab.devices, lab.memory_bytes) == ("lab", 16, 15 * GIB)
    ring, board = lab.links
    assert (ring.kind, ring.wrap, ring.bytes_per_s) == ("torus", True, 50e9)
    assert ring.effective_bytes_per_s == 25e9
    assert (board.wrap, board.latency_s) == (False, pytest.approx(5e-7))
    one = load(
        tmp_path, FILE.replace("slices = 2", "slices = 1").replace("16\n", "8\n", 1)
    )
    cut = one.with_limits(slices=2)
    assert (cut.name, cut.shape, cut.links[0].wrap) == (
        "lab in 2 slices",
        (2, 2),
        False,
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("hbm_gib = 16\n", "", "chip.memory.hbm_bytes is missing"),
        ("slices = 2\n", "", "topology.slices is missing"),
        ("[network]", "[nets]", "network is missing"),
        ('kind = "switch"', 'kind = "wire"', "links.board.kind is 'wire'"),
        ("one_way_gbit_per_s = 400", "one_way_gbit_per_s = -4",
         "links.ring.one_way_gbit_per_s is -4; it must be positive"),
        ("latency_us = 50", "latency_us = -1",
         "network.latency_us is -1; it must be at least 0"),
        ("hbm_gib", "hbm_gigs", "chip.memory.hbm_gigs has the unknown unit 'gigs'"),
        ("hbm_gib", "hbm", "chip.memory.hbm has no unit"),
        ("hbm_gib = 16", "hbm_gib = 16\nhbm_gb = 17",
         "chip.memory.hbm_gb says again what hbm_gib says"),
        ("hbm_gib = 16", "hbm_gib = 16\nhmb_gib = 16",
         "chip.memory.hmb_gib is not a known key"),
        ("hbm_gib = 16", 'hbm_gib = "16"', "hbm_gib is '16'; it must be a number"),
        ("hbm_gib = 16", "hbm_gib = true", "hbm_gib is True; it must be a number"),
        ("hbm_gib = 16", "hbm_gib = inf", "hbm_gib is inf; it must be finite"),
        ("usable_gib = 15", "usable_gib = 17", "chip.memory.usable is 18253611008"),
        ("bfloat16 = 100", "bfloat16 = 0", "peak_tflops_per_s.bfloat16 is 0"),
        ("float32 = 50", "float16 = 50", "chip.compute.peak lacks float32"),
        ("efficiency = 0.8\n", "efficiency = 80\n", "chip.memory.efficiency is 80"),
        ("[8, 128, 128]", "[8, 128]", "matmul_tile has 2 entries; it takes 3"),
        ("shape = [4, 2]", "shape = [4, 0]", "topology.shape[1] is 0"),
        ("devices = 16", "devices = 17",
         "topology.shape is [4, 2]: 2 slices of it make 16 devices, but"),
        ('["ring", "board"]', '["ring", "bored"]', "topology.links[1] names 'bored'"),
        ('["ring", "board"]', '["ring"]', "topology.links has 1 entries for 2 dims"),
        ("[true, false]", "[true, true]", "topology.wrap[1] is true, but board is no"),
        ("reduce_scatter = true", "reduce_scatter = 1", "chip.reduce_scatter is 1"),
        ('"all-gather"', '"gather"', "chip.overlaps[0] is 'gather'"),
        ('overlaps = ["all-gather"]\n', "", "chip.overlaps is missing"),
        ('name = "lab"', 'name = " "', "topology.name is empty"),
        ("[chip]", "[chip", "lab.toml is not valid TOML"),
        ('name = "lab"', 'name = "lab"\nname = "pod"', "lab.toml is not valid TOML"),
        ("shape = [4, 2]", "shape = []", "topology.shape is an empty list"),
        ("shape = [4, 2]", "shape = 8", "topology.shape is 8; it must be a list of"),
        ("shape = [4, 2]", "shape = [4.0, 2]", "topology.shape[0] is 4.0; it must be"),
        ("slices = 2", "slices = -2", "topology.slices is -2; it must be positive"),
        ("[true, false]", '["yes", false]', "topology.wrap[0] is 'yes'; it must be"),
        ("latency_us = 50", "latency_gb = 50",
         "network.latency_gb has the unknown unit 'gb'"),
        ("one_way_gb_per_s = 1\n", "one_way_gb_per_s = nan\n",
         "network.one_way_gb_per_s is nan; it must be finite"),
        ("efficiency = 0.5", "efficiency = 0", "links.ring.efficiency is 0"),
        ("float32 = 50", "float32 = 50, bflot16 = 9",
         "chip.compute.peak lists 'bflot16'"),
        ("hbm_gib = 16", "hbm_bytes = 0.5", "chip.memory.hbm is less than one byte"),
        ('[links.ring]\nkind = "torus"', '[links]\nring = 5\n[rest]\nkind = "torus"',
         "links.ring is 5; it must be a table"),
        ('source = "measured"\n\n[chip.memory]', "[chip.memory]",
         "chip.compute.source is missing"),
    ],
)  # fmt: skip
def test_wrong_files(tmp_path, old, new, said):
    assert old in FILE
    with pytest.raises(MeshError, match=re.escape(said)) as caught:
        load(tmp_path, FILE.replace(old, new, 1))
    assert "lab.toml" in caught.value.message


@pytest.mark.parametrize(
    ("old", "new", "missing", "meant"),
    [
        ("bandwidth_gb", "bandwith_gb", "chip.memory.bandwidth_bytes_per_s",
         "chip.memory.bandwith_gb_per_s"),
        ("[chip.memory]", "[chip.memroy]", "chip.memory", "chip.memroy"),
        ("kind = \"switch\"", "knid = \"switch\"", "links.board.kind",
         "links.board.knid"),
        ("slices = 2", "slice = 2", "topology.slices", "topology.slice"),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_named_beside_the_missing_one(
    tmp_path, old, new, missing, meant
):
    assert old in FILE
    with pytest.raises(MeshError) as caught:
        load(tmp_path, FILE.replace(old, new, 1))
    assert caught.value.message == f"lab.toml: {missing} is missing"
    assert caught.value.hint == f"is lab.toml: {meant} meant for it?"


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(MeshError, match=r"lab.toml is not UTF-8 text: byte 0"):
        load_topology(path)


def test_no_file(tmp_path):
    with pytest.raises(MeshError, match="cannot read topology file"):
        load_topology(tmp_path / "none.toml")


def cpu(i):
    return SimpleNamespace(platform="cpu", device_kind="cpu", id=i, process_index=0)


def tpu(i, coords, kind="TPU v5 lite", core=0, slice_index=None):
    return SimpleNamespace(
        platform="tpu", device_kind=kind, id=i, process_index=i // 4,
        coords=list(coords), core_on_chip=core, slice_index=slice_index,
    )  # fmt: skip


def gpu(i, per_process=8, kind="NVIDIA H200", **more):
    return SimpleNamespace(
        platform="gpu", device_kind=kind, id=i, process_index=i // per_process, **more
    )


def test_cpu_devices():
    devices = [cpu(i) for i in reversed(range(8))]
    assert topology_of_devices(devices) == get_topology("cpu-8")
    assert topology_of_devices(devices, slices=2) == get_topology("cpu-2x4")
    assert [d.id for d in physical_order(devices)] == list(range(8))
    with pytest.raises(MeshError, match="8 devices of cpu-8 do not make 3"):
        topology_of_devices(devices, slices=3)


def test_tpu_devices():
    # JAX numbers devices with x fastest; positions have the last dim fastest.
    box = [tpu(x + 2 * y, (x, y, 0)) for y in range(4) for x in range(2)]
    assert topology_of_devices(box) == get_topology("tpu-v5e-2x4")
    assert [tuple(d.coords[:2]) for d in physical_order(box)] == [
        (x, y) for x in range(2) for y in range(4)
    ]
    corner = [d for d in box if d.coords[1] >= 2]
    assert topology_of_devices(corner) == get_topology("tpu-v5e-2x2")
    both = [
        tpu(100 * s + x, (x, 0, 0), slice_index=s) for s in (1, 0) for x in range(4)
    ]
    assert topology_of_devices(both) == get_topology("tpu-v5e-2x4x1")
    assert topology_of_devices(both, slices=2).slices == 2
    assert [d.slice_index for d in physical_order(both)] == [0] * 4 + [1] * 4
    cores = [
        tpu(4 * x + 2 * y + c, (x, y, 0), "TPU7x", c)
        for x in range(2) for y in range(2) for c in range(2)
    ]  # fmt: skip
    assert topology_of_devices(cores) == get_topology("tpu7x-2x2x1")


def test_tpu_devices_that_fill_no_box():
    odd = [tpu(i, c) for i, c in enumerate([(0, 0, 0), (1, 0, 0), (1, 1, 0)])]
    topology = topology_of_devices(odd)
    assert (topology.shape, topology.links[0].wrap) == ((3,), False)
    assert "box" in topology.note
    uneven = [tpu(i, (i, 0, 0), slice_index=i // 2) for i in range(3)]
    with pytest.raises(MeshError, match="slices have 2, 1 devices"):
        topology_of_devices(uneven)


@pytest.mark.parametrize(
    ("devices", "shape", "noted"),
    [
        ([gpu(0)], (1,), False),
        ([gpu(i) for i in range(4)], (4,), False),
        ([gpu(i) for i in range(16)], (2, 8), False),
        ([gpu(i, 1, slice_index=i // 8) for i in range(16)], (2, 8), False),
        ([gpu(i, 1) for i in range(16)], (2, 8), True),
        ([gpu(i, 4) for i in range(8)], (2, 4), True),
    ],
)
def test_gpu_devices(devices, shape, noted):
    topology = topology_of_devices(devices)
    assert topology.shape == shape
    assert bool(topology.note) == noted
    assert topology.chip.name == "NVIDIA H200"


def test_devices_that_no_table_knows():
    with pytest.raises(MeshError, match="kind 'NVIDIA T4'"):
        topology_of_devices([gpu(0, kind="NVIDIA T4")])
    with pytest.raises(MeshError, match="found cpu, NVIDIA H200"):
        topology_of_devices([cpu(0), gpu(1)])
    with pytest.raises(MeshError, match="found no devices"):
        topology_of_devices([])
