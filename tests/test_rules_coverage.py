"""Every primitive that a model meets has a rule, and every JAX primitive a decision."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core.primitives as extended
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from rule_calls import rule_of
from rule_cases_computing import COMPUTING, NOT_RUN, POINTWISE
from rule_cases_moving import MOVING

from jaxpar.rules import known_primitives

CONTROL = frozenset(
    """jit call closed_call remat2 scan while cond custom_jvp_call custom_vjp_call
    custom_lin shard_map""".split()
)
"""Calls and loops: their bodies are priced, not they."""

WITHOUT_RULE = CONTROL | frozenset(
    """all_gather all_to_all axis_index pmax pmin ppermute psum ragged_all_to_all
    after_all create_token dce_sink stage get swap""".split()
)
"""Also what only stands inside shard_map, tokens, and mutable arrays."""

NOT_CALLED = frozenset(
    """dot_product_attention_fwd_wrapper dot_product_attention_fwd ragged_dot empty
    empty2 to_edtype from_edtype select_and_scatter eig geqp3 geqrf hessenberg
    householder_product ormqr qr schur symmetric_product tridiagonal random_seed
    random_wrap random_unwrap random_clone rng_uniform random_gamma pure_callback
    debug_callback debug_print custom_linear_solve platform_index""".split()
)
"""Rules without a case: of other machines, or shared with a primitive that has one."""


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All equations, those inside calls and loops included."""
    for eqn in jaxpr.eqns:
        inner = [
            part
            for value in eqn.params.values()
            for part in (value if isinstance(value, (tuple, list)) else (value,))
            if isinstance(part, (Jaxpr, ClosedJaxpr))
        ]
        if eqn.primitive.name in CONTROL:
            for part in inner:
                yield from equations(
                    part.jaxpr if isinstance(part, ClosedJaxpr) else part
                )
        else:
            yield eqn


def test_every_primitive_of_jax_has_a_rule_or_a_reason() -> None:
    names = {
        getattr(module, name).name
        for module in (extended, lax)
        for name in dir(module)
        if name.endswith("_p")
    }
    assert names - known_primitives() == WITHOUT_RULE & names


def test_every_rule_has_a_case_or_a_reason() -> None:
    called = {case.name for case in (*POINTWISE, *COMPUTING, *MOVING)}
    assert known_primitives() - called == NOT_CALLED | NOT_RUN
    assert not called & (NOT_CALLED | NOT_RUN)


X = jnp.ones((2, 8, 16))
IMAGES = jnp.ones((2, 8, 8, 4))
TOKENS = jnp.ones((2, 8), jnp.int32)
KEY = jax.random.key(0)


def attention(x: jax.Array) -> jax.Array:
    heads = x.reshape(2, 8, 4, 4)
    keys = heads[:, :, :2]
    return jax.nn.dot_product_attention(
        heads, keys, keys, is_causal=True, key_value_seq_lengths=jnp.full(2, 5)
    )


def cross_entropy(x: jax.Array, tokens: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(x, tokens)
    dense = optax.softmax_cross_entropy(x, jax.nn.one_hot(tokens, 16))
    return losses.mean() + dense.mean() + (x.argmax(-1) == tokens).mean()


def embedding(table: jax.Array, tokens: jax.Array) -> jax.Array:
    angles = jnp.arange(8)[:, None] / 1e4 ** (jnp.arange(8) / 8)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    first, second = jnp.split(table[tokens] + waves, 2, axis=-1)
    return jnp.stack([first, jnp.roll(second, 1, axis=1)], axis=-1)


def mixture(x: jax.Array) -> jax.Array:
    """Both ways to dispatch: capacity and one-hot products, and sorted groups."""
    tokens = x.reshape(16, 16)
    weights, chosen = lax.top_k(jax.nn.softmax(tokens @ jnp.ones((16, 4))), 2)
    places = jnp.cumsum(jax.nn.one_hot(chosen, 4, dtype=jnp.int32), axis=0)
    dispatch = jnp.einsum("tke,tkec->tec", places, jax.nn.one_hot(places, 3))
    dense = jnp.einsum("tec,td->ecd", dispatch, tokens)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=4)
    grouped = lax.ragged_dot(tokens[order // 2], jnp.ones((4, 16, 16)), sizes)
    combined = jnp.zeros_like(tokens).at[order // 2].add(grouped)
    return combined.sum() + dense.sum() + weights.sum()


def assortment(x: jax.Array) -> list[jax.Array]:
    """Functions that models use now and then."""
    flat = x.reshape(-1)
    return [
        jax.nn.gelu(x, approximate=False),
        jax.nn.softplus(x) + jax.nn.silu(x) + jax.nn.relu6(x) + jax.nn.mish(x),
        jax.nn.logsumexp(x, -1) + jax.nn.standardize(x).max(-1),
        lax.associative_scan(jnp.add, x, axis=1),
        jnp.cumprod(x, 1) + lax.cumlogsumexp(x, 1) + lax.cummax(x, 2),
        jnp.tril(x) + jnp.where(x > 0, x, 0.0) + jnp.clip(x, 0, 1),
        jnp.pad(x, ((0, 0), (1, 1), (0, 0)), mode="reflect"),
        jnp.repeat(x, 2, axis=1) + jnp.tile(x, (1, 2, 1)) + jnp.flip(x, 0).sum(),
        jnp.sort(flat) + jnp.median(flat) + jnp.quantile(flat, 0.3),
        jnp.take_along_axis(x, x.argmax(-1, keepdims=True), -1),
        jnp.fft.rfft(x).real + jnp.linalg.norm(x) + jnp.var(x) + jnp.prod(x),
        x.at[:, 1].set(2.0) + x.at[0].mul(3.0) + x.astype(jnp.bfloat16),
        lax.dynamic_update_slice(x, x[:, :1], (0, 2, 0))
        + lax.dynamic_slice(x, (0, 1, 0), (2, 1, 16)),
        jnp.linalg.solve(x[0] @ x[0].T + jnp.eye(8), x[0]),
        jnp.linalg.qr(x[0])[0].sum()
        + jnp.linalg.svd(x)[1]
        + jnp.linalg.det(x @ x.mT)[:, None],
        jax.scipy.special.betainc(x, x, x) + jax.scipy.special.erfinv(x),
        jnp.isnan(x) | jnp.isfinite(x) & jnp.any(x > 0) ^ jnp.all(x > 0),
        jnp.histogram(flat, bins=4)[0] + jnp.searchsorted(flat, flat[:4]),
        lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 2, 1), "VALID"),
        jax.image.resize(x, (2, 16, 16), "bilinear"),
        lax.optimization_barrier(lax.stop_gradient(x)),
        checkpoint_name(jax.checkpoint(jnp.tanh)(x), "saved"),
        jax.vmap(lambda row: row[jnp.argmin(row)])(x),
        lax.map(jnp.sin, x),
    ]


def randomness(key: jax.Array) -> list[jax.Array]:
    first, *others = jax.random.split(jax.random.fold_in(key, 3), 8)
    return [
        jax.random.normal(first, (2, 8)),
        jax.random.bernoulli(others[0], 0.1, (2, 8)),
        jax.random.categorical(others[1], jnp.ones((2, 8))),
        jax.random.permutation(others[2], 8),
        jax.random.randint(others[3], (2, 8), 0, 5),
        jax.random.truncated_normal(others[4], -2.0, 2.0, (8,)),
        jax.random.gamma(others[5], 2.0, (8,)),
        jax.vmap(lambda k: jax.random.uniform(k, (8,)))(jax.random.split(key, 2)),
        jax.random.wrap_key_data(jax.random.key_data(others[6])),
        jax.random.normal(jax.random.PRNGKey(0), (2,)),
    ]


class Block(nnx.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.LayerNorm(16, rngs=rngs)
        self.second = nnx.RMSNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, 16, decode=False, dropout_rate=0.1, deterministic=False, rngs=rngs
        )
        self.up = nnx.Linear(16, 32, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.LinearGeneral(32, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones((2, 8)))
        x = x + self.attention(self.first(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.second(x)))))


def transformer(x: jax.Array) -> jax.Array:
    return Block(nnx.Rngs(0))(x)


class ConvNet(nnx.Module):
    """Convolutions of all kinds, norms over batches and groups, and pooling."""

    def __init__(self, rngs: nnx.Rngs):
        self.plain = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.depthwise = nnx.Conv(8, 8, (3, 3), feature_group_count=8, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 8, (2, 2), strides=(2, 2), rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.group_norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.batch_norm(self.depthwise(nnx.relu(self.plain(x))))
        x = self.group_norm(self.up(nnx.max_pool(x, (2, 2), (2, 2))))
        return nnx.avg_pool(x, (2, 2), padding="SAME").mean((1, 2))


def convolutions(x: jax.Array) -> jax.Array:
    return ConvNet(nnx.Rngs(0))(x)


def recurrence(x: jax.Array) -> jax.Array:
    layer: Any = linen.RNN(linen.LSTMCell(16))
    return layer.apply(layer.init(KEY, x), x)


def decoding(x: jax.Array) -> jax.Array:
    """One step with a cache of keys and values."""
    layer: Any = linen.MultiHeadDotProductAttention(4, decode=True)
    variables = layer.init(KEY, x, x)
    result, _ = layer.apply(variables, x[:, :1], x[:, :1], mutable=["cache"])
    return result


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (attention, (X,)),
        (cross_entropy, (X, TOKENS)),
        (embedding, (jnp.ones((32, 16)), TOKENS)),
        (mixture, (X,)),
        (assortment, (X,)),
        (randomness, (KEY,)),
        (transformer, (X,)),
        (convolutions, (IMAGES,)),
        (recurrence, (X,)),
        (decoding, (X,)),
        (jax.grad(lambda x: transformer(x).sum()), (X,)),
        (jax.grad(lambda x: convolutions(x).sum()), (IMAGES,)),
        (jax.grad(lambda x: mixture(x).sum()), (X,)),
    ],
)
def test_every_equation_of_a_model_has_a_rule(
    function: Callable[..., Any], inputs: tuple[Any, ...]
) -> None:
    for eqn in equations(jax.make_jaxpr(function)(*inputs).jaxpr):
        rule_of(eqn)
