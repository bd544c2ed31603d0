"""What the command line calls MODEL: "zoo:NAME" or "file.py:function"."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxpar.errors import JaxparError, ModelError

_NEEDED = ("model", "loss", "batch")
_KNOWN = (
    *_NEEDED,
    *("optimizer", "init", "wrt", "mutable", "rules", "pin", "mesh", "memory_bytes"),
    *("zero", "slices", "method", "remat", "pipeline", "microbatches", "seed"),
)


def load_model(
    model: str, batch: int | None = None, seq: int | None = None
) -> dict[str, Any]:
    """The arguments of `jaxpar.make_plan` that a MODEL stands for.

    Args:
        model: "zoo:NAME", or "file.py:function" with a function that returns them.
        batch: Global batch; a function in a file must have a parameter `batch`.
        seq: Sequence length; likewise `seq`.

    Raises:
        ModelError: if there is no such model, file or function, or the function
            fails or returns something else.
    """
    where, colon, name = model.rpartition(":")
    if not colon or not where or not name:
        raise ModelError(
            f"{model!r} names no model",
            hint="write zoo:NAME (see `jaxpar zoo`) or file.py:function",
        )
    if where == "zoo":
        # Building a model imports JAX and Flax; a bad argument should not wait for it.
        from jaxpar.zoo.build import zoo  # noqa: PLC0415

        return zoo(name, batch=batch, seq=seq)
    function = _function(_load_file(where), name, where)
    given = {"batch": batch, "seq": seq}
    given = {key: value for key, value in given.items() if value is not None}
    known = inspect.signature(function).parameters
    if missing := sorted(given.keys() - known.keys()):
        raise ModelError(
            f"{model} has no parameter {missing[0]!r}, but {missing[0]} is given",
            hint=f"write def {name}({missing[0]}=...), or leave --{missing[0]} out",
        )
    return _checked(_run(lambda: function(**given), model, where), model)


def _load_file(where: str) -> ModuleType:
    path = Path(where).resolve()
    if not path.is_file():
        raise ModelError(
            f"there is no file {where!r} in {Path.cwd()}",
            hint="give the path of a Python file: path/to/file.py:function",
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loader = spec and spec.loader
    if spec is None or loader is None:
        raise ModelError(
            f"{where} is not a Python file", hint="its name must end in .py"
        )
    module = importlib.util.module_from_spec(spec)
    # As `python file.py` does, so that the file finds its neighbours and its classes
    # can be found by name.
    sys.path.insert(0, str(path.parent))
    sys.modules.setdefault(path.stem, module)
    _run(lambda: loader.exec_module(module), where, where)
    return module


def _function(module: ModuleType, name: str, where: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    found = sorted(
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    )
    raise ModelError(
        f"{where} has no function {name!r}",
        hint=f"its functions are {', '.join(found)}" if found else "it has none",
    )


def _run(action: Callable[[], Any], what: str, where: str) -> Any:
    """Runs the user's code; a failure becomes one error that names its place."""
    try:
        return action()
    except JaxparError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        path = str(Path(where).resolve())
        frame = ([f for f in frames if f.filename == path] or frames)[-1]
        raise ModelError(
            f"{what} failed with {type(error).__name__}: {error}",
            hint=f"see {frame.filename}:{frame.lineno}, in {frame.name}",
        ) from error


def _checked(made: Any, model: str) -> dict[str, Any]:
    hint = "return the arguments of jaxpar.make_plan: " + ", ".join(
        f'"{key}": ...' for key in (*_NEEDED, "optimizer")
    )
    if not isinstance(made, Mapping):
        raise ModelError(
            f"{model} returned {type(made).__name__}, not a dict", hint=hint
        )
    if missing := [key for key in _NEEDED if key not in made]:
        raise ModelError(f"{model} returned a dict without {missing[0]!r}", hint=hint)
    if unknown := [key for key in made if key not in _KNOWN]:
        raise ModelError(
            f"{model} returned a dict with {unknown[0]!r}, no argument of make_plan",
            hint=f"the arguments are {', '.join(_KNOWN)}",
        )
    return {"optimizer": None, **made}
