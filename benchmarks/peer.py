"""google-parallax, the nearest public relative: pip install '.[bench]'.

It reads the jaxpr of an NNX model's forward pass and, by a heuristic without costs,
gives one axis to the dim that most parameters share and another to the batch. It
needs two axes, and takes neither scanned nor rematerialised layers.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from hand_sharded import Training, training
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

INSTALLED = importlib.util.find_spec("parallax") is not None


@dataclass(frozen=True)
class Specs:
    """What it chose.

    Attributes:
        params: Specs, nested like the parameters.
        batch: Spec of the tokens.
    """

    params: Any
    batch: P


def choose(
    model: Callable[[nnx.Rngs], nnx.Module], tokens: Any, axes: Mapping[str, int]
) -> Specs:
    """Specs of a language model; needs no devices.

    Args:
        model: Makes the model.
        tokens: Shape of the global batch as the model takes it.
        axes: The two axes and their sizes, that of the batch first.

    Raises:
        AssertionError: for a model that it does not understand.
    """
    from parallax.sharding.auto_shard import get_shardings  # noqa: PLC0415

    graph, state = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(0))))
    data, tensor = axes
    types = (AxisType.Auto,) * 2
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)
    with jax.sharding.use_abstract_mesh(mesh):
        (params, batch), _ = get_shardings(
            lambda state, tokens: nnx.merge(graph, state)(tokens),
            state,
            tokens,
            data_axis_name=data,
            model_axis_name=tensor,
        )
    return Specs(nnx.to_pure_dict(params), batch)


def peer_training(
    arguments: Mapping[str, Any], params: Any, axes: Mapping[str, int]
) -> Training:
    """The zoo model's training step with its specs on parameters and batch."""
    model, loss = arguments["model"], arguments["loss"]
    struct = arguments["batch"]["tokens"]
    tokens = jax.ShapeDtypeStruct((struct.shape[0], struct.shape[1] - 1), struct.dtype)
    specs = choose(model, tokens, axes)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(0))))

    def loss_of(params: Any, batch: Any) -> Any:
        state = nnx.clone(abstract)
        nnx.replace_by_pure_dict(state, params)
        return loss(nnx.merge(graph, state, copy=True), batch)

    devices = jax.devices()[: math.prod(axes.values())]
    types = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=devices)
    return training(
        loss_of,
        arguments["optimizer"],
        params,
        arguments["batch"],
        jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            specs.params,
            is_leaf=lambda x: isinstance(x, P),
        ),
        NamedSharding(mesh, P(*specs.batch[:1])),
    )
