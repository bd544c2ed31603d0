"""What a compiled program communicates and holds, read from its HLO text."""

from jaxpar.hlo.collectives import KINDS, HloCollective, collectives
from jaxpar.hlo.dump import partitioned_text
from jaxpar.hlo.groups import Groups, axes_crossed, axes_of
from jaxpar.hlo.memory import CompiledMemory, memory_of

__all__ = [
    "KINDS",
    "CompiledMemory",
    "Groups",
    "HloCollective",
    "axes_crossed",
    "axes_of",
    "collectives",
    "memory_of",
    "partitioned_text",
]
