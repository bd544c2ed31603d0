"""What the options of the command line mean, as values of the library."""

import re
from typing import Any

from jaxpar.errors import MeshError, PlanError
from jaxpar.remat_choice import LEVELS


def machine(topology: str | None, mesh: str | None) -> Any:
    """What `make_plan` takes as mesh, from the two options."""
    sizes = _mesh_sizes(mesh) if mesh else None
    if topology is None:
        return sizes
    found = topology_of(topology)
    if sizes is None:
        return found
    from jaxpar.machine import on_topology

    return on_topology(found, sizes)


def topology_of(name: str) -> Any:
    """A topology by name, or from a .toml file."""
    from jaxpar.topology import get_topology, load_topology

    return load_topology(name) if name.endswith(".toml") else get_topology(name)


def _mesh_sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not axis or not size.isdigit() or axis in sizes:
            raise MeshError(
                f"--mesh {text!r}: {part!r} is not axis=size",
                hint="write it like data=2,tensor=4",
            )
        sizes[axis.strip()] = int(size)
    return sizes


def limits(
    given: dict[str, Any], pin: list[str] | None, memory: str | None
) -> dict[str, Any]:
    """Pins and memory limit as arguments; takes those of the model out of `given`."""
    found: dict[str, Any] = {}
    if pin:
        found["pin"] = dict(given.get("pin") or {}) | dict(map(_pin, pin))
        given.pop("pin", None)
    if memory is not None:
        found["memory_bytes"] = _bytes(memory)
        given.pop("memory_bytes", None)
    return found


def remat_of(given: dict[str, Any], text: str | None) -> dict[str, Any]:
    """Rematerialisation as an argument; takes the model's own out of `given`."""
    if text is None:
        return {}
    given.pop("remat", None)
    if text == "model":
        return {"remat": None}
    is_word = text == "auto" or text in LEVELS
    return {"remat": text if is_word else [name for name in text.split(",") if name]}


def _pin(text: str) -> tuple[str, tuple[tuple[str, ...], ...]]:
    pattern, found, spec = text.rpartition("=")
    if not found or not pattern:
        raise PlanError(
            f"--pin {text!r} is not REGEX=SPEC", hint="write it like 'mlp/up=-,tensor'"
        )
    dims = spec.split(",") if spec else []
    return pattern, tuple(
        () if dim in ("-", "") else tuple(dim.split("+")) for dim in dims
    )


_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise MeshError(
            f"--memory {text!r} is no size", hint="write it like 16GiB or 8000000000"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def simulate(topology: str | None) -> None:
    """Sets up simulated devices for cpu-N, before JAX starts its backend."""
    match = re.fullmatch(r"cpu-(?:\d+x)?(\d+)", topology or "")
    if match is None:
        return
    import jax

    from jaxpar.topology import get_topology

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", get_topology(topology or "").devices)
