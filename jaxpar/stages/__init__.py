"""Which blocks of a model each stage of a pipeline runs."""

from jaxpar.stages.blocks import Block, Cut
from jaxpar.stages.cut import cut
from jaxpar.stages.slots import LayerSlots

__all__ = ["Block", "Cut", "LayerSlots", "cut"]
