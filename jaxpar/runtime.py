"""What runs: the sharded state, and the jitted functions that make and advance it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpar.errors import ModelError, PlanError
from jaxpar.optimizer_state import optimizer_specs
from jaxpar.pure import Model, Tree, keyed_leaves, named_leaves, path_of, show_array
from jaxpar.rewrite import Site, rewrite
from jaxpar.sharding import Spec, fits
from jaxpar.trace import Leaf, Traced

PureLoss = Callable[[Tree, Tree, Tree, Tree, Any], tuple[jax.Array, Any]]
"""(params, model_state, rngs, batch, step) -> (loss, (aux, model_state, rngs))"""


class Jitted(Protocol):
    """What can be called, or lowered to be compiled and looked at."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        ...

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers it for arguments like those of a call, arrays or structs."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that a step keeps for the next one.

    Attributes:
        step: Steps made; int32 scalar.
        params: Trained arrays, nested dicts.
        model_state: Other arrays of the model, frozen ones too.
        opt_state: Of the optimizer; () without one.
        rngs: Random keys and counts.
    """

    step: Any
    params: Tree
    model_state: Tree
    opt_state: Tree
    rngs: Tree


@dataclass(frozen=True)
class Placement:
    """Where everything lies: specs by path, constraints by site.

    Attributes:
        storage: How each parameter rests.
        optimizer_storage: What gradients are reduced to and optimizer state is laid
            out like, per parameter; None: as `storage`. Where it is finer, each
            device updates a part of the parameter and gathers the rest (ZeRO-1).
        constraints: Within the loss.
        state: Of model state and random state; what is not named is replicated.
        batch: Of the batch; what is not named is replicated.
    """

    storage: Mapping[str, Spec]
    optimizer_storage: Mapping[str, Spec] | None = None
    constraints: Mapping[Site, tuple[Spec, ...]] = field(default_factory=dict)
    state: Mapping[str, Spec] = field(default_factory=dict)
    batch: Mapping[str, Spec] = field(default_factory=dict)

    @property
    def gradients(self) -> Mapping[str, Spec]:
        """What gradients are reduced to."""
        if self.optimizer_storage is None:
            return self.storage
        return self.optimizer_storage


@dataclass(frozen=True)
class Sharded:
    """A model and its optimizer laid out over a mesh.

    Attributes:
        init: seed -> `State`, sharded from birth. `seed` is an int or a random key.
        step: (state, batch) -> (state, metrics). Metrics are "loss", "grad_norm" (of
            the raw gradient, in float32) and "aux". The state passed in is donated:
            its arrays are gone afterwards.
        apply: (state, batch) -> (loss, aux); the forward pass alone.
        loss: The same forward pass as a pure function, for loops of one's own.
        abstract_state: `State` of `jax.ShapeDtypeStruct` with shardings.
        state_shardings: `State` of `NamedSharding`.
        batch_shardings: Shardings in the structure of the batch.
        plan: The plan that this follows.
        model: The model as pure functions.
    """

    init: Jitted
    step: Jitted
    apply: Jitted
    loss: PureLoss
    abstract_state: State
    state_shardings: State
    batch_shardings: Tree
    plan: Any
    model: Model


def merge(sharded: Sharded, state: State) -> Any:
    """The nnx.Module, or the Linen variables, that a state holds.

    Its arrays are those of the state: the next step, which donates them, leaves the
    module without values.
    """
    return sharded.model.merge(state.params, state.model_state, state.rngs)


def build(
    traced: Traced,
    optimizer: optax.GradientTransformation | None,
    mesh: Mesh | AbstractMesh,
    placement: Placement,
    plan: Any = None,
    donate: bool = True,
) -> Sharded:
    """Jitted functions that keep to a placement. Compiles nothing.

    Args:
        traced: The loss and its model.
        optimizer: None for inference: `step` then raises a ModelError.
        mesh: Mesh with Auto axes.
        placement: Where everything lies.
        plan: Kept for the caller.
        donate: Whether `step` may overwrite the state that it is given.

    Raises:
        PlanError: if the placement does not cover the model or does not fit it.
    """
    abstract = _abstract_state(traced.model, optimizer)
    shardings = _state_shardings(abstract, placement, mesh)
    batch_shardings = _by_path(traced.batch, placement.batch, mesh)
    gradients = _by_path(abstract.params, placement.gradients, mesh)
    loss = _loss(traced, placement, mesh)
    step = _Step(loss, optimizer, abstract.opt_state, gradients).step
    donated = 0 if donate else ()
    jit = partial(jax.jit, in_shardings=(shardings, batch_shardings))
    return Sharded(
        init=_init(traced.model, optimizer, abstract.opt_state, shardings),
        step=jit(step, out_shardings=(shardings, None), donate_argnums=donated),
        apply=jit(_apply(loss)),
        loss=loss,
        abstract_state=jax.tree.map(_with_sharding, abstract, shardings),
        state_shardings=shardings,
        batch_shardings=batch_shardings,
        plan=plan,
        model=traced.model,
    )


# ---- shardings


def _abstract_state(
    model: Model, optimizer: optax.GradientTransformation | None
) -> State:
    params, model_state, rngs = model.abstract
    opt_state = jax.eval_shape(optimizer.init, params) if optimizer else ()
    step = jax.ShapeDtypeStruct((), jnp.int32)
    return State(step, params, model_state, opt_state, rngs)


def _state_shardings(
    abstract: State, placement: Placement, mesh: Mesh | AbstractMesh
) -> State:
    params = named_leaves(abstract.params)
    for path in params:
        if path not in placement.storage or path not in placement.gradients:
            raise PlanError(
                f"parameter {path} has no place",
                hint="the plan belongs to another model",
            )
    followed = {p: (leaf.shape, placement.gradients[p]) for p, leaf in params.items()}
    opt_specs = optimizer_specs(abstract.opt_state, followed)
    by_path = partial(_by_path, mesh=mesh)
    return State(
        step=NamedSharding(mesh, PartitionSpec()),
        params=by_path(abstract.params, placement.storage),
        model_state=by_path(abstract.model_state, placement.state),
        opt_state=jax.tree.map(
            lambda leaf, spec: _sharding(mesh, spec), abstract.opt_state, opt_specs
        ),
        rngs=by_path(abstract.rngs, placement.state),
    )


def _by_path(tree: Tree, specs: Mapping[str, Spec], mesh: Mesh | AbstractMesh) -> Tree:
    """The tree with a sharding for every leaf; replicated where no spec is given."""
    shardings = []
    for keys, leaf in keyed_leaves(tree):
        path = path_of(keys)
        spec = specs.get(path, ((),) * len(leaf.shape))
        if len(spec) != len(leaf.shape) or not fits(spec, leaf.shape, mesh.shape):
            raise PlanError(
                f"{path} is {show_array(leaf)}; spec {spec} does not fit it "
                f"on the mesh {dict(mesh.shape)}",
                hint="the plan belongs to another model or mesh",
            )
        shardings.append(_sharding(mesh, spec))
    return jax.tree.structure(tree).unflatten(shardings)


def _sharding(mesh: Mesh | AbstractMesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))


def _with_sharding(
    leaf: jax.ShapeDtypeStruct, sharding: NamedSharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


# ---- functions


def _loss(traced: Traced, placement: Placement, mesh: Mesh | AbstractMesh) -> PureLoss:
    run = jaxpr_as_fun(rewrite(traced.jaxpr, placement.constraints, mesh))

    def loss(
        params: Tree, model_state: Tree, rngs: Tree, batch: Tree, step: Any
    ) -> tuple[jax.Array, Any]:
        arguments = traced.flatten(params, model_state, rngs, batch, step)
        for leaf, argument in zip(traced.leaves, arguments, strict=True):
            _check_argument(leaf, argument)
        return traced.unflatten(run(*arguments))

    return loss


def _check_argument(leaf: Leaf, argument: Any) -> None:
    found = jax.typeof(argument)
    if (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
        raise ModelError(
            f"{leaf.role} {leaf.path} is {show_array(found)}; "
            f"when the loss was traced it was {show_array(leaf)}",
            hint="shapes and dtypes are part of the plan: make a plan for the new ones",
        )


def _apply(loss: PureLoss) -> Callable[[State, Tree], tuple[jax.Array, Any]]:
    def apply(state: State, batch: Tree) -> tuple[jax.Array, Any]:
        value, (aux, _, _) = loss(
            state.params, state.model_state, state.rngs, batch, state.step
        )
        return value, aux

    return apply


@dataclass(frozen=True, eq=False)
class _Step:
    """One training step.

    Attributes:
        loss: With constraints.
        optimizer: Or None.
        abstract_opt_state: Types that the optimizer state keeps.
        gradients: Shardings of the gradients, and of the updated parameters before
            they return to their storage.
    """

    loss: PureLoss
    optimizer: optax.GradientTransformation | None
    abstract_opt_state: Tree
    gradients: Tree

    def step(self, state: State, batch: Tree) -> tuple[State, dict[str, Any]]:
        """The new state and the metrics."""

        def loss(params: Tree) -> tuple[jax.Array, Any]:
            return self.loss(params, state.model_state, state.rngs, batch, state.step)

        derive = jax.value_and_grad(loss, has_aux=True)
        (value, (aux, model_state, rngs)), gradients = derive(state.params)
        gradients = jax.lax.with_sharding_constraint(gradients, self.gradients)
        params, opt_state = self.update(gradients, state, value, loss)
        norm = _global_norm(gradients, self.gradients)
        metrics = {"loss": value, "grad_norm": norm, "aux": aux}
        return State(state.step + 1, params, model_state, opt_state, rngs), metrics

    def update(
        self,
        gradients: Tree,
        state: State,
        value: jax.Array,
        loss: Callable[[Tree], tuple[jax.Array, Any]],
    ) -> tuple[Tree, Tree]:
        """New parameters and optimizer state."""
        if self.optimizer is None:
            raise ModelError(
                "there is no optimizer, so there is no step to make",
                hint="apply() runs the model; pass an optimizer to train it",
            )
        # Plateau schedules read the value, line searches call the function.
        updates, opt_state = optax.with_extra_args_support(self.optimizer).update(
            gradients,
            state.opt_state,
            state.params,
            value=value,
            grad=gradients,
            value_fn=lambda params: loss(params)[0],
        )
        params = optax.apply_updates(state.params, updates)
        params = jax.lax.with_sharding_constraint(params, self.gradients)
        return params, jax.tree.map(_steady, self.abstract_opt_state, opt_state)


def _steady(struct: jax.ShapeDtypeStruct, leaf: Any) -> jax.Array:
    """The leaf in the type that it had, lest the next step be compiled anew."""
    leaf = jnp.asarray(leaf)
    if leaf.dtype == struct.dtype and not jax.typeof(leaf).weak_type:
        return leaf
    return jax.lax.convert_element_type(leaf, struct.dtype)


def _global_norm(gradients: Tree, shardings: Tree) -> jax.Array:
    """Square root of the sum of all squares, in float32.

    Devices add up all that they hold before they talk: one all-reduce for each set
    of axes that splits gradients.
    """
    total = jnp.float32(0)
    places: list[NamedSharding] = jax.tree.leaves(shardings)
    for axes in dict.fromkeys(map(_splitting, places)):
        group = [
            (x, s)
            for x, s in zip(jax.tree.leaves(gradients), places, strict=True)
            if _splitting(s) == axes
        ]

        def squares(*parts: jax.Array, axes: tuple[str, ...] = axes) -> jax.Array:
            floats = (x.astype(jnp.float32) for x in parts)
            found = sum((jnp.sum(x * x) for x in floats), jnp.float32(0))
            return jax.lax.psum(found, axes) if axes else found

        mesh, specs = group[0][1].mesh, tuple(s.spec for _, s in group)
        add = jax.shard_map(
            squares, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()
        )
        total += add(*(x for x, _ in group))
    return jnp.sqrt(total)


def _splitting(sharding: NamedSharding) -> tuple[str, ...]:
    """The axes that it splits dims over, in mesh order."""
    entries = (dim if isinstance(dim, tuple) else (dim,) for dim in sharding.spec)
    used = {axis for axes in entries for axis in axes}
    return tuple(axis for axis in sharding.mesh.shape if axis in used)


def _init(
    model: Model,
    optimizer: optax.GradientTransformation | None,
    abstract_opt_state: Tree,
    shardings: State,
) -> Jitted:
    def start(params: Tree, model_state: Tree, rngs: Tree) -> State:
        opt_state = optimizer.init(params) if optimizer else ()
        opt_state = jax.tree.map(_steady, abstract_opt_state, opt_state)
        return State(jnp.int32(0), params, model_state, opt_state, rngs)

    def init(seed: int | jax.Array) -> State:
        return start(*model.init(seed))

    if model.values is None:
        return jax.jit(init, out_shardings=shardings)
    parts = (shardings.params, shardings.model_state, shardings.rngs)
    function = jax.jit(start, in_shardings=parts, out_shardings=shardings)
    return _Placed(model, parts, function)


@dataclass(frozen=True)
class _Placed:
    """`init` of a model that has its values: they are placed, not compiled in."""

    model: Model
    shardings: tuple[Tree, Tree, Tree]
    function: Jitted

    def __call__(self, seed: int | jax.Array) -> State:
        return self.function(*jax.device_put(self.model.init(seed), self.shardings))

    def lower(self, seed: int | jax.Array) -> jax.stages.Lowered:
        return self.function.lower(*self.model.abstract)
