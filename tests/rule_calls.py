"""Calls of single primitives, for the tests of factor rules."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core.primitives as extended
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxpar.rules import ArrayType, FactorRule, rule_for


@dataclass(frozen=True, eq=False)
class Case:
    """A call with an equation of the primitive under test, named `name`."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Bound:
    """An equation with the values of its operands, and its rule."""

    equation: JaxprEqn
    operands: tuple[Any, ...]
    rule: FactorRule

    @property
    def primitive(self) -> str:
        return self.equation.primitive.name

    @property
    def result_shape(self) -> tuple[int, ...]:
        return _types(self.equation.outvars)[0].shape

    def run(
        self, operands: tuple[Any, ...], params: dict[str, Any] | None = None
    ) -> list[Any]:
        """The results of the primitive on other operands."""
        primitive = self.equation.primitive
        found = primitive.bind(*operands, **(params or self.equation.params))
        return list(found) if primitive.multiple_results else [found]


def bound(case: Case) -> Bound:
    """Evaluates a call up to the equation under test, which it returns."""
    closed = jax.make_jaxpr(case.call)(*case.inputs)
    values: dict[Any, Any] = dict(zip(closed.jaxpr.invars, case.inputs, strict=True))
    values |= zip(closed.jaxpr.constvars, closed.consts, strict=True)

    def read(eqn: JaxprEqn) -> tuple[Any, ...]:
        return tuple(
            _array(v.val if isinstance(v, Literal) else values[v], array.dtype)
            for v, array in zip(eqn.invars, _types(eqn.invars), strict=True)
        )

    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == case.name:
            return Bound(eqn, read(eqn), rule_of(eqn))
        found = eqn.primitive.bind(*read(eqn), **eqn.params)
        results = found if eqn.primitive.multiple_results else [found]
        values |= zip(eqn.outvars, results, strict=True)
    raise ValueError(f"{case.name} not in {closed}")


def _array(value: Any, dtype: Any) -> Any:
    """A NumPy array, which is cut without a compiler; keys stay what they are."""
    return (
        value
        if jnp.issubdtype(dtype, jax.dtypes.extended)
        else np.asarray(value, dtype)
    )


def rule_of(eqn: JaxprEqn) -> FactorRule:
    """The factor rule of an equation."""
    operands, results = _types(eqn.invars), _types(eqn.outvars)
    return rule_for(eqn.primitive.name, operands, results, eqn.params)


def _types(variables: Iterable[Any]) -> tuple[ArrayType, ...]:
    return tuple(ArrayType(v.aval.shape, v.aval.dtype) for v in variables)


def names(cases: list[Case]) -> list[str]:
    """Names of cases, those of one primitive numbered from 0."""
    return [
        f"{name}-{k}"
        for name, group in itertools.groupby(cases, lambda case: case.name)
        for k, _ in enumerate(group)
    ]


def reals(*shape: int, low: float = 0.1, high: float = 0.9) -> jax.Array:
    """Random numbers, the same ones for the same shape."""
    rng = np.random.default_rng(shape)
    return jnp.asarray(rng.uniform(low, high, shape), jnp.float32)


def integers(high: int, *shape: int) -> jax.Array:
    """Random integers from 0 to below `high`."""
    rng = np.random.default_rng((high, *shape))
    return jnp.asarray(rng.integers(0, high, shape), jnp.int32)


def truths(*shape: int) -> jax.Array:
    """Random truth values."""
    return integers(2, *shape) > 0


def primitive(name: str) -> Any:
    """A primitive of JAX by its name."""
    found = getattr(extended, f"{name}_p", None)
    return getattr(lax, f"{name}_p") if found is None else found


def cases(name: str, *calls: tuple[Any, ...]) -> list[Case]:
    """Calls of one primitive: functions, each with its inputs."""
    return [Case(name, call, tuple(inputs)) for call, *inputs in calls]


X = reals(4, 6)
