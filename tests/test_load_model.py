"""MODEL arguments of the command line."""

import dataclasses
import inspect
import textwrap

import jax
import numpy as np
import pytest

from jaxpar.api import Options, make_plan
from jaxpar.errors import InfeasibleError, ModelError
from jaxpar.zoo import load, load_model

FILE = """
    import neighbour
    from jaxpar.errors import InfeasibleError

    def small(batch=8):
        return {"model": neighbour.MODEL, "loss": len, "batch": batch, "seed": 3}

    def wrong(): return [1]
    def empty(): return {"model": None, "loss": None}
    def extra(): return dict(model=None, loss=None, batch=None, los=None)
    def failing(): return neighbour.fail()
    def refusing(): raise InfeasibleError("too large")
    number = 3
"""
NEIGHBOUR = """
    MODEL = "model"
    def fail(): return {}["absent"]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, text in (("my_model", FILE), ("neighbour", NEIGHBOUR)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "notes.txt").write_text("def f(): pass\n")
    return tmp_path


def test_zoo_models():
    made = load_model("zoo:gpt-tiny", batch=4, seq=64)
    assert made["batch"]["tokens"] == jax.ShapeDtypeStruct((4, 65), np.int32)


def test_functions_in_files(folder):
    made = load_model("my_model.py:small")
    assert made == {
        "model": "model",
        "loss": len,
        "batch": 8,
        "optimizer": None,
        "seed": 3,
    }
    assert load_model(f"{folder}/my_model.py:small", batch=2)["batch"] == 2


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("gpt-tiny", "names no model.*\n.*zoo:NAME"),
        ("my_model.py:", "names no model"),
        ("zoo:gpt-tinny", "did you mean gpt-tiny"),
        ("absent.py:small", "no file 'absent.py'"),
        ("notes.txt:f", "not a Python file"),
        ("broken.py:f", "broken.py failed with SyntaxError"),
        ("my_model.py:smal", "no function 'smal'.*\n.*failing, refusing, small, wrong"),
        ("my_model.py:number", "no function 'number'"),
        ("my_model.py:wrong", "returned list, not a dict"),
        ("my_model.py:empty", "without 'batch'"),
        ("my_model.py:extra", "'los', no argument of make_plan"),
        ("my_model.py:failing", r"KeyError: 'absent'\n.*my_model.py:\d+, in failing"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_is_refused(model, found):
    with pytest.raises(ModelError, match=found):
        load_model(model)


@pytest.mark.usefixtures("folder")
def test_a_size_that_the_function_does_not_take():
    with pytest.raises(ModelError, match="no parameter 'seq'"):
        load_model("my_model.py:small", seq=3)


@pytest.mark.usefixtures("folder")
def test_own_errors_pass_through():
    with pytest.raises(InfeasibleError, match="too large"):
        load_model("my_model.py:refusing")


def test_the_arguments_are_those_of_make_plan():
    signature = inspect.signature(make_plan).parameters.keys() - {"options"}
    assert set(load._KNOWN) == {
        *signature,
        *(f.name for f in dataclasses.fields(Options)),
    }
