"""Names on parameters: stacked, lifted, too few."""

from flax import linen as nn
from flax import nnx

from known_failures.checks import moments_follow, split, whole
from known_failures.situation import (
    Situation,
    init_on_x,
    linen_square_loss,
    normal,
    square_loss,
)

_LECUN = nn.initializers.lecun_normal()


class NamedLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(_LECUN, ("fsdp", "tensor"))
        self.linear = nnx.Linear(16, 16, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.linear(x))


class Stacked(nnx.Module):
    """Three layers made by one vmap and run by one scan."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.vmap(NamedLayer, in_axes=(0,), out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        run = nnx.scan(
            lambda x, layer: layer(x),
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
        )
        return run(x, self.layers)


STACKED = Situation(
    # Two names on a kernel of three dims: building the optimizer put the first on the
    # layers. And without a mesh in force the model could not be built at all.
    name="stacked annotated layers",
    source="google/flax#5112",
    model=Stacked,
    loss=square_loss,
    batch=normal(x=(8, 16), y=(8, 16)),
    mesh={"fsdp": 2, "tensor": 4},
    checks=(
        whole("linear/kernel", 0),
        split("linear/kernel", 1, "fsdp"),
        split("linear/kernel", 2, "tensor"),
        moments_follow(),
    ),
)


class NamedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        up = nn.with_logical_partitioning(_LECUN, ("embed", "mlp"))
        down = nn.with_logical_partitioning(_LECUN, ("mlp", "embed"))
        h = nn.Dense(128, kernel_init=up, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(32, kernel_init=down, name="down")(nn.gelu(h)), None


class Lifted(nn.Module):
    """Six layers in a scan, recomputed in the backward pass."""

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(
            nn.remat(NamedBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=6,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = stack(name="layers")(x, None)
        return nn.Dense(4, name="head")(x)


LIFTED = Situation(
    # The axis that the scan adds had no rule, or specs were one dim short.
    name="scanned and recomputed layers with logical names",
    source="google/flax#3870",
    model=Lifted(),
    loss=linen_square_loss,
    init=init_on_x,
    rules=(("embed", "fsdp"), ("mlp", "tensor")),
    batch=normal(x=(8, 32), y=(8, 4)),
    devices=4,
    mesh={"fsdp": 2, "tensor": 2},
    checks=(
        whole("layers/(up|down)/kernel", 0),
        split("layers/up/kernel", 1, "fsdp"),
        split("layers/up/kernel", 2, "tensor"),
        split("layers/down/kernel", 1, "tensor"),
        split("layers/down/kernel", 2, "fsdp"),
        moments_follow(),
    ),
)


class Short(nn.Module):
    """A built-in attention makes kernels of three dims of what is named as two."""

    @nn.compact
    def __call__(self, x):
        named = nn.with_logical_partitioning
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=4,
            qkv_features=64,
            kernel_init=named(_LECUN, ("embed", "heads")),
            bias_init=named(nn.initializers.zeros, ("heads",)),
            name="attn",
        )(x, x)
        init = named(_LECUN, ("embed", "unknown"))
        return nn.Dense(8, name="head")(
            nn.gelu(nn.Dense(128, kernel_init=init, name="up")(x))
        )


SHORT = Situation(
    # Fewer names than dims, and a name that no rule knows.
    name="annotations shorter than the rank",
    source="google/flax#3892",
    model=Short(),
    loss=linen_square_loss,
    init=init_on_x,
    rules=(("embed", "fsdp"), ("heads", "tensor")),
    batch=normal(x=(8, 6, 64), y=(8, 6, 8)),
    devices=4,
    mesh={"fsdp": 2, "tensor": 2},
    checks=(
        split("attn/(query|key|value)/kernel", 0, "fsdp"),
        split("attn/(query|key|value)/kernel", 1, "tensor"),
        moments_follow(),
    ),
)

ALL = (STACKED, LIFTED, SHORT)
