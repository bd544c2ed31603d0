"""The zoo's decoder and its training step, sharded by hand: no planner involved.

Specs on parameters and constraints on activations, as people write them: Megatron
(Shoeybi et al. 2019) splits heads, the feed-forward part and the vocabulary over a
tensor axis; FSDP (Rajbhandari et al. 2020, ZeRO-3) spreads the width of every matrix
over the devices that share the batch and gathers a layer's matrices to use them.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.zoo import functional
from jaxpar.zoo.config import DecoderConfig

RULES = (
    # parameter, dim of a tensor axis, dim of a storage axis
    (r"embed/embedding", 0, 1),
    (r"positions", None, 1),
    (r"(query|key|value)/kernel", 1, 0),
    (r"(query|key|value)/bias", 0, None),
    (r"out/kernel", 0, 2),
    (r"(up|gate)/kernel", 1, 0),
    (r"(up|gate)/bias", 0, None),
    (r"down/kernel", 0, 1),
    (r"head/kernel", 1, 0),
)


@dataclass(frozen=True)
class Layout:
    """A way to shard the decoder.

    Attributes:
        name: For people.
        axes: Mesh axes and their sizes, outermost first.
        batch: Axis that shares the batch.
        tensor: Axis that splits matrices, or None.
        storage: Axis over which parameters rest, or None.
    """

    name: str
    axes: Mapping[str, int]
    batch: str
    tensor: str | None = None
    storage: str | None = None

    def mesh(self) -> Mesh:
        """A mesh of these axes over the first devices."""
        devices = jax.devices()[: math.prod(self.axes.values())]
        types = (AxisType.Auto,) * len(self.axes)
        sizes = tuple(self.axes.values())
        return jax.make_mesh(sizes, tuple(self.axes), types, devices=devices)

    def spec(self, path: str, shape: tuple[int, ...], *, at_rest: bool) -> P:
        """Where a parameter lies, at rest or while it is used.

        An axis that does not divide its dim is left out.
        """
        dims: list[str | None] = [None] * len(shape)
        stacked = bool(re.match(r"layers/\D", path))
        for pattern, tensor_dim, storage_dim in RULES:
            if not re.search(pattern + "$", path):
                continue
            storage = self.storage if at_rest else None
            for axis, dim in ((self.tensor, tensor_dim), (storage, storage_dim)):
                if axis is None or dim is None:
                    continue
                if shape[dim + stacked] % self.axes[axis] == 0:
                    dims[dim + stacked] = axis
        return P(*dims)


def layouts(data: int, tensor: int) -> tuple[Layout, ...]:
    """Megatron, FSDP, and the two combined, on data * tensor devices."""
    both = {"fsdp": data, "tensor": tensor}
    return (
        Layout("Megatron", {"data": data, "tensor": tensor}, "data", "tensor"),
        Layout("FSDP", {"fsdp": data * tensor}, "fsdp", storage="fsdp"),
        Layout("FSDP + Megatron", both, "fsdp", "tensor", "fsdp"),
    )


def path_of(keys: Any) -> str:
    """A key path as text, joined by "/"."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


@dataclass(frozen=True)
class Decoder:
    """The decoder's loss under a layout.

    Attributes:
        config: What the zoo's decoder is made from. Learned and rotary positions
            only.
        layout: How it is sharded.
        mesh: Over which devices.
    """

    config: DecoderConfig
    layout: Layout
    mesh: Mesh = field(repr=False)

    def loss(self, params: Any, batch: Mapping[str, Array]) -> Array:
        """Mean cross entropy of each token given those before it."""
        tokens, config = batch["tokens"][:, :-1], self.config
        outer = self._used({k: v for k, v in params.items() if k != "layers"})
        x = self._hidden(jnp.take(outer["embed"]["embedding"], tokens, axis=0))
        if "positions" in outer:
            x = x + outer["positions"][: tokens.shape[1]]
        x = self._layers(x, params["layers"])
        x = self._norm(x, outer["final_norm"])
        if config.tied:
            logits = x @ outer["embed"]["embedding"].T
        else:
            logits = x @ outer["head"]["kernel"]
        logits = self._inner(logits)
        return functional.cross_entropy(logits, batch["tokens"][:, 1:])

    def _layers(self, x: Array, layers: Any) -> Array:
        block = self._block
        if self.config.remat == "full":
            block = jax.checkpoint(block, prevent_cse=not self.config.scan)
        if self.config.scan:
            return lax.scan(lambda x, layer: (block(x, layer), None), x, layers)[0]
        for layer in layers.values():
            x = block(x, layer)
        return x

    def _block(self, x: Array, layer: Any) -> Array:
        layer = self._used(layer)
        h = self._norm(x, layer["norm"])
        attended = self._hidden(self._attention(h, layer["attn"]))
        if self.config.parallel_block:
            return x + attended + self._hidden(self._mlp(h, layer["mlp"]))
        x = x + attended
        h = self._norm(x, layer["mlp_norm"])
        return x + self._hidden(self._mlp(h, layer["mlp"]))

    def _attention(self, h: Array, weights: Any) -> Array:
        query, key, value = (
            self._heads(_affine("bsd,dhk->bshk", h, weights[name]))
            for name in ("query", "key", "value")
        )
        if self.config.positions == "rope":
            turn = partial(functional.rotary, theta=self.config.rope_theta)
            query, key = turn(query), turn(key)
        attended = functional.attend(query, key, value, causal=self.config.causal)
        return _affine("bshk,hkd->bsd", self._heads(attended), weights["out"])

    def _mlp(self, h: Array, weights: Any) -> Array:
        up = self._inner(_affine("bsd,df->bsf", h, weights["up"]))
        gate = None
        if self.config.gated:
            gate = self._inner(_affine("bsd,df->bsf", h, weights["gate"]))
        inner = functional.activate(self.config.activation, up, gate)
        return _affine("bsf,fd->bsd", inner, weights["down"])

    def _norm(self, x: Array, weights: Any) -> Array:
        centre = self.config.norm == "layernorm"
        scale, bias = weights["scale"], weights.get("bias")
        return functional.normalise(x, scale, bias, centre=centre)

    def _used(self, params: Any) -> Any:
        """Parameters in the compute dtype, gathered from where they rest."""
        dtype = jnp.dtype(self.config.dtype)

        def use(keys: Any, x: Array) -> Array:
            spec = self.layout.spec(path_of(keys), x.shape, at_rest=False)
            return self._constrain(x.astype(dtype), spec)

        return jax.tree_util.tree_map_with_path(use, params)

    def _hidden(self, x: Array) -> Array:
        return self._constrain(x, P(self.layout.batch))

    def _inner(self, x: Array) -> Array:
        return self._constrain(x, P(self.layout.batch, None, self.layout.tensor))

    def _heads(self, x: Array) -> Array:
        tensor = self.layout.tensor
        fits = tensor and x.shape[2] % self.layout.axes[tensor] == 0
        return self._constrain(x, P(self.layout.batch, None, tensor if fits else None))

    def _constrain(self, x: Array, spec: P) -> Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


def _affine(equation: str, x: Array, weights: Mapping[str, Array]) -> Array:
    y = jnp.einsum(equation, x, weights["kernel"])
    return y + weights["bias"] if "bias" in weights else y


@dataclass(frozen=True)
class Training:
    """A jitted step, and abstract arguments to lower it with.

    Attributes:
        step: ((params, opt_state), batch) -> ((params, opt_state), metrics).
        state: Of `jax.ShapeDtypeStruct` with shardings.
        batch: The same.
        put: From whole parameters to the state of the first step.
    """

    step: Any
    state: Any
    batch: Any
    put: Callable[[Any], Any]


def training(
    loss: Callable[[Any, Any], Array],
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
    shardings: Any,
    batch_sharding: NamedSharding,
) -> Training:
    """A training step whose gradients and optimizer state lie as the parameters do.

    Args:
        loss: (params, batch) -> scalar.
        optimizer: One whose state `optax.tree_map_params` understands.
        params: Whole parameters, or their shapes.
        batch: Shapes of the global batch.
        shardings: Of the parameters.
        batch_sharding: Of every array of the batch.
    """
    everywhere = NamedSharding(batch_sharding.mesh, P())
    opt_state = jax.eval_shape(optimizer.init, params)
    opt_shardings = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        opt_state,
        shardings,
        transform_non_params=lambda _: everywhere,
    )
    places = (shardings, opt_shardings)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        grads = lax.with_sharding_constraint(grads, shardings)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {"loss": value, "grad_norm": optax.global_norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    def put(params: Any) -> Any:
        params = jax.device_put(params, shardings)
        return params, jax.jit(optimizer.init, out_shardings=opt_shardings)(params)

    return Training(
        step=jax.jit(
            step,
            in_shardings=(places, batch_sharding),
            out_shardings=(places, everywhere),
            donate_argnums=0,
        ),
        state=jax.tree.map(_struct, (params, opt_state), places),
        batch=jax.tree.map(lambda x: _struct(x, batch_sharding), batch),
        put=put,
    )


def hand_training(
    config: DecoderConfig,
    layout: Layout,
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
) -> Training:
    """The training step of the zoo's decoder under a layout."""
    mesh = layout.mesh()

    def at_rest(keys: Any, x: Any) -> NamedSharding:
        spec = layout.spec(path_of(keys), x.shape, at_rest=True)
        return NamedSharding(mesh, spec)

    return training(
        Decoder(config, layout, mesh).loss,
        optimizer,
        params,
        batch,
        jax.tree_util.tree_map_with_path(at_rest, params),
        NamedSharding(mesh, P(layout.batch)),
    )


def _struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
