"""Prices of collectives along the axes of every configuration."""

from dataclasses import dataclass, fields

import numpy as np

from jaxpar.configurations.layouts import AXES, Layouts
from jaxpar.configurations.shape import Numbers
from jaxpar.hardware import Topology
from jaxpar.mesh import LogicalMesh, logical_mesh


@dataclass(frozen=True)
class Link:
    """One axis, or several as one group; arrays along the configurations.

    Attributes:
        gather_rate: Seconds per byte of the whole that an all-gather or a
            reduce-scatter takes; an all-reduce takes twice that.
        gather_s: Latency of one.
        send_rate: Seconds per byte from one device to the next.
        send_s: Latency of that.
    """

    gather_rate: np.ndarray
    gather_s: np.ndarray
    send_rate: np.ndarray
    send_s: np.ndarray

    def gather(self, whole_bytes: Numbers) -> np.ndarray:
        """Seconds of an all-gather or a reduce-scatter of a whole of some bytes."""
        return whole_bytes * self.gather_rate + self.gather_s

    def send(self, n_bytes: Numbers) -> np.ndarray:
        """Seconds to pass bytes to the next device."""
        return n_bytes * self.send_rate + self.send_s


@dataclass(frozen=True)
class Links:
    """The links that the communication of a step uses.

    Attributes:
        tensor: The tensor axis.
        sequence: The sequence axis.
        fsdp: The fsdp axis.
        data: The data axis.
        pipeline: The pipeline axis.
    """

    tensor: Link
    sequence: Link
    fsdp: Link
    data: Link
    pipeline: Link


def links(topology: Topology, layouts: Layouts) -> Links:
    """The links behind the axes of every configuration.

    Raises:
        MeshError: if the axes of a configuration do not multiply out to the devices.
    """
    code = np.zeros(len(layouts), np.int64)
    for axis in AXES:
        code = code * (topology.devices + 1) + getattr(layouts, axis)
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    tables = {axis: np.empty((4, len(first))) for axis in AXES}
    for column, row in enumerate(first):
        sizes = {axis: int(getattr(layouts, axis)[row]) for axis in AXES}
        mesh = logical_mesh(topology, sizes)
        for axis in AXES:
            tables[axis][:, column] = _prices(mesh, axis)
    return Links(
        **{field.name: Link(*tables[field.name][:, which]) for field in fields(Links)}
    )


def _prices(mesh: LogicalMesh, axis: str) -> tuple[float, float, float, float]:
    """The fields of `Link`: a hierarchy of rings, slow links with the smallest share.

    A ring gathers V bytes over n devices in V (n-1)/n / bandwidth (Thakur et al.
    2005; Patarasuk and Yuan 2009).
    """
    link = mesh.link(axis)
    if link.size == 1:
        return 0.0, 0.0, 0.0, 0.0
    levels = sorted(link.levels, key=lambda level: -level.bytes_per_s)
    share, rate, latency = 1.0, 0.0, 0.0
    for level in levels:
        rate += share * (level.size - 1) / level.size / level.bytes_per_s
        latency += level.hops * level.latency_s
        share /= level.size
    return rate, latency, 1 / link.one_way_bytes_per_s, link.latency_s
