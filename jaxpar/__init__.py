"""A sharding compiler front-end for JAX: plans a layout, and applies it."""

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "auto_shard": "jaxpar.api",
    "make_plan": "jaxpar.api",
    "apply_plan": "jaxpar.api",
    "pareto": "jaxpar.api",
    "Plan": "jaxpar.plan",
    "load_plan": "jaxpar.plan",
    "topologies": "jaxpar.topology",
    "load_topology": "jaxpar.topology",
    "Topology": "jaxpar.hardware",
    "factor_rule": "jaxpar.rules",
    "merge": "jaxpar.runtime",
    "verify_plan": "jaxpar.verify",
    "errors": "jaxpar.errors",
}
__all__ = sorted(_WHERE)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Imports on first use: planning half and JAX load only when needed."""
    if name not in _WHERE:
        raise AttributeError(f"module 'jaxpar' has no attribute {name!r}")
    module = importlib.import_module(_WHERE[name])
    return module if _WHERE[name] == f"jaxpar.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
