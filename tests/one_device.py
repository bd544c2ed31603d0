"""Training as plain Flax and Optax do it on one device, and the same on a mesh."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from jaxpar.pure import named_leaves
from jaxpar.runtime import Sharded, State

Arrays = dict[str, np.ndarray]
"""Host arrays by '/'-joined path in the model, without the collection "params"."""


@dataclass(frozen=True)
class History:
    """What a training run went through.

    Attributes:
        initial: The model before the first update.
        final: The model after the last update.
        losses: Before each update, and after the last.
        norms: Of the gradients, as often.
    """

    initial: Arrays
    final: Arrays
    losses: Sequence[float]
    norms: Sequence[float]


def on_host(leaves: dict[str, Any]) -> Arrays:
    """Copies, since a step may donate its input."""
    return {
        path: np.array(
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else x
        )
        for path, x in leaves.items()
    }


def follow(
    state: Any,
    step: Callable[[Any], tuple[Any, Any, Any]],
    leaves_of: Callable[[Any], dict[str, Any]],
    updates: int,
) -> History:
    """Makes updates, and one step more, which sees the last of them."""
    losses, norms, initial = [], [], on_host(leaves_of(state))
    final = initial
    for _ in range(updates + 1):
        final = on_host(leaves_of(state))
        state, loss, norm = step(state)
        losses.append(float(loss))
        norms.append(float(norm))
    return History(initial, final, losses, norms)


def on_mesh(
    sharded: Sharded,
    batch: Any,
    updates: int,
    state: State | None = None,
    look: Callable[[State], None] = lambda state: None,
) -> History:
    """The history of a sharded model; `look` sees every state."""

    def leaves_of(state: State) -> dict[str, Any]:
        look(state)
        parts = (state.params, state.model_state, state.rngs)
        return {path: x for part in parts for path, x in named_leaves(part).items()}

    def step(state: State) -> tuple[State, Any, Any]:
        state, metrics = sharded.step(state, batch)
        return state, metrics["loss"], metrics["grad_norm"]

    start = sharded.init(0) if state is None else state
    return follow(start, step, leaves_of, updates)


@dataclass(frozen=True)
class Plain:
    """A model as Flax has it.

    Attributes:
        build: Its trained parameters, and all other variables.
        abstract: The same as `jax.ShapeDtypeStruct`.
        loss: (parameters, others, batch) -> (loss, others).
    """

    build: Callable[[], tuple[Any, Any]]
    abstract: tuple[Any, Any]
    loss: Callable[[Any, Any, Any], tuple[Any, Any]]

    @classmethod
    def of(
        cls,
        model: Any,
        loss: Any,
        batch: Any,
        *,
        init: Any = None,
        wrt: Any = nnx.Param,
    ) -> "Plain":
        """An NNX constructor, or a Linen module, with the arguments of `make_plan`.

        A Linen loss that returns a pair returns (loss, updated collections).
        """
        if isinstance(model, nn.Module):
            return cls._of_linen(model, loss, batch, init)
        return cls._of_nnx(model, loss, wrt)

    @classmethod
    def _of_nnx(cls, make: Any, user_loss: Any, wrt: Any) -> "Plain":
        def build() -> tuple[Any, Any, Any]:
            with nnx.use_eager_sharding(False):
                return nnx.split(make(nnx.Rngs(0)), wrt, ...)

        graph, *abstract = jax.eval_shape(build)

        def loss(params: Any, others: Any, batch: Any) -> tuple[Any, Any]:
            model = nnx.merge(graph, params, others, copy=True)
            return user_loss(model, batch), nnx.split(model, wrt, ...)[2]

        return cls(lambda: build()[1:], tuple(abstract), loss)

    @classmethod
    def _of_linen(cls, module: Any, user_loss: Any, batch: Any, init: Any) -> "Plain":
        def build() -> tuple[Any, Any]:
            variables = nn.unbox(init(module, jax.random.key(0), batch))
            names = variables.keys() - {"params"}
            return variables["params"], {name: variables[name] for name in names}

        def loss(params: Any, others: Any, batch: Any) -> tuple[Any, Any]:
            out = user_loss(module, {**others, "params": params}, batch)
            value, updated = out if isinstance(out, tuple) else (out, {})
            return value, {**others, **updated}

        return cls(build, jax.eval_shape(build), loss)

    def train(
        self, start: tuple[Any, Any], optimizer: Any, batch: Any, updates: int
    ) -> History:
        """The history on one device, from parameters and other variables."""

        @jax.jit
        def step(state: Any) -> tuple[Any, Any, Any]:
            params, others, opt_state = state
            derive = jax.value_and_grad(self.loss, has_aux=True)
            (value, others), gradients = derive(params, others, batch)
            changes, opt_state = optimizer.update(gradients, opt_state, params)
            params = optax.apply_updates(params, changes)
            norm = jnp.sqrt(sum(map(_sum_of_squares, jax.tree.leaves(gradients))))
            return (params, others, opt_state), value, norm

        state = (*start, optimizer.init(start[0]))
        return follow(
            state, step, lambda s: named_leaves(s[0]) | named_leaves(s[1]), updates
        )

    @property
    def trained(self) -> set[str]:
        """Paths of the trained parameters."""
        return set(named_leaves(self.abstract[0]))


def _sum_of_squares(x: jax.Array) -> jax.Array:
    return jnp.sum(x.astype(jnp.float32) ** 2)


def relative_error(found: Any, wanted: Any, least: float) -> float:
    """Largest difference by the largest wanted value, or by `least` if that is more.

    Infinite where shapes differ; NaN where a value is none.
    """
    if np.shape(found) != np.shape(wanted):
        return np.inf
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    scale = max(least, np.max(np.abs(wanted), initial=0.0))
    return float(np.max(np.abs(found - wanted), initial=0.0) / scale)


def course(history: History) -> Iterator[tuple[str, float]]:
    """Losses and gradient norms, with what they are."""
    for word, values in (("loss", history.losses), ("norm", history.norms)):
        yield from ((f"{word} {i}", value) for i, value in enumerate(values))
