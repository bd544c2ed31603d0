"""Models behind one face, and the loss as a jaxpr: against plain Flax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.extend.core import jaxpr_as_fun

from jaxpar.errors import ModelError
from jaxpar.model import make_model, named_leaves
from jaxpar.trace import trace

WIDTH, CLASSES, BATCH = 8, 4, 6


def batch():
    draw = np.random.default_rng(0).normal
    return {
        "x": draw(size=(BATCH, WIDTH)).astype(np.float32),
        "y": draw(size=(BATCH, WIDTH)).astype(np.float32),
    }


def assert_same(found, wanted, rtol=0.0):
    found, wanted = named_leaves(found), named_leaves(wanted)
    assert found.keys() == wanted.keys()
    for path, x in wanted.items():
        pair = (found[path], x)
        assert pair[0].dtype == pair[1].dtype, path
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            pair = tuple(map(jax.random.key_data, pair))
        np.testing.assert_allclose(*pair, rtol, 1e-6 if rtol else 0, err_msg=path)


FAST_COMPILE = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
jit = functools.partial(jax.jit, compiler_options=FAST_COMPILE)


def evaluate(traced, parts, data, step=0):
    run = jit(jaxpr_as_fun(traced.jaxpr))
    return traced.unflatten(run(*traced.flatten(*parts, data, step)))


def leaf(traced, path):
    return next(leaf for leaf in traced.leaves if leaf.path == path)


# ---- NNX


class Count(nnx.Variable):
    pass


class Mlp(nnx.Module):
    def __init__(self, rngs, layers=2):
        blocks = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(layers)]
        self.blocks = nnx.List(blocks)

    def __call__(self, x):
        for block in self.blocks:
            x = x + nnx.gelu(block(x))
        return x


class Stateful(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.calls = Count(jnp.zeros((), jnp.int32))
        self.scale = Count(2.0)
        self.table = jnp.arange(WIDTH) / WIDTH
        self.mask = np.arange(WIDTH)
        self.rngs = rngs

    def __call__(self, x):
        self.calls[...] += 1
        self.seen = nnx.Intermediate(x)
        noise = self.rngs.normal(x.shape)
        return self.drop(self.norm(x * self.table + self.mask)) * self.scale + noise


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = nnx.List([self.first])
        self.alias = self.first.kernel

    def __call__(self, x):
        return self.second[0](self.first(x)) @ self.alias[...].T


class Lora(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.inner(x)


class Layer(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", None))
        self.linear = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.linear(x))


class Stack(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Layer(rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return layer(x)

        return run(x, self.layers)


def squares(model, data):
    return jnp.mean((model(data["x"]) - data["y"]) ** 2)


def squares_with_aux(model, data):
    out = model(data["x"])
    return jnp.mean(out**2), {"largest": out.max(), "two": 2.0}


NNX_MODELS = {
    "mlp": (Mlp, squares, nnx.Param),
    "stateful": (Stateful, squares, nnx.Param),
    "aux": (Mlp, squares_with_aux, nnx.Param),
    "tied": (Tied, squares, nnx.Param),
    "lora": (Lora, squares, nnx.LoRAParam),
    "stack": (Stack, squares, nnx.Param),
    "partial": (
        functools.partial(nnx.Linear, WIDTH, WIDTH),
        squares,
        nnx.PathContains("kernel"),
    ),
}


def plain_nnx(constructor, eager):
    build = constructor if eager else nnx.jit(lambda rngs: constructor(rngs=rngs))
    with nnx.use_eager_sharding(False):
        return build(rngs=nnx.Rngs(0))


def merged(parts):
    """All parts in one dict of arrays; their paths are those of nnx.state."""
    leaves = {path: x for part in parts for path, x in named_leaves(part).items()}
    return {path: jnp.asarray(x) for path, x in leaves.items()}


@pytest.mark.parametrize("name", NNX_MODELS)
def test_nnx_is_plain_flax(name):
    constructor, loss, wrt = NNX_MODELS[name]
    data = batch()
    model = make_model(constructor, data, loss, wrt=wrt)
    plain = plain_nnx(constructor, eager=name in ("mlp", "stateful"))
    parts = jit(model.init)(0)
    assert jax.tree.structure(parts) == jax.tree.structure(model.abstract)
    assert_same(merged(parts), merged([nnx.state(plain)]))

    value, (aux, *state) = evaluate(trace(model, data), parts, data)
    wanted = jax.tree.leaves(nnx.jit(loss)(plain, data))
    nnx.pop(plain, nnx.Intermediate)
    np.testing.assert_allclose(value, wanted[0], 1e-5)
    np.testing.assert_allclose(jax.tree.leaves(aux), wanted[1:], 1e-5)
    assert_same(merged([parts[0], *state]), merged([nnx.state(plain)]), 1e-5)


def test_seeds_may_be_keys():
    model = make_model(Mlp, batch(), squares)
    assert_same(model.init(jax.random.key(1)), model.init(1))


def test_nnx_gradients_are_those_of_plain_flax():
    data = batch()
    model = make_model(Tied, data, squares)
    params, *rest = model.init(0)
    traced = trace(model, data)
    run = jaxpr_as_fun(traced.jaxpr)

    def loss(params):
        return run(*traced.flatten(params, *rest, data, 0))[0]

    assert len(named_leaves(params)) == len(("kernel", "bias"))
    wanted = nnx.jit(nnx.grad(squares))(Tied(nnx.Rngs(0)), data)
    assert_same(jit(jax.grad(loss))(params), wanted, 1e-4)


def test_nnx_merge_gives_the_module_back():
    model = make_model(Stateful, batch(), squares)
    module = model.merge(*model.init(0))
    assert isinstance(module, Stateful)
    assert type(module.drop.rngs) is nnx.RngStream
    plain = Stateful(rngs=nnx.Rngs(0))
    assert_same(merged([nnx.state(module)]), merged([nnx.state(plain)]))


def test_nnx_loss_with_rngs_gets_new_ones_every_step():
    def loss(model, data, rngs):
        return jnp.mean(model(data["x"])) + rngs.noise.uniform()

    data = batch()
    model = make_model(Mlp, data, loss)
    traced, parts = trace(model, data), model.init(3)
    first, (_, _, rngs) = evaluate(traced, parts, data, 0)
    again, second = (evaluate(traced, parts, data, step)[0] for step in (0, 1))
    assert first == again != second
    assert_same(rngs, parts[2])
    key = jax.random.fold_in(parts[2]["loss_key"], 1)
    wanted = loss(Mlp(nnx.Rngs(3)), data, nnx.Rngs(key))
    np.testing.assert_allclose(second, wanted, 1e-5)


def test_ready_module_starts_from_its_values_and_is_left_alone():
    module = Stateful(rngs=nnx.Rngs(5))
    module.calls[...] = 7
    model = make_model(module, batch(), squares)
    wanted = merged([nnx.state(module)])
    assert_same(merged(model.init(0)), wanted)
    assert_same(merged(jit(model.init)(1, model.values)), wanted)
    _, (_, state, _) = evaluate(trace(model, batch()), model.init(0), batch())
    assert state["calls"] == 8
    assert module.calls[...] == 7
    assert type(module.drop.rngs) is nnx.RngStream


def test_ready_module_of_shapes_can_be_traced_but_not_started():
    module = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
    model = make_model(module, batch(), squares)
    assert trace(model, batch()).leaves
    with pytest.raises(ModelError, match="shapes without values"):
        model.init(0)


# ---- Linen


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(
            WIDTH,
            kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")),
            bias_init=nn.with_partitioning(nn.initializers.zeros, ("tensor",)),
            name="up",
        )(x)
        x = nn.with_logical_constraint(nn.gelu(x), ("batch", "mlp"))
        return nn.Dense(WIDTH, name="down")(x)


class LinenStateful(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(WIDTH)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


class LinenStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0}
        stack = nn.scan(
            nn.remat(LinenBlock),
            variable_axes=axes,
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return stack(name="layers")(x, None)[0]


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.gelu(LinenMlp(name="mlp")(x)), None


def linen_squares(module, variables, data, rngs=None):
    out = module.apply(variables, data["x"], rngs=rngs)
    return jnp.mean((out - data["y"]) ** 2)


def with_statistics(module, variables, data, rngs):
    out, updated = module.apply(
        variables, data["x"], rngs=rngs, mutable=["batch_stats"]
    )
    return jnp.mean(out**2), updated


def with_statistics_and_aux(module, variables, data, rngs):
    loss, updated = with_statistics(module, variables, data, rngs)
    return loss, ({"twice": 2 * loss}, updated)


LINEN_MODELS = {
    "mlp": (LinenMlp(), linen_squares, ()),
    "stack": (LinenStack(), linen_squares, ()),
    "stateful": (LinenStateful(), with_statistics, "batch_stats"),
    "aux": (LinenStateful(), with_statistics_and_aux, ("batch_stats",)),
}


def step_keys(parts, step):
    first, second = jax.random.split(jax.random.fold_in(parts[2]["loss_key"], step))
    return {"params": first, "dropout": second}


@pytest.mark.parametrize("name", LINEN_MODELS)
def test_linen_is_plain_flax(name):
    module, loss, mutable = LINEN_MODELS[name]
    data = batch()
    model = make_model(module, data, loss, mutable=mutable)
    parts = jit(model.init)(0)
    variables = nn.unbox(jit(module.init)(jax.random.key(0), data["x"]))
    assert_same(model.merge(*parts), variables)
    assert_same(parts[0], variables["params"])
    value, (aux, state, _) = evaluate(trace(model, data), parts, data, 5)
    wanted = jit(loss, static_argnums=0)(module, variables, data, step_keys(parts, 5))
    wanted = wanted if isinstance(wanted, tuple) else (wanted, {})
    np.testing.assert_allclose(value, wanted[0], 1e-5)
    if name == "aux":
        np.testing.assert_allclose(aux["twice"], 2 * value, 1e-5)
        wanted = wanted[1]
    assert_same(state, wanted[1], 1e-5)


def test_linen_parts_that_are_frozen_keep_their_path():
    data = batch()
    model = make_model(LinenMlp(), data, linen_squares, wrt=lambda path: "up/" in path)
    params, state, _ = model.abstract
    assert named_leaves(params).keys() == {"up/bias", "up/kernel"}
    assert named_leaves(state).keys() == {"params/down/bias", "params/down/kernel"}
    value, _ = evaluate(trace(model, data), model.init(0), data)
    full = make_model(LinenMlp(), data, linen_squares)
    assert value == evaluate(trace(full, data), full.init(0), data)[0]


def test_linen_can_train_another_collection():
    model = make_model(LinenStateful(), batch(), with_statistics, wrt="batch_stats")
    assert named_leaves(model.abstract[0]).keys() == {"norm/mean", "norm/var"}


def test_init_may_read_the_batch_and_drops_it_where_it_does_not():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("scale", lambda key: x.std(0))

    data = batch()
    model = make_model(Scaled(), data, linen_squares)
    np.testing.assert_allclose(model.init(0)[0]["scale"], data["x"].std(0), 1e-6)
    model = make_model(LinenMlp(), data, linen_squares)
    consts = jax.make_jaxpr(model.init)(0).consts
    assert all(np.size(const) < BATCH for const in consts)


@pytest.mark.parametrize(
    "data",
    [
        np.ones((BATCH, WIDTH), np.float32),
        {"image": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)},
        {"x": np.ones((BATCH, WIDTH), np.float32), "label": np.ones(BATCH)},
    ],
)
def test_linen_init_is_guessed_where_it_is_plain(data):
    loss = lambda module, variables, data: jnp.zeros(())  # noqa: E731
    model = make_model(LinenMlp(), data, loss)
    assert model.abstract[0]["up"]["kernel"].shape == (WIDTH, WIDTH)
    assert model.abstract[2] == {}


# ---- leaves


def test_leaves_are_named_in_the_order_of_the_inputs():
    data = {"inputs": [batch()["x"], None], "scale": 0.5, "note": (), "n": np.int8(3)}

    def loss(model, data):
        return model(data["inputs"][0]).mean() * data["scale"] * data["n"]

    traced = trace(make_model(Stateful, data, loss), data)
    assert [leaf.path for leaf in traced.leaves] == [
        *("norm/bias", "norm/scale"),
        *("calls", "mask", "norm/mean", "norm/var", "scale", "table"),
        *("drop/rngs/count", "drop/rngs/key", "rngs/default/count", "rngs/default/key"),
        *("inputs/0", "n", "scale"),
        "step",
    ]
    roles = "param " * 2 + "state " * 6 + "rng " * 4 + "batch " * 3 + "rng"
    assert [leaf.role for leaf in traced.leaves] == roles.split()
    for leaf, aval in zip(traced.leaves, traced.jaxpr.in_avals, strict=True):
        assert (leaf.shape, leaf.dtype) == (aval.shape, aval.dtype)
    assert not any(leaf.names for leaf in traced.leaves)


def test_list_positions_sort_as_numbers():
    deep = functools.partial(Mlp, layers=11)
    params = make_model(deep, None, squares).abstract[0]
    assert list(params["blocks"]) == list(range(11))


@pytest.mark.parametrize(
    ("model", "path", "names", "kind"),
    [
        (Stack, "layers/linear/kernel", ("embed", None), "physical"),
        (LinenMlp(), "up/kernel", ("embed", "mlp"), "logical"),
        (LinenMlp(), "up/bias", ("tensor",), "physical"),
        (LinenMlp(), "down/kernel", None, None),
        (LinenStack(), "layers/mlp/up/kernel", ("layers", "embed", "mlp"), "logical"),
    ],
)
def test_annotations_are_kept_as_given(model, path, names, kind):
    loss = linen_squares if isinstance(model, nn.Module) else squares
    found = leaf(trace(make_model(model, batch(), loss), batch()), path)
    assert (found.names, found.names_kind) == (names, kind)


def test_ready_module_built_in_a_mesh_keeps_its_names():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("embed",))
    with jax.set_mesh(mesh):
        model = make_model(Stack(nnx.Rngs(0)), batch(), squares)
    traced = trace(model, batch())
    assert leaf(traced, "layers/linear/kernel").names == ("embed", None)
    assert "sharding_constraint" not in str(traced.jaxpr)


@pytest.mark.parametrize("enter", [jax.set_mesh, lambda mesh: mesh])
@pytest.mark.filterwarnings("ignore:.with mesh.:DeprecationWarning")
def test_a_mesh_around_the_call_is_not_seen(enter):
    def traced(model, loss):
        return str(trace(make_model(model, batch(), loss), batch()).jaxpr)

    pairs = [(Stack, squares), (LinenMlp(), linen_squares)]
    alone = [traced(*pair) for pair in pairs]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    rules = [("embed", "data"), ("batch", "data")]
    with enter(mesh), nn.logical_axis_rules(rules):
        assert [traced(*pair) for pair in pairs] == alone


# ---- refusals


class Tables(nnx.Module):
    def __init__(self, rngs):
        self.steps = nnx.Param(jnp.arange(3))


class Grows(Mlp):
    def __call__(self, x):
        self.last = nnx.BatchStat(x)
        return super().__call__(x)


class Changes(Mlp):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.mean = nnx.BatchStat(jnp.zeros(3))

    def __call__(self, x):
        self.mean.set_value(self.mean.get_value().astype(jnp.bfloat16))
        return super().__call__(x)


class Clash(Mlp):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.loss_key = nnx.RngKey(rngs(), tag="own")


def broken(rngs):
    return nnx.Linear(WIDTH, "wide", rngs=rngs)


def returns(value):
    return lambda model, data: value


def branches(model, data):
    return squares(model, data) if data["x"].sum() > 0 else 0.0


def constrains(model, data):
    spec = jax.sharding.PartitionSpec("data")
    return jax.lax.with_sharding_constraint(model(data["x"]), spec).mean()


REFUSALS = {
    "array loss": (Mlp, lambda m, d: m(d["x"]), {}, r"float32\[6,8\], not a scalar"),
    "integer loss": (Mlp, returns(jnp.int32(1)), {}, r"int32\[\], which has no grad"),
    "no loss": (Mlp, returns(None), {}, "the loss returns NoneType None"),
    "three results": (Mlp, returns((1.0, 2.0, 3.0)), {}, "the loss returns tuple"),
    "text in aux": (Mlp, returns((1.0, {"name": "a"})), {}, "aux name .* is str 'a'"),
    "no function": (Mlp, 1.0, {}, "loss is float"),
    "too few arguments": (Mlp, lambda model: 1.0, {}, r"loss\(model, batch\)"),
    "too many": (Mlp, lambda model, batch, a, b: 1.0, {}, "functools.partial"),
    "loss fails": (
        Mlp,
        lambda m, d: m(d["z"]),
        {},
        r"test_trace.py:\d+: KeyError: 'z'",
    ),
    "control flow": (Mlp, branches, {}, "no Python control flow"),
    "own constraint": (Mlp, constrains, {}, "take out with_sharding_constraint"),
    "model fails": (broken, squares, {}, r"building the model fails at test_trace.py"),
    "no module": (
        lambda rngs: {"a": 1},
        squares,
        {},
        "returns dict, not an nnx.Module",
    ),
    "no model": ("gpt2", squares, {}, "model is str 'gpt2'"),
    "a Linen class": (LinenMlp, linen_squares, {}, r"pass LinenMlp\(...\)"),
    "integer param": (Tables, squares, {}, r"parameter steps is int32\[3\]"),
    "nothing trained": (Mlp, squares, {"wrt": nnx.LoRAParam}, "no trained parameter"),
    "bad filter": (Mlp, squares, {"wrt": 3}, "selecting variables by wrt=3"),
    "new variable": (Grows, squares, {}, "the loss adds last"),
    "new dtype": (Changes, squares, {}, r"mean from float32\[3\] into bfloat16\[3\]"),
    "taken path": (Clash, lambda m, d, rngs: 1.0, {}, "'loss_key', which is taken"),
    "init for NNX": (Mlp, squares, {"init": broken}, "init= is for Linen"),
    "mutable for NNX": (Mlp, squares, {"mutable": ("a",)}, "mutable= is for Linen"),
    "filter for Linen": (
        *(LinenMlp(), linen_squares, {"wrt": nnx.LoRAParam}),
        "selects nothing in a Linen module",
    ),
    "init returns params": (
        LinenMlp(),
        linen_squares,
        {"init": lambda m, key, b: m.init(key, b["x"])["params"]},
        "no collection 'params' to train; it gives .*'up'",
    ),
    "init returns nothing": (
        *(LinenMlp(), linen_squares, {"init": lambda m, key, b: None}),
        "init returns NoneType",
    ),
    "unknown collection": (
        *(LinenStateful(), with_statistics, {"mutable": "stats"}),
        "'stats' is not among the variables",
    ),
    "trained and mutable": (
        *(LinenStateful(), with_statistics, {"mutable": "params"}),
        "'params' is trained",
    ),
    "nothing returned": (
        *(LinenStateful(), linen_squares, {"mutable": "batch_stats"}),
        "fails|must return",
    ),
    "forgotten mutable": (LinenStateful(), with_statistics, {}, "which nothing keeps"),
    "unclear batch": (
        *(nn.Dense(2), linen_squares, {}),
        r"Dense is called with \(inputs\); which parts of the batch",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_and_where(name):
    model, loss, options, message = REFUSALS[name]
    with pytest.raises(ModelError, match=message) as caught:
        trace(make_model(model, batch(), loss, **options), batch())
    assert "hint:" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": {"name": "cat"}}, "batch leaf x/name is str 'cat'"),
        ({"x": np.array(["a"])}, "batch leaf x is ndarray"),
        ({1: np.ones(2), "x": np.ones(2)}, "cannot be flattened"),
        (object(), "the batch itself"),
    ],
)
def test_batches_hold_arrays(data, message):
    with pytest.raises(ModelError, match=message):
        trace(make_model(Mlp, data, squares), data)


def test_arguments_of_another_structure_are_refused():
    data = batch()
    model = make_model(Mlp, data, squares)
    with pytest.raises(ModelError, match=r"batch has not the structure .* at z"):
        trace(model, data).flatten(*model.abstract, data | {"z": 1.0}, 0)
