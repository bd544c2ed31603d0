"""Texts that this machine does not write: TPU code, asynchronous pairs, groups."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hlo_texts import ASYNC, NO_PERCENT, TPU_SCAN, WINDOWED
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.errors import MeshError
from jaxpar.hlo import HloCollective, axes_crossed, axes_of, collectives
from jaxpar.hlo.groups import parse_groups
from jaxpar.hlo.text import shape_bytes

HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
STRIDED = ((0, 4), (1, 5), (2, 6), (3, 7))


def found(text: str) -> list[tuple[str, int, int]]:
    return [(c.kind, c.bytes, c.executions) for c in collectives(text)]


# ---- programs


def test_tpu_scan_without_a_trip_count():
    """The bound is carried by the loop; one gather is spread over three fusions."""
    gather, scatter = collectives(TPU_SCAN)
    assert gather == HloCollective(
        kind="all-gather",
        bytes=512 * 512 * 2,
        groups=STRIDED,
        executions=3,
        name="all-gather.32",
        op_name="jit(step)/while/body/gather",
    )
    assert scatter == HloCollective(
        kind="reduce-scatter",
        bytes=2 * 512 * 512 * 2,
        groups=STRIDED,
        executions=3,
        name="all-reduce.13",
        op_name="jit(step)/while/body/dot_general",
    )


def test_windowed_loop_counts_in_steps_of_two():
    assert found(WINDOWED) == [("collective-permute", 16 * 32 * 4, 4)]


@pytest.mark.parametrize(
    ("direction", "bound", "step", "trips"),
    [
        ("LT", 7, "add", 4),
        ("LE", 8, "add", 5),
        ("NE", 6, "add", 3),
        ("GT", -5, "subtract", 3),
        ("GE", 0, "subtract", 1),
        ("LT", 0, "add", 0),
    ],
)
def test_trip_counts(direction: str, bound: int, step: str, trips: int):
    text = (
        WINDOWED.replace("direction=LT", f"direction={direction}")
        .replace("constant(8)", f"constant({bound})")
        .replace("add(%i", f"{step}(%i")
    )
    assert sum(c.executions for c in collectives(text)) == trips


def test_loop_of_unknown_length_counts_once():
    text = WINDOWED.replace("constant(0)", "parameter(1)")
    (one,) = collectives(text)
    assert (one.executions, one.exact) == (1, False)


SUMS = """HloModule sums, num_partitions=8

ENTRY %main (x: f32[16]) -> (f32[16], f32[16]) {
  %x = f32[16]{0} parameter(0)
  %a = f32[16]{0} all-reduce(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%s
  %b = f32[16]{0} all-reduce(%a), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%s
  %c = f32[16]{0} all-reduce(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%s
  %d = f32[16]{0} all-reduce(%c), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%s
  %e = f32[16]{0} add(%c, %d)
  ROOT %out = (f32[16], f32[16]) tuple(%b, %e)
}
"""


def test_sums_of_sums_fold_if_nobody_reads_in_between():
    assert len(collectives(SUMS)) == 4
    joint, first, second = collectives(SUMS, folds=True)
    assert (joint.name, joint.groups) == ("b", ((0, 1, 4, 5), (2, 3, 6, 7)))
    assert joint.bytes == first.bytes == 64
    assert (first.name, second.name) == ("c", "d")


def test_asynchronous_pairs_count_once():
    assert found(ASYNC) == [
        ("all-gather", 64 * 8 * 4 + 16 * 2, 1),
        ("all-reduce", 16 * 8 * 4, 1),
        ("all-gather", 32 * 8 * 4, 1),
        ("reduce-scatter", 64 * 8 * 4, 1),
    ]


def test_short_form_without_groups():
    (one,) = collectives(NO_PERCENT)
    assert one.bytes == 3 * 5 * 4 + 7
    assert one.groups == ((0, 1, 2, 3),)


def test_text_without_entry():
    with pytest.raises(ValueError, match="ENTRY"):
        collectives("HloModule empty\n")


# ---- bytes


@pytest.mark.parametrize(
    ("kind", "wire"),
    [
        ("all-gather", 300),
        ("all-reduce", 600),
        ("reduce-scatter", 300),
        ("all-to-all", 300),
        ("collective-permute", 400),
        ("collective-broadcast", 400),
    ],
)
def test_wire_bytes_of_a_ring_of_four(kind: str, wire: float):
    one = HloCollective(kind, 400, ((0, 1, 2, 3),), 5, "x")
    assert one.wire_bytes == wire
    assert one.total_wire_bytes == 5 * wire
    alone = HloCollective(kind, 400, ((0,), (1,)), 5, "x")
    assert alone.wire_bytes == 0


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("bf16[3,5]{1,0:T(8,128)(2,1)S(1)}", 30),
        ("(f32[2], /*index=1*/(s8[3], pred[4]))", 15),
        ("f8e4m3fn[7]", 7),
        ("u4[3]", 3),
        ("c64[2]", 16),
        ("f32[<=8,2]", 64),
        ("token[]", 0),
        ("f32[0,4]", 0),
    ],
)
def test_shape_bytes(shape: str, size: int):
    assert shape_bytes(shape) == size


# ---- groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", HALVES),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", HALVES),
        ("[4,2]<=[2,4]T(1,0)", STRIDED),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", HALVES),
        ("mesh['a'=2,'b'=4] {'a'}", STRIDED),
        ("mesh[a=2,b=4] {b,a}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['a'=8,'b'=1] {'a'}", (tuple(range(8)),)),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", HALVES),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((3, 1), (2, 0))),
        ("mesh['a'=8] {'a':(1)2}", STRIDED),
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        ("mesh['a'=4,'b'=2] {'b','a':(2)2}", ((0, 2, 1, 3), (4, 6, 5, 7))),
    ],
)
def test_group_syntaxes(text: str, groups: tuple[tuple[int, ...], ...]):
    attributes = f", channel_id=1, replica_groups={text}, dimensions={{0}}"
    assert parse_groups(attributes, 8) == groups


def test_pairs_of_a_permutation():
    pairs = parse_groups("channel_id=1, source_target_pairs={{0,1},{1,0},{2,2}}", 4)
    assert pairs == ((0, 1), (1, 0), (2, 2))
    assert axes_crossed(pairs, {"data": 2, "tensor": 2}) == ("tensor",)


MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: {f"axis{i}": n for i, n in enumerate(sizes)}
)


@given(MESHES, st.data())
def test_axes_of_finds_the_axes_again(mesh: dict[str, int], data: st.DataObject):
    wide = data.draw(st.permutations([axis for axis, n in mesh.items() if n > 1]))
    axes = wide[: data.draw(st.integers(0, len(wide)))]
    ids = data.draw(st.permutations(range(math.prod(mesh.values()))))
    order = list(mesh)
    others = [a for a in order if a not in axes]
    grid = np.array(ids).reshape(tuple(mesh.values()))
    grid = grid.transpose([order.index(a) for a in (*others, *axes)])
    rows = grid.reshape(-1, math.prod(mesh[a] for a in axes))
    groups = tuple(map(tuple, rows.tolist()))
    expected = tuple(axis for axis in mesh if axis in axes)
    assert axes_of(groups, mesh, ids) == expected
    assert axes_crossed(groups, mesh, ids) == expected


@pytest.mark.parametrize("find", [axes_of, axes_crossed])
def test_device_that_the_mesh_lacks(find: Callable):
    with pytest.raises(MeshError, match="device 9 of a replica group"):
        find(((0, 9),), {"data": 8})


def test_groups_of_half_an_axis():
    halves = ((0, 1), (2, 3))
    assert axes_of(halves, {"data": 4}) is None
    assert axes_crossed(halves, {"data": 4}) == ("data",)
    assert axes_of(((0, 3), (1, 2)), {"a": 2, "b": 2}) is None
