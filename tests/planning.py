"""Small models, and the tables of their search problems."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpar.cost.problem import MeshProblem
from jaxpar.mesh import logical_mesh
from jaxpar.pins import Wishes
from jaxpar.planner import Request, plan_graph
from jaxpar.subject import prepare
from jaxpar.topology import get_topology


class Mlp(nnx.Module):
    def __init__(self, rngs, width=64):
        self.up = nnx.Linear(32, width, rngs=rngs)
        self.down = nnx.Linear(width, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def square_loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def floats(*shape):
    return {"x": jax.ShapeDtypeStruct(shape, np.float32)}


def mlp(batch=16, width=64, optimizer=None):
    return prepare(
        lambda rngs: Mlp(rngs, width),
        optimizer or optax.adam(1e-3),
        square_loss,
        floats(batch, 32),
    )


def decide(subject, mesh=None, topology="cpu-8", memory=None, wishes=None, **options):
    machine = get_topology(topology) if isinstance(topology, str) else topology
    return plan_graph(
        Request(
            graph=subject.graph,
            topology=machine.with_limits(memory),
            mesh=mesh,
            workload=subject.workload(),
            wishes=wishes or Wishes(),
            **options,
        )
    )


def tables(subject, sizes, topology="cpu-8"):
    mesh = logical_mesh(get_topology(topology), sizes)
    problem = MeshProblem(subject.graph, mesh, subject.workload(), pins={})
    return problem.build()


def storage(decision):
    graph = decision.problem.graph
    return {
        path: strategy.storage
        for leaf, strategy in zip(graph.leaves, decision.leaves, strict=True)
        for path in leaf.paths
        if leaf.role == "param"
    }
