"""Batches to train on: text that every machine has, or stand-ins of any shape.

The text is the Python standard library's own sources, byte by byte.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from jaxpar.errors import ModelError

VOCAB = 256
"""Bytes are the tokens."""

_SKIPPED = {"test", "site-packages", "dist-packages"}
_HELD_OUT_EVERY = 20


class Batches(Protocol):
    """Where batches come from: any step's, so that training can go on from there."""

    def batch_at(self, step: int) -> Any:
        """The global batch of a step, counted from 0."""
        ...


@dataclass(frozen=True)
class TextBatches:
    """Random stretches of a text, the same for the same seed and step.

    Attributes:
        tokens: The text, one token an entry.
        batch: Stretches in a batch.
        seq: Tokens that a model reads of each; one more is there to be predicted.
        seed: Of the choice.
    """

    tokens: NDArray[np.uint8] = field(repr=False)
    batch: int
    seq: int
    seed: int = 0

    def __post_init__(self):
        """Checks the sizes.

        Raises:
            ModelError: if they are not positive or the text is too short.
        """
        if self.batch < 1 or not 1 <= self.seq < len(self.tokens):
            raise ModelError(
                f"cannot cut {self.batch} stretches of {self.seq} + 1 tokens out of "
                f"{len(self.tokens)}",
                hint="batch and seq must be at least 1, seq shorter than the text",
            )

    def batch_at(self, step: int) -> dict[str, NDArray[np.int32]]:
        """The batch of a step, counted from 0: {"tokens": int32 [batch, seq + 1]}."""
        random = np.random.default_rng((self.seed, step))
        starts = random.integers(0, len(self.tokens) - self.seq, self.batch)
        rows = starts[:, None] + np.arange(self.seq + 1)
        return {"tokens": self.tokens[rows].astype(np.int32)}

    def __iter__(self) -> Iterator[dict[str, NDArray[np.int32]]]:
        """All batches from step 0 on, without end."""
        step = 0
        while True:
            yield self.batch_at(step)
            step += 1


def text_batches(
    batch: int, seq: int, seed: int = 0, *, held_out: bool = False
) -> TextBatches:
    """Batches of the standard library's sources, byte by byte.

    Every twentieth file is held out of training. Texts differ between versions of
    Python, never between runs.

    Args:
        batch: Stretches in a batch.
        seq: Bytes that a model reads of each.
        seed: Of the choice.
        held_out: Whether to take the held-out files instead.

    Raises:
        ModelError: if this Python has no sources, or a size does not fit.
    """
    return TextBatches(standard_library(held_out=held_out), batch, seq, seed)


@cache
def standard_library(*, held_out: bool = False) -> NDArray[np.uint8]:
    """The sources as one array of bytes.

    Raises:
        ModelError: if this Python comes without sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for pattern in ("*.py", "*/*.py")
        for path in folder.glob(pattern)
        if path.parent.name not in _SKIPPED
    )
    chosen = [
        path
        for number, path in enumerate(files)
        if (number % _HELD_OUT_EVERY == 0) == held_out
    ]
    if not chosen:
        raise ModelError(
            f"this Python has no sources of its standard library in {folder}",
            hint="use a Python that is not packed into an archive",
        )
    text = b"\n".join(path.read_bytes() for path in chosen)
    array = np.frombuffer(text, dtype=np.uint8)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class FixedBatches:
    """The same batch at every step.

    Attributes:
        batch: Arrays in any structure.
    """

    batch: Any

    def batch_at(self, step: int) -> Any:
        """The batch."""
        del step
        return self.batch


@dataclass(frozen=True)
class RandomBatches:
    """Numbers that stand in for data: enough to measure speed, nothing to learn.

    Attributes:
        like: Structs (or arrays) in any structure.
        seed: Of the numbers.
    """

    like: Any
    seed: int = 0

    def batch_at(self, step: int) -> Any:
        """Normal numbers for floats; 0 or 1 for integers and booleans."""
        random = np.random.default_rng((self.seed, step))

        def draw(leaf: Any) -> np.ndarray:
            if jax.numpy.issubdtype(leaf.dtype, np.floating):
                return random.normal(size=leaf.shape).astype(leaf.dtype)
            return random.integers(0, 2, leaf.shape).astype(leaf.dtype)

        return jax.tree.map(draw, self.like)


def batches_like(batch: Any, seed: int = 0) -> Batches:
    """Batches for a model of which only the batch's shapes may be known.

    Arrays are taken as they are, at every step. Structs of {"tokens": [batch,
    seq + 1]} get text in bytes, which needs a vocabulary of 256 or more. All else gets
    random numbers.
    """
    leaves = jax.tree.leaves(batch)
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return FixedBatches(batch)
    if isinstance(batch, dict) and list(batch) == ["tokens"] and leaves[0].ndim == 2:
        rows, length = leaves[0].shape
        return text_batches(rows, length - 1, seed)
    return RandomBatches(batch, seed)
