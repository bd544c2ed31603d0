"""Experts against a loop over tokens, and padded tables against plain ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.errors import ModelError
from jaxpar.zoo import experts, zoo
from jaxpar.zoo.config import DecoderConfig
from jaxpar.zoo.decoder import Decoder, next_token_loss
from jaxpar.zoo.transformer import Experts

SIZES = {
    **{"layers": 2, "d_model": 16, "heads": 4, "kv_heads": 2, "head_dim": 4},
    **{"d_ff": 24, "vocab": 50, "max_seq": 12, "activation": "swiglu"},
    **{"norm": "rmsnorm", "positions": "rope", "tied": False},
    **{"attention_bias": False, "mlp_bias": False},
}
SPARSE = SIZES | {"experts": 4, "experts_per_token": 2, "expert_group": 6}


def looped(layer: Experts, x: np.ndarray, group: int, places: int) -> np.ndarray:
    """Every token by itself, in plain numpy; full experts turn tokens away."""
    router, up, down = (
        np.asarray(p[...]) for p in (layer.router, layer.up, layer.down)
    )
    gate = np.asarray(layer.gate[...])
    y = np.zeros_like(x)
    for row in range(x.shape[0]):
        for first in range(0, x.shape[1], group):
            tokens = range(first, first + group)
            logits = x[row] @ router
            order = np.argsort(-logits, axis=-1, kind="stable")
            filled = np.zeros(router.shape[1], int)
            for choice in range(2):
                for t in tokens:
                    e = order[t, choice]
                    filled[e] += 1
                    if filled[e] > places:
                        continue
                    best = np.exp(logits[t, order[t, :2]])
                    inner = x[row, t] @ up[e]
                    gated = x[row, t] @ gate[e]
                    inner = inner * gated / (1 + np.exp(-gated))
                    y[row, t] += best[choice] / best.sum() * (inner @ down[e])
    return y


@pytest.mark.parametrize("capacity", [0.5, 1.25, 2.0])
def test_experts_equal_a_loop_over_tokens(capacity):
    config = DecoderConfig(**SPARSE, capacity_factor=capacity)
    layer = Experts(config, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(3, 12, 16)).astype(np.float32)
    places = experts.places(6, 4, 2, capacity)
    wanted = looped(layer, x, 6, places)
    turned_away = looped(layer, x, 6, 6) - wanted
    assert (np.abs(turned_away).max() > 1e-3) == (capacity < 2)
    np.testing.assert_allclose(layer(jnp.asarray(x)), wanted, atol=1e-5)


def test_places_and_groups():
    assert experts.places(1024, 8, 2, 1.25) == 320
    assert experts.places(4, 8, 2, 100.0) == 4
    assert experts.group_size(4096, 1024) == 1024
    assert experts.group_size(12, 5) == 4


EXPERTS = {"mlp/(gate|up|down)": P(None, "expert")}


@pytest.mark.parametrize(
    ("mesh", "pin"),
    [({"data": 2, "expert": 4}, EXPERTS), ({"fsdp": 2, "tensor": 4}, None)],
)
def test_experts_train_on_a_mesh_as_on_one_device(mesh, pin):
    sizes = SPARSE | {"layers": 1, "dtype": "float32", "scan": True, "remat": "none"}
    given = zoo("mixtral-8x7b", batch=8, seq=12, **sizes)
    batch = {"tokens": np.random.default_rng(1).integers(0, 50, (8, 13))}
    given["batch"] = batch
    losses = []
    for shape, wanted in (({"data": 1}, None), (mesh, pin)):
        sharded = jaxpar.auto_shard(**given, mesh=shape, pin=wanted)
        state, found = sharded.init(0), []
        for _ in range(3):
            state, metrics = sharded.step(state, batch)
            found.append(float(metrics["loss"]))
        losses.append(found)
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
    up = sharded.plan.params["layers/mlp/up"]
    assert (up.compute[1] == ("expert",)) == (pin is not None)


@pytest.mark.parametrize("tied", [False, True])
def test_padded_tables_change_no_loss_and_no_gradient(tied):
    sizes = SIZES | {"tied": tied}
    plain = Decoder(DecoderConfig(**sizes), rngs=nnx.Rngs(0))
    padded = Decoder(DecoderConfig(**sizes, pad_vocab=16), rngs=nnx.Rngs(1))
    tables = [("embed", "embedding")] + ([] if tied else [("head", "kernel")])
    state = dict(nnx.to_flat_state(nnx.state(padded)))
    for path, leaf in nnx.to_flat_state(nnx.state(plain)):
        value = leaf[...]
        if path in tables:
            assert state[path].shape == tuple(64 if n == 50 else n for n in value.shape)
            room = [
                (0, m - n) for m, n in zip(state[path].shape, value.shape, strict=True)
            ]
            value = jnp.pad(value, room, constant_values=0.7)
        state[path][...] = value
    tokens = np.random.default_rng(2).integers(0, 50, (4, 13))
    (a, da), (b, db) = (
        nnx.value_and_grad(next_token_loss)(m, {"tokens": tokens})
        for m in (plain, padded)
    )
    np.testing.assert_allclose(b, a, rtol=1e-6)
    found = dict(nnx.to_flat_state(db))
    for path, leaf in nnx.to_flat_state(da):
        wanted = np.asarray(leaf[...])
        got = np.asarray(found[path][...])
        inside = got[tuple(slice(n) for n in wanted.shape)]
        np.testing.assert_allclose(inside, wanted, atol=1e-6)
        assert np.abs(got).sum() == pytest.approx(np.abs(inside).sum())


def test_refusals():
    with pytest.raises(ModelError, match=r"experts_per_token \(3\) exceeds experts"):
        DecoderConfig(**SIZES, experts=2, experts_per_token=3)
    with pytest.raises(ModelError, match="set mlp_bias to false"):
        DecoderConfig(**SIZES | {"mlp_bias": True}, experts=2)
    with pytest.raises(ModelError, match="capacity_factor is 0"):
        DecoderConfig(**SIZES, experts=2, capacity_factor=0.0)
    with pytest.raises(ModelError, match="the Linen decoder has no experts"):
        made = zoo("gpt-tiny-linen", experts=2, mlp_bias=False)
        jax.eval_shape(
            lambda b: made["init"](made["model"], jax.random.key(0), b), made["batch"]
        )
