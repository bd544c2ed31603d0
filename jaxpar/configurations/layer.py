"""Time of one block of one microbatch on one device, by part."""

from dataclasses import dataclass

import numpy as np

from jaxpar.configurations.kernels import Kernels
from jaxpar.configurations.layouts import Layouts
from jaxpar.configurations.links import Links
from jaxpar.configurations.shape import Numbers, Shape

_OPERATORS = 45
"""Kernels that the host starts for one block forward: eager Megatron-LM launches
products, layer norms, softmax, dropout, transposes, casts; the backward has twice."""

_FLASH_BACKWARD = 2.5
"""Products of fused attention, backward over forward: five over two."""


@dataclass(frozen=True)
class Local:
    """What one device holds of one block and microbatch.

    Attributes:
        tokens: Of one microbatch, on this device.
        sequence: Tokens of one example, on this device.
        examples: Of one microbatch.
        resting: Tokens where the residual stream rests: split over tensor or not.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        ffn: Columns of one hidden matrix.
    """

    tokens: Numbers
    sequence: Numbers
    examples: Numbers
    resting: Numbers
    heads: Numbers
    kv_heads: Numbers
    ffn: Numbers


def local(shape: Shape, layouts: Layouts) -> Local:
    """What each configuration leaves to one device."""
    sequence = shape.sequence / layouts.sequence
    tokens = layouts.microbatch * sequence
    split = np.where(layouts.sequence_parallel, layouts.tensor, 1)
    return Local(
        tokens=tokens,
        sequence=sequence,
        examples=layouts.microbatch,
        resting=tokens / split,
        heads=np.ceil(shape.heads / layouts.tensor),
        kv_heads=np.ceil(shape.kv_heads / layouts.tensor),
        ffn=np.ceil(shape.ffn / layouts.tensor),
    )


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block and microbatch.

    Attributes:
        forward: Computation of the forward pass.
        backward: Computation of the backward pass, nothing recomputed.
        again: Computation that is done a second time.
        tensor: Exposed collectives of the tensor axis.
        sequence: Exposed collectives of the sequence axis.
    """

    forward: np.ndarray
    backward: np.ndarray
    again: np.ndarray
    tensor: np.ndarray
    sequence: np.ndarray


def block_time(
    shape: Shape, layouts: Layouts, kernels: Kernels, links: Links, dtype: str
) -> BlockTime:
    """Time of one block by part."""
    part = local(shape, layouts)
    inputs, weights = _products(shape, part, kernels, dtype)
    core, core_back = _attention(shape, part, layouts, kernels)
    point, point_back = _pointwise(shape, part)
    host = kernels.dispatch_s * _OPERATORS
    forward = np.maximum(
        inputs + core + kernels.pointwise * kernels.traffic_s(point), host
    )
    back_inputs = _back_products(shape, part, kernels, dtype)
    backward = np.maximum(
        back_inputs
        + weights
        + core_back
        + kernels.pointwise * kernels.traffic_s(point_back),
        2 * host,
    )
    again = _again(shape, part, layouts, kernels, (forward, core), dtype)
    tensor = _tensor_s(shape, part, layouts, links, (inputs, weights), kernels)
    sequence = _sequence_s(shape, part, layouts, links, core, kernels)
    return BlockTime(forward, backward, again, tensor, sequence)


def _again(
    shape: Shape,
    part: Local,
    layouts: Layouts,
    kernels: Kernels,
    passes: tuple[Numbers, Numbers],
    dtype: str,
) -> np.ndarray:
    """What the backward pass computes a second time.

    A compiler that sees the whole step leaves out the last product of a block: no
    gradient reads its result.
    """
    forward, core = passes
    projections, _, _, last = (
        kernels.matmul_s(part.tokens, columns, contraction, dtype=dtype)
        for columns, contraction in _matrices(shape, part)
    )
    whole = forward - (last if kernels.prunes else 0.0)
    kept = np.select(
        [layouts.remat == 1, layouts.remat == 2, layouts.remat == 3],
        [np.where(shape.flash, 0.0, core), whole, whole - projections],
        0.0,
    )
    return np.asarray(kept)


def _products(
    shape: Shape, part: Local, kernels: Kernels, dtype: str
) -> tuple[Numbers, Numbers]:
    """Products with weights: forward, and those of the weights' gradients."""
    forward, weights = 0.0, 0.0
    for columns, contraction in _matrices(shape, part):
        forward += kernels.matmul_s(part.tokens, columns, contraction, dtype=dtype)
        weights += kernels.matmul_s(contraction, columns, part.tokens, dtype=dtype)
    return forward, weights


def _back_products(shape: Shape, part: Local, kernels: Kernels, dtype: str) -> Numbers:
    """Products of the inputs' gradients."""
    return sum(
        kernels.matmul_s(part.tokens, contraction, columns, dtype=dtype)
        for columns, contraction in _matrices(shape, part)
    )


def _matrices(shape: Shape, part: Local) -> tuple[tuple[Numbers, Numbers], ...]:
    """Columns and rows of the four weight matrices of a block, on one device."""
    projected = (part.heads + 2 * part.kv_heads) * shape.head_dim
    return (
        (projected, shape.width),
        (shape.width, part.heads * shape.head_dim),
        (part.ffn * shape.hidden_matrices, shape.width),
        (shape.width, part.ffn),
    )


def _attention(
    shape: Shape, part: Local, layouts: Layouts, kernels: Kernels
) -> tuple[Numbers, Numbers]:
    """The core of attention, forward and backward: scores, softmax, values."""
    groups = part.examples * part.heads
    flops = 4.0 * groups * part.sequence * shape.sequence * shape.head_dim
    peak = kernels.chip.flops_per_s("bfloat16")
    fused = flops / 2 / (peak * kernels.flash_efficiency) + kernels.gap_s
    scores = kernels.matmul_s(part.sequence, shape.sequence, shape.head_dim, groups)
    values = kernels.matmul_s(part.sequence, shape.head_dim, shape.sequence, groups)
    turned = kernels.matmul_s(shape.sequence, shape.head_dim, part.sequence, groups)
    pairs = 1.0 * groups * part.sequence * shape.sequence
    # Softmax reads and writes 2 bytes; dropout too, and a mask of 1.
    dropout = np.where(shape.dropout, 5, 0)
    forward = scores + values + kernels.traffic_s(pairs * (4 + dropout))
    backward = scores + values + 2 * turned + kernels.traffic_s(pairs * (6 + dropout))
    flash = np.asarray(shape.flash)
    return (
        np.where(flash, fused, forward),
        np.where(flash, _FLASH_BACKWARD * fused, backward),
    )


def _pointwise(shape: Shape, part: Local) -> tuple[Numbers, Numbers]:
    """Bytes that pointwise kernels and norms read and write, forward and backward.

    Two bytes an element, masks one. Forward, per element of the residual stream: two
    norms 4 each, two sums of bias, dropout and residual 7 each. Backward: norms 10
    (their weights' gradients read again), dropout 5, sums of gradients 6, each twice.
    """
    mask = np.where(shape.dropout, 1, 0)
    stream = part.resting * shape.width
    inner = part.tokens * part.ffn
    heads = part.tokens * part.heads * shape.head_dim
    kv = part.tokens * part.kv_heads * shape.head_dim
    matrices = shape.hidden_matrices
    forward = stream * (20 + 2 * mask) + inner * (2 + 2 * matrices) + heads * 4
    backward = (
        stream * (40 + 2 * mask)
        + inner * (2 + 4 * matrices + 2 * matrices)
        + heads * 10
        + kv * 4
    )
    return forward, backward


def _tensor_s(
    shape: Shape,
    part: Local,
    layouts: Layouts,
    links: Links,
    products: tuple[Numbers, Numbers],
    kernels: Kernels,
) -> np.ndarray:
    """Exposed collectives of the tensor axis (2104.04473, 2205.05198, sec. 4.2).

    Two all-reduces forward and two backward, or as many gathers and scatters each.
    Megatron-LM hides the backward all-reduce of a column-parallel product behind the
    gradient of its weights; with sequence parallelism it gathers the saved input
    again, hides that and the scatter, and leaves the gather of the row-parallel one.
    """
    one = links.tensor.gather(2.0 * part.tokens * shape.width)
    parallel = np.asarray(layouts.sequence_parallel)
    passes = np.where(layouts.remat >= 2, 2, 1)
    early, late = np.where(parallel, 2 * one, 0.0), 4 * one
    # Two of the four products are column-parallel; a scatter hides behind the
    # gradient of their weights, a gather behind that of their inputs.
    room = kernels.hidden * (products[1] + np.where(parallel, products[0], 0.0)) / 2
    behind = np.maximum(late - room, 0.0)
    # Where every product hides its own collectives, those that the compiler starts
    # early hide; half of them are gathers, half are sums.
    wide = kernels.hidden * (passes + 1) * products[0]
    all_kinds = "reduce-scatter" in kernels.chip.overlaps
    hideable = (2 if all_kinds else 1) * 2 * one * (passes + 1)
    exposed = np.maximum(hideable - wide, 0.0)
    rest = 4 * one * (passes + 1) - hideable
    if kernels.prunes:
        rest = rest - one * (passes - 1)
    plain = 4 * passes * one + early
    return np.select(
        [layouts.tensor == 1, layouts.tensor_overlap == 0, layouts.tensor_overlap == 1],
        [0.0, plain + late, plain + behind],
        exposed + rest,
    )


def _sequence_s(
    shape: Shape,
    part: Local,
    layouts: Layouts,
    links: Links,
    core: Numbers,
    kernels: Kernels,
) -> np.ndarray:
    """Exposed moves of keys and values around the sequence axis (ring attention)."""
    whole = 4.0 * part.tokens * layouts.sequence * part.kv_heads * shape.head_dim
    one = links.sequence.gather(whole)
    passes = 3 + np.where(layouts.remat >= 2, 1, 0)
    exposed = np.maximum(one - kernels.hidden * core, 0.0)
    return np.where(layouts.sequence > 1, passes * exposed, 0.0)
