"""Sizes of a decoder transformer, and what follows from them alone."""

from dataclasses import dataclass

import numpy as np

Numbers = np.ndarray | float | int
"""One value for all configurations, or one per configuration."""


@dataclass(frozen=True)
class Shape:
    """A dense decoder; every field may be an array along the configurations.

    Attributes:
        layers: Blocks.
        width: Of the residual stream.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Width of one head.
        ffn: Width of the hidden layer of the feed-forward network.
        vocab: Rows of the embedding.
        sequence: Tokens of one example.
        gated: Whether the feed-forward network has a gate (SwiGLU): three matrices.
        tied: Whether embedding and output layer share their matrix.
        flash: Whether attention is one fused kernel that skips the masked half and
            keeps no scores; otherwise scores go through memory.
        dropout: Whether attention and residuals have dropout.
    """

    layers: Numbers
    width: Numbers
    heads: Numbers
    kv_heads: Numbers
    head_dim: Numbers
    ffn: Numbers
    vocab: Numbers
    sequence: Numbers
    gated: Numbers = False
    tied: Numbers = True
    flash: Numbers = False
    dropout: Numbers = True

    @property
    def hidden_matrices(self) -> Numbers:
        """Matrices from the residual stream into the feed-forward network."""
        return 1 + np.asarray(self.gated, int)

    @property
    def layer_params(self) -> Numbers:
        """Weights of the matrices of one block (2104.04473, eq. 2, generalised)."""
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        return attention + (1 + self.hidden_matrices) * self.width * self.ffn

    @property
    def embedding_params(self) -> Numbers:
        """Weights of one embedding, or of one output layer."""
        return self.vocab * self.width

    @property
    def params(self) -> Numbers:
        """Weights of all matrices."""
        ends = np.where(self.tied, 1, 2)
        return self.layers * self.layer_params + ends * self.embedding_params

    def attention_flops(self, batch: Numbers) -> Numbers:
        """Forward products of scores and values of one block, the mask not skipped."""
        pairs = batch * self.sequence * self.sequence
        return 4.0 * pairs * self.heads * self.head_dim

    def model_flops(self, batch: Numbers) -> Numbers:
        """FLOPs of one step without recomputation, attention counted in full.

        2104.04473, eq. 3 and 2205.05198, appendix A: 6 per weight and token.
        """
        tokens = 1.0 * batch * self.sequence
        weights = self.layers * self.layer_params + self.embedding_params
        return 6.0 * tokens * weights + 3.0 * self.layers * self.attention_flops(batch)
