"""Writing factor rules: loop indices are added one by one, then become a rule."""

import math
from collections.abc import Iterable, Sequence

from jaxpar.rules.rule import ArrayType, Dims, Factor, FactorKind, FactorRule


class RuleBuilder:
    """The factors of one operator while its rule is being written."""

    def __init__(self) -> None:
        self._factors: list[Factor] = []

    def add(self, size: int, kind: FactorKind = FactorKind.PASS) -> int | None:
        """A new factor's index, or None where there is nothing to split."""
        if size <= 1:
            return None
        self._factors.append(Factor(size, kind))
        return len(self._factors) - 1

    def reduced(self, size: int) -> int | None:
        """A new factor that is summed away."""
        return self.add(size, FactorKind.REDUCE)

    def whole(self, size: int) -> int | None:
        """A new factor that may not be split."""
        return self.add(size, FactorKind.WHOLE)

    def each(self, shape: Iterable[int], whole: Iterable[int] = ()) -> Dims:
        """A factor of its own for every dim; those in `whole` may not be split."""
        kept = frozenset(whole)
        return tuple(
            self.whole(n) if d in kept else self.add(n) for d, n in enumerate(shape)
        )

    def unsplit(self, shape: Iterable[int]) -> Dims:
        """A factor of its own for every dim, none of which may be split."""
        return tuple(self.whole(n) for n in shape)

    def aligned(
        self, arrays: Sequence[ArrayType], touched: Iterable[int]
    ) -> tuple[Dims, ...]:
        """Dims of arrays of one rank that share all factors but those of some dims.

        A touched dim may differ in size from array to array and is never split: each
        array has a factor of its own there.
        """
        apart = frozenset(touched)
        first = self.each(0 if d in apart else n for d, n in enumerate(arrays[0].shape))
        return tuple(
            tuple(
                self.whole(n) if d in apart else f
                for d, (n, f) in enumerate(zip(array.shape, first, strict=True))
            )
            for array in arrays
        )

    def rule(
        self, operands: Iterable[Dims], results: Iterable[Dims], flops: float = 0.0
    ) -> FactorRule:
        """The finished rule; `flops` of the whole, unsharded operator."""
        return FactorRule(
            tuple(self._factors), tuple(operands), tuple(results), float(flops)
        )


def elements(array: ArrayType) -> int:
    """Number of elements of an array."""
    return math.prod(array.shape)
