"""Optimizer states of other shapes than the parameters', or for some of them only."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from known_failures.checks import (
    moments_follow,
    optimized,
    split,
    state_bytes,
    unchanged,
    whole,
)
from known_failures.situation import (
    Situation,
    init_on_tokens,
    integers,
    linen_next_token_loss,
    next_token_loss,
    normal,
    square_loss,
)


class Bfloat16(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        kinds: Any = {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}
        x = nn.Embed(512, 128, name="embed", **kinds)(tokens)
        h = nn.Dense(512, name="up", **kinds)(nn.RMSNorm(name="norm", **kinds)(x))
        x = x + nn.Dense(128, name="down", **kinds)(nn.gelu(h))
        return nn.Dense(512, name="head", **kinds)(x).astype(jnp.float32)


FACTORED_AND_ACCUMULATED = Situation(
    # Row and column moments, placeholders of one element and a buffer of gradients in
    # one state: specs by shape alone met leaves of other ranks.
    name="factored moments under accumulation",
    source="google-deepmind/optax#377",
    model=Bfloat16(),
    loss=linen_next_token_loss,
    init=init_on_tokens,
    optimizer=optax.MultiSteps(optax.adafactor(1e-2), 2).gradient_transformation(),
    batch={"tokens": integers(512, 8, 17)},
    mesh={"fsdp": 4, "tensor": 2},
    updates=4,
    tolerance=2e-2,
    checks=(
        split("(up|down|head)/kernel", None, "fsdp"),
        moments_follow("acc_grads"),
    ),
)


class Labelled(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)
        self.head = nnx.Linear(64, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


def table_or_dense(params: Any) -> Any:
    def label(path: Any, _: Any) -> str:
        return "table" if "embed" in jax.tree_util.keystr(path) else "dense"

    return jax.tree_util.tree_map_with_path(label, params)


_TABLE, _DENSE = 256 * 64, 3 * 64 * 256 + 256 + 64 + 256

TWO_OPTIMIZERS = Situation(
    # Masked places of the state are empty nodes; building it failed on structure.
    name="two optimizers by label",
    source="google-deepmind/optax#1148",
    model=Labelled,
    loss=next_token_loss,
    optimizer=optax.multi_transform(
        {"table": optax.sgd(0.1), "dense": optax.adam(1e-3)}, table_or_dense
    ),
    batch={"tokens": integers(256, 8, 17)},
    mesh={"fsdp": 4, "tensor": 2},
    updates=2,
    checks=(
        moments_follow("mu|nu"),
        optimized("^(up|down|head)/"),
        # Two moments of the dense part; the step's count and Adam's.
        state_bytes(total=4 * (_TABLE + 3 * _DENSE + 2)),
    ),
)


class Adapted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        sizes = ((128, 512), (512, 512), (512, 16))
        self.first, self.second, self.third = (
            nnx.LoRALinear(*size, lora_rank=4, rngs=rngs) for size in sizes
        )

    def __call__(self, x):
        return self.third(nnx.relu(self.second(nnx.relu(self.first(x)))))


ADAPTERS = Situation(
    # Frozen weights became constants of the loss, sharded by nobody; and rules for
    # whole kernels do not fit a dim of four.
    name="low-rank adapters",
    source="NovaSky-AI/SkyRL#475",
    model=Adapted,
    loss=square_loss,
    wrt=nnx.LoRAParam,
    batch=normal(x=(16, 128), y=(16, 16)),
    mesh={"fsdp": 8},
    updates=2,
    checks=(
        split("(first|second)/kernel", None, "fsdp"),
        whole("lora_a", 1),
        whole("lora_b", 0),
        optimized("lora_[ab]"),
        unchanged("kernel|bias"),
        state_bytes(device=320_000),
    ),
)

ALL = (FACTORED_AND_ACCUMULATED, TWO_OPTIMIZERS, ADAPTERS)
