"""Images and sounds."""

import jax.numpy as jnp
from flax import linen as nn

from known_failures.checks import whole
from known_failures.situation import (
    Situation,
    cross_entropy,
    init_on_x,
    integers,
    linen_square_loss,
    normal,
)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4, name="attn")(h, h)
        h = nn.Dense(256, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(64, name="down")(nn.gelu(h))


class ClassToken(nn.Module):
    """64 patches and one token more."""

    @nn.compact
    def __call__(self, image):
        x = nn.Conv(64, (4, 4), 4, name="patch")(image).reshape(image.shape[0], -1, 64)
        first = self.param("class", nn.initializers.zeros, (1, 1, 64))
        first = jnp.broadcast_to(first, (x.shape[0], 1, 64))
        x = jnp.concatenate([first, x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, 65, 64))
        return nn.Dense(10, name="head")(Block(name="block")(x)[:, 0])


def label_loss(module, variables, batch):
    return cross_entropy(module.apply(variables, batch["x"]), batch["label"])


ODD_TOKENS = Situation(
    # Sequence sharding took for granted that the tokens divide by the axis.
    name="65 tokens on four devices",
    source="vllm-project/vllm#43634",
    model=ClassToken(),
    loss=label_loss,
    init=init_on_x,
    batch=normal(x=(8, 32, 32, 3)) | {"label": integers(10, 8)},
    mesh={"data": 2, "sequence": 4},
    checks=(whole("positions", 1), whole("class")),
)


class Speech(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(48, name="inwards")(x)
        grouped = nn.Conv(48, (16,), feature_group_count=8, name="grouped")(x)
        x = nn.LayerNorm(name="norm")(x + nn.gelu(grouped))
        x = nn.Conv(48, (5,), feature_group_count=48, name="depthwise")(x)
        return nn.Dense(8, name="head")(x)


GROUPED = Situation(
    # The partitioner cut the kernel's inputs within a group; the compiler failed.
    name="grouped convolution",
    source="google/flax#3831",
    model=Speech(),
    loss=linen_square_loss,
    init=init_on_x,
    batch=normal(x=(8, 40, 24), y=(8, 40, 8)),
    mesh={"data": 4, "tensor": 2},
    checks=(
        whole("(grouped|depthwise)/kernel", 0),
        whole("(grouped|depthwise)/kernel", 1),
    ),
)

ALL = (ODD_TOKENS, GROUPED)
