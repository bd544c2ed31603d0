"""The decoder once more, in Flax Linen: the same paths, the same mathematics."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from jaxpar.errors import ModelError
from jaxpar.zoo import functional
from jaxpar.zoo.config import DecoderConfig
from jaxpar.zoo.initial import Initializer, inward, normal, outward

_POSITIONS = ("learned", "rope")


def _named(init: Initializer, config: DecoderConfig, *names: str) -> Any:
    return nn.with_logical_partitioning(init, names) if config.annotate else init


def _dense(
    config: DecoderConfig,
    init: Initializer,
    inputs: tuple[str, ...],
    outputs: dict[str, int],
    *,
    bias: bool,
    name: str,
) -> nn.DenseGeneral:
    """A projection from the last dims (`inputs` are their names) to new ones."""
    return nn.DenseGeneral(
        tuple(outputs.values()),
        axis=tuple(range(-len(inputs), 0)),
        use_bias=bias,
        kernel_init=_named(init, config, *inputs, *outputs),
        bias_init=_named(nn.initializers.zeros, config, *outputs),
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        name=name,
    )


class Norm(nn.Module):
    """Layer norm or RMS norm over the last dim."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalises [..., d_model]."""
        config, width = self.config, (self.config.d_model,)
        centre = config.norm == "layernorm"
        ones = _named(nn.initializers.ones, config, "embed")
        scale = self.param("scale", ones, width, config.param_dtype)
        bias = None
        if centre and config.norm_bias:
            zeros = _named(nn.initializers.zeros, config, "embed")
            bias = self.param("bias", zeros, width, config.param_dtype)
        return functional.normalise(x, scale, bias, centre=centre)


class Attention(nn.Module):
    """Multi-head attention, with fewer key heads where the config says so."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """From [batch, length, d_model] to the same."""
        config = self.config
        init, bias = inward(config.d_model), config.attention_bias
        make = partial(_dense, config, init, ("embed",), bias=bias)
        width = {"head_dim": config.head_dim}
        query = make({"heads": config.heads} | width, name="query")(x)
        key = make({"kv_heads": config.kv_heads} | width, name="key")(x)
        value = make({"kv_heads": config.kv_heads} | width, name="value")(x)
        if config.positions == "rope":
            query = functional.rotary(query, theta=config.rope_theta)
            key = functional.rotary(key, theta=config.rope_theta)
        attended = functional.attend(query, key, value, causal=config.causal)
        init = outward(config.heads * config.head_dim, config)
        inputs, outputs = ("heads", "head_dim"), {"embed": config.d_model}
        out = _dense(config, init, inputs, outputs, bias=bias, name="out")
        return out(attended)


class Mlp(nn.Module):
    """The feed-forward part, gated or not."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """From [batch, length, d_model] to the same."""
        config = self.config
        init, bias = inward(config.d_model), config.mlp_bias
        inner = {"mlp": config.d_ff}
        make = partial(_dense, config, init, ("embed",), inner, bias=bias)
        gate = make(name="gate")(x) if config.gated else None
        up = make(name="up")(x)
        init, outputs = outward(config.d_ff, config), {"embed": config.d_model}
        down = _dense(config, init, ("mlp",), outputs, bias=bias, name="down")
        return down(functional.activate(config.activation, up, gate))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm; or both behind one."""

    config: DecoderConfig
    deterministic: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """From [batch, length, d_model] to the same."""
        config = self.config
        drop = nn.Dropout(config.dropout, deterministic=self.deterministic)
        h = Norm(config, name="norm")(x)
        attended = drop(Attention(config, name="attn")(h))
        mlp = Mlp(config, name="mlp")
        if config.parallel_block:
            return x + attended + drop(mlp(h))
        x = x + attended
        return x + drop(mlp(Norm(config, name="mlp_norm")(x)))


class Layers(nn.Module):
    """The blocks, named "0", "1", ..."""

    config: DecoderConfig
    deterministic: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """From [batch, length, d_model] to the same."""
        make = nn.remat(Block) if self.config.remat == "full" else Block
        for layer in range(self.config.layers):
            x = make(self.config, self.deterministic, name=str(layer))(x)
        return x


def _layers(config: DecoderConfig, deterministic: bool) -> Callable[[Array], Array]:
    """The blocks as one module named "layers", unrolled or scanned."""
    if not config.scan:
        return Layers(config, deterministic, name="layers")
    block = Block
    if config.remat == "full":
        block = nn.remat(block, prevent_cse=False)
    stack = nn.scan(
        lambda block, x: (block(x), None),
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        length=config.layers,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return lambda x: stack(block(config, deterministic, name="layers"), x)[0]


class LinenDecoder(nn.Module):
    """The model of `jaxpar.zoo.decoder.Decoder`, for learned or rotary positions.

    Parameter paths are those of the NNX decoder, below "params".
    """

    config: DecoderConfig
    deterministic: bool = False

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        """From [batch, length] integers to [batch, length, table_rows] logits.

        Raises:
            ModelError: if the config asks for relative positions or experts.
        """
        config = self.config
        if config.positions not in _POSITIONS:
            raise ModelError(
                f"the Linen decoder has no {config.positions!r} positions",
                hint=f"use the NNX decoder, or one of {', '.join(_POSITIONS)}",
            )
        if config.experts > 1:
            raise ModelError(
                f"the Linen decoder has no experts, but the config {config.experts}",
                hint="use the NNX decoder",
            )
        embed = nn.Embed(
            config.table_rows,
            config.d_model,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            embedding_init=_named(normal(0.02), config, "vocab", "embed"),
            name="embed",
        )
        x = embed(tokens)
        if config.positions == "learned":
            init = _named(normal(0.02), config, "position", "embed")
            shape = (config.max_seq, config.d_model)
            table = self.param("positions", init, shape, config.param_dtype)
            x = x + table[: tokens.shape[1]].astype(x.dtype)
        x = nn.Dropout(config.dropout, deterministic=self.deterministic)(x)
        x = _layers(config, self.deterministic)(x)
        x = Norm(config, name="final_norm")(x)
        if config.tied:
            return functional.without_padding(embed.attend(x), vocab=config.vocab)
        init, outputs = inward(config.d_model), {"vocab": config.table_rows}
        head = _dense(config, init, ("embed",), outputs, bias=False, name="head")
        return functional.without_padding(head(x), vocab=config.vocab)


def linen_next_token_loss(
    module: nn.Module,
    variables: Any,
    batch: dict[str, Array],
    rngs: dict[str, Array] | None = None,
) -> Array:
    """Mean cross entropy, in nats, of each token given those before it.

    Args:
        module: A `LinenDecoder`.
        variables: What its `init` gave.
        batch: {"tokens": int [batch, length + 1]}.
        rngs: Keys by stream; "dropout" where the config has dropout.
    """
    tokens = batch["tokens"]
    logits: Any = module.apply(variables, tokens[:, :-1], rngs=rngs)
    return functional.cross_entropy(logits, tokens[:, 1:])
