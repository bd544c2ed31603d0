"""Operators that every device has to carry out in full."""

from collections.abc import Mapping
from typing import Any

from jaxpar.rules.builder import RuleBuilder
from jaxpar.rules.rule import ArrayType, FactorRule, factor_rule

KEYS = (
    *("random_seed", "random_wrap", "random_unwrap", "random_fold_in"),
    *("random_split", "random_clone"),
)
"""Small, and not worth a split."""

SEQUENTIAL = ("rng_bit_generator", "rng_uniform", "random_gamma")
"""Their numbers depend on how they are split, or on a loop over all of them."""

FOREIGN = ("pure_callback", "debug_callback", "debug_print", "custom_linear_solve")
"""Nothing is known of what they call."""

SCALAR = ("platform_index",)
"""Which branch to take on which backend."""


@factor_rule(*KEYS, *SEQUENTIAL, *FOREIGN, *SCALAR)
def opaque(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
) -> FactorRule:
    """No dim may be split."""
    build = RuleBuilder()
    return build.rule(
        [build.unsplit(operand.shape) for operand in operands],
        [build.unsplit(result.shape) for result in results],
    )
