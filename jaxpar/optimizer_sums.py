"""Which sums an optimizer takes over the dims of a parameter.

Norms of gradients and of parameters, means over rows and columns: where such a dim
is split, the terms meet in a collective. The update is traced, on shapes alone, and
every dim of a gradient, parameter or moment is followed to where it is summed away.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import ModelError
from jaxpar.flatten import FlatEquation, FlatProgram, flatten
from jaxpar.graph import HEAVY
from jaxpar.optimizer_state import optimizer_leaves
from jaxpar.pure import named_leaves
from jaxpar.quotient import PSEUDO, rule_of
from jaxpar.rules import FactorKind, FactorRule, has_rule

Origin = tuple[str, int, bool]
"""Path of a parameter, one of its dims, and whether it lies as parameters do
(else as gradients and moments do)."""
Origins = tuple[Origin | None, ...]


@dataclass(frozen=True)
class OptimizerSum:
    """One sum over dims of one parameter, or of its gradient or moments.

    Attributes:
        parameter: Path.
        kept: Dims of the parameter that the result still has.
        over: Dims that are summed away.
        bytes: Of the whole result.
        stored: Whether the parameter itself is summed, in the layout of its storage.
    """

    parameter: str
    kept: tuple[int, ...]
    over: tuple[int, ...]
    bytes: float
    stored: bool


def optimizer_sums(
    optimizer: optax.GradientTransformation, params: Any, wanted: Sequence[str]
) -> tuple[OptimizerSum, ...]:
    """The sums of one update, for some parameters.

    Only those parameters are traced, unless the optimizer insists on all: equal
    layers need not be looked at one by one.

    Args:
        optimizer: An optax transformation.
        params: Nested dicts of structs.
        wanted: Paths of parameters.

    Raises:
        ModelError: if the update fails on the parameters.
    """
    named = named_leaves(params)
    try:
        program, origins = _traced(optimizer, _nested({p: named[p] for p in wanted}))
    except Exception:  # masks and labels may be written for the whole tree
        program, origins = _traced_whole(optimizer, params)
    chosen = set(wanted)
    return tuple(s for s in _sums(program, origins) if s.parameter in chosen)


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *outer, last = path.split("/")
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = leaf
    return tree


def _traced_whole(
    optimizer: optax.GradientTransformation, params: Any
) -> tuple[FlatProgram, dict[int, Origins]]:
    try:
        return _traced(optimizer, params)
    except Exception as problem:
        raise ModelError(
            f"the optimizer's update fails on the parameters: {problem}",
            hint="it gets gradients and parameters as nested dicts of arrays",
        ) from problem


def _traced(
    optimizer: optax.GradientTransformation, params: Any
) -> tuple[FlatProgram, dict[int, Origins]]:
    """The update as a flat program, and the origins of its inputs."""

    def update(gradients: Any, opt_state: Any, params: Any) -> Any:
        value = jnp.float32(0)
        return optax.with_extra_args_support(optimizer).update(
            gradients,
            opt_state,
            params,
            value=value,
            grad=gradients,
            value_fn=lambda _: value,
        )

    opt_state = jax.eval_shape(optimizer.init, params)
    program = flatten(jax.make_jaxpr(update)(params, opt_state, params))
    shapes = {path: tuple(leaf.shape) for path, leaf in named_leaves(params).items()}
    moments = (
        tuple(
            None if d is None or leaf.parameter is None else (leaf.parameter, d, False)
            for d in leaf.dims
        )
        for leaf in optimizer_leaves(opt_state, shapes)
    )
    found = [*_whole(shapes, stored=False), *moments, *_whole(shapes, stored=True)]
    return program, dict(zip(program.inputs, found, strict=True))


def _whole(shapes: Mapping[str, tuple[int, ...]], *, stored: bool) -> Iterator[Origins]:
    for path, shape in shapes.items():
        yield tuple((path, d, stored) for d in range(len(shape)))


def _sums(program: FlatProgram, origins: dict[int, Origins]) -> Iterator[OptimizerSum]:
    for equation in program.equations:
        name = equation.primitive
        if name in HEAVY or not (has_rule(name) or name in PSEUDO):
            continue
        rule = rule_of(equation, program.types)
        factors = _origins_of_factors(rule, equation, origins)
        for tensor, dims in zip(equation.results, rule.results, strict=True):
            found = tuple(None if f is None else factors.get(f) for f in dims)
            origins[tensor] = found
            size = math.prod(program.types[tensor].shape)
            size *= program.types[tensor].dtype.itemsize
            yield from _summed(rule, factors, found, float(size))


def _origins_of_factors(
    rule: FactorRule, equation: FlatEquation, origins: Mapping[int, Origins]
) -> dict[int, Origin]:
    """What each factor runs over; gradients and moments come before parameters."""
    found: dict[int, Origin] = {}
    for tensor, dims in zip(equation.operands, rule.operands, strict=True):
        known = () if tensor is None else origins.get(tensor, ())
        for factor, origin in zip(dims, known, strict=False):
            if factor is not None and origin is not None:
                held = found.get(factor)
                if held is None or (held[2] and not origin[2]):
                    found[factor] = origin
    return found


def _summed(
    rule: FactorRule, factors: Mapping[int, Origin], left: Origins, size: float
) -> Iterator[OptimizerSum]:
    """The sum over every parameter whose dims go away."""
    gone = [
        origin
        for f, origin in factors.items()
        if rule.factors[f].kind is FactorKind.REDUCE
    ]
    for parameter in dict.fromkeys(path for path, _, _ in gone):
        yield OptimizerSum(
            parameter,
            tuple(o[1] for o in left if o is not None and o[0] == parameter),
            tuple(d for path, d, _ in gone if path == parameter),
            size,
            all(stored for path, _, stored in gone if path == parameter),
        )
