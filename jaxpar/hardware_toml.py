"""Hardware tables in TOML: chips and links of families and of users' machines."""

import math
from collections.abc import Mapping
from dataclasses import replace

from jaxpar.hardware import Chip, Family, Link, Topology
from jaxpar.strict_toml import StrictTable

_DTYPES = (
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "float8",
    "float4",
    "int8",
    "uint8",
    "int4",
    "uint4",
)
_OVERLAPPING = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_LINK_KINDS = ("torus", "switch", "network")


def read_topology(root: StrictTable) -> Topology:
    """One machine: tables `topology`, `chip`, `links.NAME` and `network`.

    Raises:
        MeshError: if a key is missing, unknown, out of range or in an unknown unit,
            or if the shape does not multiply out; with the path of the key.
    """
    head = root.child("topology")
    slices, shape = head.count("slices"), head.counts("shape")
    _check_devices(head, slices, shape)
    chip = _read_chip(root)
    topology = Topology(
        name=head.text("name"),
        chip=chip,
        slices=slices,
        shape=shape,
        links=_read_dims(head, _read_links(root), len(shape)),
        network=_read_network(root),
        memory_bytes=chip.usable_bytes,
    )
    root.close()
    return topology


def _check_devices(head: StrictTable, slices: int, shape: tuple[int, ...]) -> None:
    devices, found = head.count("devices"), slices * math.prod(shape)
    if found != devices:
        raise head.fail(
            "shape",
            f"is {list(shape)}: {slices} slices of it make {found} devices, "
            f"but {head.path('devices')} is {devices}",
        )


def _read_dims(
    head: StrictTable, links: dict[str, Link], rank: int
) -> tuple[Link, ...]:
    names, wraps = head.texts("links"), head.flags("wrap")
    for key, given in (("links", names), ("wrap", wraps)):
        if len(given) != rank:
            raise head.fail(key, f"has {len(given)} entries for {rank} dims of shape")
    for i, (name, wrap) in enumerate(zip(names, wraps, strict=True)):
        if name not in links:
            known = ", ".join(links)
            raise head.fail(f"links[{i}]", f"names {name!r}", f"known links: {known}")
        if wrap and links[name].kind != "torus":
            raise head.fail(f"wrap[{i}]", f"is true, but {name} is no torus link")
    return tuple(
        replace(links[name], wrap=wrap) for name, wrap in zip(names, wraps, strict=True)
    )


def read_family(root: StrictTable) -> Family:
    """One packaged family: tables `family`, `chip`, `links.NAME` and `network`."""
    head = root.child("family")
    links = _read_links(root)
    inner = head.text("inner") if head.has("inner") else None
    family = Family(
        name=head.text("name"),
        aliases=head.texts("aliases"),
        device_kinds=head.texts("device_kinds"),
        chip=_read_chip(root),
        rank=head.count("rank"),
        counts=head.choice("counts", ("chips", "devices")),
        outer=links[head.text("outer")],
        inner=links[inner] if inner else None,
        inner_size=head.count("inner_size") if inner else 1,
        network=_read_network(root),
        pod=head.counts("pod") if head.has("pod") else (),
        wrap=head.choice("wrap", ("pod", "cubes", "never")),
        examples=head.texts("examples"),
    )
    head.text("source")
    root.close()
    return family


def _read_chip(root: StrictTable) -> Chip:
    table = root.child("chip")
    compute, memory = table.child("compute"), table.child("memory")
    peaks = compute.quantities("peak", "flops_per_s")
    _check_dtypes(compute, peaks)
    hbm_bytes, usable_bytes = memory.whole_bytes("hbm"), memory.whole_bytes("usable")
    if usable_bytes > hbm_bytes:
        raise memory.fail(
            "usable", f"is {usable_bytes} bytes, more than the {hbm_bytes} of hbm"
        )
    rows, columns, contraction = compute.counts("matmul_tile", entries=3)
    layout_rows, layout_columns = memory.counts("layout_tile", entries=2)
    return Chip(
        name=table.text("name"),
        peak_flops_per_s=peaks,
        matmul_efficiency=compute.fraction("matmul_efficiency"),
        matmul_tile=(rows, columns, contraction),
        overhead_s=compute.quantity("overhead", "s", zero=True),
        hbm_bytes=hbm_bytes,
        usable_bytes=usable_bytes,
        hbm_bytes_per_s=memory.quantity("bandwidth", "bytes_per_s"),
        hbm_efficiency=memory.fraction("efficiency"),
        layout_tile=(layout_rows, layout_columns),
        reduce_scatter=table.flag("reduce_scatter"),
        merges_partial_sums=table.flag("merges_partial_sums"),
        overlaps=_read_overlaps(table),
        source=f"{compute.text('source')}; {memory.text('source')}",
    )


def _read_overlaps(table: StrictTable) -> tuple[str, ...]:
    kinds = table.texts("overlaps")
    for i, kind in enumerate(kinds):
        if kind not in _OVERLAPPING:
            known = ", ".join(_OVERLAPPING)
            raise table.fail(f"overlaps[{i}]", f"is {kind!r}", f"kinds are {known}")
    return kinds


def _check_dtypes(compute: StrictTable, peaks: Mapping[str, float]) -> None:
    for dtype in ("bfloat16", "float32"):
        if dtype not in peaks:
            raise compute.fail("peak", f"lacks {dtype}", "list bfloat16 and float32")
    for dtype in peaks:
        if dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise compute.fail("peak", f"lists {dtype!r}", f"dtypes are {known}")


def _read_links(root: StrictTable) -> dict[str, Link]:
    return {
        name: _read_link(table, name, table.choice("kind", _LINK_KINDS))
        for name, table in root.children("links").items()
    }


def _read_network(root: StrictTable) -> Link:
    table = root.child("network")
    return _read_link(table, table.text("name"), "network")


def _read_link(table: StrictTable, name: str, kind: str) -> Link:
    return Link(
        name=name,
        kind=kind,
        bytes_per_s=table.quantity("one_way", "bytes_per_s"),
        latency_s=table.quantity("latency", "s", zero=True),
        efficiency=table.fraction("efficiency"),
        wrap=False,
        source=table.text("source"),
    )
