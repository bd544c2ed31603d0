"""Calling what the user wrote: constructors, losses, initialisers."""

import contextlib
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import Mesh

from jaxpar.errors import JaxparError, ModelError
from jaxpar.pure import Tree, keyed_leaves, path_of, show_array

_MISSING = inspect.Parameter.empty
_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_PAIR = 2


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """Hides whatever mesh the caller has entered, so that a trace does not see it."""
    nothing = Mesh(np.empty((), object), ())
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(nothing))
        with warnings.catch_warnings():
            # Only this deprecated form overrides a mesh that was entered by it.
            warnings.simplefilter("ignore", DeprecationWarning)
            stack.enter_context(nothing)
        yield


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turns an exception from the user's code into a ModelError that names the place.

    Raises:
        ModelError: from the original exception.
    """
    try:
        yield
    except JaxparError:
        raise
    except Exception as error:
        text = str(error).strip().split("\n\n")[0]
        raise ModelError(
            f"{what} fails{_place(error)}: {type(error).__name__}: {text}",
            hint=_hint(error),
        ) from error


def _hint(error: Exception) -> str:
    abstract = (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    )
    if isinstance(error, abstract):
        return (
            "it is traced with shapes only, as under jax.jit: no Python control flow "
            "and no numpy on array values"
        )
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return (
            "an array made while the model was built is kept where Flax does not look "
            "for it; wrap it in nnx.Variable"
        )
    if "non-empty mesh in context" in str(error):
        return (
            "jaxpar chooses the shardings: take out with_sharding_constraint, or name "
            "the dims by flax.linen.with_logical_constraint, which waits for rules"
        )
    return "it must run as it is under jax.jit"


def _place(error: Exception) -> str:
    """The innermost line outside libraries, or nothing."""
    own = str(Path(__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not frame.filename.startswith((own, "<"))
    ]
    if not frames:
        return ""
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}"


def replay(traced: ClosedJaxpr) -> Callable[..., list[jax.Array]]:
    """What was traced once as a function, less the work that no result needs."""
    jaxpr = traced.jaxpr
    live = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not live.isdisjoint(equation.outvars):
            equations.append(equation)
            live.update(v for v in equation.invars if not isinstance(v, Literal))
    pairs = zip(jaxpr.constvars, traced.consts, strict=True)
    consts = {var: const for var, const in pairs if var in live}
    pruned = jaxpr.replace(eqns=equations[::-1], constvars=list(consts))
    return jaxpr_as_fun(ClosedJaxpr(pruned, list(consts.values())))


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature, or None where Python does not know it (some C functions)."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def required_parameters(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of the arguments that a call must give, or None if not known."""
    signature = signature_of(function)
    if signature is None:
        return None
    kinds = (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    return tuple(
        p.name
        for p in signature.parameters.values()
        if p.kind in kinds and p.default is _MISSING
    )


def rngs_parameter(loss: Callable[..., Any], before: tuple[str, ...]) -> str | None:
    """How the loss wants its random keys.

    Args:
        loss: The user's.
        before: Names of the arguments that come first, for the message.

    Returns:
        "" for the argument after `before`, a name for a keyword-only one, or None if
        the loss takes no random keys. A parameter with a default is taken for random
        keys only by its name.

    Raises:
        ModelError: if the loss takes fewer or more arguments than that.
    """
    if not callable(loss):
        raise ModelError(
            f"loss is {type(loss).__name__} {loss!r:.60}, not a function",
            hint=f"pass a function of ({', '.join(before)})",
        )
    signature = signature_of(loss)
    if signature is None:
        return None
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    required = [p for p in positional if p.default is _MISSING]
    variadic = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    wanted = [
        p.name
        for p in parameters
        if p.kind is inspect.Parameter.KEYWORD_ONLY
        and (p.default is _MISSING or _names_keys(p.name))
    ]
    too_few = len(positional) < len(before) and not variadic
    extra = len(required) - len(before) + len(wanted)
    if too_few or extra > 1:
        raise ModelError(
            f"loss{signature} must be callable as loss({', '.join(before)}) "
            f"or loss({', '.join(before)}, rngs)",
            hint="bind other arguments with functools.partial",
        )
    if wanted:
        return wanted[0]
    after = positional[len(before) :]
    if after and (after[0].default is _MISSING or _names_keys(after[0].name)):
        return ""
    return None


def _names_keys(name: str) -> bool:
    return "rng" in name or name in ("key", "keys")


def call_loss(
    loss: Callable[..., Any], arguments: tuple[Any, ...], how: str | None, rngs: Any
) -> tuple[jax.Array, Any]:
    """Calls the user's loss and takes apart what it returns.

    Args:
        loss: The user's.
        arguments: The leading ones.
        how: As `rngs_parameter` gave it.
        rngs: What the loss gets for random keys, if it wants any.

    Returns:
        The scalar loss and all else that came with it, or None.

    Raises:
        ModelError: if the call fails or its result is no floating-point scalar.
    """
    with user_code("the loss"):
        if how is None:
            out = loss(*arguments)
        elif how:
            out = loss(*arguments, **{how: rngs})
        else:
            out = loss(*arguments, rngs)
    scalar, rest = out if isinstance(out, tuple) and len(out) == _PAIR else (out, None)
    return _scalar(scalar), rest


def _scalar(value: Any) -> jax.Array:
    wanted = "a floating-point scalar, or (scalar, aux)"
    try:
        kind = jax.typeof(value)
    except TypeError as error:
        raise ModelError(
            f"the loss returns {type(value).__name__} {value!r:.60}",
            hint=f"return {wanted}",
        ) from error
    if kind.shape != ():
        raise ModelError(
            f"the loss returns an array {show_array(kind)}, not a scalar",
            hint="reduce it over the batch, for instance by .mean()",
        )
    if not jnp.issubdtype(kind.dtype, jnp.floating):
        raise ModelError(
            f"the loss is {show_array(kind)}, which has no gradient",
            hint=f"return {wanted}",
        )
    return jnp.asarray(value)


def check_aux(aux: Tree) -> Tree:
    """The aux as it is.

    Raises:
        ModelError: if a leaf is not an array.
    """
    for keys, leaf in keyed_leaves(aux):
        try:
            jax.typeof(leaf)
        except TypeError as error:
            raise ModelError(
                f"aux {path_of(keys)} of the loss is {type(leaf).__name__} "
                f"{leaf!r:.60}, which is not an array",
                hint="return (scalar, aux) with arrays alone in aux",
            ) from error
    return aux
