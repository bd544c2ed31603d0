"""From jaxprs to operator graphs: inlining, folding, classes, clusters, views."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Primitive

from jaxpar.errors import RuleError
from jaxpar.flatten import flatten
from jaxpar.fold import Run, fold, simplify
from jaxpar.graph import check
from jaxpar.lower import group_path, lower
from jaxpar.model import make_model
from jaxpar.trace import trace

WIDTH = 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Stack(nnx.Module):
    def __init__(self, layers, rngs):
        self.first = nnx.Linear(8, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.last = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def square_loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def lowered(model, loss=square_loss, batch=None, **options):
    batch = batch or {"x": jax.ShapeDtypeStruct((8, 8), np.float32)}
    found = lower(trace(make_model(model, batch, loss), batch), 8, **options)
    check(found.graph)
    return found


@pytest.mark.parametrize("layers", [2, 3, 7])
def test_depth_does_not_grow_the_graph(layers):
    two = lowered(lambda rngs: Stack(2, rngs)).graph
    more = lowered(lambda rngs: Stack(layers, rngs)).graph
    assert len(more.operators) == len(two.operators)
    kernel = next(f for f in more.leaves if "up/kernel" in f.paths[0])
    assert kernel.paths == tuple(f"blocks/{i}/up/kernel" for i in range(layers))
    up = next(o for o in more.operators if o.name == "blocks/*/up/kernel:dot_general")
    assert up.executions == layers


def test_unfolded_keeps_every_block():
    graph = lowered(lambda rngs: Stack(3, rngs), folded=False).graph
    assert all(len(leaf.paths) == 1 for leaf in graph.leaves)
    names = {op.name for op in graph.operators}
    assert {f"blocks/{i}/up/kernel:dot_general" for i in range(3)} <= names


def test_folded_work_is_the_whole_work():
    def flops(graph):
        return sum(op.flops * op.executions for op in graph.operators if op.heavy)

    whole = lowered(lambda rngs: Stack(5, rngs), folded=False).graph
    folded = lowered(lambda rngs: Stack(5, rngs)).graph
    assert flops(folded) == flops(whole)
    assert flops(whole) == 2 * 8 * (8 * WIDTH + 5 * 8 * WIDTH**2 + 4 * WIDTH)


def test_blocks_of_different_width_do_not_fold():
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    sizes = [(8, 16), (16, 24), (24, 8)]
    weights = [jax.ShapeDtypeStruct(s, np.float32) for s in sizes]
    jaxpr = jax.make_jaxpr(loss)(weights, jax.ShapeDtypeStruct((4, 8), np.float32))
    program = flatten(jaxpr)
    firsts = [group[0] for group in simplify(program).groups]
    assert fold(program, firsts).runs == ()


def test_every_layer_may_read_one_shared_weight():
    def loss(shared, weights, x):
        for w in weights:
            x = jnp.tanh(x @ w) * 2.0
            x = jnp.sin(x @ shared) + 1.0
        return jnp.sum(x)

    square = jax.ShapeDtypeStruct((8, 8), np.float32)
    jaxpr = jax.make_jaxpr(loss)(square, [square] * 4, square)
    program = flatten(jaxpr)
    firsts = [group[0] for group in simplify(program).groups]
    (run,) = fold(program, firsts).runs
    assert run == Run(0, 6, 4)


def test_a_scanned_stack_has_a_layer_dim_that_nothing_splits():
    class Scanned(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=6)
            @nnx.vmap(in_axes=0, out_axes=0)
            def make(r):
                return Block(r)

            self.blocks = make(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, block):
                return block(x)

            return run(x, self.blocks)

    batch = {"x": jax.ShapeDtypeStruct((8, WIDTH), np.float32)}
    graph = lowered(Scanned, batch=batch).graph
    kernel = next(f for f in graph.leaves if "up/kernel" in f.paths[0])
    assert kernel.stacked and kernel.shape[0] == 6
    assert graph.tensors[kernel.tensor].shape == kernel.shape[1:]
    assert any(op.kind == "loop_carry" for op in graph.operators)


def test_heads_cut_out_by_a_reshape_bind_the_projection():
    class Heads(nnx.Module):
        def __init__(self, rngs):
            self.q = nnx.Linear(16, 6 * 4, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.q(x).reshape(*x.shape[:-1], 6, 4))

    batch = {"x": jax.ShapeDtypeStruct((8, 16), np.float32)}
    graph = lowered(Heads, batch=batch).graph
    kernel = next(f for f in graph.leaves if f.paths == ("q/kernel",))
    width = graph.tensors[kernel.tensor].classes[1]
    assert graph.classes[width].granularity == 6


def test_batch_and_token_dims_are_told_apart():
    class Mix(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            h = self.w(x)
            return jnp.einsum("bsd,btd->bst", h, h)

    batch = {"x": jax.ShapeDtypeStruct((8, 12, 16), np.float32)}
    graph = lowered(Mix, batch=batch).graph
    x = next(leaf for leaf in graph.leaves if leaf.role == "batch")
    batch_dim, token, width = (
        graph.classes[c] for c in graph.tensors[x.tensor].classes
    )
    assert (batch_dim.batch, token.token, width.token) == (True, True, False)


def test_a_tensor_with_several_readers_gets_one_view():
    graph = lowered(lambda rngs: Stack(2, rngs)).graph
    views = [op for op in graph.operators if op.kind == "view"]
    readers: dict[int, set[str]] = {}
    for op in graph.operators:
        for operand in op.operands:
            for use in operand.uses:
                readers.setdefault(use.tensor, set()).add(op.name)
    assert views
    assert all(len(readers[v.operands[0].uses[0].tensor]) == 1 for v in views)


def test_the_gradient_of_a_weight_is_a_sum_over_the_batch_factor():
    graph = lowered(lambda rngs: Stack(2, rngs)).graph
    op = next(o for o in graph.operators if o.name == "first/kernel:dot_general")
    data, weight = op.operands
    assert weight.lacks == (data.dims[0],)
    assert data.lacks == ()


@pytest.mark.parametrize("operand", ["data", "constant"])
def test_unknown_primitives_are_named_with_the_way_to_register_them(operand):
    strange = Primitive("strange_kernel")
    strange.def_abstract_eval(lambda x: x)

    def loss(model, batch):
        x = model(batch["x"])
        return jnp.mean(x + strange.bind(x if operand == "data" else jnp.ones(3)).sum())

    with pytest.raises(RuleError, match=r"strange_kernel[\s\S]*factor_rule"):
        lowered(lambda rngs: nnx.Linear(8, 8, rngs=rngs), loss)


def test_group_path_marks_what_differs():
    assert group_path(["a/0/k", "a/1/k"]) == "a/*/k"
    assert group_path(["a/0/k"]) == "a/0/k"
