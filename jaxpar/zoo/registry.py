"""The zoo's entries, read from models.toml; no JAX here."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from typing import Any

from jaxpar.errors import ModelError
from jaxpar.zoo.config import DecoderConfig, VitConfig

_CONFIGS = {
    "decoder": DecoderConfig,
    "linen-decoder": DecoderConfig,
    "vit": VitConfig,
}


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer as data.

    Attributes:
        name: Of a function of optax, such as "adamw".
        learning_rate: After the warm-up.
        warmup_steps: Steps over which the learning rate rises from 0, linearly.
        clip_norm: Global norm that gradients are cut to; None leaves them.
        arguments: More arguments of the function.
    """

    name: str
    learning_rate: float
    warmup_steps: int = 0
    clip_norm: float | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ZooEntry:
    """One model of the zoo with the way it is trained.

    Attributes:
        name: What follows "zoo:".
        family: "decoder", "linen-decoder" or "vit".
        config: Its sizes and options.
        batch: Sequences or images in a global batch.
        seq: Tokens in a sequence; None for images.
        optimizer: How it is trained.
        description: One line.
        source: Where the numbers are from.
    """

    name: str
    family: str
    config: DecoderConfig | VitConfig
    batch: int
    seq: int | None
    optimizer: OptimizerSpec
    description: str
    source: str

    def changed(
        self, batch: int | None = None, seq: int | None = None, **overrides: Any
    ) -> "ZooEntry":
        """The entry with another batch, sequence length or config fields.

        Learned positions grow with the sequence where they must.

        Raises:
            ModelError: if a field is unknown or a value does not fit.
        """
        known = sorted(f.name for f in fields(self.config))
        if unknown := sorted(set(overrides) - set(known)):
            raise ModelError(
                f"zoo:{self.name} has no option {unknown[0]!r}",
                hint=f"options are batch, seq, {', '.join(known)}",
            )
        if seq is not None and self.seq is None:
            raise ModelError(f"zoo:{self.name} takes images, not sequences (seq={seq})")
        for name, value in (("batch", batch), ("seq", seq)):
            if value is not None and value < 1:
                raise ModelError(f"{name} is {value}, but must be at least 1")
        seq = seq or self.seq
        if isinstance(self.config, DecoderConfig) and seq is not None:
            overrides.setdefault("max_seq", max(seq, self.config.max_seq))
        config = replace(self.config, **overrides)
        return replace(self, config=config, batch=batch or self.batch, seq=seq)


@cache
def entries() -> Mapping[str, ZooEntry]:
    """All entries by name, in the order of the file."""
    text = resources.files("jaxpar.zoo").joinpath("models.toml").read_text("utf-8")
    return {name: _entry(name, table) for name, table in tomllib.loads(text).items()}


def find(name: str) -> ZooEntry:
    """The entry of a name.

    Raises:
        ModelError: if there is none; lists the nearest names, or all.
    """
    if name in entries():
        return entries()[name]
    near = difflib.get_close_matches(name, entries(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "see `jaxpar zoo`"
    raise ModelError(
        f"the zoo has no model {name!r}; it has {', '.join(entries())}", hint=hint
    )


def _entry(name: str, table: dict[str, Any]) -> ZooEntry:
    config = _CONFIGS[table["family"]](**table.pop("config"))
    optimizer = OptimizerSpec(**table.pop("optimizer"))
    seq = table.pop("seq", None)
    return ZooEntry(name=name, config=config, optimizer=optimizer, seq=seq, **table)
