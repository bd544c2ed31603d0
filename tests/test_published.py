"""Published runs: what is known, what can be planned, what is refused."""

import math

import pytest

from jaxpar.cli_compare import as_published
from jaxpar.errors import ModelError
from jaxpar.topology import get_topology
from jaxpar.zoo import entries
from jaxpar.zoo.published import published, published_run

RUNS = [run for name in entries() for run in published(name)]


@pytest.mark.parametrize("run", RUNS, ids=lambda r: f"{r.model}-{r.topology}")
def test_every_run_has_a_source_and_fits_its_machine(run):
    assert run.source
    entries()[run.model].changed(run.batch, run.seq, **run.options)
    if run.topology is not None:
        devices = get_topology(run.topology).devices
        assert devices % math.prod(run.mesh.values()) == 0


def test_a_layout_is_planned_as_published():
    run, plan = as_published("zoo:megatron-22b")
    assert dict(plan.mesh) == {"tensor": 8} == dict(run.mesh)
    assert any("as published" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("model", "number", "found"),
    [
        ("zoo:megatron-1t", 1, "pipeline=64, tensor=8"),
        ("zoo:palm-62b", 1, "no layout of zoo:palm-62b is published"),
        ("zoo:palm-62b", 2, "has 1 published runs"),
        ("zoo:gpt-tiny", 1, "has 0 published runs"),
        ("a.py:f", 1, "only models of the zoo"),
    ],
)
def test_what_cannot_be_planned_is_refused(model, number, found):
    with pytest.raises(ModelError, match=found):
        as_published(model, number)


def test_run_numbers_start_at_one():
    assert published_run("gpt3-175b", 2).topology == "tpu-v6e-16x16"
