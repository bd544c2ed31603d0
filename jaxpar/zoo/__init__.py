"""Models to plan and train: published sizes as data, built with Flax.

`entries()` and `find(name)` need no JAX; `zoo(name)` builds, `load_model(text)`
resolves what the command line takes.
"""

from typing import Any

from jaxpar.zoo.load import load_model
from jaxpar.zoo.registry import OptimizerSpec, ZooEntry, entries, find

__all__ = ["OptimizerSpec", "ZooEntry", "entries", "find", "load_model", "zoo"]


def zoo(name: str, **overrides: Any) -> dict[str, Any]:
    """The arguments of `jaxpar.make_plan`; see `jaxpar.zoo.build.zoo`."""
    # JAX and Flax take seconds to import; listing the zoo should not.
    from jaxpar.zoo.build import zoo as build  # noqa: PLC0415

    return build(name, **overrides)
