"""Models of the zoo train on any mesh as they train on one device."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_device import History, Plain, course, on_mesh, relative_error

import jaxpar
from jaxpar.pure import LOSS_KEY, named_leaves
from jaxpar.runtime import Sharded, State
from jaxpar.zoo import zoo

UPDATES = 3
TOLERANCE = 1e-5
LEAST_PARAMETER = 0.01
"""What smaller parameters are compared as: key biases, whose gradient is nothing but
rounding, stay below."""

SMALL = {"layers": 2, "d_model": 32, "heads": 4, "kv_heads": 4, "head_dim": 8}
SMALL |= {"d_ff": 64, "batch": 24}
TEXT = SMALL | {"vocab": 64, "seq": 8, "max_seq": 8}
GROUPED = TEXT | {"heads": 8, "kv_heads": 2, "head_dim": 4}
PARALLEL = {
    "kv_heads": 1,
    "activation": "swiglu",
    "positions": "rope",
    "parallel_block": True,
    "attention_bias": False,
    "mlp_bias": False,
    "norm_bias": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "unrolled": ("gpt-tiny", TEXT),
    "scanned": ("gpt-tiny", TEXT | {"scan": True}),
    "recomputed": ("gpt-tiny", TEXT | {"scan": True, "remat": "full"}),
    "dropout": ("gpt-tiny", TEXT | {"dropout": 0.1}),
    "untied": ("gpt-tiny", TEXT | {"tied": False}),
    "grouped heads": ("llama-tiny", GROUPED),
    "parallel block": ("gpt-tiny", TEXT | PARALLEL),
    "relative": ("gpt-tiny", TEXT | {"positions": "relative"}),
    "transformer-xl": ("gpt-tiny", TEXT | {"positions": "transformer_xl"}),
    "linen": ("gpt-tiny-linen", TEXT),
    "linen scanned": ("gpt-tiny-linen", TEXT | {"scan": True, "remat": "full"}),
    "vit": ("vit-tiny", SMALL | {"image": 8, "pooling": "token"}),
}
MESHES: dict[str, Any] = {
    "cpu-2": "cpu-2",
    "cpu-4": "cpu-4",
    "cpu-6": "cpu-6",
    "cpu-8": "cpu-8",
    "data-tensor": {"data": 2, "tensor": 4},
    "fsdp-tensor": {"fsdp": 2, "tensor": 4},
    "fsdp": {"fsdp": 8},
    "free": {"x": 2, "y": 4},
    "data-sequence-tensor": {"data": 2, "sequence": 2, "tensor": 2},
}
OPTIMIZERS = {"adamw": optax.adamw(1e-3), "sgd": optax.sgd(0.1)}
QUICK = {
    ("unrolled", "data-tensor", "sgd"),
    ("scanned", "data-sequence-tensor", "sgd"),
    ("recomputed", "fsdp-tensor", "adamw"),
    ("dropout", "free", "sgd"),
    ("untied", "cpu-6", "adamw"),
    ("grouped heads", "fsdp-tensor", "sgd"),
    ("parallel block", "data-tensor", "sgd"),
    ("relative", "cpu-4", "sgd"),
    ("transformer-xl", "data-sequence-tensor", "sgd"),
    ("linen", "cpu-2", "sgd"),
    ("linen scanned", "fsdp", "sgd"),
    ("vit", "cpu-8", "sgd"),
}
ALL = [(a, b, c) for a in MODELS for b in MESHES for c in OPTIMIZERS]


@dataclass(frozen=True)
class Subject:
    """A model of the zoo, and what it is on one device."""

    model: Any
    loss: Any
    batch: Any
    init: Any
    plain: Plain

    def start(self) -> tuple[Any, Any]:
        """Parameters and other variables, made anew: steps may donate them.

        Biases that start at zero would hide what becomes of them.
        """
        return filled(self.plain.abstract, 0.2)

    def shard(self, mesh: Any, optimizer: Any) -> Sharded:
        return jaxpar.auto_shard(
            self.model, optimizer, self.loss, self.batch, mesh, init=self.init
        )


@cache
def subject(name: str) -> Subject:
    entry, sizes = MODELS[name]
    made = zoo(entry, **sizes)
    model, loss, init = made["model"], made["loss"], made.get("init")
    batch = filled(made["batch"])
    plain = Plain.of(model, loss, batch, init=init)
    return Subject(model, loss, batch, init, plain)


@cache
def one_device(name: str, optimizer: str) -> History:
    it = subject(name)
    return it.plain.train(it.start(), OPTIMIZERS[optimizer], it.batch, UPDATES)


def filled(tree: Any, scale: float = 1.0) -> Any:
    """Normal numbers; tokens or labels; keys. No two arrays are alike."""
    r = np.random.default_rng(0)

    def fill(struct: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(r.integers(100)), struct.shape)
        if jnp.issubdtype(struct.dtype, jnp.integer):
            below = 64 if struct.ndim > 1 else 10
            return r.integers(0, below, struct.shape, dtype=struct.dtype)
        return scale * r.normal(size=struct.shape).astype(struct.dtype)

    return jax.tree.map(fill, tree)


def first_state(it: Subject, sharded: Sharded, optimizer: Any) -> State:
    """The state that one device starts from, laid out as planned."""
    params, others = map(named_leaves, it.start())

    def placed(tree: Any, values: dict[str, Any]) -> Any:
        leaves = [values[path] for path in named_leaves(tree)]
        return jax.tree.structure(tree).unflatten(leaves)

    abstract = sharded.abstract_state
    keys = {LOSS_KEY: jax.random.key(0)}
    state = State(
        np.int32(0),
        placed(abstract.params, params),
        placed(abstract.model_state, others),
        optimizer.init(placed(abstract.params, params)),
        placed(abstract.rngs, others | keys),
    )
    return jax.device_put(state, sharded.state_shardings)


@pytest.mark.parametrize(
    ("name", "mesh", "optimizer"),
    [
        pytest.param(
            *names,
            id="-".join(names).replace(" ", "-"),
            marks=[] if names in QUICK else pytest.mark.slow,
        )
        for names in ALL
    ],
)
def test_training_equals_one_device(name: str, mesh: str, optimizer: str) -> None:
    it, wanted = subject(name), one_device(name, optimizer)
    sharded = it.shard(MESHES[mesh], OPTIMIZERS[optimizer])
    start = first_state(it, sharded, OPTIMIZERS[optimizer])
    found = on_mesh(sharded, it.batch, UPDATES, start)
    for (what, a), (_, b) in zip(course(found), course(wanted), strict=True):
        assert a == pytest.approx(b, rel=TOLERANCE, abs=0), what
    # Adam moves what has no gradient by rounding noise: not to be compared.
    compared = it.plain.trained if optimizer == "sgd" else ()
    for path in compared:
        values = found.final[path], wanted.final[path]
        assert relative_error(*values, LEAST_PARAMETER) <= TOLERANCE, path


def test_quick_combinations_are_known() -> None:
    assert QUICK <= set(ALL)
    assert {name for name, _, _ in QUICK} == set(MODELS)
    assert {mesh for _, mesh, _ in QUICK} == set(MESHES)
