"""What repeated blocks keep for the backward pass: the choice, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import PlanError

LEVELS = ("none", "selective", "full")
"""Each keeps less than the one before, and computes more twice.

none: all that the backward pass reads is kept. selective: attention cores (scores,
softmax, dropout, context) are computed again (Korthikanti et al. 2022,
arXiv:2205.05198). full: each repeated block keeps its input alone.
"""
WORDS = ("model", *LEVELS, "named")
"""Also: "model", no choice was made; "named", blocks keep named values and their
input."""


@dataclass(frozen=True)
class Remat:
    """A choice. What the model itself rematerialises stays as it is under each.

    Attributes:
        level: One of `WORDS`.
        saved: For "named": names of activations.
    """

    level: str = "model"
    saved: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """For people."""
        if self.level == "named":
            return f"keeps {', '.join(self.saved) or 'nothing'}"
        return self.level


AS_IT_IS = Remat()


def choices(wanted: Any, *, own: bool) -> tuple[Remat, ...]:
    """What the option `remat=` admits, the cheapest in time first.

    Args:
        wanted: "auto", one of `LEVELS`, None, or names of activations.
        own: Whether the model has checkpoints of its own: it is then tried first as
            it is.

    Raises:
        PlanError: for anything else.
    """
    if wanted is None:
        return (AS_IT_IS,)
    if wanted == "auto":
        first, *harder = map(Remat, LEVELS)
        return (AS_IT_IS if own else first, *harder)
    if isinstance(wanted, str) and wanted in LEVELS:
        return (Remat(wanted),)
    is_names = isinstance(wanted, Sequence) and not isinstance(wanted, str)
    if is_names and wanted and all(isinstance(name, str) for name in wanted):
        return (Remat("named", tuple(wanted)),)
    raise PlanError(
        f"remat={wanted!r} is no way to rematerialise",
        hint='use "auto", "none", "selective", "full", a list of names of activations '
        "to keep, or None to leave it to the model",
    )
