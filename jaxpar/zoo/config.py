"""Sizes and options of the zoo's models: plain data, checked, without JAX."""

from dataclasses import dataclass, fields
from typing import Any

from jaxpar.errors import ModelError

GATED = ("swiglu", "geglu")
_CHOICES = {
    "activation": ("gelu", "relu", *GATED),
    "norm": ("layernorm", "rmsnorm"),
    "positions": ("learned", "rope", "relative", "transformer_xl"),
    "remat": ("none", "full"),
    "dtype": ("float32", "bfloat16", "float16"),
    "param_dtype": ("float32", "bfloat16", "float16"),
    "pooling": ("mean", "token"),
}
RELATIVE_BUCKETS = 32
"""Distances that a "relative" bias table tells apart (T5: 32, the far ones in bins)."""


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """A stack of equal transformer blocks.

    Attributes:
        layers: Number of blocks.
        d_model: Width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads: `heads`, a divisor of it (grouped), or 1.
        head_dim: Width of one head.
        d_ff: Inner width of the feed-forward part.
        activation: "gelu", "relu", or the gated "swiglu", "geglu" (three matrices).
        norm: "layernorm" or "rmsnorm", before each part and at the end.
        positions: "learned" (a table added to the input), "rope", "relative" (T5: one
            bias table a layer) or "transformer_xl" (Dai et al. 2019, used by Gopher).
        rope_theta: Base of the rotary frequencies.
        parallel_block: Attention and feed-forward read one norm and are added
            together (PaLM).
        attention_bias: Biases in the attention projections.
        mlp_bias: Biases in the feed-forward part.
        norm_bias: Bias of a layernorm.
        causal: Whether a token sees only those before it.
        scan: One stacked block run by a scan, in place of a list of blocks.
        remat: "full" recomputes each block in the backward pass; "none" does not.
        experts: Feed-forward parts of which a router chooses; 1 is a dense block.
        experts_per_token: How many of them each token is sent to.
        expert_group: Most tokens that share the places of an expert (GShard); a
            longer sequence is cut into equal groups.
        capacity_factor: Places of an expert in a group over the tokens that it gets
            when all experts get as many; a token that finds none is passed over.
        dropout: Rate of the dropout on each part's output.
        dtype: In which blocks compute; norms and softmax always use float32.
        param_dtype: In which parameters rest.
        annotate: Put logical axis names on the parameters.
    """

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    activation: str = "gelu"
    norm: str = "layernorm"
    positions: str = "learned"
    rope_theta: float = 10_000.0
    parallel_block: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    causal: bool = True
    scan: bool = False
    remat: str = "none"
    experts: int = 1
    experts_per_token: int = 1
    expert_group: int = 1024
    capacity_factor: float = 1.25
    dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    annotate: bool = False

    def __post_init__(self):
        """Checks sizes and names.

        Raises:
            ModelError: if a size is not a positive integer, a name is unknown, or
                the options contradict each other.
        """
        for field in fields(self):
            _check(field.name, field.type, getattr(self, field.name))
        if self.heads % self.kv_heads:
            raise ModelError(
                f"kv_heads ({self.kv_heads}) does not divide heads ({self.heads})",
                hint="each key head serves an equal group of query heads",
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ModelError(
                f"head_dim ({self.head_dim}) is odd, but rope turns pairs of numbers",
                hint='use an even head_dim, or other positions, such as "learned"',
            )
        if self.experts_per_token > self.experts:
            raise ModelError(
                f"experts_per_token ({self.experts_per_token}) exceeds experts "
                f"({self.experts})"
            )
        if self.experts > 1 and self.mlp_bias:
            raise ModelError(
                f"{self.experts} experts with mlp_bias", hint="set mlp_bias to false"
            )
        if self.positions in ("relative", "transformer_xl") and not self.causal:
            raise ModelError(
                f'positions "{self.positions}" look back only, but causal is false',
                hint='use "learned" or "rope" positions',
            )

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part has a gate matrix."""
        return self.activation in GATED

    @property
    def norm_parameters(self) -> int:
        """Weights in one norm."""
        has_bias = self.norm == "layernorm" and self.norm_bias
        return self.d_model * (1 + has_bias)

    @property
    def block_parameters(self) -> int:
        """Weights in one block."""
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.d_model * (query + keys)
        attention += self.attention_bias * (query + 2 * keys + self.d_model)
        if self.positions == "relative":
            attention += self.heads * RELATIVE_BUCKETS
        if self.positions == "transformer_xl":
            attention += (self.d_model + 2) * query
        inner = 1 + self.gated
        mlp = (1 + inner) * self.d_model * self.d_ff
        mlp += self.mlp_bias * (inner * self.d_ff + self.d_model)
        if self.experts > 1:
            mlp = self.experts * (mlp + self.d_model)
        norms = (1 if self.parallel_block else 2) * self.norm_parameters
        return attention + mlp + norms

    @property
    def stack_parameters(self) -> int:
        """Weights in all blocks and the norm that ends them."""
        return self.layers * self.block_parameters + self.norm_parameters


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(StackConfig):
    """A decoder-only language model.

    Attributes:
        vocab: Number of tokens known.
        max_seq: Rows of the table of learned positions; the longest input then.
        tied: One table for the input embedding and for the output logits.
        pad_vocab: The tables get as many rows more as make their number a multiple
            of this, so that axes which do not divide `vocab` can split them. No
            token looks the extra rows up, and their logits are masked.
    """

    vocab: int
    max_seq: int
    tied: bool = True
    pad_vocab: int = 1

    @property
    def table_rows(self) -> int:
        """Rows of the token tables, padding included."""
        return -(-self.vocab // self.pad_vocab) * self.pad_vocab

    @property
    def parameters(self) -> int:
        """Weights in the whole model."""
        tables = self.table_rows * (1 if self.tied else 2)
        tables += self.max_seq if self.positions == "learned" else 0
        return self.stack_parameters + tables * self.d_model


@dataclass(frozen=True, kw_only=True)
class VitConfig(StackConfig):
    """A vision transformer that classifies square images.

    Attributes:
        image: Pixels along one side.
        patch: Pixels along one side of a patch; divides `image`.
        channels: Colours of a pixel.
        classes: Number of labels.
        pooling: "mean" over the patches, or "token": a learned extra first token.
    """

    image: int
    patch: int
    classes: int
    channels: int = 3
    pooling: str = "token"
    causal: bool = False

    def __post_init__(self):
        """Checks the patches as well.

        Raises:
            ModelError: if a value is out of range or patches do not tile the image.
        """
        super().__post_init__()
        if self.image % self.patch:
            raise ModelError(
                f"patch ({self.patch}) does not divide image ({self.image})",
                hint="use a patch that tiles the image",
            )

    @property
    def tokens(self) -> int:
        """Length of the sequence that the blocks see."""
        return (self.image // self.patch) ** 2 + (self.pooling == "token")

    @property
    def parameters(self) -> int:
        """Weights in the whole model."""
        patch = self.patch**2 * self.channels + 1
        positions = self.tokens if self.positions == "learned" else 0
        token = self.pooling == "token"
        head = (self.d_model + 1) * self.classes
        return self.stack_parameters + (patch + positions + token) * self.d_model + head


def _check(name: str, kind: Any, value: Any) -> None:
    """Refuses a value that the field of a config cannot have."""
    if name in _CHOICES and value not in _CHOICES[name]:
        raise ModelError(
            f"{name} is {value!r}", hint=f"use one of {', '.join(_CHOICES[name])}"
        )
    is_kind = isinstance(value, (int, float) if kind is float else kind)
    if not is_kind or (kind is not bool and isinstance(value, bool)):
        raise ModelError(f"{name} is {value!r}, but must be of type {kind.__name__}")
    if kind is int and value < 1:
        raise ModelError(f"{name} is {value}, but must be at least 1")
    if name == "capacity_factor" and value <= 0:
        raise ModelError(f"capacity_factor is {value}, but must be above 0")
    if name == "dropout" and not 0 <= value < 1:
        raise ModelError(f"dropout is {value}, but must be at least 0 and below 1")
