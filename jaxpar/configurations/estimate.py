"""Step time, utilisation and memory of whole training configurations."""

from dataclasses import dataclass

import numpy as np

from jaxpar.configurations.chips import kernels as chip_kernels
from jaxpar.configurations.kernels import Kernels
from jaxpar.configurations.layer import BlockTime, block_time, local
from jaxpar.configurations.layouts import Layouts
from jaxpar.configurations.links import Links, links
from jaxpar.configurations.memory import Memory, memory, stage_layers, stage_params
from jaxpar.configurations.shape import Numbers, Shape
from jaxpar.hardware import Topology

_VOCAB_TILE = 128
"""Implementations pad the vocabulary to a multiple of this on every device."""

_LOSS_BYTES = 52
"""Per logit of an eager cross-entropy: cast to float32, maximum, shift, exponential,
sum, division forward; scale and cast back backward."""

_OPTIMIZER_BYTES = 56
"""Per parameter of an eager mixed-precision Adam: gradients to float32, check, norm
and clip 28; moments and copy 28 (float32 gradient, copy, two moments read; three
written); cast 2 to 6 more."""


@dataclass(frozen=True)
class Seconds:
    """Parts of a step, one row per configuration; they add up to the step.

    Attributes:
        compute: Of the stage with most work, for all its microbatches.
        recompute: What it computes a second time.
        ends: What embedding and output layer add to that stage.
        tensor: Exposed collectives of the tensor axis.
        sequence: Exposed moves along the sequence axis.
        fsdp: Exposed gathers of parameters and scatters of gradients.
        data: Exposed reductions of gradients over replicas.
        pipeline: Exposed sends between stages.
        bubble: Waiting for the pipeline to fill and to drain.
        optimizer: The update.
    """

    compute: np.ndarray
    recompute: np.ndarray
    ends: np.ndarray
    tensor: np.ndarray
    sequence: np.ndarray
    fsdp: np.ndarray
    data: np.ndarray
    pipeline: np.ndarray
    bubble: np.ndarray
    optimizer: np.ndarray

    @property
    def step(self) -> np.ndarray:
        """The whole step."""
        return (
            self.compute
            + self.recompute
            + self.ends
            + self.tensor
            + self.sequence
            + self.fsdp
            + self.data
            + self.pipeline
            + self.bubble
            + self.optimizer
        )


@dataclass(frozen=True)
class Estimate:
    """What is predicted of every configuration.

    Attributes:
        seconds: Of one step, by part.
        memory: Bytes of the fullest device, by class.
        fits: Whether they are within the topology's limit.
        mfu: Model FLOPs over what the chips could do, attention counted in full.
        hfu: The same with recomputed FLOPs.
    """

    seconds: Seconds
    memory: Memory
    fits: np.ndarray
    mfu: np.ndarray
    hfu: np.ndarray


def evaluate(
    shape: Shape,
    layouts: Layouts,
    topology: Topology,
    *,
    dtype: str = "bfloat16",
    kernels: Kernels | None = None,
) -> Estimate:
    """Predicts every configuration; rows do not influence each other.

    Args:
        shape: The model; its fields may be arrays along the configurations.
        layouts: The configurations.
        topology: The machine; every configuration uses all its devices.
        dtype: Of the products with weights.
        kernels: Constants of the chip; by default those of `chips.KERNELS`.

    Raises:
        MeshError: if the axes of a configuration do not multiply out to the devices,
            or the chip's kernels are not known.
    """
    kernels = kernels or chip_kernels(topology)
    seconds = step_seconds(shape, layouts, kernels, links(topology, layouts), dtype)
    used = memory(shape, layouts)
    flops = shape.model_flops(layouts.batch)
    again = np.select(
        [layouts.remat >= 2, layouts.remat == 1],
        [
            (flops - 6.0 * layouts.batch * shape.sequence * shape.embedding_params) / 3,
            shape.layers * shape.attention_flops(layouts.batch),
        ],
        0.0,
    )
    peak = seconds.step * topology.devices * topology.chip.flops_per_s(dtype)
    return Estimate(
        seconds=seconds,
        memory=used,
        fits=used.total <= topology.memory_bytes,
        mfu=flops / peak,
        hfu=(flops + again) / peak,
    )


def step_seconds(
    shape: Shape, layouts: Layouts, kernels: Kernels, wires: Links, dtype: str
) -> Seconds:
    """Time of one step, by part."""
    block = block_time(shape, layouts, kernels, wires, dtype)
    many, count = layouts.microbatches, _stage(shape, layouts, kernels, block, dtype)
    layers, ends, others = count
    send = _send_s(shape, layouts, wires)
    stages, chunks = layouts.pipeline, layouts.interleave
    fill = (others + (stages - 1) * 2 * send) / chunks
    # Only computation hides what crosses the links.
    busy = block.forward + block.backward + block.again
    fsdp = _fsdp_s(shape, layouts, kernels, wires, busy)
    return Seconds(
        compute=many * layers * (block.forward + block.backward),
        recompute=many * layers * block.again,
        ends=many * ends,
        tensor=many * layers * block.tensor,
        sequence=many * layers * block.sequence,
        fsdp=fsdp,
        data=_data_s(shape, layouts, kernels, wires, layers * busy),
        pipeline=many * chunks * 2 * send,
        bubble=np.where(stages > 1, fill, 0.0),
        optimizer=np.asarray(_optimizer_s(shape, layouts, kernels)),
    )


def _stage(
    shape: Shape, layouts: Layouts, kernels: Kernels, block: BlockTime, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The slowest stage: its blocks, and what ends add; and all others' seconds.

    One microbatch passes all stages once, and the slowest sets the pace of the rest:
    a step takes m times the slowest and once all the others.
    """
    once = block.forward + block.backward + block.again + block.tensor + block.sequence
    first, last = _ends_s(shape, layouts, kernels, dtype)
    most, outer = stage_layers(shape, layouts)
    one = layouts.pipeline == 1
    ends = np.where(one, first + last, np.maximum(last, first))
    at_end = one | (outer * once + ends > most * once)
    layers = np.where(at_end, np.where(one, shape.layers, outer), most)
    slowest = layers * once + np.where(at_end, ends, 0.0)
    total = shape.layers * once + first + last
    return layers, np.where(at_end, ends, 0.0), np.maximum(total - slowest, 0.0)


def _ends_s(
    shape: Shape, layouts: Layouts, kernels: Kernels, dtype: str
) -> tuple[Numbers, Numbers]:
    """Embedding, and output layer with loss, of one microbatch, both passes."""
    part = local(shape, layouts)
    columns = _VOCAB_TILE * np.ceil(shape.vocab / (layouts.tensor * _VOCAB_TILE))
    product = (
        kernels.matmul_s(part.tokens, columns, shape.width, dtype=dtype)
        + kernels.matmul_s(part.tokens, shape.width, columns, dtype=dtype)
        + kernels.matmul_s(shape.width, columns, part.tokens, dtype=dtype)
    )
    traffic = kernels.pointwise * kernels.traffic_s(
        1.0 * _LOSS_BYTES * part.tokens * columns
    )
    # Lookup, sum with positions and dropout; scattered sum of the gradients.
    first = kernels.pointwise * kernels.traffic_s(24.0 * part.tokens * shape.width)
    return first, product + traffic


def _send_s(shape: Shape, layouts: Layouts, wires: Links) -> np.ndarray:
    """One activation to the next stage; where split, gathered again over tensor."""
    n_bytes = 2.0 * local(shape, layouts).tokens * shape.width
    split = layouts.split_sends | layouts.sequence_parallel
    again = wires.tensor.gather(n_bytes)
    again = np.where(split & ~layouts.sequence_parallel, again, 0.0)
    one = wires.pipeline.send(n_bytes / np.where(split, layouts.tensor, 1)) + again
    return np.where(layouts.pipeline > 1, one, 0.0)


def _fsdp_s(
    shape: Shape, layouts: Layouts, kernels: Kernels, wires: Links, busy: np.ndarray
) -> np.ndarray:
    """Exposed gathers and scatters of the fsdp axis.

    Stage 3 gathers a block's parameters for each pass of each microbatch, behind the
    block before it, and scatters the gradients; stages 1 and 2 scatter and gather
    once a step; stage 0 all-reduces.
    """
    params = stage_params(shape, layouts)
    block = shape.layer_params / layouts.tensor
    passes = 2 + np.where(layouts.remat >= 2, 1, 0)
    gather = passes * wires.fsdp.gather(2.0 * block)
    scatter = wires.fsdp.gather(layouts.grad_bytes * block)
    if "reduce-scatter" in kernels.chip.overlaps:
        gather, scatter = gather + scatter, 0.0
    exposed = np.maximum(gather - kernels.hidden * busy, 0.0) + scatter
    layers, _ = stage_layers(shape, layouts)
    outer = 2 * wires.fsdp.gather(2.0 * shape.embedding_params / layouts.tensor)
    third = layouts.microbatches * (layers * exposed + outer)
    scatter = wires.fsdp.gather(layouts.grad_bytes * params)
    back_bytes = np.where(layouts.zero == 0, layouts.grad_bytes, 2)
    gather = wires.fsdp.gather(back_bytes * params)
    room = np.where(layouts.data_overlap, kernels.hidden * busy * layers, 0.0)
    plain = np.maximum(scatter + gather - room, 0.0)
    return np.where(layouts.fsdp > 1, np.where(layouts.zero == 3, third, plain), 0.0)


def _data_s(
    shape: Shape, layouts: Layouts, kernels: Kernels, wires: Links, busy: np.ndarray
) -> np.ndarray:
    """Exposed all-reduce of the gradients over replicas, and of a shared embedding."""
    split = np.where(layouts.zero >= 2, layouts.fsdp, 1)
    n_bytes = layouts.grad_bytes * stage_params(shape, layouts) / split
    both = 2 * wires.data.gather(n_bytes)
    room = np.where(layouts.data_overlap, kernels.hidden * busy * 2 / 3, 0.0)
    exposed = np.where(layouts.data > 1, np.maximum(both - room, 0.0), 0.0)
    table = layouts.grad_bytes * shape.embedding_params / layouts.tensor
    shared = np.asarray(shape.tied) & (layouts.pipeline > 1)
    return exposed + np.where(shared, 2 * wires.pipeline.send(table / 2), 0.0)


def _optimizer_s(shape: Shape, layouts: Layouts, kernels: Kernels) -> Numbers:
    """The update: its traffic; what is split over fsdp is updated once."""
    split = np.where(layouts.zero >= 1, layouts.fsdp, 1)
    return kernels.traffic_s(_OPTIMIZER_BYTES * stage_params(shape, layouts) / split)
