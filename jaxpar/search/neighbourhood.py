"""Part of a network around good plans, small enough to search exactly."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxpar.search.contraction import find_order
from jaxpar.search.network import Network, restrict

WIDTHS = (16, 12, 8, 6, 4, 3, 2)
"""Choices per variable that a neighbourhood may hold, widest first."""

WORK = 4e6
"""Joined entries that a neighbourhood may cost."""

FREE_WIDTH = 8
"""Choices of the variables that stay free where not all can."""

STEP = 1e5
"""Joined entries of one step there."""

OTHER_PRICES = 2
"""Earlier prices of bytes whose favourite choices stay in the neighbourhood."""


class Neighbourhood:
    """The most promising choices of every variable, as many as elimination can take.

    Choices promise something if they are part of a plan in hand, or if their slack
    is low at the present price of bytes, or was at the prices before. Without the
    latter the price would swing between values that suit half of the choices each.
    Where even few choices make too wide a graph, some variables stay as they are in
    the first plan; other ones every time.
    """

    def __init__(self, count: int):
        self._worn = [0] * count
        self._favourites: dict[float, dict[int, np.ndarray]] = {}

    def around(
        self,
        network: Network,
        plans: Sequence[Sequence[int]],
        slack: Mapping[int, np.ndarray],
        price: float,
    ) -> Network:
        """The neighbourhood as a network of its own.

        Args:
            network: What to cut it from.
            plans: Local choices of all variables.
            slack: Per variable, how much worse than the best each choice promises
                to be, shape (K,).
            price: Of bytes, that the slack refers to.
        """
        rank = self._ranks(network, plans, slack, price)

        def chosen(width: int) -> tuple[dict[int, np.ndarray], list[int]]:
            keep = {v: ranks < width for v, ranks in rank.items()}
            sizes = [1] * len(network.sizes)
            for v, mask in keep.items():
                sizes[v] = int(np.count_nonzero(mask))
            return keep, sizes

        for width in WIDTHS:
            keep, sizes = chosen(width)
            order = find_order(sizes, network.neighbours)
            if order.work <= WORK:
                return restrict(network, keep)
        keep, sizes = chosen(FREE_WIDTH)
        order = find_order(sizes, network.neighbours, STEP, self._worn)
        for v in order.fixed:
            self._worn[v] += 1
            keep[v] = np.arange(network.sizes[v]) == plans[0][v]
        return restrict(network, keep)

    def _ranks(
        self,
        network: Network,
        plans: Sequence[Sequence[int]],
        slack: Mapping[int, np.ndarray],
        price: float,
    ) -> dict[int, np.ndarray]:
        """Per variable, the width from which on each choice belongs, shape (K,)."""
        others = [f for p, f in self._favourites.items() if p != price]
        favourites: dict[int, np.ndarray] = {}
        ranks: dict[int, np.ndarray] = {}
        for v, loose in slack.items():
            best = np.argsort(loose, kind="stable")
            rank = np.empty(best.size, dtype=int)
            rank[best] = np.arange(best.size)
            kept = network.kept[v]
            favourites[v] = kept[best[: WIDTHS[0]]]
            for other in others:
                old = other[v]
                at = np.minimum(np.searchsorted(kept, old), kept.size - 1)
                left = at[kept[at] == old]
                rank[left] = np.minimum(rank[left], 2 * np.arange(left.size))
            for plan in plans:
                rank[plan[v]] = 0
            ranks[v] = rank
        self._favourites.pop(price, None)
        self._favourites[price] = favourites
        for stale in list(self._favourites)[: -OTHER_PRICES - 1]:
            del self._favourites[stale]
        return ranks
