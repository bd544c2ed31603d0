"""A vision transformer in Flax NNX."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxpar.zoo import functional
from jaxpar.zoo.config import VitConfig
from jaxpar.zoo.initial import inward, normal
from jaxpar.zoo.transformer import Norm, linear, make_layers, named, param, run_layers


class Vit(nnx.Module):
    """Dosovitskiy et al. 2021: patches, blocks, pooling, linear classifier."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.config = config
        side, embed = (config.patch, config.patch), {"embed": config.d_model}
        fan_in = config.patch**2 * config.channels
        names = ("height", "width", "channels", "embed")
        self.patch = nnx.Conv(
            config.channels,
            config.d_model,
            side,
            strides=side,
            padding="VALID",
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            kernel_init=named(inward(fan_in), names, config),
            bias_init=named(nnx.initializers.zeros, ("embed",), config),
            rngs=rngs,
        )
        pooled, zeros = config.pooling == "token", nnx.initializers.zeros
        self.token = param(rngs, zeros, embed, config) if pooled else None
        table, learned = (
            {"position": config.tokens} | embed,
            config.positions == "learned",
        )
        self.positions = param(rngs, normal(0.02), table, config) if learned else None
        self.layers = make_layers(config, rngs)
        self.final_norm = Norm(config, rngs=rngs)
        init, classes = inward(config.d_model), {"classes": config.classes}
        self.head = linear(rngs, init, embed, classes, config, bias=True)

    def __call__(self, images: Array) -> Array:
        """From [batch, image, image, channels] to [batch, classes] logits."""
        x = self.patch(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        if self.token is not None:
            first = self.token[...].astype(x.dtype)
            first = jnp.broadcast_to(first, (x.shape[0], 1, x.shape[-1]))
            x = jnp.concatenate([first, x], axis=1)
        if self.positions is not None:
            x = x + self.positions[...].astype(x.dtype)
        x = self.final_norm(run_layers(self.layers, x, self.config))
        return self.head(x.mean(axis=1) if self.token is None else x[:, 0])


def label_loss(model: Vit, batch: dict[str, Array]) -> Array:
    """Mean cross entropy, in nats, of the labels.

    Args:
        model: The classifier.
        batch: {"image": float [batch, image, image, channels], "label": int [batch]}.
    """
    return functional.cross_entropy(model(batch["image"]), batch["label"])
