"""Transformer blocks in Flax NNX, and a stack of them, unrolled or scanned."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar.zoo import experts, functional
from jaxpar.zoo.config import RELATIVE_BUCKETS, StackConfig
from jaxpar.zoo.initial import Initializer, inward, normal, outward

Names = tuple[str, ...]


def named(init: Callable[..., Array], names: Names, config: StackConfig) -> Initializer:
    """The initializer, with logical axis names where the config wants them."""
    return nnx.with_partitioning(init, names) if config.annotate else init


def param(
    rngs: nnx.Rngs, init: Initializer, shape: dict[str, int], config: StackConfig
) -> nnx.Param:
    """A parameter of the given sizes, by logical name."""
    init = named(init, tuple(shape), config)
    return nnx.Param(init(rngs.params(), tuple(shape.values()), config.param_dtype))


def linear(
    rngs: nnx.Rngs,
    init: Initializer,
    inputs: dict[str, int],
    outputs: dict[str, int],
    config: StackConfig,
    *,
    bias: bool,
) -> nnx.LinearGeneral:
    """A projection from the last dims (by logical name) to new ones."""
    return nnx.LinearGeneral(
        tuple(inputs.values()),
        tuple(outputs.values()),
        axis=tuple(range(-len(inputs), 0)),
        use_bias=bias,
        kernel_init=named(init, (*inputs, *outputs), config),
        bias_init=named(nnx.initializers.zeros, tuple(outputs), config),
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


class Norm(nnx.Module):
    """Layer norm or RMS norm over the last dim."""

    def __init__(self, config: StackConfig, *, rngs: nnx.Rngs):
        self.centre = config.norm == "layernorm"
        width = {"embed": config.d_model}
        self.scale = param(rngs, nnx.initializers.ones, width, config)
        zeros = nnx.initializers.zeros
        has_bias = self.centre and config.norm_bias
        self.bias = param(rngs, zeros, width, config) if has_bias else None

    def __call__(self, x: Array) -> Array:
        """Normalises [..., d_model]."""
        bias = None if self.bias is None else self.bias[...]
        return functional.normalise(x, self.scale[...], bias, centre=self.centre)


class RelativeBias(nnx.Module):
    """Score biases by head and distance (T5)."""

    def __init__(self, config: StackConfig, *, rngs: nnx.Rngs):
        sizes = {"heads": config.heads, "distance": RELATIVE_BUCKETS}
        self.table = param(rngs, normal(0.02), sizes, config)

    def __call__(self, query: Array) -> tuple[Array, Array]:
        """The query as it is, and the bias [1, heads, length, length]."""
        bias = functional.relative_bias(self.table[...], length=query.shape[1])
        return query, bias


class DistanceBias(nnx.Module):
    """Content and position biases of Transformer-XL (Dai et al. 2019)."""

    def __init__(self, config: StackConfig, *, rngs: nnx.Rngs):
        self.width, self.dtype = config.d_model, config.dtype
        heads = {"heads": config.heads, "head_dim": config.head_dim}
        self.distance = linear(
            rngs,
            inward(config.d_model),
            {"embed": config.d_model},
            heads,
            config,
            bias=False,
        )
        self.content = param(rngs, nnx.initializers.zeros, heads, config)
        self.position = param(rngs, nnx.initializers.zeros, heads, config)

    def __call__(self, query: Array) -> tuple[Array, Array]:
        """The query against contents, and the bias [batch, heads, length, length]."""
        waves = functional.sinusoids(
            length=query.shape[1], width=self.width, dtype=self.dtype
        )
        position = query + self.position[...].astype(query.dtype)
        bias = functional.distance_bias(position, self.distance(waves))
        return query + self.content[...].astype(query.dtype), bias


_BIASES = {"relative": RelativeBias, "transformer_xl": DistanceBias}


class Attention(nnx.Module):
    """Multi-head attention, with fewer key heads where the config says so."""

    def __init__(self, config: StackConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed = {"embed": config.d_model}
        heads = {"heads": config.heads, "head_dim": config.head_dim}
        kv_heads = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
        init, bias = inward(config.d_model), config.attention_bias
        self.query = linear(rngs, init, embed, heads, config, bias=bias)
        self.key = linear(rngs, init, embed, kv_heads, config, bias=bias)
        self.value = linear(rngs, init, embed, kv_heads, config, bias=bias)
        init = outward(config.heads * config.head_dim, config)
        self.out = linear(rngs, init, heads, embed, config, bias=bias)
        make = _BIASES.get(config.positions)
        self.bias = make(config, rngs=rngs) if make else None

    def __call__(self, x: Array) -> Array:
        """From [batch, length, d_model] to the same."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.config.positions == "rope":
            query = functional.rotary(query, theta=self.config.rope_theta)
            key = functional.rotary(key, theta=self.config.rope_theta)
        query, bias = self.bias(query) if self.bias else (query, None)
        attended = functional.attend(query, key, value, bias, causal=self.config.causal)
        return self.out(attended)


class Mlp(nnx.Module):
    """The feed-forward part, gated or not."""

    def __init__(self, config: StackConfig, *, rngs: nnx.Rngs):
        self.activation = config.activation
        embed, inner = {"embed": config.d_model}, {"mlp": config.d_ff}
        init, bias = inward(config.d_model), config.mlp_bias
        make = partial(linear, rngs, init, embed, inner, config, bias=bias)
        self.gate = make() if config.gated else None
        self.up = make()
        init = outward(config.d_ff, config)
        self.down = linear(rngs, init, inner, embed, config, bias=bias)

    def __call__(self, x: Array) -> Array:
        """From [batch, length, d_model] to the same."""
        gate = self.gate(x) if self.gate else None
        return self.down(functional.activate(self.activation, self.up(x), gate))


class Experts(nnx.Module):
    """Feed-forward parts of which each token is sent to a few (Shazeer et al. 2017)."""

    def __init__(self, config: StackConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed, inner = {"embed": config.d_model}, {"mlp": config.d_ff}
        each, init = {"experts": config.experts}, inward(config.d_model)
        self.router = param(rngs, init, embed | each, config)
        make = partial(param, rngs, init, each | embed | inner, config)
        self.gate = make() if config.gated else None
        self.up = make()
        init = outward(config.d_ff, config)
        self.down = param(rngs, init, each | inner | embed, config)

    def __call__(self, x: Array) -> Array:
        """From [batch, length, d_model] to the same."""
        config, shape = self.config, x.shape
        group = experts.group_size(shape[1], config.expert_group)
        x = x.reshape(shape[0], shape[1] // group, group, shape[2])
        # The router decides in float32 (Fedus et al. 2022, "selective precision").
        logits = x.astype(jnp.float32) @ self.router[...].astype(jnp.float32)
        send, weigh = experts.route(
            logits,
            chosen=config.experts_per_token,
            places=experts.places(
                group, config.experts, config.experts_per_token, config.capacity_factor
            ),
        )
        sent = jnp.einsum("bngec,bngd->ebncd", send.astype(x.dtype), x)
        gate = None if self.gate is None else _of_each(sent, self.gate[...])
        inner = functional.activate(
            config.activation, _of_each(sent, self.up[...]), gate
        )
        made = _of_each(inner, self.down[...])
        y = jnp.einsum("bngec,ebncd->bngd", weigh.astype(x.dtype), made)
        return y.reshape(shape)


class Block(nnx.Module):
    """Attention and feed-forward, each behind a norm; or both behind one."""

    def __init__(self, config: StackConfig, *, rngs: nnx.Rngs):
        self.norm = Norm(config, rngs=rngs)
        self.attn = Attention(config, rngs=rngs)
        self.mlp_norm = None if config.parallel_block else Norm(config, rngs=rngs)
        self.mlp = (Mlp if config.experts == 1 else Experts)(config, rngs=rngs)
        streams = rngs if config.dropout else None
        self.attn_drop = nnx.Dropout(config.dropout, rngs=streams)
        self.mlp_drop = nnx.Dropout(config.dropout, rngs=streams)

    def __call__(self, x: Array) -> Array:
        """From [batch, length, d_model] to the same."""
        h = self.norm(x)
        attended = self.attn_drop(self.attn(h))
        if self.mlp_norm is None:
            return x + attended + self.mlp_drop(self.mlp(h))
        x = x + attended
        return x + self.mlp_drop(self.mlp(self.mlp_norm(x)))


def _of_each(x: Array, kernels: Array) -> Array:
    """Products of [experts, ..., inputs] with one matrix [inputs, outputs] each."""
    return jnp.einsum("ebncd,edf->ebncf", x, kernels.astype(x.dtype))


def make_layers(config: StackConfig, rngs: nnx.Rngs) -> nnx.Module:
    """The blocks: a list, or one block whose parameters have a leading dim.

    The list is made by a jitted function, and `run_layers` runs it by another: both
    are traced for the first block alone, so depth costs next to nothing.
    """

    def make_block(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    if not config.scan:
        make = nnx.jit(make_block, graph=False)
        return nnx.List([make(rngs) for _ in range(config.layers)])
    name = _layer_name(config)
    make = nnx.vmap(make_block, in_axes=(0,), out_axes=0, transform_metadata=name)
    return nnx.split_rngs(splits=config.layers)(make)(rngs)


def run_layers(layers: Any, x: Array, config: StackConfig) -> Array:
    """Sends [batch, length, d_model] through the blocks that `make_layers` made."""

    def block(x: Array, layer: Any) -> Array:
        return layer(x)

    if config.remat == "full":
        block = nnx.remat(block, prevent_cse=not config.scan, graph=False)
    if config.scan:
        return nnx.scan(block, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, graph=False)(
            x, layers
        )
    run = nnx.jit(block, graph=False)
    for layer in layers:
        x = run(x, layer)
    return x


def _layer_name(config: StackConfig) -> dict[str, str]:
    return {nnx.PARTITION_NAME: "layers"} if config.annotate else {}
