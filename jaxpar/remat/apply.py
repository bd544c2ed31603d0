"""A choice of rematerialisation, applied to a traced loss."""

from dataclasses import replace

from jaxpar.flatten import flatten
from jaxpar.remat.attention import attention_cores
from jaxpar.remat.blocks import repeated_blocks
from jaxpar.remat.edit import Names, checkpointed
from jaxpar.trace import Traced


def rematerialised(traced: Traced, level: str, names: Names) -> Traced:
    """The loss with checkpoints; the same object where the level changes nothing.

    Checkpoints of the model stay as they are, and what is in them is left alone.

    Args:
        traced: The loss.
        level: One of `remat_choice.WORDS`.
        names: For "named": what is kept.
    """
    if level in ("model", "none"):
        return traced
    program = flatten(traced.jaxpr)
    if level == "selective":
        pairs = zip(traced.leaves, program.inputs, strict=True)
        batch = [tensor for leaf, tensor in pairs if leaf.role == "batch"]
        regions = attention_cores(traced.jaxpr, program, batch)
    else:
        regions = repeated_blocks(traced.jaxpr, program)
    if not regions:
        return traced
    return replace(traced, jaxpr=checkpointed(traced.jaxpr, regions, names))
