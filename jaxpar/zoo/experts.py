"""Which expert a token is sent to, and to which of its places.

Dispatch by products with 0/1 tensors (Lepikhin et al. 2020, GShard; Fedus et al. 2022,
Switch Transformer): every dim is a loop index of a contraction, so batch, groups,
experts, places and width can all be split. It costs 2 * places * experts * d_model
FLOPs a token each way.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array


def group_size(length: int, most: int) -> int:
    """Tokens of a group: the largest divisor of `length` that is at most `most`."""
    return max(d for d in range(1, min(length, most) + 1) if length % d == 0)


def places(group: int, experts: int, chosen: int, capacity_factor: float) -> int:
    """Tokens of a group that one expert can take; never more than there are."""
    return min(group, max(1, math.ceil(group * chosen / experts * capacity_factor)))


def route(logits: Array, *, chosen: int, places: int) -> tuple[Array, Array]:
    """Sends each token to the experts of its greatest logits.

    First choices of all tokens come before second choices, and earlier tokens before
    later ones; whoever finds an expert full is not sent to it. The weights are the
    softmax of the chosen logits (Jiang et al. 2024, Mixtral, equation 2); they are
    not scaled up where a choice was passed over.

    Args:
        logits: [..., group, experts] in float32.
        chosen: Experts of a token.
        places: Tokens that an expert takes from a group.

    Returns:
        Where tokens go, 0 or 1, and the same times the weights of the answers; both
        [..., group, experts, places] in float32.
    """
    experts = logits.shape[-1]
    best, which = jax.lax.top_k(logits, chosen)
    weights = jax.nn.softmax(best, axis=-1)
    shape = (*logits.shape, places)
    send, weigh = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    taken = jnp.zeros((*logits.shape[:-2], 1, experts), jnp.int32)
    for choice in range(chosen):
        wanted = jax.nn.one_hot(which[..., choice], experts, dtype=jnp.int32)
        place = taken + jnp.cumsum(wanted, axis=-2) - wanted
        # No place has the number -1 or one beyond the last: those are all zeros.
        slot = jax.nn.one_hot(jnp.where(wanted > 0, place, -1), places)
        send = send + slot
        weigh = weigh + slot * weights[..., choice, None, None]
        taken = taken + wanted.sum(axis=-2, keepdims=True)
    return send, weigh
