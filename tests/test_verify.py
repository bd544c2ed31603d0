"""Predicted against compiled, on the partitioned CPU program."""

import json
import re
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import jaxpar
from benchmarks.forced_plans import FORCED, FORMS, WORKS, Case, unequal
from jaxpar.errors import MeshError, ModelError, PlanError
from jaxpar.hlo.collectives import HloCollective
from jaxpar.plan import CollectivePlan
from jaxpar.verify.compare import collective_rows
from jaxpar.zoo import zoo

QUICK = ("zero-1 x tensor", "data x fsdp x tensor", "tensor + sequence")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", QUICK)
def test_every_collective_is_predicted(plan, form):
    check = Case(plan, form, "training").check()
    assert check.rows
    assert not unequal(check)


@pytest.mark.parametrize("plan", ["fsdp x tensor", "data x sequence"])
def test_every_collective_of_inference_is_predicted(plan):
    check = Case(plan, "scanned", "inference").check()
    assert check.rows
    assert not unequal(check)


def test_tensor_and_sequence_split_tokens_between_blocks():
    sharded = jaxpar.auto_shard(
        **zoo("gpt-tiny", layers=1), **FORCED["tensor + sequence"].options()
    )
    phases = Counter(
        c.phase
        for c in sharded.plan.collectives
        if c.kind == "all-gather" and c.bytes == 2**19
    )
    # Before attention, MLP and logits; and of the cotangents of what the former two
    # made (Korthikanti et al. 2022, figure 5).
    assert phases == {"forward": 3, "backward": 2}
    tokens = (("data",), ("tensor",), ())
    assert tokens in sharded.plan.activations["positions:add"].specs


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", FORCED)
def test_every_collective_of_every_forced_plan_is_predicted(plan, form, work, layers):
    assert not unequal(Case(plan, form, work, layers).check())


def test_a_convolution_on_the_data_axis():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(4, 16, (3, 3), rngs=rngs)
            self.out = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.conv(x)).mean((1, 2)))

    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    batch = {
        "x": jax.ShapeDtypeStruct((16, 8, 8, 4), jnp.float32),
        "y": jax.ShapeDtypeStruct((16, 8), jnp.float32),
    }
    sharded = jaxpar.auto_shard(Net, optax.sgd(0.1), loss, batch, mesh={"data": 4})
    assert not unequal(jaxpar.verify_plan(sharded))


def test_linen_from_a_plan():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(8)(linen.relu(linen.Dense(64)(x)))

    def loss(module, variables, batch, rngs):
        return jnp.mean(module.apply(variables, batch["x"]) ** 2)

    def init(module, rngs, batch):
        return module.init(rngs, batch["x"])

    batch = {"x": jax.ShapeDtypeStruct((16, 32), jnp.float32)}
    given = (Net(), optax.adam(1e-3), loss, batch)
    plan = jaxpar.make_plan(*given, mesh={"fsdp": 4}, init=init, zero=3)
    check = jaxpar.verify_plan(plan, *given, init=init)
    assert not unequal(check)
    assert any(row.kind == "all-gather" for row in check.rows)


def test_a_wrong_prediction_is_found():
    given = zoo("gpt-tiny", layers=1)
    sharded = jaxpar.auto_shard(**given, mesh={"data": 4})
    honest = jaxpar.verify_plan(sharded)
    plan = sharded.plan
    lying = plan.__class__(**{**vars(plan), "collectives": plan.collectives[1:]})
    check = jaxpar.verify_plan(lying, *map(given.get, _SUBJECT))
    assert len(check.problems()) > len(honest.problems())
    first = check.problems()[0]
    assert re.search(r"all-reduce over data: [\d,]+ bytes predicted", first)
    assert json.loads(json.dumps(check.to_json()))["agrees"] is False


_SUBJECT = ("model", "optimizer", "loss", "batch")


def test_rows_match_by_kind_axes_and_bytes():
    predicted = [
        CollectivePlan(
            kind="reduce-scatter",
            axes=("b",),
            bytes=8,
            executions=3,
            phase="backward",
            where="w",
        )
    ]
    compiled = [HloCollective("all-reduce", 8, ((0, 1), (2, 3)), 2, "x")]
    sizes = {"a": 2, "b": 2}
    (row,) = collective_rows(predicted, compiled, sizes, scatters=False)
    assert (row.kind, row.axes, row.predicted, row.compiled) == (
        "all-reduce",
        ("b",),
        3,
        2,
    )
    assert len(collective_rows(predicted, compiled, sizes, scatters=True)) == 2


def test_zero_stages_store_what_they_say():
    given = zoo("gpt-tiny", layers=1)
    kernel = "layers/0/mlp/up/kernel"
    found = {}
    for zero in (0, 1, 3):
        plan = jaxpar.make_plan(**given, mesh={"fsdp": 4}, zero=zero)
        entry = plan.params[kernel]
        found[zero] = ("fsdp" in str(entry.storage), "fsdp" in str(entry.optimizer))
    assert found == {0: (False, False), 1: (False, True), 3: (True, True)}
    with pytest.raises(PlanError, match="zero=4 is no stage of ZeRO"):
        jaxpar.make_plan(**given, mesh={"fsdp": 4}, zero=4)


def test_activation_pins_bind():
    given = zoo("gpt-tiny", layers=1)
    mesh = {"data": 2, "tensor": 2}
    free = jaxpar.make_plan(**given, mesh=mesh)
    shapes = {n: a.shape for n, a in free.activations.items() if "->" not in n}
    name = next(n for n, s in shapes.items() if s == (16, 128, 128))
    spec = P("data", "tensor", None)
    plan = jaxpar.make_plan(**given, mesh=mesh, pin={re.escape(name): spec})
    assert plan.activations[name].specs[0][:2] == (("data",), ("tensor",))
    with pytest.raises(ModelError, match="matches no parameter and no activation"):
        jaxpar.make_plan(**given, mesh=mesh, pin={"nonsense": spec})


def test_errors_are_early():
    given = zoo("gpt-tiny", layers=1)
    plan = jaxpar.make_plan(**given, mesh="tpu-v5e-4x4")
    subject = [given[key] for key in _SUBJECT]
    with pytest.raises(PlanError, match="backend is 'gpu'"):
        jaxpar.verify_plan(plan, *subject, backend="gpu")
    with pytest.raises(MeshError, match="needs 16 devices, there are 8"):
        jaxpar.verify_plan(plan, *subject)
