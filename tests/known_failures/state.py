"""State beside the parameters: random keys, counters, running statistics."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from known_failures.checks import ends_as, optimized, restored_on, whole
from known_failures.situation import (
    Situation,
    cross_entropy,
    integers,
    normal,
    square_loss,
)


class Calls(nnx.Variable):
    """How often the model was called."""


class Counting(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(64, 4, rngs=rngs)
        self.calls = Calls(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.down(self.drop(nnx.relu(self.up(x))))


DROPOUT_AND_COUNTER = Situation(
    # The mask was drawn without the input's sharding; what a jitted step counted was
    # lost. Masks must be those of the whole batch on one device.
    name="dropout and a counter",
    source="google/flax#5209",
    model=Counting,
    loss=square_loss,
    batch=normal(x=(16, 16), y=(16, 4)),
    mesh={"data": 8},
    updates=3,
    tolerance=1e-5,
    checks=(
        whole("drop/rngs|calls"),
        ends_as("calls", 3),
        optimized("^(up|down)/"),
    ),
)


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i, width in enumerate((16, 32)):
            x = nn.Conv(width, (3, 3), 2, use_bias=False, name=f"conv{i}")(x)
            norm = nn.BatchNorm(False, momentum=0.9, name=f"norm{i}")
            x = nn.relu(norm(x))
        return nn.Dense(10, name="head")(x.mean((1, 2)))


def updating_loss(module, variables, batch):
    logits, updated = module.apply(variables, batch["x"], mutable=["batch_stats"])
    return cross_entropy(logits, batch["label"]), updated


# Each device would see another spread.
_SPREAD = np.linspace(0.1, 3.0, 16, dtype=np.float32)[:, None, None, None]

BATCH_STATISTICS = Situation(
    # Statistics were those of one device's part of the batch.
    name="statistics of the whole batch",
    source="google/flax#2417",
    model=Convolutions(),
    loss=updating_loss,
    mutable=("batch_stats",),
    init=lambda module, key, batch: module.init(key, batch["x"]),
    optimizer=optax.sgd(0.1, momentum=0.9),
    batch={"x": normal(x=(16, 8, 8, 3))["x"] * _SPREAD, "label": integers(10, 16)},
    mesh={"data": 8},
    updates=2,
    checks=(whole("^batch_stats/"), optimized("^(conv|norm|head)")),
)


class Dropped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.second = nnx.Linear(64, 64, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.third = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.third(self.drop(nnx.relu(self.second(nnx.relu(self.first(x))))))


RESTORED_ELSEWHERE = Situation(
    # Restoring on fewer devices tried to rebuild the mesh of the writer.
    name="restored on another mesh",
    source="google/orbax#648",
    model=Dropped,
    loss=square_loss,
    batch=normal(x=(16, 32), y=(16, 8)),
    mesh={"fsdp": 8},
    updates=2,
    checks=(restored_on({"fsdp": 2, "tensor": 2}),),
)

ALL = (DROPOUT_AND_COUNTER, BATCH_STATISTICS, RESTORED_ELSEWHERE)
