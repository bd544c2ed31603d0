"""Memory of the fullest device of every configuration, by class."""

from dataclasses import dataclass

import numpy as np

from jaxpar.configurations.layer import Local, local
from jaxpar.configurations.layouts import Layouts
from jaxpar.configurations.shape import Numbers, Shape

_PARAM_BYTES = 2
_STATE_BYTES = 12
"""Of one parameter: a float32 copy and two moments (2205.05198, mixed precision)."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that holds most.

    Attributes:
        params: Parameters, two bytes each.
        gradients: Gradients.
        optimizer: Float32 copies and moments.
        activations: Saved for the backward pass.
        logits: Of one microbatch, in float32, and their gradient.
        working: One block that is recomputed, and gathered parameters of two blocks.
    """

    params: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    activations: np.ndarray
    logits: np.ndarray
    working: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The sum of all classes."""
        held = self.params + self.gradients + self.optimizer + self.activations
        return held + self.logits + self.working


def stage_layers(shape: Shape, layouts: Layouts) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of the fullest inner stage, and of the first and last stage.

    Where stages are uneven, the ends have one block less; where ends are balanced,
    embedding and output layer take the place of one block each.
    """
    extra = np.where(layouts.balanced_ends & (layouts.pipeline > 1), 2, 0)
    most = np.ceil((shape.layers + extra) / layouts.pipeline)
    least = np.floor((shape.layers + extra) / layouts.pipeline)
    return most, np.maximum(least - extra / 2, 0)


def stage_params(shape: Shape, layouts: Layouts) -> np.ndarray:
    """Parameters of the fullest stage on one device, before fsdp splits them."""
    most, ends = stage_layers(shape, layouts)
    whole = np.where(layouts.pipeline > 1, 1, np.where(shape.tied, 1, 2))
    inner = most * shape.layer_params
    outer = ends * shape.layer_params + whole * shape.embedding_params
    return np.maximum(np.where(layouts.pipeline > 2, inner, 0), outer) / layouts.tensor


def memory(shape: Shape, layouts: Layouts) -> Memory:
    """Memory of the fullest device."""
    part = local(shape, layouts)
    params = stage_params(shape, layouts)
    split = [np.where(layouts.zero >= stage, layouts.fsdp, 1) for stage in (1, 2, 3)]
    block = _block_bytes(shape, part)
    entry = 2.0 * part.resting * shape.width
    saved = np.select(
        [layouts.remat == 1, layouts.remat == 2, layouts.remat == 3],
        [block - _core_bytes(shape, part), entry, entry + _projected(shape, part)],
        block,
    )
    live = np.where(layouts.remat >= 2, block, 0.0)
    live = np.where(layouts.remat == 1, _core_bytes(shape, part), live)
    gathered = np.where(
        layouts.zero >= 3, 2 * _PARAM_BYTES * shape.layer_params / layouts.tensor, 0
    )
    logits = 8.0 * part.tokens * shape.vocab / layouts.tensor
    return Memory(
        params=_PARAM_BYTES * params / split[2],
        gradients=layouts.grad_bytes * params / split[1],
        optimizer=_STATE_BYTES * params / split[0],
        activations=saved * _layers_in_flight(shape, layouts),
        logits=np.where(layouts.pipeline > 1, 0.0, logits),
        working=live + gathered,
    )


def _layers_in_flight(shape: Shape, layouts: Layouts) -> np.ndarray:
    """Blocks times microbatches whose activations the first stage keeps.

    1F1B keeps min(stages, microbatches) of its own blocks, interleaving
    1 + (p-1)/(p v) times as much (2205.05198, sec. 4.2.3).
    """
    stages, chunks = layouts.pipeline, layouts.interleave
    most, _ = stage_layers(shape, layouts)
    extra = np.where(chunks > 1, 1 + (stages - 1) / (stages * chunks), 1.0)
    return most * np.minimum(stages * extra, layouts.microbatches)


def _projected(shape: Shape, part: Local) -> Numbers:
    """Queries, keys and values."""
    return 2.0 * part.tokens * shape.head_dim * (part.heads + 2 * part.kv_heads)


def _core_bytes(shape: Shape, part: Local) -> Numbers:
    """Scores that softmax, dropout and the product with values keep: 5 a s^2 b."""
    each = np.where(shape.flash, 0.0, 2 + np.where(shape.dropout, 3, 0))
    return each * part.examples * part.heads * part.sequence * shape.sequence


def _block_bytes(shape: Shape, part: Local) -> Numbers:
    """All that one block keeps of one microbatch (2205.05198, sec. 4.1).

    Of the stream: inputs of two norms, of attention and of the feed-forward network,
    two bytes each, and two masks. Inside: queries, keys, values, context, the inputs
    and the output of the nonlinearity.
    """
    stream = part.resting * shape.width * (8 + np.where(shape.dropout, 2, 0))
    heads = 2.0 * part.tokens * shape.head_dim * 2 * (part.heads + part.kv_heads)
    hidden = 2.0 * part.tokens * part.ffn * _kept_hidden(shape)
    statistics = np.where(shape.flash, 4.0, 0.0) * part.tokens * part.heads
    return stream + heads + hidden + statistics + _core_bytes(shape, part)


def _kept_hidden(shape: Shape) -> Numbers:
    return shape.hidden_matrices + 1
