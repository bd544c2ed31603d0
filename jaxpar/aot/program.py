"""A sharded step as bytes that another process can compile."""

from dataclasses import dataclass

import jax
from jax import export

from jaxpar.errors import PlanError
from jaxpar.runtime import Sharded


@dataclass(frozen=True)
class Program:
    """A program over flat arrays, for the TPU platform.

    Attributes:
        code: Serialised by `jax.export`.
        donated: How many arguments, the first ones, give up their memory.
        devices: That it runs on.
        text: The same program without source lines, which are not the same twice.
    """

    code: bytes
    donated: int
    devices: int
    text: str


def program_of(sharded: Sharded, batch: object, *, training: bool) -> Program:
    """The training step, or the forward pass alone.

    No device is needed: shardings may be over a `jax.sharding.AbstractMesh`.

    Args:
        sharded: What is to be compiled.
        batch: Arrays or `jax.ShapeDtypeStruct`; only their types count.
        training: Whether the step, or the forward pass, is wanted.

    Raises:
        PlanError: if the library that serialises programs is missing.
    """
    state = sharded.abstract_state
    batch = jax.tree.map(_placed, batch, sharded.batch_shardings)
    leaves, tree = jax.tree.flatten((state, batch))
    function = sharded.step if training else sharded.apply

    def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        # Exports know no classes of ours; the order of the leaves is all they need.
        return tuple(jax.tree.leaves(function(*tree.unflatten(leaves))))

    exported = export.export(jax.jit(flat), platforms=["tpu"])(*leaves)
    try:
        code = bytes(exported.serialize())
    except ImportError as problem:
        raise PlanError(
            "compiling for TPUs needs flatbuffers, which is not installed",
            hint="pip install 'jaxpar[tpu]'",
        ) from problem
    donated = len(jax.tree.leaves(state)) if training else 0
    return Program(code, donated, exported.nr_devices, exported.mlir_module())


def _placed(leaf: jax.Array, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
