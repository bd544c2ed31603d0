"""Training on a mesh is training on one device, laid out as told."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax import contrib

from jaxpar.errors import ModelError, PlanError
from jaxpar.model import make_model
from jaxpar.pure import named_leaves
from jaxpar.rewrite import Site
from jaxpar.runtime import Placement, Sharded, State, build, merge
from jaxpar.sharding import Spec
from jaxpar.trace import trace

STEPS = 3
D, M, N = ("data",), ("model",), ()


class Count(nnx.Variable):
    pass


class Net(nnx.Module):
    """Dropout keys, batch statistics and a counter beside the parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 64, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(64, 8, rngs=rngs)
        self.calls = Count(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.down(self.drop(nnx.relu(self.norm(self.up(x)))))


def net_loss(model: Any, batch: Any) -> Any:
    out = model(batch["x"])
    return jnp.mean((out - batch["y"]) ** 2), {"out": out}


class LinenNet(nn.Module):
    """A small Linen network in bfloat16."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kinds: Any = {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}
        return nn.Dense(8, name="down", **kinds)(
            nn.relu(nn.Dense(64, use_bias=False, name="up", **kinds)(x))
        )


def linen_loss(module: nn.Module, variables: Any, batch: Any) -> jax.Array:
    out: Any = module.apply(variables, batch["x"])
    return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)


def make_batch() -> dict[str, Any]:
    r = np.random.default_rng(0)
    x, y = (r.normal(size=(16, n)).astype(np.float32) for n in (16, 8))
    return {"x": x, "y": y, "nothing": None}


STORAGE: dict[str, Spec] = {
    "up/kernel": (N, M),
    "norm/scale": (M,),
    "norm/bias": (N,),
    "down/kernel": (M, N),
    "down/bias": (N,),
}
FINER: dict[str, Spec] = STORAGE | {
    "up/kernel": (D, M),
    "norm/bias": (D,),
    "down/kernel": (M, D),
    "down/bias": (D,),
}
BATCH: dict[str, Spec] = {"x": (D, N), "y": (D, N)}
STATE: dict[str, Spec] = {"norm/mean": (M,), "norm/var": (M,)}
PLACEMENT = Placement(STORAGE, FINER, state=STATE, batch=BATCH)
LINEN = Placement({p: s for p, s in STORAGE.items() if "norm" not in p}, batch=BATCH)


@dataclass
class Compiled:
    """Names of the programs compiled while a test runs."""

    names: list[str]


@pytest.fixture
def compiled() -> Iterator[Compiled]:
    log = Compiled([])

    def listen(event: str, _seconds: float, **info: Any) -> None:
        if event.endswith("/backend_compile_duration"):
            log.names.append(str(info.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield log
    jax.monitoring.unregister_event_duration_listener(listen)


def make_mesh(data: int, model: int) -> Mesh:
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices, ("data", "model"))


def shard(
    optimizer: Any = None,
    placement: Placement = PLACEMENT,
    mesh: Mesh | None = None,
    model: Any = Net,
    loss: Any = net_loss,
    **options: Any,
) -> Sharded:
    batch = make_batch()
    traced = trace(make_model(model, batch, loss, **options), batch)
    return build(traced, optimizer, mesh or make_mesh(2, 4), placement)


@pytest.fixture(scope="module")
def adamw() -> Sharded:
    return shard(optax.adamw(1e-2))


def plain(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def on_host(tree: Any) -> dict[str, np.ndarray]:
    return {path: np.array(plain(x)) for path, x in named_leaves(tree).items()}


def model_leaves(state: State) -> dict[str, np.ndarray]:
    return on_host(state.params) | on_host(state.model_state) | on_host(state.rngs)


def misplaced(sharded: Sharded, state: State) -> list[str]:
    wanted = named_leaves(sharded.state_shardings)
    return [
        path
        for path, x in named_leaves(state).items()
        if not x.sharding.is_equivalent_to(wanted[path], x.ndim)
    ]


def single_device_run(optimizer: Any) -> Iterator[tuple[Any, float, float]]:
    """Plain NNX and optax: model leaves before, loss and gradient norm of each step."""
    graph, params, rest = jax.jit(lambda: nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...))()

    def loss(params: Any, rest: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        value, _ = net_loss(model, batch)
        return value, nnx.split(model, nnx.Param, ...)[2]

    @jax.jit
    def step(params: Any, rest: Any, opt_state: Any, batch: Any) -> Any:
        derive = jax.value_and_grad(loss, has_aux=True)
        (value, rest), grads = derive(params, rest, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        norm = optax.tree.norm(grads)
        return optax.apply_updates(params, updates), rest, opt_state, value, norm

    opt_state = optimizer.init(params)
    for _ in range(STEPS + 1):
        before = on_host(params) | on_host(rest)
        params, rest, opt_state, value, norm = step(
            params, rest, opt_state, make_batch()
        )
        yield before, float(value), float(norm)


def check_parity(sharded: Sharded, optimizer: Any) -> None:
    state = sharded.init(0)
    for wanted, loss, norm in single_device_run(optimizer):
        found = model_leaves(state)
        assert found.keys() == wanted.keys()
        for path, x in wanted.items():
            np.testing.assert_allclose(found[path], x, 1e-4, 1e-5, err_msg=path)
        assert not misplaced(sharded, state)
        state, metrics = sharded.step(state, make_batch())
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)


def test_training_equals_one_device() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    check_parity(shard(optimizer), optimizer)


def test_constraints_within_the_loss_change_no_number() -> None:
    optimizer = optax.adamw(1e-2)
    batch = make_batch()
    traced = trace(make_model(Net, batch, net_loss), batch)
    names = [eqn.primitive.name for eqn in traced.jaxpr.jaxpr.eqns]
    products = [i for i, name in enumerate(names) if name == "dot_general"]
    kernel = next(i for i, x in enumerate(traced.leaves) if x.path == "up/kernel")
    constraints: dict[Site, tuple[Spec, ...]] = {
        Site((), products[0], 0, "after"): ((D, M),),
        Site((), products[1], 0, "after"): ((D, N),),
        Site((), -1, kernel, "input"): ((N, M),),
    }
    placement = replace(PLACEMENT, storage=FINER, constraints=constraints)
    sharded = build(traced, optimizer, make_mesh(2, 4), placement)
    check_parity(sharded, optimizer)


def test_a_step_donates_its_state_and_compiles_once(compiled: Compiled) -> None:
    sharded = shard(optax.sgd(1e-2))
    assert not compiled.names
    state = sharded.init(0)
    for step in range(STEPS):
        state, before = sharded.step(state, make_batch())[0], state
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert state.step == step + 1
        assert state.step.dtype == jnp.int32
    assert [n for n in compiled.names if "step" in n] == ["jit(step)"]


def test_placement(adamw: Sharded) -> None:
    sharded = adamw
    mesh = make_mesh(2, 4)

    def lies(*dims: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*dims))

    shardings = named_leaves(sharded.state_shardings)
    ranks = {p: len(x.shape) for p, x in named_leaves(sharded.abstract_state).items()}
    for path, wanted in {
        "params/up/kernel": lies(None, "model"),
        "params/down/bias": lies(),
        "opt_state/0/mu/up/kernel": lies("data", "model"),
        "opt_state/0/nu/down/bias": lies("data"),
        "opt_state/0/count": lies(),
        "model_state/norm/mean": lies("model"),
        "model_state/calls": lies(),
        "rngs/drop/rngs/key": lies(),
        "step": lies(),
    }.items():
        assert shardings[path].is_equivalent_to(wanted, ranks[path]), path
    assert sharded.batch_shardings["x"].is_equivalent_to(lies("data"), 2)
    assert sharded.batch_shardings["nothing"] is None
    structs = named_leaves(sharded.abstract_state)
    assert {path: struct.sharding for path, struct in structs.items()} == shardings


def test_everything_lowers_without_data(adamw: Sharded) -> None:
    sharded = adamw
    step = sharded.step.lower(sharded.abstract_state, make_batch()).compile()
    assert "all-reduce" in step.as_text()
    sharded.apply.lower(sharded.abstract_state, make_batch())
    memory = sharded.init.lower(0).compile().memory_analysis()
    assert memory.output_size_in_bytes < 64 * 1024


def test_apply_is_the_forward_pass(adamw: Sharded) -> None:
    sharded = adamw
    state = sharded.init(0)
    loss, aux = sharded.apply(state, make_batch())
    model: Any = merge(sharded, state)
    wanted, wanted_aux = net_loss(model, make_batch())
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(aux["out"], wanted_aux["out"], rtol=1e-4, atol=1e-5)
    parts = (state.params, state.model_state, state.rngs)
    pure_loss, _ = jax.jit(sharded.loss)(*parts, make_batch(), state.step)
    np.testing.assert_allclose(pure_loss, wanted, rtol=1e-5)


def test_without_an_optimizer_there_is_no_step() -> None:
    sharded = shard()
    assert sharded.abstract_state.opt_state == ()
    with pytest.raises(ModelError, match="no optimizer"):
        sharded.step.lower(sharded.abstract_state, make_batch())


def test_initial_values_are_those_of_the_model_bit_for_bit() -> None:
    sharded = shard()
    build_model = jax.jit(lambda key: nnx.split(Net(nnx.Rngs(key)))[1])
    for seed in (0, 7):
        found = model_leaves(sharded.init(seed))
        wanted = on_host(build_model(jax.random.key(seed)))
        assert found.keys() == wanted.keys()
        for path, x in wanted.items():
            np.testing.assert_array_equal(found[path], x, err_msg=path)


def test_a_ready_module_starts_with_its_own_values() -> None:
    module = nnx.jit(lambda: Net(nnx.Rngs(5)))()
    wanted = on_host(nnx.state(module))
    sharded = shard(optax.adamw(1e-2), model=module)
    state = sharded.init(0)
    assert not misplaced(sharded, state)
    for path, x in model_leaves(state).items():
        np.testing.assert_array_equal(x, wanted[path], err_msg=path)
    sharded.step(state, make_batch())
    assert on_host(nnx.state(module)).keys() == wanted.keys()  # not donated
    # Values are arguments: as constants they would be whole on every device.
    assert len(sharded.init.lower(0).as_text()) < 50_000


def test_linen_in_bfloat16_trains() -> None:
    sharded = shard(
        optax.adafactor(1e-2),
        LINEN,
        model=LinenNet(),
        loss=linen_loss,
        init=lambda module, rngs, batch: module.init(rngs, batch["x"]),
    )
    state = sharded.init(0)
    init = jax.jit(LinenNet().init)
    wanted = on_host(init(jax.random.key(0), make_batch()["x"])["params"])
    for path, x in on_host(state.params).items():
        np.testing.assert_array_equal(x, wanted[path], err_msg=path)
    losses = []
    for _ in range(STEPS):
        state, metrics = sharded.step(state, make_batch())
        losses.append(float(metrics["loss"]))
        assert not misplaced(sharded, state)
    assert losses[-1] < losses[0]
    assert metrics["grad_norm"].dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert set(merge(sharded, state)) == {"params"}


def test_frozen_leaves_are_sharded_and_stay_as_they_are() -> None:
    in_bias = nnx.All(nnx.Param, nnx.PathContains("bias"))
    biases = {p: s for p, s in STORAGE.items() if p.endswith("bias")}
    rest = STATE | {p: s for p, s in STORAGE.items() if p not in biases}
    placement = Placement(biases, state=rest, batch=BATCH)
    sharded = shard(optax.sgd(0.1), placement, wrt=in_bias)
    state = sharded.init(0)
    kernel = state.model_state["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 16)
    before = on_host(state.model_state)
    state, _ = sharded.step(state, make_batch())
    after = on_host(state.model_state)
    np.testing.assert_array_equal(after["up/kernel"], before["up/kernel"])
    assert not misplaced(sharded, state)


def drifting() -> optax.GradientTransformation:
    """A careless optimizer: its state changes dtype from step to step."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return jax.tree.map(lambda g: -0.1 * g, updates), state + np.float32(1)

    return optax.GradientTransformation(lambda params: jnp.bfloat16(0), update)


@pytest.mark.parametrize(
    "optimizer",
    [
        contrib.schedule_free_adamw(1e-2),
        optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau()),
        optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(3)),
        optax.MultiSteps(optax.adamw(1e-2), 2),
        drifting(),
    ],
    ids=["copies params", "reads the loss", "calls the loss", "cond", "drifts"],
)
def test_unusual_optimizers(optimizer: Any, compiled: Compiled) -> None:
    sharded = shard(optimizer)
    state = sharded.init(0)
    for _ in range(2):
        state, metrics = sharded.step(state, make_batch())
        assert np.isfinite(metrics["loss"])
        assert not misplaced(sharded, state)
    assert [n for n in compiled.names if "step" in n] == ["jit(step)"]


def test_checkpoint_restores_on_another_mesh(adamw: Sharded, tmp_path: Path) -> None:
    sharded = adamw
    other = shard(optax.adamw(1e-2), mesh=make_mesh(4, 1))
    state, _ = sharded.step(sharded.init(0), make_batch())
    with ocp.StandardCheckpointer() as store:
        store.save(tmp_path / "state", state)
        store.wait_until_finished()
        restored = store.restore(tmp_path / "state", other.abstract_state)
    assert isinstance(restored, State)
    assert not misplaced(other, restored)
    for path, x in on_host(state).items():
        np.testing.assert_array_equal(on_host(restored)[path], x, err_msg=path)
    _, wanted = sharded.step(state, make_batch())
    _, found = other.step(restored, make_batch())
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)


def test_a_placement_that_does_not_fit_is_refused() -> None:
    lost = {p: s for p, s in STORAGE.items() if p != "norm/bias"}
    with pytest.raises(PlanError, match="norm/bias"):
        shard(placement=replace(PLACEMENT, storage=lost))
    with pytest.raises(PlanError, match=r"x is float32\[16,16\].*'data': 5"):
        shard(mesh=make_mesh(5, 1))
    with pytest.raises(PlanError, match="down/bias"):
        shard(placement=replace(PLACEMENT, storage=STORAGE | {"down/bias": (D, M)}))


def test_another_batch_is_refused(adamw: Sharded) -> None:
    sharded = adamw
    short = {name: x if x is None else x[:8] for name, x in make_batch().items()}
    with pytest.raises(ModelError, match=r"x is float32\[8,16\]"):
        sharded.step.lower(sharded.abstract_state, short)
    integers = make_batch() | {"x": np.zeros((16, 16), np.int32)}
    with pytest.raises(ModelError, match=r"x is int32\[16,16\]"):
        sharded.step.lower(sharded.abstract_state, integers)
    sharded.step.lower(sharded.abstract_state, make_batch() | {"x": np.zeros((16, 16))})
