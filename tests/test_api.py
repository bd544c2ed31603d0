"""The public functions: plans, files, shardings, and refusals before any compile."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from planning import Mlp, floats, square_loss

import jaxpar
from jaxpar.errors import (
    InfeasibleError,
    MeshError,
    ModelError,
    PlanError,
    RuleError,
)


def narrow(rngs):
    return Mlp(rngs, 30)


def mlp_plan(mesh="cpu-8", model=Mlp, **options):
    arguments = {"optimizer": optax.adam(1e-3), "loss": square_loss}
    batch = options.pop("batch", floats(16, 32))
    return jaxpar.make_plan(model, batch=batch, mesh=mesh, **arguments | options)


def mlp_sharded(mesh=None, **options):
    return jaxpar.auto_shard(
        Mlp, optax.adam(1e-3), square_loss, floats(16, 32), mesh, **options
    )


def test_a_plan_needs_no_devices_of_its_topology():
    plan = mlp_plan("tpu-v5e-4x4")
    assert np.prod(list(plan.mesh.values())) == 16
    assert plan.topology.name == "tpu-v5e-4x4"
    assert plan.search.status == "optimal" and plan.search.gap == 0


def test_a_plan_survives_its_file(tmp_path):
    plan = mlp_plan({"data": 2, "tensor": 4})
    plan.save(tmp_path / "plan.json")
    assert jaxpar.load_plan(tmp_path / "plan.json") == plan


def test_a_saved_plan_gives_the_same_program(tmp_path):
    sharded = mlp_sharded({"data": 2, "tensor": 4})
    sharded.plan.save(tmp_path / "plan.json")
    again = jaxpar.apply_plan(
        jaxpar.load_plan(tmp_path / "plan.json"),
        Mlp,
        optax.adam(1e-3),
        square_loss,
        floats(16, 32),
    )
    texts = [
        s.step.lower(s.abstract_state, floats(16, 32)).as_text()
        for s in (sharded, again)
    ]
    assert texts[0] == texts[1]


def test_a_plan_edited_by_hand_is_followed(tmp_path):
    path = tmp_path / "plan.json"
    mlp_plan({"data": 2, "tensor": 4}).save(path)
    data = json.loads(path.read_text())
    data["params"]["up/kernel"]["storage"] = [["data", "tensor"], None]
    path.write_text(json.dumps(data))
    sharded = jaxpar.apply_plan(
        jaxpar.load_plan(path), Mlp, optax.adam(1e-3), square_loss, floats(16, 32)
    )
    spec = sharded.state_shardings.params["up"]["kernel"].spec
    assert spec == P(("data", "tensor"), None)


def test_a_plan_of_another_model_or_batch_is_refused():
    plan = mlp_plan({"data": 8})
    with pytest.raises(PlanError, match="up/kernel"):
        jaxpar.apply_plan(plan, narrow, optax.sgd(1), square_loss, floats(16, 32))
    with pytest.raises(PlanError, match="batch"):
        jaxpar.apply_plan(plan, Mlp, optax.sgd(1), square_loss, floats(8, 32))


def test_an_unknown_activation_is_named(tmp_path):
    path = tmp_path / "plan.json"
    mlp_plan({"data": 2, "tensor": 4}).save(path)
    data = json.loads(path.read_text())
    name, entry = next(iter(data["activations"].items()))
    data["activations"][name.replace("dot", "dto") + "x"] = entry
    path.write_text(json.dumps(data))
    plan = jaxpar.load_plan(path)
    with pytest.raises(PlanError, match="no such value"):
        jaxpar.apply_plan(plan, Mlp, optax.sgd(1), square_loss, floats(16, 32))


def test_pins_bind():
    plan = mlp_plan({"fsdp": 2, "tensor": 4}, pin={r"up/kernel": P("tensor", "fsdp")})
    assert plan.params["up/kernel"].storage == (("tensor",), ("fsdp",))
    assert "pin" in plan.params["up/kernel"].reason


def test_pins_that_cannot_be_met_are_refused():
    mesh = {"fsdp": 2, "tensor": 4}
    with pytest.raises(ModelError, match="matches no parameter"):
        mlp_plan(mesh, pin={"upp/kernel": P("tensor")})
    with pytest.raises(RuleError, match="tensr"):
        mlp_plan(mesh, pin={"up/kernel": P("tensr")})
    with pytest.raises(MeshError, match=r"dim 1 \(30\).*tensor=4"):
        mlp_plan(mesh, model=narrow, pin={"up/kernel": P(None, "tensor")})
    with pytest.raises(ModelError, match="3 dims"):
        mlp_plan(mesh, pin={"up/kernel": P("tensor", None, None)})


class Annotated(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(
            nn.initializers.lecun_normal(), ("embed", "mlp")
        )
        return nn.Dense(64, kernel_init=init, name="up")(x)


def linen_loss(module, variables, batch):
    return jnp.mean(module.apply(variables, batch["x"]) ** 2)


def linen_plan(rules):
    return jaxpar.make_plan(
        Annotated(),
        optax.adam(1e-3),
        linen_loss,
        floats(16, 32),
        {"fsdp": 2, "tensor": 4},
        init=lambda m, key, batch: m.init(key, batch["x"]),
        rules=rules,
    )


def test_rules_bind_annotated_parameters():
    plan = linen_plan((("embed", "fsdp"), ("mlp", "tensor")))
    assert plan.params["up/kernel"].storage == (("fsdp",), ("tensor",))
    assert plan.notes == ()


def test_misspelt_rules_and_names_are_reported():
    notes = " ".join(linen_plan((("embd", "fsdp"), ("mlp", "tensor"))).notes)
    assert "rule 'embd'" in notes and "did you mean 'embed'" in notes
    assert "name 'embed'" in notes
    with pytest.raises(RuleError, match="'tensr'"):
        linen_plan((("mlp", "tensr"),))


def test_bad_meshes_are_refused_with_numbers():
    with pytest.raises(MeshError, match="needs 16 devices, there are 8"):
        mlp_sharded({"data": 16})
    with pytest.raises(MeshError, match="size 0"):
        mlp_sharded({"data": 0})
    with pytest.raises(MeshError, match="unknown topology"):
        mlp_plan("tpu-v9-4x4")
    with pytest.raises(MeshError, match=r"pipeline.*4"):
        mlp_sharded({"pipeline": 4, "data": 2})


def test_too_little_memory_is_refused_before_any_compile(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    with pytest.raises(InfeasibleError, match="1000 bytes"):
        mlp_sharded(memory_bytes=1000)


def test_options_of_later_versions_are_refused_not_ignored():
    for option in ({"microbatches": 4}, {"pipeline": {"a": 1}}):
        with pytest.raises(PlanError, match="not supported"):
            mlp_plan(**option)


def test_a_jax_mesh_keeps_its_devices():
    devices = np.array(jax.devices()[4:8]).reshape(2, 2)
    sharded = mlp_sharded(jax.sharding.Mesh(devices, ("data", "tensor")))
    found = {d for s in jax.tree.leaves(sharded.state_shardings) for d in s.device_set}
    assert found == set(devices.flat)
    assert sharded.plan.mesh == {"data": 2, "tensor": 2}


def test_every_parameter_has_a_reason():
    plan = mlp_plan({"fsdp": 2, "tensor": 4})
    assert all(p.reason for p in plan.params.values())


def test_work_that_an_axis_cannot_split_is_reported():
    plan = mlp_plan({"tensor": 7}, model=narrow, batch=floats(8, 32))
    notes = " ".join(plan.notes)
    assert "axis tensor (7) splits nothing of" in notes
    assert "tensor (7) does not divide" in plan.params["up/kernel"].reason


def test_inference_has_a_forward_pass_only():
    batch = floats(16, 32)
    sharded = jaxpar.auto_shard(Mlp, None, square_loss, batch, {"data": 8})
    state = sharded.init(0)
    x = np.ones((16, 32), np.float32)
    loss, aux = sharded.apply(state, {"x": x})
    model = jaxpar.merge(sharded, state)
    np.testing.assert_allclose(loss, square_loss(model, {"x": x}), rtol=1e-6)
    assert aux is None
    assert state.opt_state == ()


@pytest.mark.parametrize("method", ["elimination", "ilp"])
def test_methods_agree(method):
    plan = mlp_plan({"data": 2, "tensor": 4}, method=method)
    assert plan.search.method == method
    assert plan.search.objective_s == pytest.approx(
        mlp_plan({"data": 2, "tensor": 4}).search.objective_s, rel=1e-6
    )


def test_the_package_lists_its_contract():
    for name in (
        "auto_shard",
        "make_plan",
        "apply_plan",
        "load_plan",
        "Plan",
        "topologies",
        "factor_rule",
        "errors",
        "merge",
    ):
        assert getattr(jaxpar, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = jaxpar.nonsense
