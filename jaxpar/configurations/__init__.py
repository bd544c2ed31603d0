"""Whole training configurations of a transformer, priced many at a time.

Pure numpy, one row per configuration: closed forms for products in tiles and waves,
pointwise traffic, collectives over the links behind each axis, the pipeline's bubble
and memory by class.
"""

from jaxpar.configurations.chips import KERNELS, kernels
from jaxpar.configurations.estimate import Estimate, Seconds, evaluate
from jaxpar.configurations.kernels import Kernels
from jaxpar.configurations.layouts import REMAT, Layouts, layouts
from jaxpar.configurations.memory import Memory
from jaxpar.configurations.shape import Shape
from jaxpar.configurations.space import space

__all__ = [
    "KERNELS",
    "REMAT",
    "Estimate",
    "Kernels",
    "Layouts",
    "Memory",
    "Seconds",
    "Shape",
    "evaluate",
    "kernels",
    "layouts",
    "space",
]
