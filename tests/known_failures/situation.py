"""What a situation is made of, and the losses and batches that many share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar
from jaxpar.runtime import Sharded


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A small model like one that a tool failed on, and what must come of it.

    Attributes:
        name: A few words.
        source: The public report, "owner/repository#number".
        model: An NNX constructor or a Linen module.
        loss: As `jaxpar.auto_shard` takes it; like init, optimizer, wrt, mutable,
            rules, mesh, slices and memory_bytes.
        batch: The global batch.
        devices: How many the machine has.
        updates: How many are compared with one device.
        tolerance: Relative, of that comparison.
        checks: What else must hold of the plan.
        refusal: The numbers that a refusal must name; none: a plan is due.
    """

    name: str
    source: str
    model: Any
    loss: Callable[..., Any]
    batch: Any
    init: Callable[..., Any] | None = None
    optimizer: optax.GradientTransformation = field(
        default_factory=lambda: optax.adam(1e-3)
    )
    wrt: Any = nnx.Param
    mutable: tuple[str, ...] = ()
    rules: Any = None
    mesh: Mapping[str, int] | None = None
    devices: int = 8
    slices: int = 1
    memory_bytes: int | None = None
    updates: int = 1
    tolerance: float = 1e-4
    checks: tuple[Callable[[Any], None], ...] = ()
    refusal: tuple[int, ...] = ()

    def shard(self, mesh: Mapping[str, int] | None) -> Sharded:
        """What jaxpar makes of it on a mesh."""
        return jaxpar.auto_shard(
            self.model,
            self.optimizer,
            self.loss,
            self.batch,
            mesh,
            init=self.init,
            wrt=self.wrt,
            mutable=self.mutable,
            rules=self.rules,
            slices=self.slices,
            memory_bytes=self.memory_bytes,
        )


def normal(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Standard normal float32 arrays."""
    r = np.random.default_rng(0)
    return {k: r.normal(size=n).astype(np.float32) for k, n in shapes.items()}


def integers(below: int, *shape: int) -> np.ndarray:
    """Uniform int32 numbers."""
    return np.random.default_rng(0).integers(0, below, shape, dtype=np.int32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean over all labels, by a gather along the classes."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def next_token_loss(model: Any, batch: Any) -> Any:
    """Of an NNX language model."""
    tokens = batch["tokens"]
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def linen_next_token_loss(module: Any, variables: Any, batch: Any) -> Any:
    """Of a Linen language model."""
    tokens = batch["tokens"]
    return cross_entropy(module.apply(variables, tokens[:, :-1]), tokens[:, 1:])


def init_on_tokens(module: Any, key: Any, batch: Any) -> Any:
    """Variables of a Linen language model."""
    return module.init(key, batch["tokens"][:, :-1])


def square_loss(model: Any, batch: Any) -> Any:
    """Of an NNX regression."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def linen_square_loss(module: Any, variables: Any, batch: Any) -> Any:
    """Of a Linen regression."""
    return jnp.mean((module.apply(variables, batch["x"]) - batch["y"]) ** 2)


def init_on_x(module: Any, key: Any, batch: Any) -> Any:
    """Variables of a Linen regression."""
    return module.init(key, batch["x"])
