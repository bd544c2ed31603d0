"""How a training step is laid out over a machine: one row per configuration."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from jaxpar.errors import MeshError

REMAT = ("none", "selective", "full", "projections")
"""Index: what `Layouts.remat` holds. Selective recomputes the core of attention,
projections all but queries, keys and values."""

AXES = ("pipeline", "data", "fsdp", "sequence", "tensor")
"""Axes of the mesh, outermost first: the order of Megatron-LM's ranks."""


@dataclass(frozen=True)
class Layouts:
    """Configurations; all fields are arrays of one length.

    Attributes:
        data: Replicas; their gradients are all-reduced.
        fsdp: Devices that split the batch and, to the degree of `zero`, the state.
        zero: What fsdp splits: 0 nothing, 1 optimizer state, 2 gradients too,
            3 parameters too (Rajbhandari et al. 2020).
        tensor: Devices that split heads and hidden layers.
        sequence: Devices that split tokens (context parallelism).
        sequence_parallel: Whether tokens are split over `tensor` where heads and
            hidden layers are not (2205.05198).
        pipeline: Stages.
        interleave: Chunks of layers per stage (2104.04473).
        microbatch: Examples of one microbatch on one device.
        microbatches: Microbatches of one step.
        remat: Index into `REMAT`.
        tensor_overlap: Collectives of the tensor axis: 0 exposed, 1 hidden behind
            the products of the backward pass, 2 behind those of both passes.
        data_overlap: Whether gradients are reduced once a step behind computation;
            what stage 3 gathers for every block always is.
        split_sends: Whether a stage sends each activation once, split over tensor.
        balanced_ends: Whether embedding and output layer count as a layer each when
            layers are cut into stages.
        grad_bytes: Of one element of the gradients that are reduced.
    """

    data: np.ndarray
    fsdp: np.ndarray
    zero: np.ndarray
    tensor: np.ndarray
    sequence: np.ndarray
    sequence_parallel: np.ndarray
    pipeline: np.ndarray
    interleave: np.ndarray
    microbatch: np.ndarray
    microbatches: np.ndarray
    remat: np.ndarray
    tensor_overlap: np.ndarray
    data_overlap: np.ndarray
    split_sends: np.ndarray
    balanced_ends: np.ndarray
    grad_bytes: np.ndarray

    def __post_init__(self):
        lengths = {np.shape(getattr(self, field.name)) for field in fields(self)}
        if len(lengths) != 1 or len(next(iter(lengths))) != 1:
            raise MeshError(
                f"configurations need arrays of one length, found shapes {lengths}",
                hint="make them with configurations.layouts(...)",
            )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, rows: slice | np.ndarray) -> "Layouts":
        """Some of the configurations."""
        return Layouts(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @property
    def batch(self) -> np.ndarray:
        """Examples of one step."""
        return self.data * self.fsdp * self.microbatch * self.microbatches

    @property
    def devices(self) -> np.ndarray:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.tensor * self.sequence * self.pipeline


_DEFAULTS = {field.name: 1 for field in fields(Layouts)} | {
    "zero": 0,
    "sequence_parallel": False,
    "remat": 0,
    "tensor_overlap": 0,
    "data_overlap": False,
    "split_sends": True,
    "balanced_ends": False,
    "grad_bytes": 2,
}


def layouts(**columns: ArrayLike) -> Layouts:
    """Configurations from columns; scalars count for all, missing ones are plain.

    Raises:
        MeshError: if a column is unknown, or their lengths do not agree.
    """
    unknown = sorted(set(columns) - set(_DEFAULTS))
    if unknown:
        raise MeshError(
            f"configurations have no {', '.join(unknown)}",
            hint=f"columns are {', '.join(_DEFAULTS)}",
        )
    values = {name: columns.get(name, value) for name, value in _DEFAULTS.items()}
    try:
        arrays = np.broadcast_arrays(*(np.atleast_1d(v) for v in values.values()))
    except ValueError as error:
        raise MeshError(f"columns of configurations do not agree: {error}") from error
    return Layouts(**dict(zip(values, arrays, strict=True)))
