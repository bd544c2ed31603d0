"""Better plans from a plan and bounds: exact search of a large neighbourhood."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxpar.search.contraction import Contraction, find_order, make_schedule
from jaxpar.search.network import Network, restrict

WIDTHS = (16, 12, 8, 6, 4, 3, 2)
"""Choices per variable that a neighbourhood may hold, widest first."""


def improve(
    network: Network,
    unary: Sequence[np.ndarray],
    choice: Sequence[int],
    slack: dict[int, np.ndarray],
    wear: list[int],
    work: float,
) -> list[int]:
    """The best choice of a neighbourhood that elimination can search exactly.

    The neighbourhood is the most promising choices of every variable (least slack,
    and always the present choice), as many as `work` allows; where even the least
    number makes too wide a graph, some variables stay as they are. The result is
    never worse than the given choice.

    Args:
        network: What to search.
        unary: Seconds per choice (bytes priced in).
        choice: The present choice, of every variable.
        slack: Per variable, how unpromising each choice is.
        wear: Per variable, how often it stayed as it is; updated.
        work: Joined entries to spend.
    """
    base = replace(network, unary=tuple(unary))
    keep = small = None
    for width in WIDTHS:
        keep = _promising(base, choice, slack, width)
        small = restrict(base, keep)
        order = find_order(small)
        if order.work <= work or not order.variables:
            break
    else:
        order = find_order(small, cap=work / 100, wear=wear)
    ...
