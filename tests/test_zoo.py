"""The zoo's models against each other, and against plain numpy."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, traverse_util

from jaxpar import data
from jaxpar.errors import ModelError
from jaxpar.zoo import entries, functional, zoo
from jaxpar.zoo.config import RELATIVE_BUCKETS, DecoderConfig, VitConfig
from jaxpar.zoo.decoder import Decoder, next_token_loss
from jaxpar.zoo.linen_decoder import LinenDecoder
from jaxpar.zoo.vit import Vit, label_loss

TINY = DecoderConfig(
    layers=2,
    d_model=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    d_ff=32,
    vocab=32,
    max_seq=12,
)
TINY_VIT = VitConfig(
    layers=2,
    d_model=16,
    heads=2,
    kv_heads=2,
    head_dim=8,
    d_ff=32,
    image=8,
    patch=4,
    classes=5,
)
LLAMA = {
    "activation": "swiglu",
    "norm": "rmsnorm",
    "positions": "rope",
    "tied": False,
    "attention_bias": False,
    "mlp_bias": False,
}
PALM = LLAMA | {"norm": "layernorm", "norm_bias": False, "parallel_block": True}
OPTIONS = {
    "gpt": {"kv_heads": 4},
    "llama": LLAMA,
    "palm": PALM | {"kv_heads": 1, "tied": True},
    "gopher": {"norm": "rmsnorm", "positions": "transformer_xl"},
    "t5": {"positions": "relative", "activation": "geglu"},
    "relu": {"activation": "relu", "mlp_bias": False},
}
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab, (3, 12), dtype=np.int32)
BATCH = {"tokens": TOKENS}


# Half the time to compile, and nothing here runs for long.
quick = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def filled(make):
    """A module of numpy's random numbers: no program draws them, no bias is zero."""
    random = np.random.default_rng(5)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(0.3 * random.normal(size=leaf.shape), leaf.dtype)

    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(make))
        return nnx.merge(graph, jax.tree.map(fill, state))


@cache
def decoder(**options):
    """A decoder that tests share, so they must not change it."""
    return filled(lambda: Decoder(replace(TINY, **options), rngs=nnx.Rngs(0)))


def structure(make):
    """Parameters of a module that is never built, as structs by path."""
    with nnx.use_eager_sharding(False):
        state = nnx.state(nnx.eval_shape(make), nnx.Param)
    return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


@quick
def logits(model, tokens):
    return model(tokens)


@quick
def gradients(model, batch):
    return nnx.value_and_grad(next_token_loss)(model, batch)


@quick
def loss_and_update(model, batch):
    return next_token_loss(model, batch), model


def assert_close(found, wanted, tolerance=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance),
        found,
        wanted,
    )


# ---- the decoder


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_never_look_ahead(options):
    model, cut = decoder(**options), 7
    changed = TOKENS.copy()
    changed[:, cut:] = (changed[:, cut:] + 1) % TINY.vocab
    before, after = logits(model, TOKENS), logits(model, changed)
    assert before.shape == (3, 12, TINY.vocab)
    np.testing.assert_array_equal(before[:, :cut], after[:, :cut])
    assert np.all(np.abs(before - after).max(axis=-1)[:, cut:] > 1e-5)


@pytest.mark.parametrize("name", ["gpt", "llama", "gopher", "t5"])
def test_order_matters_wherever_positions_are_known(name):
    model = decoder(**OPTIONS[name])
    swapped = TOKENS.copy()
    swapped[:, [2, 3]] = [1, 5]
    other = swapped.copy()
    other[:, [2, 3]] = [5, 1]
    last = logits(model, swapped)[:, -1] - logits(model, other)[:, -1]
    assert np.abs(last).max() > 1e-5


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_config_counts_the_parameters(options, scan):
    config = replace(TINY, scan=scan, **options)
    found = structure(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in found.values()) == config.parameters


@pytest.mark.parametrize("name", ["llama", "gopher"])
def test_scanned_layers_equal_unrolled_ones(name):
    unrolled = decoder(**OPTIONS[name])
    scanned = nnx.clone(decoder(**OPTIONS[name], scan=True))
    flat = dict(nnx.to_flat_state(nnx.state(unrolled)))
    stacked = {path: leaf[...] for path, leaf in flat.items() if path[0] != "layers"}
    for path in flat:
        if path[:2] == ("layers", 0):
            each = [flat["layers", i, *path[2:]][...] for i in range(TINY.layers)]
            stacked["layers", *path[2:]] = jnp.stack(each)
    nnx.update(scanned, nnx.from_flat_state(stacked))
    assert_close(logits(scanned, TOKENS), logits(unrolled, TOKENS))


def test_recomputation_changes_no_gradient():
    options = LLAMA | {"scan": True}
    loss, plain = gradients(decoder(**options), BATCH)
    same_loss, recomputed = gradients(decoder(**options, remat="full"), BATCH)
    assert_close(same_loss, loss)
    assert_close(nnx.to_pure_dict(recomputed), nnx.to_pure_dict(plain), 1e-4)


@pytest.mark.parametrize("scan", [False, True])
def test_each_block_is_recomputed_on_its_own(scan):
    plain, recomputed = (
        str(jax.make_jaxpr(next_token_loss)(decoder(scan=scan, remat=remat), BATCH))
        for remat in ("none", "full")
    )
    assert ("remat" in plain, "remat" in recomputed) == (False, True)


@pytest.mark.parametrize("scan", [False, True])
def test_dropout_draws_anew_in_every_step_and_can_be_turned_off(scan):
    model = nnx.clone(decoder(dropout=0.5, scan=scan, remat="full"))
    first, model = loss_and_update(model, BATCH)
    second, model = loss_and_update(model, BATCH)
    assert first != second
    model.eval()
    first, model = loss_and_update(model, BATCH)
    second, _ = loss_and_update(model, BATCH)
    assert first == second


def test_only_the_first_of_equal_layers_is_traced(monkeypatch):
    calls = []
    attend = functional.attend
    monkeypatch.setattr(
        functional, "attend", lambda *a, **k: calls.append(1) or attend(*a, **k)
    )
    config = replace(TINY, layers=24)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    jax.eval_shape(next_token_loss, model, BATCH)
    assert len(model.layers) == 24
    assert len(calls) == 1


def test_compute_and_storage_dtypes():
    model = decoder(dtype="bfloat16", **LLAMA)
    assert logits(model, TOKENS).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {
        jnp.dtype("float32")
    }
    assert jax.eval_shape(next_token_loss, model, BATCH).dtype == jnp.float32
    half = structure(
        lambda: Decoder(replace(TINY, param_dtype="bfloat16"), rngs=nnx.Rngs(0))
    )
    assert {leaf.dtype for leaf in half.values()} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("scan", [False, True])
def test_annotations_name_every_dim(scan):
    model = decoder(annotate=True, scan=scan, **LLAMA)
    found = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for leaf in found.values():
        assert len(leaf.get_metadata("out_sharding")) == leaf.ndim
    query = found[("layers", *(() if scan else (0,)), "attn", "query", "kernel")]
    names = ("embed", "heads", "head_dim")
    assert query.get_metadata("out_sharding") == (("layers", *names) if scan else names)


def test_a_small_gpt_learns_in_twenty_steps():
    made = zoo("gpt-tiny", batch=8, seq=32, layers=2, d_model=64, d_ff=128)
    batches = data.text_batches(8, 32)
    graph, state = nnx.split(quick(lambda: made["model"](nnx.Rngs(0)))())
    optimizer = optax.adam(3e-3)

    @quick
    def step(state, moments, batch):
        def loss(state):
            return made["loss"](nnx.merge(graph, state), batch)

        value, change = jax.value_and_grad(loss)(state)
        change, moments = optimizer.update(change, moments)
        return optax.apply_updates(state, change), moments, value

    moments, losses = optimizer.init(state), []
    for number in range(20):
        state, moments, value = step(state, moments, batches.batch_at(number))
        losses.append(float(value))
    assert abs(losses[0] - np.log(256)) < 1
    assert losses[-1] < 0.8 * losses[0]


# ---- its Linen twin


@pytest.mark.parametrize(
    ("name", "scan"), [("gpt", False), ("llama", True), ("palm", False)]
)
def test_the_linen_twin_has_the_same_paths_and_logits(name, scan):
    options = OPTIONS[name] | ({"scan": True} if scan else {})
    model, twin = decoder(**options), LinenDecoder(replace(TINY, **options))
    values = {
        tuple(map(str, path)): leaf[...]
        for path, leaf in nnx.to_flat_state(nnx.state(model))
    }
    made = jax.eval_shape(twin.init, jax.random.key(0), TOKENS)["params"]
    shapes = {k: v.shape for k, v in traverse_util.flatten_dict(made).items()}
    assert shapes == {path: value.shape for path, value in values.items()}
    variables = {"params": traverse_util.unflatten_dict(values)}
    assert_close(quick(twin.apply)(variables, TOKENS), logits(model, TOKENS))


def test_the_linen_twin_has_names_and_dropout():
    twin = LinenDecoder(replace(TINY, annotate=True, dropout=0.5, scan=True))
    boxed = jax.eval_shape(twin.init, jax.random.key(0), TOKENS)
    specs = nn.get_partition_spec(boxed)["params"]
    kernel = specs["layers"]["attn"]["query"]["kernel"]
    assert tuple(kernel) == ("layers", "embed", "heads", "head_dim")
    variables = nn.meta.unbox(quick(twin.init)(jax.random.key(0), TOKENS))
    apply = quick(lambda key: twin.apply(variables, TOKENS, rngs={"dropout": key}))
    one, other = apply(jax.random.key(1)), apply(jax.random.key(2))
    assert np.abs(one - other).max() > 1e-3


def test_the_linen_twin_refuses_relative_positions():
    twin = LinenDecoder(replace(TINY, positions="relative"))
    with pytest.raises(ModelError, match="'relative' positions"):
        jax.eval_shape(twin.init, jax.random.key(0), TOKENS)


# ---- the vision transformer


@pytest.mark.parametrize("pooling", ["mean", "token"])
def test_vit_classifies(pooling):
    config = replace(TINY_VIT, pooling=pooling)
    model = filled(lambda: Vit(config, rngs=nnx.Rngs(0)))
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert size == config.parameters
    assert config.tokens == (4 if pooling == "mean" else 5)
    images = np.random.default_rng(0).normal(size=(3, 8, 8, 3)).astype(np.float32)
    found = logits(model, images)
    assert found.shape == (3, 5)
    brighter = images.copy()
    brighter[1] += 1
    change = np.abs(logits(model, brighter) - found).max(axis=1)
    assert list(change > 1e-6) == [False, True, False]
    loss = quick(label_loss)(model, {"image": images, "label": np.array([0, 1, 2])})
    assert np.isfinite(loss)


# ---- the mathematics


def numpy_attention(query, key, value, bias, causal):
    """The definition, with keys repeated and one head at a time."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.empty_like(query)
    group = query.shape[2] // key.shape[2]
    for b, h in np.ndindex(query.shape[0], query.shape[2]):
        scores = query[b, :, h] @ key[b, :, h // group].T / np.sqrt(query.shape[-1])
        scores = scores + (0 if bias is None else bias[b % len(bias), h])
        if causal:
            scores = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[b, :, h] = weights @ value[b, :, h // group]
    return out


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_with_grouped_heads(kv_heads, causal, biased):
    random = np.random.default_rng(1)
    query = random.normal(size=(2, 5, 6, 4)).astype(np.float32)
    key, value = random.normal(size=(2, 2, 5, kv_heads, 4)).astype(np.float32)
    bias = random.normal(size=(1, 6, 5, 5)).astype(np.float32) if biased else None
    found = functional.attend(query, key, value, bias, causal=causal)
    wanted = numpy_attention(query, key, value, bias, causal)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_rotary_scores_depend_on_the_distance_alone():
    one, other = np.random.default_rng(2).normal(size=(2, 8)).astype(np.float32)
    turned = functional.rotary(
        jnp.broadcast_to(jnp.stack([one, other]), (1, 9, 2, 8)), theta=100.0
    )
    query, key = np.asarray(turned)[0].transpose(1, 0, 2)
    scores = query @ key.T
    for distance in range(9):
        diagonal = np.diagonal(scores, -distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        np.linalg.norm(query, axis=-1), np.linalg.norm(one), rtol=1e-5
    )
    np.testing.assert_allclose(scores[0, 0], one @ other, rtol=1e-4)
    assert np.ptp(scores[:, 0]) > 0.1


def test_skew_counts_back_from_the_diagonal():
    length = 6
    by_distance = np.arange(2 * length**2, dtype=np.float32).reshape(2, length, length)
    found = functional.skew(jnp.asarray(by_distance))
    for row in range(length):
        for column in range(row + 1):
            at = length - 1 - (row - column)
            np.testing.assert_array_equal(
                found[:, row, column], by_distance[:, row, at]
            )


def test_relative_buckets_widen_with_the_distance():
    length = 200
    table = np.arange(RELATIVE_BUCKETS, dtype=np.float32)[None]
    buckets = np.asarray(functional.relative_bias(jnp.asarray(table), length=length))
    assert buckets.shape == (1, 1, length, length)
    by_distance = buckets[0, 0, -1, ::-1]
    np.testing.assert_array_equal(by_distance[:16], np.arange(16))
    assert np.all(np.diff(by_distance) >= 0)
    np.testing.assert_array_equal(by_distance[128:], RELATIVE_BUCKETS - 1)
    np.testing.assert_array_equal(buckets[0, 0, 150, :151], by_distance[:151][::-1])
    # As T5 has it: 16 + floor(16 * log(d / 16) / log(128 / 16)).
    assert [by_distance[d] for d in (20, 31, 33, 64, 100)] == [17, 21, 21, 26, 30]


def test_transformer_xl_scores_by_distance():
    random = np.random.default_rng(3)
    query = random.normal(size=(2, 5, 3, 4)).astype(np.float32)
    distance = random.normal(size=(5, 3, 4)).astype(np.float32)
    found = functional.distance_bias(query, distance)
    for i in range(5):
        for j in range(i + 1):
            wanted = np.einsum("bhd,hd->bh", query[:, i], distance[4 - (i - j)]) / 2
            np.testing.assert_allclose(found[:, :, i, j], wanted, rtol=1e-4, atol=1e-5)
    waves = functional.sinusoids(length=5, width=7, dtype="float32")
    np.testing.assert_allclose(waves[4], [0, 0, 0, 0, 1, 1, 1], atol=1e-6)


def test_cross_entropy_and_norms_equal_those_of_the_libraries():
    random = np.random.default_rng(4)
    scores = (30 * random.normal(size=(2, 5, 11))).astype(np.float32)
    labels = random.integers(0, 11, (2, 5))
    wanted = optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()
    assert_close(quick(functional.cross_entropy)(scores, labels), wanted)
    scale, bias = random.normal(size=(2, 11)).astype(np.float32)
    for centre, module in (
        (True, nn.LayerNorm(epsilon=1e-6)),
        (False, nn.RMSNorm(epsilon=1e-6)),
    ):
        params = {"scale": scale} | ({"bias": bias} if centre else {})
        found = functional.normalise(
            scores, scale, bias if centre else None, centre=centre
        )
        assert_close(found, module.apply({"params": params}, scores), 1e-4)


# ---- entries

PUBLISHED = {
    "gpt-small": 124_439_808,
    "llama-8b": 8_030_261_248,
    "vit-b16": 86_567_656,
    "gpt3-175b": 174_604_259_328,
    "palm-8b": 8_632_012_800,
    "palm-62b": 62_495_662_080,  # Table 1: 62.50 B
    "palm-540b": 540_356_474_880,  # 540.35 B
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "megatron-175b": 174_615_846_912,  # arXiv:2104.04473 Table 1: 174.6 B
    "megatron-530b": 529_600_819_200,  # 529.6 B
    "megatron-1t": 1_008_038_758_400,  # 1008.0 B
    "gopher-280b": 279_714_217_984,
}


@pytest.mark.parametrize("name", entries())
def test_every_entry_builds_abstractly(name):
    made, entry = zoo(name), entries()[name]
    if entry.family == "linen-decoder":
        params = jax.eval_shape(
            lambda batch: made["init"](made["model"], jax.random.key(0), batch),
            made["batch"],
        )["params"]
    else:
        module = nnx.eval_shape(lambda: made["model"](nnx.Rngs(0)))
        loss = jax.eval_shape(made["loss"], module, made["batch"])
        assert (loss.shape, loss.dtype) == ((), jnp.float32)
        params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert total == entry.config.parameters == PUBLISHED.get(name, total)
    jax.eval_shape(made["optimizer"].init, params)
    assert {leaf.shape[0] for leaf in made["batch"].values()} == {entry.batch}


def test_overrides_reach_the_model_and_the_batch():
    made = zoo("gpt-tiny", batch=4, seq=256, layers=3, scan=True)
    assert made["batch"]["tokens"].shape == (4, 257)
    found = structure(lambda: made["model"](nnx.Rngs(0)))
    assert found["layers", "norm", "scale"].shape == (3, 128)
    assert found["positions",].shape == (256, 128)


@pytest.mark.parametrize(
    ("name", "overrides", "found"),
    [
        ("gpt-tny", {}, "did you mean gpt-tiny"),
        ("xyz", {}, "it has gpt-tiny, "),
        ("gpt-tiny", {"layer": 3}, "no option 'layer'.*\n.*layers"),
        ("gpt-tiny", {"remat": "some"}, "remat is 'some'.*\n.*none, full"),
        ("gpt-tiny", {"layers": 0}, "layers is 0, but must be at least 1"),
        ("gpt-tiny", {"layers": 2.0}, "layers is 2.0, but must be of type int"),
        ("gpt-tiny", {"scan": 1}, "scan is 1, but must be of type bool"),
        ("gpt-tiny", {"dropout": 1.5}, "dropout is 1.5"),
        ("gpt-tiny", {"batch": 0}, "batch is 0"),
        ("llama-tiny", {"kv_heads": 3}, r"kv_heads \(3\) does not divide heads \(8\)"),
        ("llama-tiny", {"head_dim": 5}, r"head_dim \(5\) is odd"),
        ("vit-tiny", {"patch": 5}, r"patch \(5\) does not divide image \(32\)"),
        ("vit-tiny", {"seq": 5}, "takes images"),
        ("vit-tiny", {"positions": "relative"}, "look back only"),
    ],
)
def test_refusals_say_what_to_do(name, overrides, found):
    with pytest.raises(ModelError, match=found):
        zoo(name, **overrides)
