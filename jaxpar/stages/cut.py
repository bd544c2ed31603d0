"""Cutting a chain of blocks into the stages of a pipeline.

The cut minimises, in this order, the time of the slowest stage, the time of all
transfers, and the sum of squared stage times, which evens out what the first two leave
open. With m microbatches a pipeline takes the sum of its stages and transfers plus
m - 1 times the slowest stage, so for a given slowest stage the second makes it fastest.
"""

import math
from collections.abc import Sequence

from jaxpar.errors import InfeasibleError, MeshError
from jaxpar.schedule import one_f_one_b, stash
from jaxpar.stages.blocks import Block, Cut
from jaxpar.stages.chain import Chain, evenest, least_bottleneck, least_bytes
from jaxpar.stages.shared import Found, shared


def cut(
    blocks: Sequence[Block],
    devices: int,
    *,
    chunks: int = 1,
    memory_bytes: float = math.inf,
    in_flight: Sequence[int] | None = None,
) -> Cut:
    """Cuts a chain into devices * chunks stages, none of them empty.

    Args:
        blocks: The chain, embedding and head included.
        devices: Positions along the pipeline axis.
        chunks: Stages on each device.
        memory_bytes: Limit for each device.
        in_flight: Per stage, the microbatches that it holds at most, such as
            `stash(schedule).stages`; default those of 1F1B, p - s on stage s of p.

    Raises:
        MeshError: more stages than blocks.
        InfeasibleError: no cut fits; says how little memory would do at best.
    """
    stages = devices * chunks
    if devices < 1 or chunks < 1 or len(blocks) < stages:
        raise MeshError(
            f"{len(blocks)} blocks cannot fill {stages} pipeline stages ({devices} "
            f"devices with {chunks} each)",
            hint=f"use {len(blocks)} stages at most",
        )
    if in_flight is None:
        in_flight = stash(one_f_one_b(devices, 4 * devices, chunks, wave=False)).stages
    if len(in_flight) != stages:
        raise MeshError(f"{len(in_flight)} counts of microbatches for {stages} stages")
    chain = Chain(blocks, devices, in_flight, memory_bytes)
    slowest_s = least_bottleneck(chain)
    if slowest_s == math.inf:
        raise _refusal(chain, Found(None, True))
    bounds, certain = evenest(chain, slowest_s), True
    if (chain.held(bounds) > chain.most_bytes).any():
        found = shared(chain, slowest_s)
        if found.bounds is None:
            raise _refusal(chain, found)
        bounds, certain = found.bounds, found.certain
    return Cut(tuple(blocks), devices, bounds, tuple(in_flight), certain)


def _refusal(chain: Chain, found: Found) -> InfeasibleError:
    """No cut fits: the least that the fullest device would need, and the limit."""
    least, limit = max(least_bytes(chain), found.least_bytes), chain.limit_bytes
    held = ", ".join(map(str, chain.in_flight))
    what = "fits" if found.certain else "was found to fit"
    return InfeasibleError(
        f"no cut of {chain.count} blocks into {chain.stages} stages on {chain.devices} "
        f"devices {what}: a device needs at least {math.ceil(least)} bytes "
        f"({least / 2**30:.3g} GiB), {math.floor(limit)} bytes ({limit / 2**30:.3g} "
        f"GiB) are available; the stages hold {held} microbatches",
        hint="use more stages, smaller microbatches, or rematerialise more",
    )
