"""Machines of other than two-to-the-n equal devices, and axes that fit no machine."""

import optax
from flax import linen as nn
from flax import nnx

from known_failures.checks import (
    init_bytes,
    no_collective,
    only_between_slices,
    refuses,
    split,
    state_bytes,
    whole,
)
from known_failures.situation import (
    Situation,
    init_on_tokens,
    init_on_x,
    integers,
    linen_next_token_loss,
    linen_square_loss,
    normal,
    square_loss,
)


class Residual(nn.Module):
    """A token model of widths that five does not divide, but for the vocabulary."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(320, 96, name="embed")(tokens)
        for i in range(2):
            h = nn.Dense(384, name=f"up{i}")(nn.LayerNorm(name=f"norm{i}")(x))
            x = x + nn.Dense(96, name=f"down{i}")(nn.gelu(h))
        return nn.Dense(320, name="head")(x)


FIVE_DEVICES = Situation(
    # The width does not divide by five, and the library's own exception surfaced.
    name="five devices",
    source="marin-community/levanter#429",
    model=Residual(),
    loss=linen_next_token_loss,
    init=init_on_tokens,
    optimizer=optax.adamw(1e-3),
    batch={"tokens": integers(320, 10, 17)},
    devices=5,
    checks=(whole(r"^(up|down|norm)\d/"),),
)


class Wide(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 512, rngs=rngs)
        self.second = nnx.Linear(512, 512, rngs=rngs)
        self.third = nnx.Linear(512, 16, rngs=rngs)

    def __call__(self, x):
        return self.third(nnx.relu(self.second(nnx.relu(self.first(x)))))


TWO_SLICES = Situation(
    # The mesh helper for one slice laid a talkative axis across the slow network.
    name="two slices",
    source="jax-ml/jax#37769",
    model=Wide,
    loss=square_loss,
    batch=normal(x=(32, 64), y=(32, 16)),
    slices=2,
    memory_bytes=2_600_000,
    checks=(only_between_slices("data"), state_bytes(device=2_600_000)),
)


class Small(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


ONE_DEVICE = Situation(
    # A script with a mesh of eight was started on one accelerator.
    name="one device",
    source="xai-org/grok-1#38",
    model=Small,
    loss=square_loss,
    batch=normal(x=(7, 16), y=(7, 4)),
    devices=1,
    tolerance=1e-6,
    checks=(no_collective, refuses({"data": 1, "tensor": 8}, 8, 1)),
)


class Wider(nn.Module):
    """One kernel of 64 MiB."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(16384, use_bias=False, name="wide")(x)
        return nn.Dense(4, name="head")(nn.relu(h))


LARGER_THAN_A_DEVICE = Situation(
    # The kernel, and its random bits, were made whole on one device before they were
    # sharded.
    name="kernel larger than a device",
    source="jax-ml/jax#19893",
    model=Wider(),
    loss=linen_square_loss,
    init=init_on_x,
    batch=normal(x=(8, 1024), y=(8, 4)),
    memory_bytes=48 * 2**20,
    checks=(
        split("wide/kernel", None),
        state_bytes(device=26 * 2**20),
        init_bytes(48 * 2**20),
    ),
)

ALL = (FIVE_DEVICES, TWO_SLICES, ONE_DEVICE, LARGER_THAN_A_DEVICE)
