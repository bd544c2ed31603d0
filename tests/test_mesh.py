"""Logical meshes: factorisations, placement on links, device order."""

import itertools
import math
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.errors import MeshError
from jaxpar.mesh import device_order, factorizations, logical_mesh
from jaxpar.topology import get_topology

AXES = ("data", "fsdp", "tensor", "expert")
PLACES = (
    "cpu-2x6", "tpu-v5e-4x4", "tpu-v5e-2x4x4", "tpu-v4-4x4x8", "tpu-v3-4x4",
    "tpu-v5p-3x2x2x4", "tpu7x-2x2x1", "dgx-h100-24", "dgx-h100-4x16",
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 96), rank=st.integers(1, 4), slices=st.integers(1, 4),
    limit=st.integers(1, 96),
)  # fmt: skip
def test_factorizations_are_all_and_no_more(n, rank, slices, limit):
    axes = AXES[:rank]
    if n % slices:
        with pytest.raises(MeshError, match=f"{n} devices do not make {slices}"):
            factorizations(n, axes, slices)
        return
    found = factorizations(n, axes, slices, {axes[-1]: limit})
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    wanted = [
        dict(zip(axes, sizes, strict=True))
        for sizes in itertools.product(divisors, repeat=rank)
        if math.prod(sizes) == n and sizes[0] % slices == 0 and sizes[-1] <= limit
    ]
    assert found == wanted


def test_factorizations_by_role():
    sizes = factorizations(8, ("fsdp", "pipeline", "data"), slices=2)
    assert all(s["pipeline"] % 2 == 0 or s["data"] % 2 == 0 for s in sizes)
    assert {"fsdp": 4, "pipeline": 2, "data": 1} in sizes
    free = factorizations(8, ("x", "y"), slices=4)
    assert free == [
        {"x": 1, "y": 8},
        {"x": 2, "y": 4},
        {"x": 4, "y": 2},
        {"x": 8, "y": 1},
    ]
    assert factorizations(1, ()) == [{}]
    assert factorizations(2, ()) == []
    with pytest.raises(MeshError, match="distinct"):
        factorizations(4, ("x", "x"))
    with pytest.raises(MeshError, match="limits name axes"):
        factorizations(4, ("x",), at_most={"y": 2})


def test_factorizations_of_a_pod_are_quick():
    begin = time.perf_counter()
    found = factorizations(6144, AXES[:3])
    # 2^11 * 3 over three axes.
    assert len(found) == math.comb(13, 2) * 3
    assert time.perf_counter() - begin < 0.5


@settings(deadline=None, max_examples=40)
@given(data=st.data(), name=st.sampled_from(PLACES), rank=st.integers(1, 4))
def test_device_order_is_a_permutation_with_slices_outermost(data, name, rank):
    topology = get_topology(name)
    every = factorizations(topology.devices, AXES[:rank], topology.slices)
    mesh = logical_mesh(topology, data.draw(st.sampled_from(every)))
    order = device_order(mesh)
    assert order.shape == mesh.shape
    assert sorted(order.ravel()) == list(range(topology.devices))
    per_slice = topology.devices // topology.slices
    inside = mesh.sizes["data"] // topology.slices
    for index in np.ndindex(*mesh.shape):
        assert order[index] // per_slice == index[0] // inside
    assert mesh.slow_axis == ("data" if topology.slices > 1 else None)
    for axis, link in zip(mesh.axes, mesh.links, strict=True):
        assert link.size == mesh.sizes[axis]
        assert link.size == math.prod(level.size for level in link.levels)
        if link.levels:
            assert link.bytes_per_s == min(v.bytes_per_s for v in link.levels)


def distance(topology, a, b):
    """Links between two positions of one slice, around the ring where it closes."""
    steps = 0
    for size, link, x, y in zip(
        topology.shape, topology.links,
        np.unravel_index(a, topology.shape), np.unravel_index(b, topology.shape),
        strict=True,
    ):  # fmt: skip
        direct = abs(int(x) - int(y))
        steps += min(direct, size - direct) if link.wrap else direct
    return steps


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    name=st.sampled_from(
        ("tpu-v5e-4x4", "tpu-v5e-8x16", "tpu-v4-4x4x8", "tpu-v5p-8x8x8")
    ),
)
def test_neighbours_are_a_stride_apart(data, name):
    topology = get_topology(name)
    every = factorizations(topology.devices, AXES[:3])
    mesh = logical_mesh(topology, data.draw(st.sampled_from(every)))
    order = device_order(mesh)
    for i, pieces in enumerate(mesh.pieces):
        if len(pieces) != 1:
            continue
        (piece,) = pieces
        lines = np.moveaxis(order, i, -1).reshape(-1, piece.size)
        for line in lines[:4]:
            pairs = list(itertools.pairwise(line))
            if mesh.links[i].wrap:
                pairs.append((line[-1], line[0]))
            assert {distance(topology, a, b) for a, b in pairs} == {piece.stride}


@pytest.mark.parametrize(
    ("name", "sizes", "axis", "ring_bytes_per_s", "hops", "rings"),
    [
        # A closed ring runs both ways, an open line is held up at its ends.
        ("tpu-v5e-16x16", {"data": 16, "tensor": 16}, "tensor", 90e9, 8, 1),
        ("tpu-v5e-4x4", {"data": 4, "tensor": 4}, "tensor", 45e9, 3, 1),
        ("tpu-v5e-16x16", {"data": 256}, "data", 180e9, 16, 2),
        ("tpu-v5p-8x8x8", {"data": 8, "tensor": 64}, "tensor", 360e9, 8, 2),
        # Part of a dim: the inner part is a line, the outer closes the ring in strides.
        ("tpu-v5e-16x16", {"data": 64, "tensor": 4}, "tensor", 45e9, 3, 1),
        ("tpu-v5e-16x16", {"x": 16, "data": 4, "tensor": 4}, "data", 22.5e9, 2, 1),
        # Two devices are neighbours once.
        ("tpu-v5e-2x4", {"data": 2, "tensor": 4}, "data", 45e9, 1, 1),
        # Within a node all ports serve; between nodes one NIC per GPU.
        ("dgx-a100-80g-64", {"data": 8, "tensor": 8}, "tensor", 234e9, 7, 1),
        ("dgx-a100-80g-64", {"data": 8, "tensor": 8}, "data", 22.5e9, 7, 1),
    ],
)
def test_bandwidth_of_an_axis(name, sizes, axis, ring_bytes_per_s, hops, rings):
    link = logical_mesh(get_topology(name), sizes).link(axis)
    assert link.bytes_per_s == pytest.approx(ring_bytes_per_s)
    assert (link.hops, link.levels[0].rings) == (hops, rings)


def test_all_to_all_is_what_the_cut_lets_through():
    # Scaling book: on a closed ring of n an all-to-all of V takes V n / (8 links).
    ring = logical_mesh(get_topology("tpu-v5e-16x16"), {"data": 16, "tensor": 16})
    assert ring.link("tensor").all_to_all_bytes_per_s == pytest.approx(8 * 45e9 / 16)
    line = logical_mesh(get_topology("tpu-v5e-4x4"), {"data": 4, "tensor": 4})
    assert line.link("tensor").all_to_all_bytes_per_s == pytest.approx(4 * 45e9 / 4)
    node = logical_mesh(get_topology("dgx-h100-8"), {"expert": 8}).link("expert")
    assert node.all_to_all_bytes_per_s == pytest.approx(node.bytes_per_s * 8 / 7)


def test_levels_from_slow_to_fast():
    mesh = logical_mesh(get_topology("tpu-v5e-2x4x4"), {"data": 8, "tensor": 4})
    slow, fast = mesh.link("data").levels
    assert (slow.kind, slow.size, fast.kind, fast.size) == ("network", 2, "torus", 4)
    assert mesh.link("data").kind == "network"
    nodes = logical_mesh(get_topology("dgx-h100-2x32"), {"data": 16, "tensor": 4})
    assert [(v.kind, v.size) for v in nodes.link("data").levels] == [
        ("network", 8), ("switch", 2),
    ]  # fmt: skip
    cores = logical_mesh(get_topology("tpu7x-4x4x4"), {"data": 16, "tensor": 8})
    assert [(v.kind, v.size) for v in cores.link("tensor").levels] == [
        ("torus", 4), ("switch", 2),
    ]  # fmt: skip


def test_an_axis_of_one_costs_nothing():
    link = logical_mesh(get_topology("cpu-4"), {"data": 4, "tensor": 1}).link("tensor")
    assert (link.levels, link.kind, link.size) == ((), "none", 1)
    assert link.bytes_per_s == link.all_to_all_bytes_per_s == math.inf
    assert (link.latency_s, link.hops) == (0, 0)


@pytest.mark.parametrize(
    ("sizes", "slow"),
    [
        ({"fsdp": 4, "data": 2, "tensor": 2}, "data"),
        ({"fsdp": 4, "data": 1, "pipeline": 4}, "pipeline"),
        ({"expert": 1, "fsdp": 4, "tensor": 4}, "fsdp"),
        ({"data": 1, "tensor": 16}, "tensor"),
    ],
)
def test_the_axis_that_spans_slices(sizes, slow):
    topology = get_topology("tpu-v5e-2x2x4")
    mesh = logical_mesh(topology, sizes)
    assert mesh.slow_axis == slow
    assert mesh.sizes == sizes
    slices = device_order(mesh) // 8
    crossing = [
        axis
        for i, axis in enumerate(mesh.axes)
        if (slices.max(i) != slices.min(i)).any()
    ]
    assert crossing == [slow]


def test_the_slow_axis_can_be_chosen():
    topology, sizes = get_topology("cpu-2x4"), {"data": 2, "pipeline": 2, "tensor": 2}
    assert logical_mesh(topology, sizes, slow_axis="pipeline").slow_axis == "pipeline"
    with pytest.raises(MeshError, match=re.escape("axis 'depth' does not have")):
        logical_mesh(topology, sizes, slow_axis="depth")


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("cpu-1", {"data": 1, "tensor": 8},
         "data=1, tensor=8 needs 8 devices, but cpu-1 has"),
        ("cpu-8", {"data": 0}, "data=0: every axis must have a size of at least 1"),
        ("cpu-4x2", {"data": 2, "tensor": 4, "x": 1}, None),
        ("cpu-8x1", {"data": 2, "tensor": 4}, "8 slices of cpu-8x1: no axis has"),
    ],
)  # fmt: skip
def test_meshes_that_do_not_fit(name, sizes, said):
    topology = get_topology(name)
    if said is None:
        assert logical_mesh(topology, sizes).slow_axis == "tensor"
        return
    with pytest.raises(MeshError, match=re.escape(said)):
        logical_mesh(topology, sizes)


def test_the_empty_mesh():
    mesh = logical_mesh(get_topology("cpu-1"), {})
    assert (mesh.devices, device_order(mesh).shape) == (1, ())
