"""Factor rules: what an operator's dims have to do with each other.

A rule names the loop indices (*factors*) of one operator and says which dims of
its operands and results each factor runs over, as einsum letters do. Everything
else (candidate shardings, FLOPs per device, forward and backward communication)
is derived from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from jaxpar.errors import RuleError


class FactorKind(Enum):
    """How a factor may be split over devices.

    PASS: each device computes its own part; no communication in the forward pass.
    REDUCE: summed (or otherwise combined) away; split, it leaves a partial result.
    WHOLE: may not be split.
    """

    PASS = "pass"
    REDUCE = "reduce"
    WHOLE = "whole"


@dataclass(frozen=True)
class Factor:
    """One loop index: its length and how it may be split."""

    size: int
    kind: FactorKind = FactorKind.PASS


Dims = tuple[int | None, ...]
"""Per dim of a tensor, the factor that splits it, or None where nothing may."""


@dataclass(frozen=True)
class FactorRule:
    """Factors of one operator, and the dims they run over.

    Attributes:
        factors: The loop indices.
        operands: Per operand, per dim, the index of its factor or None.
        results: Per result, per dim, the same.
        flops: Floating-point operations of the whole, unsharded forward operator.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    flops: float = 0.0

    def __post_init__(self):
        for dims in self.operands + self.results:
            used = [f for f in dims if f is not None]
            if any(not 0 <= f < len(self.factors) for f in used):
                raise RuleError(f"factor rule {self} names a factor that it lacks")
            if len(used) != len(set(used)):
                raise RuleError(f"factor rule {self} runs one factor over two dims")


@dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of one array; all that a rule may know of it."""

    shape: tuple[int, ...]
    dtype: Any


RuleFunction = Callable[
    [tuple[ArrayType, ...], tuple[ArrayType, ...], Mapping[str, Any]], FactorRule
]
_RULES: dict[str, RuleFunction] = {}


def factor_rule(*primitives: str) -> Callable[[RuleFunction], RuleFunction]:
    """Registers a factor rule for primitives, by name.

    The decorated function gets the operand types, the result types and the
    parameters of the primitive, and returns a `FactorRule`:

        @jaxpar.factor_rule("my_kernel")
        def my_kernel(operands, results, params):
            batch, width = operands[0].shape
            return FactorRule(
                factors=(Factor(batch), Factor(width, FactorKind.WHOLE)),
                operands=((0, 1),), results=((0, 1),), flops=2.0 * batch * width,
            )
    """

    def register(rule: RuleFunction) -> RuleFunction:
        for primitive in primitives:
            _RULES[primitive] = rule
        return rule

    return register


def has_rule(primitive: str) -> bool:
    """Whether a primitive has a factor rule."""
    return primitive in _RULES


def known_primitives() -> frozenset[str]:
    """Names of all primitives that have a factor rule."""
    return frozenset(_RULES)


def rule_for(
    primitive: str,
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
    where: str = "",
) -> FactorRule:
    """The factor rule of one operator.

    Raises:
        RuleError: if the primitive has no rule, or one that contradicts the shapes;
            names the primitive and where it was met.
    """
    place = f" at {where}" if where else ""
    if primitive not in _RULES:
        shapes = ", ".join(f"{o.dtype}{list(o.shape)}" for o in operands)
        raise RuleError(
            f"primitive {primitive!r} ({shapes}){place} "
            "has no factor rule, so its layout cannot be priced",
            hint=f"register one: @jaxpar.factor_rule({primitive!r}); see its docstring",
        )
    rule = _RULES[primitive](operands, results, params)
    for side, types, dims in (
        ("operands", operands, rule.operands),
        ("results", results, rule.results),
    ):
        shapes = tuple(array.shape for array in types)
        if not _fit(shapes, dims, rule.factors):
            raise RuleError(
                f"the factor rule of primitive {primitive!r}{place} gives its {side} "
                f"of shapes {shapes} the dims {dims} over {rule.factors}",
                hint="one factor or None per dim, whose size divides that of the dim",
            )
    return rule


def _fit(
    shapes: tuple[tuple[int, ...], ...],
    dims: tuple[Dims, ...],
    factors: tuple[Factor, ...],
) -> bool:
    """Whether every dim has an entry, whose factor divides its size."""
    same_ranks = [len(shape) for shape in shapes] == [len(entry) for entry in dims]
    return same_ranks and all(
        f is None or n % factors[f].size == 0
        for shape, entry in zip(shapes, dims, strict=True)
        for n, f in zip(shape, entry, strict=True)
    )
