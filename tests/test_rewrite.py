"""Constraints anywhere change where values lie, never what they are."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, check_jaxpr, jaxpr_as_fun
from jax.sharding import Mesh

from jaxpar.rewrite import TRANSPARENT, Site, rewrite
from jaxpar.sharding import Spec

SIZES = {"data": 2, "model": 2}
WIDTH, HEADS, BATCH, LENGTH = 16, 4, 8, 8
LONG = 20


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), tuple(SIZES))


# ---- places


def inner_jaxprs(eqn: Any) -> Iterator[tuple[str, int, Jaxpr]]:
    for name, value in eqn.params.items():
        for i, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield name, i, getattr(item, "jaxpr", item)


def all_sites(jaxpr: Jaxpr, path: Any = ()) -> Iterator[tuple[Site, Any]]:
    """Every place in transparent code, with the type of the value there."""
    for slot, var in enumerate(jaxpr.invars):
        yield Site(path, -1, slot, "input"), var.aval
    for index, eqn in enumerate(jaxpr.eqns):
        for slot, atom in enumerate(eqn.invars):
            if not isinstance(atom, Literal):
                yield Site(path, index, slot, "before"), atom.aval
        for slot, var in enumerate(eqn.outvars):
            yield Site(path, index, slot, "after"), var.aval
        if eqn.primitive.name in TRANSPARENT:
            for name, i, inner in inner_jaxprs(eqn):
                yield from all_sites(inner, (*path, (index, name, i)))


def random_spec(shape: tuple[int, ...], rng: random.Random) -> Spec:
    """Any legal spec: every axis on some dim that divides, or on none."""
    dims: list[tuple[str, ...]] = [()] * len(shape)
    for axis in rng.sample(sorted(SIZES), len(SIZES)):
        free = [None]
        for d, n in enumerate(shape):
            parts = int(np.prod([SIZES[a] for a in dims[d]])) * SIZES[axis]
            free += [d] * (n % parts == 0)
        if (dim := rng.choice(free)) is not None:
            dims[dim] = (*dims[dim], axis)
    return tuple(dims)


def random_constraints(
    jaxpr: Jaxpr, seed: int, share: float
) -> dict[Site, tuple[Spec, ...]]:
    """A share of all floats constrained where they are made, some of their uses too."""
    rng = random.Random(seed)
    return {
        site: tuple(random_spec(aval.shape, rng) for _ in range(rng.choice((1, 1, 2))))
        for site, aval in all_sites(jaxpr)
        if aval.ndim and jnp.issubdtype(aval.dtype, jnp.floating)
        if rng.random() < (share / 5 if site.when == "before" else share)
    }


# ---- programs


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = (heads[:, :, i] for i in range(3))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        return x + self.drop(nnx.gelu(self.out(mixed)))


class Unrolled(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.block = Block(rngs)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.block(x))


class Scanned(nnx.Module):
    """Two blocks of one stack, rematerialised."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.vmap(lambda rngs: Block(rngs, 0.5), in_axes=0, out_axes=0)
        self.blocks = nnx.split_rngs(splits=2)(make)(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.remat(lambda block, x: block(x))
        step = nnx.scan(
            lambda x, block: run(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return step(x, self.blocks)


class Conv(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(4, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(nnx.max_pool(x, (2, 2), strides=(2, 2)).mean((1, 2)))


def random_input(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def nnx_program(make: Callable[[nnx.Rngs], nnx.Module], *shape: int) -> Any:
    """A differentiable loss with the changed state as aux, and its arguments."""
    build = jax.jit(lambda: nnx.split(make(nnx.Rngs(0)), nnx.Param, ...))
    graph, params, rest = build()

    def loss(params: Any, rest: Any, x: jax.Array) -> Any:
        model: Any = nnx.merge(graph, params, rest, copy=True)
        return jnp.mean(model(x) ** 2), nnx.state(model, nnx.Not(nnx.Param))

    return loss, (params, rest, jax.random.normal(jax.random.key(1), shape))


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


clipped.defvjp(
    lambda x: (jnp.sin(x), jnp.cos(x)), lambda r, g: (jnp.clip(g, -0.1, 0.1) * r,)
)


def custom_program() -> Any:
    def loss(w: jax.Array, x: jax.Array) -> Any:
        h = clipped(jax.nn.relu(x @ w))
        return jax.nn.logsumexp(jax.nn.silu(h)), h

    return loss, (random_input(8, 16), np.ones((8, 8), np.float32))


def control_program() -> Any:
    def loss(w: jax.Array, x: jax.Array) -> Any:
        x = lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ w), lambda x: x - w, x)
        steps, y = lax.while_loop(
            lambda c: c[1].sum() < 100.0,
            lambda c: (c[0] + 1, c[1] * 2.0 + 1.0),
            (0, lax.stop_gradient(x)),
        )
        rows = jnp.take(w, jnp.array([1, 5, 2]), axis=0)
        return jnp.sum(x * y) + jnp.sum(rows), (steps, y)

    return loss, (random_input(8, 8), np.ones((8, 8), np.float32))


SEQUENCE = (BATCH, LENGTH, WIDTH)
PROGRAMS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: nnx_program(
        lambda rngs: nnx.Sequential(
            nnx.Linear(16, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 8, rngs=rngs)
        ),
        *(8, 16),
    ),
    "attention": lambda: nnx_program(Unrolled, *SEQUENCE),
    "scan, remat, dropout": lambda: nnx_program(Scanned, *SEQUENCE),
    "convolution": lambda: nnx_program(Conv, 8, 4, 4, 4),
    "custom derivatives": custom_program,
    "cond and while": control_program,
}


def flat(program: Any) -> tuple[Callable[..., Any], ClosedJaxpr, Any]:
    """Of (loss, args): jaxpr, and its evaluation as a function like the loss."""
    loss, args = program
    closed, shape = jax.make_jaxpr(loss, return_shape=True)(*args)

    def as_function(jaxpr: ClosedJaxpr) -> Callable[..., Any]:
        run = jaxpr_as_fun(jaxpr)
        tree = jax.tree.structure(shape)
        return lambda *args: jax.tree.unflatten(tree, run(*jax.tree.leaves(args)))

    return as_function, closed, args


def plain(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def numbers(tree: Any) -> list[np.ndarray]:
    return [np.array(plain(x)) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_numerics_survive_any_constraints(name: str, mesh: Mesh) -> None:
    as_function, closed, args = flat(PROGRAMS[name]())
    share = 0.5 if len(closed.jaxpr.eqns) > LONG else 1.0  # compiling takes long
    constraints = random_constraints(closed.jaxpr, len(name), share)
    rewritten = rewrite(closed, constraints, mesh)
    check_jaxpr(rewritten.jaxpr)

    def derive(jaxpr: ClosedJaxpr) -> list[np.ndarray]:
        gradient = jax.value_and_grad(as_function(jaxpr), has_aux=True)
        return numbers(jax.jit(gradient)(*args))

    for found, wanted in zip(derive(rewritten), derive(closed), strict=True):
        scale = max(1e-6, np.abs(wanted).max(initial=0.0))
        np.testing.assert_allclose(found / scale, wanted / scale, atol=1e-5)


# ---- surgery

ROWS: Spec = (("data",), ())
COLUMNS: Spec = ((), ("model",))


def traced(function: Callable[..., Any], *shapes: tuple[int, ...]) -> ClosedJaxpr:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.make_jaxpr(function)(*arguments)


def names(jaxpr: Jaxpr) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def specs(jaxpr: Jaxpr) -> list[Spec]:
    eqns = [e for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]
    dims = [e.params["sharding"].spec for e in eqns]
    return [tuple((d,) if d else () for d in spec) for spec in dims]


def test_after_reaches_every_later_use_in_order(mesh: Mesh) -> None:
    closed = traced(lambda x: (y := jnp.sin(x), y + x), (8, 8))
    site = Site((), 0, 0, "after")
    jaxpr = rewrite(closed, {site: (ROWS, COLUMNS)}, mesh).jaxpr
    assert names(jaxpr) == ["sin", "sharding_constraint", "sharding_constraint", "add"]
    assert specs(jaxpr) == [ROWS, COLUMNS]
    last = jaxpr.eqns[2].outvars[0]
    assert jaxpr.eqns[1].outvars[0] is jaxpr.eqns[2].invars[0]
    assert jaxpr.outvars[0] is last and jaxpr.eqns[3].invars[0] is last


def test_before_reaches_one_operand(mesh: Mesh) -> None:
    closed = traced(lambda x: (x * x, x + 1.0), (8, 8))
    jaxpr = rewrite(closed, {Site((), 0, 1, "before"): (ROWS,)}, mesh).jaxpr
    constraint, product, total = jaxpr.eqns
    assert product.invars == [jaxpr.invars[0], constraint.outvars[0]]
    assert total is closed.jaxpr.eqns[1]


def test_input_reaches_every_use_in_its_jaxpr(mesh: Mesh) -> None:
    closed = traced(lambda x: lax.scan(lambda c, x: (c + x, c * x), x[0], x), (4, 8, 8))
    scan = names(closed.jaxpr).index("scan")
    site = Site(((scan, "jaxpr", 0),), -1, 1, "input")
    rewritten = rewrite(closed, {site: (ROWS,)}, mesh)
    body = rewritten.jaxpr.eqns[scan].params["jaxpr"].jaxpr
    constraint, *uses = body.eqns
    assert specs(body) == [ROWS]
    assert all(constraint.outvars[0] in eqn.invars for eqn in uses)


def test_untouched_equations_and_shared_bodies_stay_the_same_objects(
    mesh: Mesh,
) -> None:
    inner = jax.jit(lambda x: jnp.sin(x) * 2.0)
    closed = traced(lambda x: inner(inner(x)), (8, 8))
    first, second = closed.jaxpr.eqns
    assert first.params["jaxpr"] is second.params["jaxpr"]
    site = Site(((1, "jaxpr", 0),), 0, 0, "after")
    jaxpr = rewrite(closed, {site: (ROWS,)}, mesh).jaxpr
    assert jaxpr.eqns[0] is first
    assert names(first.params["jaxpr"].jaxpr) == ["sin", "mul"]
    assert names(jaxpr.eqns[1].params["jaxpr"].jaxpr)[1] == "sharding_constraint"
    assert rewrite(closed, {}, mesh).jaxpr.eqns == closed.jaxpr.eqns


def test_branches_and_open_bodies(mesh: Mesh) -> None:
    def program(x: jax.Array) -> jax.Array:
        x = jax.checkpoint(jnp.sin)(x)
        return lax.cond(x[0, 0] > 0, jnp.cos, jnp.tanh, x)

    closed = traced(program, (8, 8))
    cond = names(closed.jaxpr).index("cond")
    constraints = {
        Site(((0, "jaxpr", 0),), -1, 0, "input"): (ROWS,),
        Site(((cond, "branches", 1),), 0, 0, "after"): (COLUMNS,),
    }
    rewritten = rewrite(closed, constraints, mesh)
    check_jaxpr(rewritten.jaxpr)
    remat, branches = (rewritten.jaxpr.eqns[i].params for i in (0, cond))
    assert specs(remat["jaxpr"]) == [ROWS]
    assert [specs(b.jaxpr) for b in branches["branches"]] == [[], [COLUMNS]]


def test_branches_may_disagree(mesh: Mesh) -> None:
    def program(x: jax.Array) -> jax.Array:
        return lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x) * x, lambda x: -x, x).sum()

    closed = traced(program, (8, 8))
    cond = names(closed.jaxpr).index("cond")
    constraints = {
        Site(((cond, "branches", branch),), equation, 0, when): (spec,)
        for branch, spec in enumerate((ROWS, COLUMNS))
        for equation, when in ((-1, "input"), (0, "after"))
    }
    run = jaxpr_as_fun(rewrite(closed, constraints, mesh))
    x = random_input(8, 8)
    found = jax.jit(jax.grad(lambda x: run(x)[0]))(x)
    np.testing.assert_allclose(found, jax.grad(program)(x), rtol=1e-5, atol=1e-6)


def test_constraints_carry_the_line_of_their_value(mesh: Mesh) -> None:
    closed = traced(lambda x: jnp.sin(x) * 2.0, (8, 8))
    jaxpr = rewrite(closed, {Site((), 0, 0, "after"): (ROWS,)}, mesh).jaxpr
    assert jaxpr.eqns[1].source_info is closed.jaxpr.eqns[0].source_info


def test_cotangents_and_recomputation_are_constrained_too(mesh: Mesh) -> None:
    closed = traced(jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)).sum()), (8, 8))
    site = Site(((0, "jaxpr", 0),), 0, 0, "after")
    run = jaxpr_as_fun(rewrite(closed, {site: (ROWS,)}, mesh))
    gradient = traced(jax.grad(lambda x: run(x)[0]), (8, 8))
    places = [eqn for eqn in str(gradient).splitlines() if "spec=P('data'" in eqn]
    assert len(places) == 3  # forward, recomputed forward, cotangent


def test_key_arrays_can_be_constrained_and_scalars_have_no_layout(mesh: Mesh) -> None:
    keys = jax.random.split(jax.random.key(0), 8)

    def draw(keys: jax.Array) -> jax.Array:
        return jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys).sum()

    closed = jax.make_jaxpr(draw)(keys)
    constraints = {
        Site((), -1, 0, "input"): ((("data",),),),
        Site((), len(closed.jaxpr.eqns) - 1, 0, "after"): ((),),
    }
    rewritten = rewrite(closed, constraints, mesh)
    assert names(rewritten.jaxpr).count("sharding_constraint") == 1
    np.testing.assert_allclose(
        jax.jit(jaxpr_as_fun(rewritten))(keys)[0], draw(keys), rtol=1e-6
    )


def test_the_callers_mesh_does_not_leak_in(mesh: Mesh) -> None:
    closed = traced(lambda x: jnp.sin(x) * 2.0, (8, 40))
    x = jnp.ones((8, 40))
    with jax.set_mesh(jax.make_mesh((8,), ("other",))):
        rewritten = rewrite(closed, {Site((), 0, 0, "after"): (ROWS,)}, mesh)
    (y,) = jax.jit(jaxpr_as_fun(rewritten))(x)
    np.testing.assert_allclose(y, jnp.sin(x) * 2.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("site", "spec", "message"),
    [
        (Site((), 9, 0, "after"), ROWS, "no value 0 'after' equation 9"),
        (Site((), 0, 7, "before"), ROWS, "no value 7 'before' equation 0"),
        (Site((), -1, 0, "after"), ROWS, "no value 0 'after' equation -1"),
        (Site(((5, "jaxpr", 0),), 0, 0, "after"), ROWS, "no equation 5"),
        (Site(((1, "body", 0),), 0, 0, "after"), ROWS, "no jaxpr 0 in 'body'"),
        (Site(((1, "jaxpr", 1),), 0, 0, "after"), ROWS, "no jaxpr 1 in 'jaxpr'"),
        (Site(((0, "call_jaxpr", 0),), 0, 0, "after"), ROWS, "opaque"),
        (Site((), 0, 0, "after"), (("data",), ("data",)), "does not fit"),
        (Site((), 0, 0, "after"), (("stage",), ()), "does not fit"),
        (Site((), -1, 0, "input"), ((), ("data", "model")), "does not fit"),
        (Site((), -1, 0, "input"), (("data",),), "does not fit"),
    ],
)
def test_impossible_constraints_are_refused(
    site: Site, spec: Spec, message: str, mesh: Mesh
) -> None:
    closed = traced(lambda x: jax.jit(jnp.sin)(jax.nn.relu(x)), (8, 6))
    with pytest.raises(ValueError, match=message):
        rewrite(closed, {site: (spec,)}, mesh)
