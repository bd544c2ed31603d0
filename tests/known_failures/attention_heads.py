"""Heads that the tensor axis does not divide."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from known_failures.checks import one_array, split, whole
from known_failures.situation import (
    Situation,
    cross_entropy,
    init_on_tokens,
    integers,
    linen_next_token_loss,
    next_token_loss,
)


class GroupedDecoder(nnx.Module):
    """Flat projections, cut into 28 query heads and 4 key heads by reshapes."""

    def __init__(self, rngs: nnx.Rngs, width=224, heads=28, kv_heads=4, head_dim=8):
        self.head_dim = head_dim

        def project(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.q = project(width, heads * head_dim)
        self.k = project(width, kv_heads * head_dim)
        self.v = project(width, kv_heads * head_dim)
        self.o = project(heads * head_dim, width)
        self.up, self.down = project(width, 2 * width), project(2 * width, width)
        self.head = project(width, 256)

    def __call__(self, tokens):
        x = self.embed(tokens)
        q, k, v = (
            project(x).reshape(*tokens.shape, -1, self.head_dim)
            for project in (self.q, self.k, self.v)
        )
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.reshape(*tokens.shape, -1))
        return self.head(x + self.down(nnx.gelu(self.up(x))))


HEADS_28 = Situation(
    # Refused as 28 % 8 != 0; the flat width, 28 * 8, divides: a planner that looks at
    # shapes alone would cut heads in two.
    name="28 query heads on 8 devices",
    source="vllm-project/vllm#11797",
    model=GroupedDecoder,
    loss=next_token_loss,
    batch={"tokens": integers(256, 4, 17)},
    mesh={"tensor": 8},
    checks=(
        whole("^[qkv]/kernel", 1),
        whole("^o/kernel", 0),
        split("^up/kernel", 1, "tensor"),
        split("^down/kernel", 0, "tensor"),
    ),
)


class MultiQuery(nn.Module):
    """Eight query heads read one key head; projections have a dim for heads."""

    @nn.compact
    def __call__(self, x):
        def project(heads: int, name: str) -> Any:
            return nn.DenseGeneral((heads, 16), use_bias=False, name=name)(x)

        q, k, v = project(8, "query"), project(1, "key"), project(1, "value")
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return nn.DenseGeneral(64, axis=(-2, -1), use_bias=False, name="out")(attended)


class GatedDecoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, 64, name="embed")(tokens)
        x = x + MultiQuery(name="attn")(nn.RMSNorm()(x))
        h = nn.RMSNorm()(x)
        gate, up = (nn.Dense(256, use_bias=False, name=n)(h) for n in ("gate", "up"))
        x = x + nn.Dense(64, use_bias=False, name="down")(nn.gelu(gate) * up)
        return nn.Dense(256, name="head")(x)


ONE_KEY_HEAD = Situation(
    # One rule for query, key and value put the model axis on a dim of size 1.
    name="one key head",
    source="keras-team/keras-hub#1613",
    model=GatedDecoder(),
    loss=linen_next_token_loss,
    init=init_on_tokens,
    batch={"tokens": integers(256, 4, 17)},
    mesh={"data": 2, "tensor": 4},
    checks=(
        whole("attn/(key|value)/kernel", 1),
        whole("attn/(key|value)/kernel", 2, "tensor"),
        split("attn/query/kernel", 1, "tensor"),
        split("attn/out/kernel", 0, "tensor"),
    ),
)


class BiasedAttention(nn.Module):
    """Six heads, with a bias on the scores from a table of distance by head."""

    causal: bool

    @nn.compact
    def __call__(self, x, source):
        def project(x: Any, name: str) -> Any:
            return nn.DenseGeneral((6, 16), use_bias=False, name=name)(x)

        q, k, v = project(x, "q"), project(source, "k"), project(source, "v")
        table = self.param("relative", nn.initializers.normal(0.1), (32, 6))
        distance = jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None]
        bias = table[jnp.clip(distance + 16, 0, 31)].transpose(2, 0, 1)[None]
        attended = jax.nn.dot_product_attention(q, k, v, bias, is_causal=self.causal)
        return nn.DenseGeneral(64, axis=(-2, -1), use_bias=False, name="o")(attended)


class Layer(nn.Module):
    """Of the encoder, or, given what that made of the source, of the decoder."""

    @nn.compact
    def __call__(self, x, source=None):
        h = nn.RMSNorm()(x)
        x = x + BiasedAttention(source is not None, name="self")(h, h)
        if source is not None:
            x = x + BiasedAttention(False, name="cross")(nn.RMSNorm()(x), source)
        h = nn.Dense(256, name="wi")(nn.RMSNorm()(x))
        return x + nn.Dense(64, name="wo")(nn.relu(h))


class EncoderDecoder(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        shared = nn.Embed(256, 64, name="shared")
        x = shared(source)
        for i in range(2):
            x = Layer(name=f"encoder{i}")(x)
        return shared.attend(Layer(name="decoder0")(shared(target), x))


def translation_loss(module, variables, batch):
    target = batch["target"]
    logits = module.apply(variables, batch["source"], target[:, :-1])
    return cross_entropy(logits, target[:, 1:])


SIX_HEADS_WITH_BIAS = Situation(
    # The layout of a deep encoder was reused for a shallow decoder; and a bias table
    # must be cut as the heads are, or not at all.
    name="six heads with relative bias",
    source="huggingface/transformers#16584",
    model=EncoderDecoder(),
    loss=translation_loss,
    init=lambda m, key, batch: m.init(key, batch["source"], batch["target"][:, :-1]),
    batch={"source": integers(256, 8, 12), "target": integers(256, 8, 10)},
    mesh={"data": 2, "tensor": 4},
    checks=(
        one_array("shared"),
        whole("relative", 1),
        whole("(self|cross)/[qkv]/kernel", 1, "tensor"),
        split("wi/kernel", 1, "tensor"),
        split("wo/kernel", 0, "tensor"),
    ),
)

ALL = (HEADS_28, ONE_KEY_HEAD, SIX_HEADS_WITH_BIAS)
