"""Vocabularies and their tables."""

from flax import nnx

from known_failures.checks import one_array, split, weights, whole
from known_failures.situation import Situation, integers, next_token_loss


class Untied(nnx.Module):
    """A table in front, another behind."""

    def __init__(self, rngs: nnx.Rngs, vocab=5003, width=64):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        logits = self.head(self.norm(x + self.down(nnx.gelu(self.up(x)))))
        assert logits.shape[-1] == self.embed.num_embeddings
        return logits


PRIME_VOCABULARY = Situation(
    # Uneven sharding of the vocabulary was refused; users had to pad it by hand.
    name="prime vocabulary",
    source="NVIDIA-NeMo/RL#403",
    model=Untied,
    loss=next_token_loss,
    batch={"tokens": integers(5003, 4, 17)},
    mesh={"data": 2, "tensor": 4},
    checks=(
        whole("^embed/embedding", 0),
        whole("^head/kernel", 1),
        split("^(embed/embedding|head/kernel)", None),
    ),
)


class Transposed(nnx.Module):
    """The output projection by a table that something else owns too."""

    def __init__(self, table: nnx.Param):
        self.table = table

    def __call__(self, x):
        return x @ self.table[...].T


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(512, 64, rngs=rngs)
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)
        self.head = Transposed(self.embed.embedding)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


TIED_TABLE = Situation(
    # Reached by two names, the table was sharded twice; indices ran out of range.
    name="tied table",
    source="Lightning-AI/lightning-thunder#257",
    model=Tied,
    loss=next_token_loss,
    batch={"tokens": integers(512, 4, 17)},
    mesh={"data": 2, "tensor": 4},
    updates=2,
    checks=(
        one_array("embed/embedding|head/table"),
        weights(512 * 64 + 2 * 64 * 256 + 256 + 64),
        split("embed/embedding|head/table", None, "tensor"),
    ),
)

ALL = (PRIME_VOCABULARY, TIED_TABLE)
