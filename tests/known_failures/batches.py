"""Batches that are not one array, or do not divide."""

from dataclasses import replace

import numpy as np
import optax
from flax import nnx

from known_failures.checks import batch_split
from known_failures.situation import Situation, cross_entropy, integers, normal


class Tagger(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(128, 32, rngs=rngs)
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.down(nnx.relu(self.up(self.embed(tokens))))


def masked_loss(model, batch):
    inputs, mask = batch["inputs"], batch["inputs"]["mask"]
    each = optax.softmax_cross_entropy_with_integer_labels(
        model(inputs["tokens"]), batch["labels"]
    )
    return batch["more"]["scale"] * (each * mask).sum() / mask.sum()


NESTED = Situation(
    # A spec for a scalar or for None raised, and the error pointed elsewhere.
    name="nested batch",
    source="jax-ml/jax#14519",
    model=Tagger,
    loss=masked_loss,
    batch={
        "inputs": {
            "tokens": integers(128, 8, 12),
            "mask": integers(10, 8, 12) < 7,
            "absent": None,
        },
        "labels": integers(8, 8, 12),
        "more": {"scale": np.float32(0.5), "lengths": integers(12, 8), "note": ()},
    },
    devices=4,
    mesh={"data": 4},
    tolerance=1e-5,
    checks=(batch_split("inputs/|labels|lengths", "data"),),
)


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(20, 32, rngs=rngs), nnx.Linear(32, 3, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


UNEVEN = Situation(
    # The last batch of an epoch failed with an arithmetic error.
    name="ten examples on four devices",
    source="keras-team/keras#21167",
    model=Classifier,
    loss=lambda model, batch: cross_entropy(model(batch["x"]), batch["label"]),
    batch=normal(x=(10, 20)) | {"label": integers(3, 10)},
    devices=4,
    mesh={"data": 4},
    refusal=(10, 4),
)

UNEVEN_ON_ANY_MESH = replace(
    # The mean must be that of exactly the ten examples.
    UNEVEN,
    name="ten examples on four devices of any use",
    mesh=None,
    tolerance=1e-5,
    refusal=(),
)

ALL = (NESTED, UNEVEN, UNEVEN_ON_ANY_MESH)
