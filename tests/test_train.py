"""The training loop, on eight simulated devices."""

import io
from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from jaxpar.data import FixedBatches, RandomBatches
from jaxpar.errors import JaxparError, ModelError
from jaxpar.train import train

LIKE = {"x": jax.ShapeDtypeStruct((16, 4), np.float32)}
OPTIMIZER = optax.adam(0.1)


@cache
def sharded(devices=8):
    """A line fitted to zero, in the shape of what `auto_shard` returns."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    whole, rows = (NamedSharding(mesh, PartitionSpec(*s)) for s in ((), ("data",)))

    def init(seed):
        params = {"w": jax.random.normal(jax.random.key(seed), (4,))}
        key = jax.random.key(seed)
        return {"params": params, "opt": OPTIMIZER.init(params), "key": key}

    def step(state, batch):
        loss, gradient = jax.value_and_grad(
            lambda params: ((batch["x"] @ params["w"]) ** 2).mean()
        )(state["params"])
        change, opt = OPTIMIZER.update(gradient, state["opt"])
        params = optax.apply_updates(state["params"], change)
        return state | {"params": params, "opt": opt}, {"loss": loss}

    shapes = jax.eval_shape(init, 0)
    shardings = jax.tree.map(lambda _: whole, shapes)
    return SimpleNamespace(
        init=jax.jit(init, out_shardings=shardings, static_argnums=0),
        step=jax.jit(step, out_shardings=(shardings, None), donate_argnums=0),
        batch_shardings={"x": rows},
        abstract_state=jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
            shapes,
        ),
        plan=SimpleNamespace(save=lambda path: path.write_text("{}")),
    )


def written(**options):
    console = Console(file=io.StringIO(), width=100, **options)
    return console, console.file.getvalue


def host(state):
    return jax.tree.map(np.asarray, state | {"key": jax.random.key_data(state["key"])})


def test_the_loss_is_shown_and_falls():
    console, text = written()
    done = train(sharded(), RandomBatches(LIKE), 25, log_every=10, console=console)
    lines = text().splitlines()
    shown = ["step 1/25", "step 10/25", "step 20/25", "step 25/25"]
    assert [line.split("  ")[0] for line in lines[:4]] == shown
    assert lines[-2] == f"loss {done.first_loss:.4f} at step 1"
    assert lines[-1] == f"loss {done.last_loss:.4f} at step 25"
    assert done.last_loss < 0.5 * done.first_loss
    assert (done.first_step, done.steps, done.unit) == (0, 25, "examples")
    assert done.rate_per_s > 0


def test_a_terminal_gets_a_bar():
    console, text = written(force_terminal=True)
    train(sharded(), RandomBatches(LIKE), 3, console=console)
    assert "3/3" in text()
    assert "loss" in text()


def test_tokens_are_counted():
    like = SimpleNamespace(**vars(sharded()))
    like.step = lambda state, batch: (state, {"loss": batch["tokens"].mean()})
    like.batch_shardings = {"tokens": like.batch_shardings["x"]}
    batches = FixedBatches({"tokens": np.ones((8, 5), np.float32)})
    console, text = written()
    assert train(like, batches, 3, console=console).unit == "tokens"
    assert "tokens a second" in text()


def test_resuming_equals_going_on(tmp_path):
    batches, options = RandomBatches(LIKE), {"console": written()[0]}
    whole = train(sharded(), batches, 9, seed=3, **options)
    train(sharded(), batches, 4, seed=3, checkpoint=tmp_path, **options)
    assert (tmp_path / "plan.json").read_text() == "{}"
    console, text = written()
    rest = train(
        sharded(4), batches, 9, checkpoint=tmp_path, resume=True, console=console
    )
    assert text().startswith("resumed from step 4")
    assert rest.first_step == 4
    assert rest.last_loss == pytest.approx(whole.last_loss, rel=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
        host(rest.state),
        host(whole.state),
    )
    console, text = written()
    again = train(
        sharded(), batches, 9, checkpoint=tmp_path, resume=True, console=console
    )
    assert again.last_loss is None
    assert "nothing to do: 9 of 9" in text()


def test_checkpoints_are_not_overwritten_by_accident(tmp_path):
    options = {"console": written()[0], "checkpoint": tmp_path}
    batches = RandomBatches(LIKE)
    train(sharded(), batches, 3, save_every=2, resume=True, **options)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["2", "3"]
    with pytest.raises(JaxparError, match=r"checkpoint of step 3.*\n.*resume"):
        train(sharded(), batches, 5, **options)
    other = SimpleNamespace(**vars(sharded()))
    other.abstract_state = {"params": other.abstract_state["params"]}
    with pytest.raises(JaxparError, match=r"step 3 .* does not fit"):
        train(other, batches, 5, resume=True, **options)
    with pytest.raises(JaxparError, match="without a folder"):
        train(sharded(), batches, 5, resume=True)


def test_a_loss_that_is_not_finite_stops_training():
    batches = FixedBatches({"x": np.full((16, 4), np.nan, np.float32)})
    with pytest.raises(ModelError, match="loss of step 1 is nan"):
        train(sharded(), batches, 5, console=written()[0])
