"""Situations in which public tools failed their users, each as a small model."""

from known_failures import (
    annotations,
    attention_heads,
    batches,
    convolutions,
    layers,
    meshes,
    optimizers,
    state,
    vocabulary,
)
from known_failures.situation import Situation

__all__ = ["SITUATIONS", "Situation"]

_THEMES = (
    attention_heads,
    vocabulary,
    meshes,
    optimizers,
    annotations,
    state,
    convolutions,
    batches,
    layers,
)
SITUATIONS = tuple(situation for theme in _THEMES for situation in theme.ALL)
