"""The command line, in processes of its own: output, files, exit status."""

import json
import subprocess
import sys

import pytest

ENV_FREE = [sys.executable, "-m", "jaxpar.cli"]


def run(*arguments, cwd=None):
    return subprocess.run(
        [*ENV_FREE, *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    done = run(
        "plan",
        "zoo:gpt-tiny",
        "--topology",
        "tpu-v5e-4x4",
        "--out",
        str(path),
        "--json",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(path.read_text())
    return path


def test_plan_prints_the_plan_file(plan_file):
    data = json.loads(plan_file.read_text())
    assert data["topology"]["name"] == "tpu-v5e-4x4"
    assert data["search"]["status"] == "optimal"
    assert data["predicted"]["memory"]["total_bytes"] > 0


def test_explain_says_why(plan_file):
    done = run("explain", str(plan_file), "up/kernel")
    assert done.returncode == 0, done.stderr
    assert "layers/0/mlp/up/kernel" in done.stdout


def test_plans_differ(plan_file, tmp_path):
    other = tmp_path / "other.json"
    done = run(
        "plan",
        "zoo:gpt-tiny",
        "--topology",
        "tpu-v5e-4x4",
        "--mesh",
        "data=4,tensor=4",
        "--pin",
        "mlp/up/kernel=-,tensor",
        "--out",
        str(other),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(other.read_text())["mesh"] == {"data": 4, "tensor": 4}
    done = run("diff", str(plan_file), str(other))
    assert done.returncode == 0 and "mesh" in done.stdout


def test_lists():
    done = run("topologies", "--json")
    assert any(t["name"] == "cpu-8" for t in json.loads(done.stdout))
    done = run("zoo", "--json")
    assert any(e["name"] == "gpt-tiny" for e in json.loads(done.stdout))


BAD = {
    "unknown model": (["plan", "zoo:gpt-tny"], 2, "gpt-tiny"),
    "unknown topology": (["plan", "zoo:gpt-tiny", "--topology", "tpu-v9-1"], 2, "v9"),
    "bad mesh": (
        ["plan", "zoo:gpt-tiny", "--topology", "cpu-8", "--mesh", "data"],
        2,
        "data",
    ),
    "bad memory": (
        ["plan", "zoo:gpt-tiny", "--topology", "cpu-8", "--memory", "much"],
        2,
        "16GiB",
    ),
    "does not fit": (
        ["plan", "zoo:gpt-tiny", "--topology", "cpu-8", "--memory", "100KiB"],
        3,
        "parameters",
    ),
}


@pytest.mark.parametrize("case", BAD, ids=list(BAD))
def test_bad_input_is_one_message_and_a_status(case):
    arguments, status, word = BAD[case]
    done = run(*arguments)
    assert done.returncode == status, done.stderr
    assert word in done.stderr and "Traceback" not in done.stderr


SMALL_MODEL = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Tagger(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, 16, rngs=rngs)
        self.head = nnx.Linear(16, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))


def loss(model, batch):
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    labels = jax.nn.one_hot(tokens[:, 1:], 256)
    return optax.softmax_cross_entropy(logits, labels).mean()


def build(batch=8, seq=16):
    tokens = jax.ShapeDtypeStruct((batch, seq + 1), np.int32)
    return {
        "model": Tagger,
        "optimizer": optax.adam(1e-2),
        "loss": loss,
        "batch": {"tokens": tokens},
    }
"""


def test_train_trains_on_simulated_devices(tmp_path):
    (tmp_path / "small.py").write_text(SMALL_MODEL)
    command = ["train", "small.py:build", "--topology", "cpu-4", "--json"]
    command += ["--checkpoint", str(tmp_path / "run")]
    done = run(*command, "--steps", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["steps"] == 3 and result["last_loss"] < 7
    done = run(*command, "--steps", "5", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["first_step"] == 3


def test_a_wrong_topology_file_is_one_error(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text('[topology]\nname = "lab"\nslices = 1\nshapes = [8]\n')
    done = run("plan", "zoo:gpt-tiny", "--topology", str(path))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: lab.toml: topology.shape is missing",
        "hint: is lab.toml: topology.shapes meant for it?",
    ]
