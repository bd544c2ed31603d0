"""Layers and experts that the axes made for them do not divide."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from known_failures.checks import whole
from known_failures.situation import Situation, normal, square_loss


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Ten(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inwards = nnx.Linear(8, 32, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(10)])
        self.outwards = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        x = self.inwards(x)
        for block in self.blocks:
            x = block(x)
        return self.outwards(x)


UNEVEN_STAGES = Situation(
    # Integer division gave each stage as many layers, and two layers vanished.
    name="ten layers on four stages",
    source="NVIDIA/Megatron-LM#1304",
    model=Ten,
    loss=square_loss,
    batch=normal(x=(16, 8), y=(16, 4)),
    devices=4,
    mesh={"pipeline": 4},
    refusal=(10, 4),
)


class Experts(nnx.Module):
    """Four experts, two of them for each token; all are computed."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(64, 4, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (4, 64, 128)))
        self.down = nnx.Param(init(rngs.params(), (4, 128, 64)))

    def __call__(self, x):
        top, index = jax.lax.top_k(jax.nn.softmax(self.router(x)), 2)
        shares = top / top.sum(axis=-1, keepdims=True)
        gate = (jax.nn.one_hot(index, 4) * shares[..., None]).sum(axis=-2)
        h = nnx.gelu(jnp.einsum("bsd,edf->bsef", x, self.up[...]))
        return x + jnp.einsum("bsef,efd,bse->bsd", h, self.down[...], gate)


FEW_EXPERTS = Situation(
    # Groups of 4 // 8 experts were empty.
    name="four experts on eight devices",
    source="deepspeedai/DeepSpeed#4562",
    model=Experts,
    loss=square_loss,
    batch=normal(x=(8, 8, 64), y=(8, 8, 64)),
    mesh={"expert": 8},
    refusal=(4, 8),
)

FEW_EXPERTS_ON_ANY_AXIS = replace(
    # Eight devices have work for each of the four experts.
    FEW_EXPERTS,
    name="four experts on an axis of any use",
    mesh={"devices": 8},
    refusal=(),
    checks=(whole("^(up|down)$", 0), whole("^router/kernel", 1)),
)

ALL = (UNEVEN_STAGES, FEW_EXPERTS, FEW_EXPERTS_ON_ANY_AXIS)
