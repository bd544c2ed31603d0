"""Batches: the same ones wherever training goes on."""

import itertools

import jax
import numpy as np
import pytest

from jaxpar import data
from jaxpar.errors import ModelError


def test_a_batch_depends_on_seed_and_step_alone():
    batches = data.text_batches(3, 17, seed=4)
    by_step = [batches.batch_at(step)["tokens"] for step in range(3)]
    again = data.text_batches(3, 17, seed=4)
    for step, found in enumerate(itertools.islice(again, 3)):
        np.testing.assert_array_equal(found["tokens"], by_step[step])
    assert not np.array_equal(by_step[0], by_step[1])
    other = data.text_batches(3, 17, seed=5).batch_at(0)["tokens"]
    assert not np.array_equal(by_step[0], other)


def test_a_batch_is_cut_from_the_text():
    tokens = data.text_batches(4, 60).batch_at(9)["tokens"]
    assert (tokens.shape, tokens.dtype) == ((4, 61), np.int32)
    text = data.standard_library().tobytes()
    assert all(bytes(row.astype(np.uint8)) in text for row in tokens)


def test_held_out_text_is_not_trained_on():
    held_out = data.standard_library(held_out=True)
    assert 0 < len(held_out) < len(data.standard_library()) / 5
    stretch = data.text_batches(1, 2000, held_out=True).batch_at(0)["tokens"][0]
    text = data.standard_library().tobytes()
    assert bytes(stretch.astype(np.uint8)) not in text


def test_every_stretch_of_a_short_text_is_met():
    batches = data.TextBatches(np.arange(5, dtype=np.uint8), batch=50, seq=3)
    starts = set(batches.batch_at(0)["tokens"][:, 0].tolist())
    assert starts == {0, 1}


@pytest.mark.parametrize(("batch", "seq"), [(0, 3), (2, 0), (2, 5)])
def test_sizes_that_do_not_fit(batch, seq):
    with pytest.raises(ModelError, match=rf"{batch} stretches of {seq} \+ 1 tokens"):
        data.TextBatches(np.arange(5, dtype=np.uint8), batch, seq)


def test_a_python_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ModelError, match="no sources"):
        data.standard_library.__wrapped__()


def test_batches_for_structs_and_for_arrays():
    struct = jax.ShapeDtypeStruct
    text = data.batches_like({"tokens": struct((2, 9), np.int32)}, seed=1)
    np.testing.assert_array_equal(
        text.batch_at(3)["tokens"], data.text_batches(2, 8, 1).batch_at(3)["tokens"]
    )
    images = {
        "image": struct((2, 4, 4, 3), np.float32),
        "label": struct((2,), np.int32),
        "mask": struct((2,), np.bool_),
    }
    made = data.batches_like(images).batch_at(0)
    for name, leaf in images.items():
        assert (made[name].shape, made[name].dtype) == (leaf.shape, leaf.dtype)
    assert set(made["label"].tolist()) <= {0, 1}
    own = {"x": np.ones((2, 3))}
    assert data.batches_like(own).batch_at(7) is own
