"""NNX constructors and modules as pure functions."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec

from jaxpar.errors import ModelError
from jaxpar.pure import (
    LOSS_KEY,
    PARAM,
    RNG,
    STATE,
    Annotation,
    Keys,
    Layout,
    Model,
    Parts,
    Tree,
    key_struct,
    keyed_leaves,
    path_of,
    strong,
)
from jaxpar.user_code import (
    call_loss,
    check_aux,
    no_mesh,
    replay,
    rngs_parameter,
    signature_of,
    user_code,
)

_NAMES_KEYS = ("out_sharding", "sharding_names", "sharding")
"""Where a variable's metadata holds its sharding names; the newest Flax first."""


def nnx_model(
    model: Callable[..., Any] | nnx.Module, loss: Callable[..., Any], wrt: Any
) -> Model:
    """The pure face of an NNX model.

    Args:
        model: A function of nnx.Rngs that builds the module, called once and
            abstractly; or a ready module, which is left as it is.
        loss: loss(model, batch) or loss(model, batch, rngs) -> scalar or (scalar, aux).
        wrt: NNX filter of the trained variables.

    Raises:
        ModelError: if the model cannot be built, or `wrt` selects nothing, or arrays
            that are not floating.
    """
    how = rngs_parameter(loss, ("model", "batch"))
    values = None
    if isinstance(model, nnx.Module):
        graphdef, state, values = _take_apart(model)
        make = functools.partial(_values_of, values)
    else:
        graphdef, state, make = _trace_constructor(model)
    layout = _layout(state, wrt)
    init, abstract = layout.initialiser(make, loss_key=how is not None)
    functions = _Functions(graphdef, layout, loss, how)
    return Model(
        kind="nnx",
        init=init,
        loss=functions.loss,
        merge=functions.merge,
        abstract=abstract,
        names=layout.annotate(_annotations(state)),
        values=values,
    )


class _Stream(nnx.RngStream):
    """A random stream that replaces its count instead of updating it in place.

    Flax's update in place asks tracers for their sharding, upon which JAX searches
    everything traced so far: quadratic in the depth of the model.
    """

    def __call__(self) -> jax.Array:
        count = self.count.get_value()
        self.count.set_value(count + 1)
        return jax.random.fold_in(self.key.get_value(), count)


def _retype_streams(tree: Any, old: type, new: type) -> None:
    for _, node in nnx.iter_graph(tree):
        if type(node) is old:
            object.__setattr__(node, "__class__", new)


@dataclass(frozen=True)
class _Functions:
    """What a `Model` needs beside `init`."""

    graphdef: Any
    layout: Layout
    user_loss: Callable[..., Any]
    how: str | None

    def merge(self, params: Tree, model_state: Tree, rngs: Tree) -> nnx.Module:
        module = self._merge(params, model_state, rngs)
        _retype_streams(module, _Stream, nnx.RngStream)
        return module

    def _merge(self, *parts: Tree) -> nnx.Module:
        with nnx.use_eager_sharding(False):
            return nnx.merge(self.graphdef, self.layout.join(*parts), copy=True)

    def loss(
        self, params: Tree, model_state: Tree, rngs: Tree, batch: Tree, step: Any
    ) -> tuple[jax.Array, Parts]:
        module = self._merge(params, model_state, rngs)
        with nnx.use_eager_sharding(False):
            keys = None
            if self.how is not None:
                keys = nnx.Rngs(jax.random.fold_in(rngs[LOSS_KEY], step))
            value, aux = call_loss(self.user_loss, (module, batch), self.how, keys)
            leaves = self.layout.conform(_split(module)[1])
        _, model_state, own_rngs = self.layout.split(leaves)
        return value, (check_aux(aux), model_state, rngs | own_rngs)


def _take_apart(module: nnx.Module) -> tuple[Any, Tree, tuple[Any, ...] | None]:
    """Graph, state and arrays of a ready module; no arrays if it is abstract."""
    with user_code("taking the module apart"):
        module = nnx.clone(module)
        _retype_streams(module, nnx.RngStream, _Stream)
        graphdef, state = _split(module)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        return graphdef, state, None
    state = _strong(state)
    return graphdef, state, tuple(jax.tree.leaves(state))


def _values_of(values: tuple[Any, ...] | None, _key: jax.Array) -> tuple[Any, ...]:
    if values is None:
        raise ModelError(
            "the module holds shapes without values, so there is nothing to start from",
            hint="pass the function of nnx.Rngs that builds it",
        )
    return values


def _trace_constructor(
    constructor: Callable[..., Any],
) -> tuple[Any, Tree, Callable[[jax.Array], list[jax.Array]]]:
    """Graph, abstract state, and the traced making of its leaves."""
    by_keyword = _takes_rngs_by_keyword(constructor)

    def build(key: jax.Array) -> tuple[Any, Tree]:
        with nnx.use_eager_sharding(False):
            rngs = nnx.Rngs(key)
            _retype_streams(rngs, nnx.RngStream, _Stream)
            with user_code("building the model"):
                arguments = ((), {"rngs": rngs}) if by_keyword else ((rngs,), {})
                module = constructor(*arguments[0], **arguments[1])
            if not isinstance(module, nnx.Module):
                raise ModelError(
                    f"the model function returns {type(module).__name__}, "
                    "not an nnx.Module",
                    hint="model= is a function of nnx.Rngs that returns the module",
                )
            graphdef, state = _split(module)
        return graphdef, _strong(state)

    with no_mesh():
        trace = jax.make_jaxpr(build, return_shape=True)
        traced, (graphdef, state) = trace(key_struct())
    return graphdef, state, replay(traced)


def _takes_rngs_by_keyword(constructor: Any) -> bool:
    function = constructor
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        function = vars(function).get("__init__", function.__init__)
    signature = signature_of(function)
    parameter = signature.parameters.get("rngs") if signature else None
    return parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY


def _split(module: nnx.Module) -> tuple[Any, Tree]:
    """Graph and state, less what was sown.

    Every walk over the module takes as long as tracing its layers, so the graph of the
    first one tells whether there is anything to sow out or to declare.
    """
    graphdef, state = nnx.split(module)
    kinds = {getattr(node, "type", object) for node in graphdef.nodes}
    sown = any(issubclass(kind, nnx.Intermediate) for kind in kinds)
    static = (getattr(value, "value", None) for _, value in graphdef.attributes)
    undeclared = any(isinstance(value, Tracer) for value in static)
    if not sown and not undeclared:
        return graphdef, state
    nnx.pop(module, nnx.Intermediate)
    if undeclared:
        _declare_arrays(module)
    return nnx.split(module)


def _declare_arrays(module: nnx.Module) -> None:
    """Marks plain arrays among the attributes as data.

    Flax does so for concrete arrays only; under a trace it takes them for static.
    """
    for _, node in nnx.iter_graph(module):
        if not isinstance(node, nnx.Module):
            continue
        for name, value in list(vars(node).items()):
            if isinstance(value, Tracer):
                setattr(node, name, nnx.data(value))


def _strong(state: Tree) -> Tree:
    leaves = [strong(x, f"variable {path_of(k)}") for k, x in keyed_leaves(state)]
    return jax.tree.structure(state).unflatten(leaves)


def _layout(state: Tree, wrt: Any) -> Layout:
    with user_code(f"selecting variables by wrt={wrt!r:.60}"):
        trained, random, _ = nnx.split_state(state, wrt, nnx.RngState, ...)
    part_of = {keys: PARAM for keys, _ in keyed_leaves(trained)}
    part_of |= {keys: RNG for keys, _ in keyed_leaves(random)}
    return Layout.of(state, lambda keys: (part_of.get(keys, STATE), keys))


def _annotations(state: Tree) -> dict[Keys, Annotation]:
    found = {}
    for keys, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.Variable):
            metadata = variable.get_metadata()
            given = next((metadata[k] for k in _NAMES_KEYS if metadata.get(k)), None)
            if given is not None:
                kind = "logical" if metadata.get("sharding_rules") else "physical"
                found[keys] = Annotation(_names(given), kind)
    return found


def _names(given: Any) -> tuple[Any, ...]:
    """Names out of a tuple, a PartitionSpec, a NamedSharding or a Format."""
    while not isinstance(given, tuple | list | PartitionSpec):
        given = given.spec if hasattr(given, "spec") else given.sharding
    return tuple(given)
