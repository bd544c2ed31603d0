"""How the chosen plan moves when only the machine or the batch changes.

    python benchmarks/what_if.py

Nothing about the model or the search changes within a table, only one figure:

- memory of a device: weights are whole on every device while there is room (only the
  optimizer state is split), then more and more of them are stored in parts (FSDP), and
  in the end a tensor axis splits what is computed as well;
- sequences in the batch: the fewer tokens a device has, the less its computation hides
  weights that come over the links, so tensor grows at the cost of fsdp;
- speed of the links inside a node of GPUs: tensor, whose messages are many, is worth
  having only where they are fast, and stays on them;
- slices, which a network joins that is slow beside the torus: tensor keeps to the
  torus, and data crosses.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import jaxpar
from jaxpar.mesh import logical_mesh
from jaxpar.topology import Topology, get_topology
from jaxpar.zoo import zoo

TOPOLOGY = "tpu-v5e-4x4"
GPUS = "dgx-h100-16"
DECODER: Mapping[str, Any] = {
    "layers": 8,
    "d_model": 2048,
    "heads": 16,
    "kv_heads": 16,
    "head_dim": 128,
    "d_ff": 8192,
    "vocab": 8192,
    "dtype": "float32",
    "scan": True,
    "remat": "full",
}
"""400 M parameters; layers are computed twice, so FSDP gathers every weight twice,
and whole weights cost less time wherever there is room for them."""
MEMORY_GIB = (16.0, 3.0, 2.5, 2.25, 2.0)
BATCHES = (64, 16, 8, 4, 2, 1)
NVLINK_SPEEDS = (1 / 16, 1, 4, 16)
SLICES = (1, 2, 4)
AMPLE_BYTES = 64 * 2**30


@dataclass(frozen=True)
class Answer:
    """What was chosen.

    Attributes:
        changed: The figure that was changed, in words.
        mesh: Axes and their sizes.
        copies: Of the weights at rest, over all devices together.
        links: Behind each axis, slow ones first.
        step_s: Predicted.
        memory_bytes: Predicted, per device.
    """

    changed: str
    mesh: Mapping[str, int]
    copies: float
    links: Mapping[str, tuple[str, ...]]
    step_s: float
    memory_bytes: int

    def axis(self, name: str) -> str:
        """An axis in words."""
        links = " + ".join(dict.fromkeys(self.links[name]))
        return f"{name}={self.mesh[name]} ({links})"


def by_memory() -> Iterator[Answer]:
    """32 sequences of 1024 tokens, on devices of less and less memory."""
    given, machine = zoo("gpt-tiny", batch=32, seq=1024, **DECODER), _machine()
    for gib in MEMORY_GIB:
        limited = replace(machine, memory_bytes=int(gib * 2**30))
        yield _answer(f"{gib:g} GiB", given, limited)


def by_batch() -> Iterator[Answer]:
    """Fewer and fewer sequences of 2048 tokens, with ample memory."""
    ample = replace(_machine(), memory_bytes=AMPLE_BYTES)
    for batch in BATCHES:
        given = zoo("gpt-tiny", batch=batch, seq=2048, **DECODER)
        yield _answer(f"sequences: {batch}", given, ample)


def by_nvlink() -> Iterator[Answer]:
    """32 sequences of 1024 tokens on two nodes of eight GPUs."""
    given, machine = zoo("gpt-tiny", batch=32, seq=1024, **DECODER), get_topology(GPUS)
    for speed in NVLINK_SPEEDS:
        links = tuple(
            replace(link, bytes_per_s=link.bytes_per_s * speed)
            if link.name == "nvlink"
            else link
            for link in machine.links
        )
        inner = links[-1].bytes_per_s / 1e9
        yield _answer(f"NVLink {inner:,.0f} GB/s", given, replace(machine, links=links))


def by_slices() -> Iterator[Answer]:
    """Four sequences of 2048 tokens, with ample memory, on parts of one pod."""
    ample = replace(_machine(), memory_bytes=AMPLE_BYTES)
    given = zoo("gpt-tiny", batch=4, seq=2048, **DECODER)
    for slices in SLICES:
        yield _answer(f"slices: {slices}", given, ample.with_limits(slices=slices))


TABLES = {
    "memory of a device": by_memory,
    "sequences in the batch": by_batch,
    "links inside a node": by_nvlink,
    "slices": by_slices,
}


def _machine() -> Topology:
    return get_topology(TOPOLOGY)


def _answer(changed: str, given: dict[str, Any], machine: Topology) -> Answer:
    plan = jaxpar.make_plan(**given, mesh=machine)
    memory, laid = plan.predicted.memory, logical_mesh(machine, plan.mesh)
    return Answer(
        changed=changed,
        mesh=plan.mesh,
        copies=memory.parameters_bytes * laid.devices / (4 * plan.model.parameters),
        links={
            axis: tuple(level.link for level in laid.link(axis).levels)
            for axis in laid.axes
        },
        step_s=plan.predicted.step_s,
        memory_bytes=memory.total_bytes,
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    jax.config.update("jax_platforms", "cpu")
    for title, answers in TABLES.items():
        table = Table(title=title, title_justify="left")
        for header in ("", "mesh", "copies", "step", "memory"):
            table.add_column(header, no_wrap=True)
        for a in answers():
            table.add_row(
                a.changed,
                ", ".join(map(a.axis, a.mesh)),
                f"{a.copies:.1f}",
                f"{1e3 * a.step_s:.0f} ms",
                f"{a.memory_bytes / 2**30:.2f} GiB",
            )
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
