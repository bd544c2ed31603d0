"""Published training runs, read from published.toml; no JAX here."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from jaxpar.errors import ModelError
from jaxpar.zoo.registry import find


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """How a model of the zoo was trained, as far as it is published.

    Attributes:
        model: Name of the zoo entry.
        batch: Sequences in the global batch.
        seq: Tokens in a sequence.
        source: Where the numbers are from, and what had to be assumed.
        topology: Name of the machine; None where it is not published.
        mesh: Axis sizes, outermost first; those that are published.
        pipeline: The schedule, for a mesh with a pipeline axis.
        zero: Stage of ZeRO.
        options: Fields of the entry's config that differ.
        step_s: Measured seconds a step.
        mfu: Measured share of the peak, counting model FLOPs alone.
    """

    model: str
    batch: int
    seq: int
    source: str
    topology: str | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    pipeline: str | None = None
    zero: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    step_s: float | None = None
    mfu: float | None = None

    def machine(self) -> tuple[str, Mapping[str, int]]:
        """Topology and mesh, where jaxpar can plan the layout as it was.

        Raises:
            ModelError: if they are not published, or the layout has a pipeline.
        """
        if self.topology is None or not self.mesh:
            raise ModelError(
                f"no layout of zoo:{self.model} is published: {self.source}",
                hint="leave the published layout out, and name a --topology",
            )
        if self.pipeline is not None:
            axes = ", ".join(f"{a}={n}" for a, n in self.mesh.items())
            raise ModelError(
                f"zoo:{self.model} ran on {self.topology} as {axes} ({self.pipeline}): "
                "plans with a pipeline axis are not made from published runs yet",
                hint="`--run` takes another run of the model; without the published "
                f"layout, use --topology {self.topology}",
            )
        return self.topology, self.mesh


@cache
def _runs() -> Mapping[str, tuple[PublishedRun, ...]]:
    text = resources.files("jaxpar.zoo").joinpath("published.toml").read_text("utf-8")
    return {
        model: tuple(PublishedRun(model=model, **table) for table in tables)
        for model, tables in tomllib.loads(text).items()
    }


def published(model: str) -> tuple[PublishedRun, ...]:
    """The published runs of a zoo entry, the best known first; may be empty.

    Raises:
        ModelError: if the zoo has no such model.
    """
    return _runs().get(find(model).name, ())


def published_run(model: str, number: int = 1) -> PublishedRun:
    """One published run of a zoo entry, counted from 1.

    Raises:
        ModelError: if there is none of that number.
    """
    known = published(model)
    if not 1 <= number <= len(known):
        raise ModelError(
            f"zoo:{model} has {len(known)} published runs, but not number {number}",
            hint="; ".join(f"{i + 1}: {r.source}" for i, r in enumerate(known))
            or "only models of papers have them, see `jaxpar zoo`",
        )
    return known[number - 1]
