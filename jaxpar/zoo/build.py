"""From a zoo entry to the arguments of `jaxpar.make_plan`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpar.zoo.config import VitConfig
from jaxpar.zoo.decoder import Decoder, next_token_loss
from jaxpar.zoo.linen_decoder import LinenDecoder, linen_next_token_loss
from jaxpar.zoo.registry import OptimizerSpec, ZooEntry, find
from jaxpar.zoo.vit import Vit, label_loss

_NNX = {"decoder": (Decoder, next_token_loss), "vit": (Vit, label_loss)}


def zoo(
    name: str, *, batch: int | None = None, seq: int | None = None, **overrides: Any
) -> dict[str, Any]:
    """The arguments of `jaxpar.make_plan` for a model of the zoo.

    Args:
        name: Such as "gpt-tiny"; `jaxpar.zoo.entries()` has them all.
        batch: Sequences or images in the global batch, in place of the entry's.
        seq: Tokens in a sequence, in place of the entry's.
        **overrides: Fields of `DecoderConfig` or `VitConfig`: layers, scan, remat...

    Returns:
        {"model", "optimizer", "loss", "batch"}, and "init" for Linen. The batch is
        made of ShapeDtypeStructs; a language model's has seq + 1 tokens in a row.

    Raises:
        ModelError: if the name or an override is unknown or does not fit.
    """
    return arguments(find(name).changed(batch, seq, **overrides))


def arguments(entry: ZooEntry) -> dict[str, Any]:
    """The same, of an entry at hand."""
    made = {"optimizer": make_optimizer(entry.optimizer), "batch": _batch(entry)}
    if entry.family == "linen-decoder":
        module = LinenDecoder(entry.config)  # pyright: ignore[reportArgumentType]
        return made | {"model": module, "loss": linen_next_token_loss, "init": _init}
    make, loss = _NNX[entry.family]

    def model(rngs: nnx.Rngs) -> nnx.Module:
        # Names are for the planner; without a mesh nothing may act on them yet.
        with nnx.use_eager_sharding(False):
            return make(entry.config, rngs=rngs)

    return made | {"model": model, "loss": loss}


def make_optimizer(spec: OptimizerSpec) -> optax.GradientTransformation:
    """The optimizer that a spec describes."""
    rate: optax.ScalarOrSchedule = spec.learning_rate
    if spec.warmup_steps:
        rate = optax.linear_schedule(0.0, rate, spec.warmup_steps)
    update = getattr(optax, spec.name)(rate, **spec.arguments)
    if spec.clip_norm is None:
        return update
    return optax.chain(optax.clip_by_global_norm(spec.clip_norm), update)


def _batch(entry: ZooEntry) -> dict[str, jax.ShapeDtypeStruct]:
    config, batch = entry.config, entry.batch
    if isinstance(config, VitConfig):
        image = (batch, config.image, config.image, config.channels)
        return {
            "image": jax.ShapeDtypeStruct(image, jnp.float32),
            "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
        }
    length = 1 + (entry.seq or config.max_seq)
    return {"tokens": jax.ShapeDtypeStruct((batch, length), jnp.int32)}


def _init(module: LinenDecoder, rngs: Any, batch: dict[str, jax.Array]) -> Any:
    return module.init(rngs, batch["tokens"][:, :-1])
