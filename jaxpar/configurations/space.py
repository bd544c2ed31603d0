"""All configurations of a model, a batch and a number of devices."""

import numpy as np

from jaxpar.configurations.layouts import AXES, Layouts, layouts
from jaxpar.configurations.shape import Shape
from jaxpar.mesh import factorizations

_CHOICES = {
    "remat": (0, 1, 2),
    "zero": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "tensor_overlap": (0, 1, 2),
    "data_overlap": (False, True),
    "split_sends": (False, True),
}
_WITHOUT_AXIS = {
    "zero": "fsdp",
    "sequence_parallel": "tensor",
    "tensor_overlap": "tensor",
    "split_sends": "tensor",
}
"""Choices that change nothing where the axis has size 1."""


def space(
    shape: Shape, devices: int, batch: int, *, most_tensor: int | None = None
) -> Layouts:
    """Every configuration that divides the model and the batch without rest.

    Heads, key and value heads, hidden layers and tokens divide over their axes, layers
    over stages and chunks, the batch over replicas and microbatches; interleaving needs
    stages, and microbatches in multiples of them (2104.04473, sec. 2.2). Choices that
    change nothing are listed once.

    Args:
        shape: One model: its fields are numbers.
        devices: Of the machine.
        batch: Examples of one step.
        most_tensor: Largest tensor axis; None for no limit.
    """
    limits = {"tensor": most_tensor} if most_tensor else None
    rows: list[tuple[int, ...]] = []
    for sizes in factorizations(devices, AXES, at_most=limits):
        if _divides(shape, sizes):
            rows += _cuts(shape, sizes, batch)
    names = (*AXES, "interleave", "microbatch", "microbatches")
    columns = dict(
        zip(names, np.array(rows, int).reshape(-1, len(names)).T, strict=True)
    )
    grids = np.meshgrid(
        np.arange(len(rows)), *_CHOICES.values(), indexing="ij", sparse=False
    )
    which, *choices = (grid.ravel() for grid in grids)
    columns = {name: column[which] for name, column in columns.items()}
    columns |= dict(zip(_CHOICES, choices, strict=True))
    return layouts(**columns)[_distinct(columns)]


def _divides(shape: Shape, sizes: dict[str, int]) -> bool:
    tensor, sequence = sizes["tensor"], sizes["sequence"]
    split = (shape.heads, shape.kv_heads, shape.ffn, shape.sequence)
    even = all(value % tensor == 0 for value in split)
    return bool(
        even
        and shape.sequence % (sequence * tensor) == 0
        and shape.layers % sizes["pipeline"] == 0
    )


def _cuts(shape: Shape, sizes: dict[str, int], batch: int) -> list[tuple[int, ...]]:
    """Axes, interleaving, microbatch and microbatches of one mesh."""
    replicas = sizes["data"] * sizes["fsdp"]
    if batch % replicas:
        return []
    axes = tuple(sizes[axis] for axis in AXES)
    stages, share = sizes["pipeline"], batch // replicas
    blocks = int(shape.layers) // stages
    return [
        (*axes, chunks, size, share // size)
        for size in range(1, share + 1)
        if share % size == 0
        for chunks in range(1, blocks + 1)
        if blocks % chunks == 0
        and (chunks == 1 or (stages > 1 and share // size % stages == 0))
    ]


def _distinct(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Which configurations are not the same as another of the grid."""
    keep = np.ones(len(columns["data"]), bool)
    for name, axis in _WITHOUT_AXIS.items():
        keep &= (columns[axis] > 1) | (columns[name] == _CHOICES[name][0])
    replicas = columns["data"] * columns["fsdp"]
    keep &= (replicas > 1) | ~columns["data_overlap"]
    keep &= (columns["pipeline"] > 1) | ~columns["split_sends"]
    keep &= ~columns["sequence_parallel"] | ~columns["split_sends"]
    return keep
