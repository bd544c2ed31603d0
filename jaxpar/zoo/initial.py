"""First values of parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array

from jaxpar.zoo.config import StackConfig

Initializer = Callable[..., Array]


@partial(jax.jit, static_argnames=("shape", "dtype", "stddev"))
def _draw(key: Array, shape: tuple[int, ...], dtype: Any, stddev: float) -> Array:
    return stddev * jax.random.normal(key, shape, dtype)


def normal(stddev: float) -> Initializer:
    """Normal numbers; jitted, so that equal parameters of many layers trace once."""

    def init(key: Array, shape: tuple[int, ...], dtype: Any = "float32") -> Array:
        return _draw(key, tuple(shape), dtype, stddev)

    return init


def inward(fan_in: int) -> Initializer:
    """For a matrix whose result should have the size of its input."""
    return normal(fan_in**-0.5)


def outward(fan_in: int, config: StackConfig) -> Initializer:
    """For a matrix whose result joins the residual stream, as all 2 * layers do.

    Radford et al. 2019 (GPT-2): scaled by 1 / sqrt(number of joins).
    """
    return normal((fan_in * 2 * config.layers) ** -0.5)
