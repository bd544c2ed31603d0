"""The mathematics that the NNX and Linen models share; no parameters here."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar.zoo.config import RELATIVE_BUCKETS

_NORM_EPSILON = 1e-6
_RELATIVE_REACH = 128
_PLAIN = ("bqhd,bshd->bhqs", "bhqs,bshd->bqhd")
_GROUPED = ("bqkgd,bskd->bkgqs", "bkgqs,bskd->bqkgd")


def normalise(x: Array, scale: Array, bias: Array | None, *, centre: bool) -> Array:
    """Layer norm, or RMS norm without `centre`, over the last dim, in float32.

    Args:
        x: [..., width].
        scale: [width].
        bias: [width] or None.
        centre: Whether the mean is taken away first.

    Returns:
        [..., width], in the dtype of `x`.
    """
    y = x.astype(jnp.float32)
    if centre:
        y = y - y.mean(axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(axis=-1, keepdims=True) + _NORM_EPSILON)
    y = y * scale.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def activate(activation: str, up: Array, gate: Array | None) -> Array:
    """The inner values of the feed-forward part.

    Args:
        activation: A name from `StackConfig.activation`.
        up: [batch, length, d_ff].
        gate: The same shape for "swiglu" and "geglu", else None.
    """
    function = {
        "gelu": jax.nn.gelu,
        "relu": jax.nn.relu,
        "swiglu": jax.nn.silu,
        "geglu": jax.nn.gelu,
    }[activation]
    return function(up) if gate is None else function(gate) * up


def rotary(x: Array, *, theta: float) -> Array:
    """Turns pairs (i, i + head_dim/2) by an angle that grows with the position.

    Su et al. 2021 (RoPE), with the halves paired as in GPT-NeoX and Llama.

    Args:
        x: [batch, length, heads, head_dim].
        theta: Base of the frequencies.
    """
    length, half = x.shape[1], x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None, None] * frequency
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attend(
    query: Array, key: Array, value: Array, bias: Array | None = None, *, causal: bool
) -> Array:
    """Softmax attention; the softmax runs in float32.

    With fewer key heads than query heads, each key head serves a group of
    neighbouring query heads; keys are not repeated.

    Args:
        query: [batch, length, heads, head_dim].
        key: [batch, length, kv_heads, head_dim].
        value: As `key`.
        bias: [batch or 1, heads, length, length], added to the scores; or None.
        causal: Whether a token sees only itself and those before it.

    Returns:
        [batch, length, heads, head_dim].
    """
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    equations, split = _PLAIN, (heads,)
    if kv_heads != heads:
        equations, split = _GROUPED, (kv_heads, heads // kv_heads)
    query = (query * head_dim**-0.5).reshape(batch, length, *split, head_dim)
    scores = jnp.einsum(equations[0], query, key).astype(jnp.float32)
    if bias is not None:
        scores = scores + bias.reshape(bias.shape[0], *split, length, length)
    if causal:
        seen = jnp.tri(length, dtype=bool)
        scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum(equations[1], weights, value).reshape(
        batch, length, heads, head_dim
    )


def skew(by_distance: Array) -> Array:
    """From "how far back" to "which key": the relative shift of Transformer-XL.

    Args:
        by_distance: [..., length, length]; the last dim counts the distance down
            from length - 1 to 0.

    Returns:
        [..., length, length], the last dim being the key; entries above the
        diagonal mean nothing, and a causal mask must hide them.
    """
    *outer, length, _ = by_distance.shape
    padded = jnp.pad(by_distance, [(0, 0)] * (len(outer) + 1) + [(1, 0)])
    return padded.reshape(*outer, length + 1, length)[..., 1:, :]


def relative_bias(table: Array, *, length: int) -> Array:
    """Score biases by head and distance (Raffel et al. 2020, T5, causal).

    Near distances have a bucket each; far ones share buckets of growing width.

    Args:
        table: [heads, RELATIVE_BUCKETS].
        length: Of the sequence.

    Returns:
        [1, heads, length, length] in float32.
    """
    exact = RELATIVE_BUCKETS // 2
    distance = jnp.arange(length - 1, -1, -1, dtype=jnp.float32)
    octave = jnp.log(jnp.maximum(distance, exact) / exact) / math.log(
        _RELATIVE_REACH / exact
    )
    far = exact + octave * (RELATIVE_BUCKETS - exact)
    bucket = jnp.minimum(
        jnp.where(distance < exact, distance, far), RELATIVE_BUCKETS - 1
    )
    by_distance = jnp.take(table.astype(jnp.float32), bucket.astype(jnp.int32), axis=1)
    shape = (1, table.shape[0], length, length)
    return skew(jnp.broadcast_to(by_distance[None, :, None, :], shape))


def sinusoids(*, length: int, width: int, dtype: str) -> Array:
    """Sines and cosines of the distances length - 1 down to 0: [length, width]."""
    distance = jnp.arange(length - 1, -1, -1, dtype=jnp.float32)
    half = (width + 1) // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = distance[:, None] * frequency
    waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    return waves[:, :width].astype(dtype)


def distance_bias(query: Array, distance: Array) -> Array:
    """Scores of queries against encoded distances (Dai et al. 2019, Transformer-XL).

    Args:
        query: [batch, length, heads, head_dim].
        distance: [length, heads, head_dim], for distances length - 1 down to 0.

    Returns:
        [batch, heads, length, length] in float32, for `attend`.
    """
    query = query * query.shape[-1] ** -0.5
    scores = jnp.einsum("bqhd,phd->bhqp", query, distance)
    return skew(scores.astype(jnp.float32))


def without_padding(logits: Array, *, vocab: int) -> Array:
    """Logits [..., table_rows] whose entries from `vocab` on can never be chosen."""
    rows = logits.shape[-1]
    if rows == vocab:
        return logits
    row = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(row < vocab, logits, jnp.finfo(logits.dtype).min)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean cross entropy in float32; no gather, so classes may be sharded.

    Args:
        logits: [..., classes], any float dtype.
        labels: [...], integers.

    Returns:
        A scalar, in nats.
    """
    logits = logits.astype(jnp.float32)
    classes = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    hits = jnp.where(classes == labels[..., None], logits, 0.0).sum(axis=-1)
    return (jax.nn.logsumexp(logits, axis=-1) - hits).mean()
