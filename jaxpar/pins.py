"""What binds layouts: user pins, rules, annotations.

A pin names a parameter by a pattern; a rule maps a logical name to mesh axes; an
annotation gives the names of a parameter's dims. Whatever has no effect is said.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpar.errors import MeshError, ModelError, RuleError
from jaxpar.graph import GraphLeaf, OperatorGraph
from jaxpar.strategy import ROLES, Bound, Pin

AxisNames = tuple[str, ...]


@dataclass
class Wishes:
    """What the user binds, in plain values.

    Attributes:
        pins: Pattern over the parameter path, or over the name of an activation ->
            per dim axes, or None for whole.
        rules: Logical name -> axes; an empty tuple for "whole".
    """

    pins: Mapping[str, tuple[AxisNames, ...]] = field(default_factory=dict)
    rules: Mapping[str, AxisNames] = field(default_factory=dict)


def as_axes(entry: Any) -> AxisNames:
    """One entry of a spec or rule as a tuple of axes."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def wishes(pins: Mapping[str, Any] | None, rules: Any) -> Wishes:
    """Reads `pin=` and `rules=` as users write them.

    Raises:
        RuleError: if a rule is no pair of name and axes; names it.
    """
    pairs = rules.items() if isinstance(rules, Mapping) else (rules or ())
    found: dict[str, AxisNames] = {}
    for pair in pairs:
        try:
            name, axes = pair
            found.setdefault(str(name), as_axes(axes))
        except (TypeError, ValueError) as problem:
            raise RuleError(
                f"rule {pair!r} is not a pair of a logical name and mesh axes",
                hint='write rules=(("embed", "fsdp"), ("mlp", "tensor"))',
            ) from problem
    read = {p: tuple(as_axes(e) for e in spec) for p, spec in (pins or {}).items()}
    return Wishes(read, found)


def check_axes(wanted: Wishes, sizes: Mapping[str, int], *, searched: bool) -> None:
    """Refuses pins and rules that name axes which the mesh cannot have.

    Raises:
        RuleError: names the axis, and the axes that there are.
    """
    known = set(sizes) | (set(ROLES) if searched else set())
    named = [(f"rule {n!r}", a) for n, axes in wanted.rules.items() for a in axes]
    named += [
        (f"pin {p!r}", a)
        for p, spec in wanted.pins.items()
        for dim in spec
        for a in dim
    ]
    for where, axis in named:
        if axis not in known:
            near = difflib.get_close_matches(axis, known, 1)
            raise RuleError(
                f"{where} names axis {axis!r}; the mesh has {', '.join(sorted(known))}",
                hint=f"did you mean {near[0]!r}?" if near else "name one of them",
            )


def leaf_pins(
    graph: OperatorGraph, wanted: Wishes, sizes: Mapping[str, int]
) -> tuple[dict[int, Pin], tuple[str, ...]]:
    """Pins per leaf on one mesh, and notes on what had no effect.

    Raises:
        ModelError: if a pin matches no parameter or does not fit one's rank.
        MeshError: if a pinned dim does not divide.
    """
    notes: dict[str, None] = {}
    used_rules: set[str] = set()
    found: dict[int, Pin] = {}
    for i, leaf in enumerate(graph.leaves):
        if leaf.role not in ("param", "state"):
            continue
        explicit = _explicit(leaf, wanted.pins, sizes)
        if explicit is not None:
            found[i] = explicit
        elif leaf.names is not None:
            pin = _annotated(leaf, wanted.rules, sizes, notes, used_rules)
            if pin is not None:
                found[i] = pin
    _check_pins_used(graph, wanted.pins)
    for name in wanted.rules.keys() - used_rules:
        notes[_unused_rule(name, graph)] = None
    return found, tuple(notes)


def activation_pins(
    graph: OperatorGraph, wanted: Wishes, sizes: Mapping[str, int]
) -> dict[int, Bound]:
    """What binds operators: pins whose pattern matches results of theirs.

    A pattern that matches a parameter means parameters only.

    Raises:
        ModelError: if a pin has more dims than a result.
        MeshError: if a pinned dim does not divide.
    """
    paths = _parameter_paths(graph)
    found: dict[int, Bound] = {}
    for pattern, spec in wanted.pins.items():
        if any(re.search(pattern, path) for path in paths):
            continue
        for i, op in enumerate(graph.operators):
            for result in op.results:
                tensor = graph.tensors[result.tensor]
                if re.search(pattern, tensor.name):
                    pin = _pin(pattern, spec, tensor.name, tensor.shape, sizes)
                    found[i] = (*found.get(i, ()), (result.dims, pin))
    return found


def uniform(leaf_paths: Sequence[str], patterns: Iterable[str]) -> bool:
    """Whether every pattern matches all or none of some paths."""
    return all(
        len({bool(re.search(pattern, path)) for path in leaf_paths}) == 1
        for pattern in patterns
    )


def _explicit(
    leaf: GraphLeaf, pins: Mapping[str, tuple[AxisNames, ...]], sizes: Mapping[str, int]
) -> Pin | None:
    for pattern, spec in pins.items():
        if re.search(pattern, leaf.paths[0]):
            return _pin(pattern, spec, leaf.paths[0], leaf.shape, sizes)
    return None


def _pin(
    pattern: str,
    spec: tuple[AxisNames, ...],
    name: str,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
) -> Pin:
    """A pin on one array, if it fits."""
    where = f"pin {pattern!r} on {name} {list(shape)}"
    if len(spec) > len(shape):
        raise ModelError(
            f"{where}: the spec has {len(spec)} dims, the array {len(shape)}"
        )
    dims = spec + ((),) * (len(shape) - len(spec))
    flat = [a for dim in dims for a in dim]
    if len(flat) != len(set(flat)):
        raise MeshError(f"{where}: an axis is used twice in {spec}")
    for d, axes in enumerate(dims):
        parts = math.prod(sizes.get(a, 1) for a in axes)
        if shape[d] % parts:
            raise MeshError(
                f"{where}: dim {d} ({shape[d]}) does not divide by "
                f"{' x '.join(f'{a}={sizes[a]}' for a in axes)}",
                hint="pin another dim or fewer axes",
            )
    return Pin(tuple(_wide(axes, sizes) for axes in dims), where)


def _wide(axes: AxisNames, sizes: Mapping[str, int]) -> AxisNames:
    """The axes that split anything: an axis of one device does not."""
    return tuple(a for a in axes if sizes.get(a, 1) > 1)


def _parameter_paths(graph: OperatorGraph) -> list[str]:
    leaves = (leaf for leaf in graph.leaves if leaf.role in ("param", "state"))
    return [path for leaf in leaves for path in leaf.paths]


def _check_pins_used(graph: OperatorGraph, pins: Mapping[str, Any]) -> None:
    paths = _parameter_paths(graph)
    results = [
        graph.tensors[r.tensor].name for op in graph.operators for r in op.results
    ]
    known = [*paths, *results]
    for pattern in pins:
        if not any(re.search(pattern, name) for name in known):
            near = difflib.get_close_matches(pattern, known, 3, 0.3) or paths[:3]
            raise ModelError(
                f"pin {pattern!r} matches no parameter and no activation",
                hint=f"names are like {', '.join(near)}",
            )


def _aligned(leaf: GraphLeaf) -> tuple[Any, ...]:
    """Names padded to the rank: layer dims in front, others at the end."""
    names = tuple(leaf.names or ())[: len(leaf.shape)]
    missing = len(leaf.shape) - len(names)
    if missing and leaf.stacked:
        names, missing = (None, *names), missing - 1
    return names + (None,) * missing


def _annotated(
    leaf: GraphLeaf,
    rules: Mapping[str, AxisNames],
    sizes: Mapping[str, int],
    notes: dict[str, None],
    used_rules: set[str],
) -> Pin | None:
    dims: list[AxisNames | None] = []
    taken: set[str] = set()
    for d, name in enumerate(_aligned(leaf)):
        axes = _mapped(name, leaf, rules, sizes, notes, used_rules)
        if axes is None:
            dims.append(None)
            continue
        wide = [a for a in _wide(axes, sizes) if a not in taken]
        usable = _dividing(wide, leaf.shape[d], sizes)
        if usable != wide:
            notes[
                f"{leaf.paths[0]}: dim {d} ({leaf.shape[d]}), named {name!r}, does not "
                f"divide by {' x '.join(f'{a} ({sizes[a]})' for a in wide)}; it is "
                f"split over {', '.join(usable) or 'nothing'} instead"
            ] = None
        taken.update(usable)
        dims.append(tuple(usable))
    if leaf.stacked and dims and dims[0] is None:
        dims[0] = ()
    bound = any(d is not None for d in dims[1 if leaf.stacked else 0 :])
    return Pin(tuple(dims), "annotation") if bound else None


def _dividing(axes: Sequence[str], n: int, sizes: Mapping[str, int]) -> list[str]:
    kept: list[str] = []
    for axis in axes:
        if n % math.prod(sizes[a] for a in (*kept, axis)) == 0:
            kept.append(axis)
    return kept


def _mapped(
    name: Any,
    leaf: GraphLeaf,
    rules: Mapping[str, AxisNames],
    sizes: Mapping[str, int],
    notes: dict[str, None],
    used_rules: set[str],
) -> AxisNames | None:
    """Axes that a name stands for; None where it binds nothing."""
    if name is None:
        return None
    parts = as_axes(name)
    found: list[str] = []
    for part in parts:
        if part in rules:
            used_rules.add(part)
            found += rules[part]
        elif part in sizes and leaf.names_kind == "physical":
            found.append(part)
        else:
            known = [*rules, *sizes]
            near = difflib.get_close_matches(part, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            notes[
                f"name {part!r} (first on {leaf.paths[0]}) has no rule and is no axis "
                f"of the mesh: it binds nothing{hint}"
            ] = None
            return None
    return tuple(found)


def _unused_rule(name: str, graph: OperatorGraph) -> str:
    given = sorted(
        {p for leaf in graph.leaves for n in (leaf.names or ()) for p in as_axes(n)}
    )
    near = difflib.get_close_matches(name, given, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"rule {name!r} matches no annotation of the model{hint}"
