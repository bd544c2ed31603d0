"""A decoder-only language model in Flax NNX."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar.zoo import functional
from jaxpar.zoo.config import DecoderConfig
from jaxpar.zoo.initial import inward, normal
from jaxpar.zoo.transformer import Norm, linear, make_layers, named, param, run_layers


class Decoder(nnx.Module):
    """GPT, Llama, PaLM or Gopher, as the config says.

    Parameters lie at `embed/embedding`, `positions`, `layers/0/attn/query/kernel` (or
    `layers/attn/query/kernel` with a leading dim, when scanned), `final_norm/scale`
    and `head/kernel` (when not tied).
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(
            config.table_rows,
            config.d_model,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            embedding_init=named(normal(0.02), ("vocab", "embed"), config),
            rngs=rngs,
        )
        embed, vocab = {"embed": config.d_model}, {"vocab": config.table_rows}
        table = {"position": config.max_seq} | embed
        learned = config.positions == "learned"
        self.positions = param(rngs, normal(0.02), table, config) if learned else None
        self.drop = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)
        self.layers = make_layers(config, rngs)
        self.final_norm = Norm(config, rngs=rngs)
        make = partial(linear, rngs, inward(config.d_model), embed, vocab, config)
        self.head = None if config.tied else make(bias=False)

    def __call__(self, tokens: Array) -> Array:
        """From [batch, length] integers to [batch, length, table_rows] logits."""
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]].astype(x.dtype)
        x = run_layers(self.layers, self.drop(x), self.config)
        x = self.final_norm(x)
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return functional.without_padding(logits, vocab=self.config.vocab)


def next_token_loss(model: Decoder, batch: dict[str, Array]) -> Array:
    """Mean cross entropy, in nats, of each token given those before it.

    Args:
        model: The decoder.
        batch: {"tokens": int [batch, length + 1]}.
    """
    tokens = batch["tokens"]
    return functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
