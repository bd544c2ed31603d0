"""Random numbers: keys stay whole, each device draws its own part of the bits."""

from collections.abc import Mapping
from typing import Any

from jaxpar.rules.builder import RuleBuilder
from jaxpar.rules.rule import ArrayType, FactorRule, factor_rule


@factor_rule("random_bits")
def random_bits(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
) -> FactorRule:
    """Bit i depends on the key and i alone, as JAX generates by default."""
    build = RuleBuilder()
    bits = build.each(results[0].shape)
    return build.rule((build.unsplit(operands[0].shape),), (bits,))
