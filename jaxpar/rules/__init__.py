"""Factor rules of the primitives of JAX, by family; importing it registers all."""

from jaxpar.rules import (
    attention,
    contraction,
    convolution,
    indexing,
    linear_algebra,
    opaque,
    pointwise,
    random,
    reduction,
    shape,
    slicing,
    sorting,
    window,
)
from jaxpar.rules.rule import (
    ArrayType,
    Dims,
    Factor,
    FactorKind,
    FactorRule,
    RuleFunction,
    factor_rule,
    has_rule,
    known_primitives,
    rule_for,
)

FAMILIES = (
    attention,
    contraction,
    convolution,
    indexing,
    linear_algebra,
    opaque,
    pointwise,
    random,
    reduction,
    shape,
    slicing,
    sorting,
    window,
)
"""The modules whose import fills the registry."""

__all__ = [
    "FAMILIES",
    "ArrayType",
    "Dims",
    "Factor",
    "FactorKind",
    "FactorRule",
    "RuleFunction",
    "factor_rule",
    "has_rule",
    "known_primitives",
    "rule_for",
]
