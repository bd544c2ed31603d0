"""Predicted peak memory against what the compiler takes."""

import pytest

import jaxpar
from jaxpar.verify.compare import MEMORY_ABOVE, MEMORY_BELOW
from jaxpar.zoo import zoo


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"fsdp": 8}, {"zero": 1}),
        ({"fsdp": 8}, {"zero": 3}),
        ({"tensor": 4}, {}),
        ({"fsdp": 4, "tensor": 2}, {"zero": 1}),
    ],
)
def test_training_step_of_a_scanned_model(sizes: dict, options: dict):
    given = zoo("gpt-tiny", scan=True)
    sharded = jaxpar.auto_shard(**given, mesh=sizes, **options)
    total = jaxpar.verify_plan(sharded).memory[-1]
    ratio = total.predicted_bytes / total.compiled_bytes
    assert 1 - MEMORY_BELOW <= ratio <= 1 + MEMORY_ABOVE


def test_what_is_said_to_fit_fits():
    given = zoo("gpt-tiny", scan=True)
    free = jaxpar.make_plan(**given)
    need = free.predicted.memory.total_bytes
    limit = int(0.9 * need)
    kept = jaxpar.make_plan(**given, memory_bytes=limit)
    assert kept.predicted.memory.total_bytes <= limit < need
