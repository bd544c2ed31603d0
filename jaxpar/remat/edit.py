"""Wraps groups of equations of a traced program into checkpoints.

The jaxpr is edited, never traced again. A checkpoint keeps its inputs and, of what is
computed inside, only the values that carry a name; the rest is computed once more in
the backward pass.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var

from jaxpar.flatten import Path


@dataclass(frozen=True)
class Region:
    """Equations to be computed again in the backward pass.

    Attributes:
        path: Of their jaxpr, from the root.
        equations: Indices in it. No path of the dataflow leaves them and returns.
        looped: Whether they run inside a scan, where nothing merges the two runs.
    """

    path: Path
    equations: tuple[int, ...]
    looped: bool


Names = Mapping[tuple[Path, int, int], str]
"""(path of a jaxpr, equation, result) -> the name under which it is kept."""


def checkpointed(
    closed: ClosedJaxpr, regions: Iterable[Region], names: Names
) -> ClosedJaxpr:
    """The program with its regions wrapped; same inputs, outputs and values.

    Args:
        closed: The program.
        regions: None inside another, none overlapping.
        names: Values to keep.
    """
    root = _Edits()
    for region in regions:
        root.at(region.path).regions.append(region)
    for (path, equation, slot), name in names.items():
        root.at(path).names[equation, slot] = name
    kept = tuple(sorted(set(names.values())))
    return closed.replace(jaxpr=_edited(closed.jaxpr, root, kept))


@dataclass
class _Edits:
    """What happens in one jaxpr, and in those inside of it."""

    regions: list[Region] = field(default_factory=list)
    names: dict[tuple[int, int], str] = field(default_factory=dict)
    inside: dict[tuple[int, str, int], "_Edits"] = field(default_factory=dict)

    def at(self, path: Path) -> "_Edits":
        edits = self
        for step in path:
            edits = edits.inside.setdefault(step, _Edits())
        return edits


def _edited(jaxpr: Jaxpr, edits: _Edits, kept: tuple[str, ...]) -> Jaxpr:
    eqns = [[eqn] for eqn in jaxpr.eqns]
    for (index, parameter, item), inner in edits.inside.items():
        eqns[index] = [_with_inner(eqns[index][0], parameter, item, inner, kept)]
    renamed: dict[Var, Var] = {}
    for index, group in enumerate(eqns):
        if renamed:
            group[0] = group[0].replace(
                invars=[_current(a, renamed) for a in group[0].invars]
            )
        for slot, var in enumerate(group[0].outvars):
            if (name := edits.names.get((index, slot))) is not None:
                if not isinstance(var, DropVar):
                    group.append(_named(var, name, group[0], renamed))
    outvars = [_current(a, renamed) for a in jaxpr.outvars]
    for region in edits.regions:
        _wrap(eqns, region, outvars, kept)
    flat = [eqn for group in eqns for eqn in group]
    return jaxpr.replace(eqns=flat, outvars=outvars)


def _current(atom: Any, renamed: Mapping[Var, Var]) -> Any:
    return atom if isinstance(atom, Literal) else renamed.get(atom, atom)


def _with_inner(
    eqn: JaxprEqn, parameter: str, item: int, edits: _Edits, kept: tuple[str, ...]
) -> JaxprEqn:
    held = eqn.params[parameter]
    items = list(held) if isinstance(held, tuple) else [held]
    old = items[item]
    if isinstance(old, ClosedJaxpr):
        items[item] = old.replace(jaxpr=_edited(old.jaxpr, edits, kept))
    else:
        items[item] = _edited(old, edits, kept)
    changed = tuple(items) if isinstance(held, tuple) else items[0]
    return eqn.replace(params={**eqn.params, parameter: changed})


def _named(var: Var, name: str, source: JaxprEqn, renamed: dict[Var, Var]) -> JaxprEqn:
    """The equation that gives a value its name; later readers read its result."""
    made = jax.make_jaxpr(partial(checkpoint_name, name=name))(_struct(var))
    result = Var(var.aval)
    renamed[var] = result
    (eqn,) = made.jaxpr.eqns
    info = source.source_info
    return eqn.replace(invars=[var], outvars=[result], source_info=info)


def _wrap(
    eqns: list[list[JaxprEqn]],
    region: Region,
    outvars: Sequence[Any],
    kept: tuple[str, ...],
) -> None:
    """Puts one checkpoint in the place of a region's equations.

    Others that stand between them run before it, unless they read its results.
    """
    inside = [eqn for i in region.equations for eqn in eqns[i]]
    first, last = min(region.equations), max(region.equations)
    chosen = set(region.equations)
    made = {v for eqn in inside for v in eqn.outvars if not isinstance(v, DropVar)}
    late = set(made)
    before: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    for i in range(first, last + 1):
        if i not in chosen:
            for eqn in eqns[i]:
                depends = any(v in late for v in _variables(eqn.invars))
                (after if depends else before).append(eqn)
                late.update(eqn.outvars if depends else ())
        eqns[i] = []
    rest = [eqn for group in eqns for eqn in group] + before + after
    read = {v for eqn in rest for v in _variables(eqn.invars)}
    read.update(_variables(outvars))
    results = [v for eqn in inside for v in eqn.outvars if v in made and v in read]
    inputs = [
        v
        for v in dict.fromkeys(v for e in inside for v in _variables(e.invars))
        if v not in made
    ]
    if inputs and results:
        inside = [_checkpoint(inside, inputs, results, region, kept)]
    eqns[last] = [*before, *inside, *after]


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [a for a in atoms if not isinstance(a, Literal)]


def _checkpoint(
    inside: list[JaxprEqn],
    inputs: list[Var],
    results: list[Var],
    region: Region,
    kept: tuple[str, ...],
) -> JaxprEqn:
    """A checkpoint equation; its parameters come from a traced template."""
    policy = jax.checkpoint_policies.save_only_these_names(*kept) if kept else None
    wrapped = jax.checkpoint(
        _pass_on, prevent_cse=not region.looped, policy=policy, static_argnums=(0,)
    )
    template = jax.make_jaxpr(partial(wrapped, len(results)))(*map(_struct, inputs))
    (eqn,) = template.jaxpr.eqns
    effects = frozenset().union(*(e.effects for e in inside))
    body: Jaxpr = eqn.params["jaxpr"].replace(
        constvars=[], invars=inputs, outvars=results, eqns=inside, effects=effects
    )
    return eqn.replace(
        invars=inputs,
        outvars=[*results],
        params={**eqn.params, "jaxpr": body},
        effects=effects,
        source_info=inside[-1].source_info,
    )


def _struct(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _pass_on(count: int, *values: jax.Array) -> tuple[Any, ...]:
    """Something to trace with as many results as wanted."""
    return tuple(values[0] for _ in range(count))
