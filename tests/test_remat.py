"""Rematerialisation as a choice: same numbers, less memory, predicted as compiled."""

import json
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import typer
from flax import nnx
from jax.extend.core import Literal

import jaxpar
from jaxpar.cli import app
from jaxpar.errors import PlanError
from jaxpar.flatten import flatten
from jaxpar.hlo.memory import memory_of
from jaxpar.plan import Plan, diff
from jaxpar.remat.attention import attention_cores
from jaxpar.remat.blocks import jaxpr_at, repeated_blocks
from jaxpar.remat_choice import LEVELS, Remat
from jaxpar.subject import prepare
from jaxpar.variants import under
from jaxpar.zoo import zoo

MESH = {"data": 2, "tensor": 2}


def decoder(*, scan: bool, **changes):
    sizes = {"batch": 8, "seq": 128, "layers": 2, "d_model": 64, "d_ff": 128}
    sizes |= {"vocab": 64, "max_seq": 256, "head_dim": 16}
    return zoo("gpt-tiny", scan=scan, **sizes | changes)


cli = typer.main.get_command(app)


def kept(scan: bool) -> list[str]:
    return [f"layers/{'' if scan else '*/'}attn/out/kernel:dot_general"]


def tokens(arguments):
    struct = arguments["batch"]["tokens"]
    drawn = np.random.default_rng(0).integers(0, 64, struct.shape)
    return {"tokens": jnp.asarray(drawn, struct.dtype)}


class Unnamed(nnx.Module):
    """Blocks without functions of their own: only their equations repeat."""

    def __init__(self, rngs, blocks=4, width=32):
        self.up = nnx.List([nnx.Linear(width, 64, rngs=rngs) for _ in range(blocks)])
        self.down = nnx.List([nnx.Linear(64, width, rngs=rngs) for _ in range(blocks)])

    def __call__(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nnx.gelu(up(x)))
        return x


def unnamed_loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


UNNAMED = (Unnamed, optax.sgd(0.1), unnamed_loss, {"x": np.ones((16, 32), np.float32)})


# ---- what is wrapped


@pytest.mark.parametrize("scan", [True, False])
def test_attention_cores_are_scores_to_context(scan):
    subject = prepare(**decoder(scan=scan))
    program = flatten(subject.traced.jaxpr)
    batch = [
        tensor
        for leaf, tensor in zip(subject.traced.leaves, program.inputs, strict=True)
        if leaf.role == "batch"
    ]
    cores = attention_cores(subject.traced.jaxpr, program, batch)
    assert len(cores) == (1 if scan else 2)
    for core in cores:
        jaxpr = jaxpr_at(subject.traced.jaxpr.jaxpr, core.path)
        inside = [jaxpr.eqns[i] for i in core.equations]
        names = [eqn.primitive.name for eqn in inside]
        assert names.count("dot_general") == 2
        assert "exp" in names
        assert "iota" in names  # the mask is made again too
        made = {v for eqn in inside for v in eqn.outvars}
        read = {v for e in inside for v in e.invars if not isinstance(v, Literal)}
        largest = max(v.aval.size for v in read - made)
        assert largest == 8 * 128 * 4 * 16  # query, key, value; nothing of length^2


def test_blocks_without_functions_are_found_by_their_equations():
    subject = prepare(*UNNAMED)
    blocks = repeated_blocks(subject.traced.jaxpr, flatten(subject.traced.jaxpr))
    assert len(blocks) == 4
    for block in blocks:
        names = [subject.traced.jaxpr.eqns[i].primitive.name for i in block.equations]
        assert names.count("dot_general") == 2


def test_checkpoints_of_the_model_are_left_alone():
    subject = prepare(**decoder(scan=True, remat="full"))
    for level in LEVELS:
        assert under(subject, Remat(level)) is subject
    for remat in (None, "auto"):
        plan = jaxpar.make_plan(
            **decoder(scan=True, remat="full"), mesh=MESH, remat=remat
        )
        assert plan.remat.level == "model"


# ---- numbers


@pytest.mark.parametrize("scan", [True, False])
def test_losses_and_gradients_are_those_without(scan):
    arguments = decoder(scan=scan, dropout=0.1)
    batch, results = tokens(arguments), []
    state = jaxpar.auto_shard(**arguments, mesh=MESH, remat="none").init(0)
    for remat in ("none", "selective", kept(scan)):
        loss = jaxpar.auto_shard(**arguments, mesh=MESH, remat=remat).loss
        derive = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, _), gradients = derive(
            state.params, state.model_state, state.rngs, batch, state.step
        )
        results.append([value, *jax.tree.leaves(gradients)])
    for found in results[1:]:
        for one, other in zip(results[0], found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_blocks_without_functions_keep_their_numbers():
    norms = []
    for remat in ("none", "full"):
        sharded = jaxpar.auto_shard(*UNNAMED, mesh={"data": 4}, remat=remat)
        _, metrics = sharded.step(sharded.init(0), UNNAMED[3])
        norms.append(float(metrics["grad_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


# ---- predicted and compiled


@pytest.mark.parametrize(
    ("scan", "mesh"), [(True, {"fsdp": 4}), (False, MESH)], ids=["scan", "unrolled"]
)
def test_collectives_run_as_often_as_predicted(scan, mesh):
    arguments = decoder(scan=scan)
    executions = {}
    for remat in ("none", "selective", "full", kept(scan)):
        sharded = jaxpar.auto_shard(**arguments, mesh=mesh, remat=remat)
        check = jaxpar.verify_plan(sharded)
        odd = [row for row in check.rows if row.predicted != row.compiled]
        assert not odd
        executions[str(remat)] = sum(row.compiled for row in check.rows)
    # A block made again gathers its weights again, and adds up what it reads.
    assert executions["full"] > executions["none"]
    assert executions[str(kept(scan))] <= executions["full"]


def falls(values) -> bool:
    return all(a > b for a, b in pairwise(values))


def test_memory_falls_from_level_to_level():
    arguments = decoder(scan=True, layers=4)
    temporaries, residuals, seconds = [], [], []
    for level in LEVELS:
        sharded = jaxpar.auto_shard(**arguments, mesh={"data": 2}, remat=level)
        lowered = sharded.step.lower(sharded.abstract_state, arguments["batch"])
        temporaries.append(memory_of(lowered.compile()).temporaries_bytes)
        residuals.append(sharded.plan.predicted.memory.residuals_bytes)
        seconds.append(sharded.plan.predicted.compute_s)
    assert falls(temporaries)
    assert falls(residuals)
    assert falls(reversed(seconds))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
def test_memory_falls_by_the_account_of_the_tpu_compiler(scan):
    # The CPU compiler drops what keeps it from making unrolled blocks again early.
    pytest.importorskip("libtpu")
    sizes = {"layers": 4, "seq": 512, "batch": 32, "d_model": 128, "head_dim": 32}
    arguments = decoder(scan=scan, max_seq=512, **sizes)
    compiled = []
    for level in LEVELS:
        plan = jaxpar.make_plan(**arguments, mesh="tpu-v5e-2x2", remat=level)
        check = jaxpar.verify_plan(plan, **arguments, backend="tpu", tier="optimised")
        compiled.append(check.memory[1].compiled_bytes)
    assert falls(compiled)


# ---- the choice


def needs(plan: Plan) -> int:
    return plan.predicted.memory.total_bytes


def test_levels_are_chosen_when_and_only_when_memory_asks_for_them():
    arguments = decoder(scan=True)
    asked = {
        level: jaxpar.make_plan(**arguments, mesh=MESH, remat=level) for level in LEVELS
    }
    assert needs(asked["none"]) > needs(asked["selective"]) > needs(asked["full"])
    for level in LEVELS:
        limit = needs(asked[level])
        plan = jaxpar.make_plan(**arguments, mesh=MESH, memory_bytes=limit)
        assert plan.remat.level == level
        assert needs(plan) <= limit
        # Nothing that keeps more fits; what is chosen is the fastest that does.
        for other in LEVELS:
            try:
                rival = jaxpar.make_plan(
                    **arguments, mesh=MESH, memory_bytes=limit, remat=other
                )
            except jaxpar.errors.InfeasibleError:
                continue
            assert rival.predicted.step_s >= plan.predicted.step_s * (1 - 1e-6)
    reason = asked["full"].remat.reason
    assert reason == "as asked"


def test_searched_meshes_name_the_level_that_was_tried():
    arguments = decoder(scan=True, layers=8, seq=256)
    roomy = jaxpar.make_plan(**arguments, mesh="cpu-8")
    assert roomy.remat.level == "none"
    assert {t.remat for t in roomy.search.meshes_tried} == {"none"}
    tight = jaxpar.make_plan(
        **arguments, mesh="cpu-8", memory_bytes=int(needs(roomy) * 0.5)
    )
    assert tight.remat.level != "none"
    assert {t.remat for t in tight.search.meshes_tried} == set(LEVELS)
    assert "too much" in tight.remat.reason
    assert tight.predicted.step_s >= roomy.predicted.step_s


def test_without_training_nothing_is_kept_and_nothing_made_again():
    arguments = decoder(scan=True) | {"optimizer": None}
    plan = jaxpar.make_plan(**arguments, mesh=MESH)
    assert plan.remat.level == "none"


# ---- the plan file


def test_a_plan_carries_its_choice_to_the_program(tmp_path):
    arguments = decoder(scan=False)
    plan = jaxpar.make_plan(**arguments, mesh=MESH, remat=kept(False))
    plan.save(tmp_path / "plan.json")
    read = jaxpar.load_plan(tmp_path / "plan.json")
    assert read.remat.saved == tuple(kept(False))
    sharded = jaxpar.apply_plan(read, **arguments)
    jaxpr = jax.make_jaxpr(sharded.loss)(*_loss_arguments(sharded, arguments))
    assert str(jaxpr).count("SaveOnlyTheseNames") == 2
    other = jaxpar.make_plan(**arguments, mesh=MESH, remat="full")
    assert any(c.where == "remat.level" for c in diff(read, other).setup)


def _loss_arguments(sharded, arguments):
    state = sharded.abstract_state
    return state.params, state.model_state, state.rngs, arguments["batch"], state.step


@pytest.mark.parametrize(
    ("section", "where"),
    [
        ({"level": "some"}, "remat.level: unknown word 'some'"),
        ({"level": "named"}, "remat.saved: 0 names"),
        ({"level": "full", "saved": ["a"]}, "remat.saved: 1 names"),
        ({"level": "full", "keep": []}, "remat: unknown key 'keep'"),
        ({"level": "full", "saved": "a"}, "remat.saved"),
    ],
)
def test_wrong_sections_are_named_by_their_key_path(section, where):
    data = jaxpar.make_plan(*UNNAMED, mesh={"data": 2}).to_json()
    with pytest.raises(PlanError, match=where.replace("[", r"\[")):
        Plan.from_json(data | {"remat": section})


def test_plan_files_without_the_section_mean_the_model_as_it_is():
    data = jaxpar.make_plan(*UNNAMED, mesh={"data": 2}).to_json()
    del data["remat"]
    assert Plan.from_json(data).remat.level == "model"


@pytest.mark.parametrize("remat", ["some", 3, [], [1], ""])
def test_other_wishes_are_refused(remat):
    with pytest.raises(PlanError, match="no way to rematerialise"):
        jaxpar.make_plan(*UNNAMED, mesh={"data": 2}, remat=remat)


def test_unknown_names_are_refused_with_the_nearest():
    arguments = decoder(scan=True)
    wanted = ["layers/attn/out/kernel:dot_genral"]
    with pytest.raises(PlanError, match="makes no value") as caught:
        jaxpar.make_plan(**arguments, mesh=MESH, remat=wanted)
    assert "layers/attn/out/kernel:dot_general" in caught.value.hint
    plan = jaxpar.make_plan(**arguments, mesh=MESH)
    edited = replace(plan, remat=replace(plan.remat, level="named", saved=("x",)))
    with pytest.raises(PlanError, match="makes no value 'x'"):
        jaxpar.apply_plan(edited, **arguments)


# ---- memory against time


@pytest.fixture(scope="module")
def front():
    arguments = decoder(scan=True, layers=8, seq=256)
    return arguments, jaxpar.pareto(**arguments, mesh="cpu-8")


def test_the_front_trades_memory_for_time(front):
    _, points = front
    assert len(points) > 2
    assert falls([p.memory_bytes for p in points])
    assert falls([-p.step_s for p in points])
    assert points[0].remat == "none"
    assert points[0].slower == 0
    assert points[-1].remat == "full"


def test_every_point_is_the_plan_of_its_limit(front):
    arguments, points = front
    for point in points:
        plan = jaxpar.make_plan(
            **arguments, mesh="cpu-8", memory_bytes=point.limit_bytes
        )
        assert plan.search.objective_s == pytest.approx(point.step_s, rel=1e-6)
        assert plan.remat.level == point.remat
        assert point.memory_bytes <= point.limit_bytes
        assert needs(plan) <= point.limit_bytes


def test_the_command_prints_the_front(capsys):
    command = ["plan", "zoo:gpt-tiny", "--topology", "cpu-8", "--pareto"]
    cli(command, standalone_mode=False)
    assert "memory against time" in capsys.readouterr().out
    cli([*command, "--json"], standalone_mode=False)
    points = json.loads(capsys.readouterr().out)
    assert points[0]["slower"] == 0
    assert {"memory_bytes", "step_s", "mesh", "remat", "fits"} <= points[0].keys()


@pytest.mark.parametrize(
    ("option", "level"),
    [("full", "full"), ("model", "model"), (kept(False)[0], "named")],
)
def test_the_command_takes_a_level(option, level, capsys):
    command = ["plan", "zoo:gpt-tiny", "--mesh", "data=2", "--remat", option, "--json"]
    cli(command, standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["remat"]["level"] == level
