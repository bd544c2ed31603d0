"""The tables of a plan as rows of text; whoever draws them decides how."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.plan import Change, ParamPlan, Plan
from jaxpar.report.group import groups
from jaxpar.report.units import (
    bytes_text,
    mesh_text,
    percent_text,
    seconds_text,
    shape_text,
    spec_text,
)

_QUOTED = re.compile(r'"[^"]*"')
_UNITS = (
    (re.compile(r"_s(\.|$)"), seconds_text),
    (re.compile(r"_bytes$|bytes_per_device$|^collectives"), bytes_text),
    (re.compile(r"mfu$"), percent_text),
)


@dataclass(frozen=True)
class Rows:
    """A table before it is drawn.

    Attributes:
        title: What stands over it.
        headers: Names of the columns.
        rows: Cells of each row.
        limit: How many rows are enough for a summary.
        details: Columns that a narrow summary does without.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    limit: int
    details: frozenset[str] = frozenset({"reason"})


def parameters(plan: Plan) -> Rows:
    """Parameters by their share of memory; layers with equal specs stand once."""

    def look(path: str) -> tuple[Any, ...]:
        param = plan.params[path]
        return param.shape, param.dtype, param.storage, param.compute, param.optimizer

    found: list[tuple[int, tuple[str, ...]]] = []
    for group in groups(plan.params, look):
        members = [plan.params[path] for path in group.names]
        total = sum(param.bytes_per_device for param in members)
        row = (
            group.label,
            str(len(members)),
            shape_text(members[0].shape),
            *_spec_cells(members[0]),
            bytes_text(total),
            _stages(members),
            _reason(param.reason for param in members),
        )
        found.append((total, row))
    specs = ("storage", "compute", "optimizer")
    return Rows(
        "parameters (compute and optimizer: where unlike storage)",
        ("parameter", "count", "shape", *specs, "per device", "stage", "reason"),
        _heaviest_first(found),
        limit=24,
        details=frozenset({"shape", "reason"}),
    )


def activations(plan: Plan) -> Rows:
    """Activation constraints in the order of the forward pass."""

    def look(name: str) -> tuple[Any, ...]:
        value = plan.activations[name]
        return value.shape, value.dtype, value.specs, value.executions

    rows: list[tuple[str, ...]] = []
    for group in groups(plan.activations, look):
        members = [plan.activations[name] for name in group.names]
        first = members[0]
        row = (
            group.label,
            str(sum(value.executions for value in members)),
            shape_text(first.shape),
            " > ".join(spec_text(spec) for spec in first.specs),
            _reason(value.reason for value in members),
        )
        rows.append(row)
    headers = ("activation", "count", "shape", "sharding", "reason")
    return Rows("activations", headers, tuple(rows), limit=8)


def collectives(plan: Plan) -> Rows:
    """Collectives by the bytes that they move in one step."""
    named = {f"{c.where} {i}": c for i, c in enumerate(plan.collectives)}

    def look(name: str) -> tuple[Any, ...]:
        collective = named[name]
        return collective.kind, collective.axes, collective.bytes, collective.phase

    found: list[tuple[int, tuple[str, ...]]] = []
    for group in groups(named, look):
        members = [named[name] for name in group.names]
        first, total = members[0], sum(c.total_bytes for c in members)
        row = (
            f"{first.kind} over {', '.join(first.axes)}",
            str(sum(c.executions for c in members)),
            bytes_text(first.bytes),
            bytes_text(total),
            first.phase,
            group.label.rsplit(" ", 1)[0],
            _reason(c.reason for c in members),
        )
        found.append((total, row))
    sizes = ("count", "each", "per step")
    headers = ("collective", *sizes, "phase", "where", "reason")
    return Rows("collectives", headers, _heaviest_first(found), limit=8)


def replicated(plan: Plan) -> Rows:
    """Large tensors that every device holds whole, and why."""

    def look(name: str) -> tuple[Any, ...]:
        tensor = plan.replicated[name]
        return tensor.bytes, tensor.wanted, tensor.reason

    found: list[tuple[int, tuple[str, ...]]] = []
    for group in groups(plan.replicated, look):
        first = plan.replicated[group.names[0]]
        row = (
            group.label,
            str(len(group.names)),
            bytes_text(first.bytes),
            first.wanted,
            first.reason,
        )
        found.append((first.bytes * len(group.names), row))
    headers = ("tensor", "count", "each", "wanted", "why")
    return Rows("whole on every device", headers, _heaviest_first(found), limit=6)


def meshes(plan: Plan) -> Rows:
    """Meshes that the search looked at."""
    rows = tuple(
        (
            mesh_text(tried.mesh),
            tried.remat or "",
            "" if tried.objective_s is None else seconds_text(tried.objective_s),
            tried.refused or "",
        )
        for tried in plan.search.meshes_tried
    )
    return Rows("meshes", ("mesh", "remat", "time", "refused"), rows, limit=8)


def changes(title: str, found: Sequence[Change]) -> Rows:
    """One section of a comparison; layers that changed alike stand once."""
    by_place = {change.where: change for change in found}

    def look(where: str) -> tuple[str, str]:
        return repr(by_place[where].before), repr(by_place[where].after)

    rows: list[tuple[str, ...]] = []
    for group in groups(by_place, look):
        change = by_place[group.names[0]]
        row = (
            group.label,
            str(len(group.names)),
            _value_text(change.where, change.before),
            _value_text(change.where, change.after),
            _growth(change),
        )
        rows.append(row)
    headers = ("where", "count", "before", "after", "growth")
    return Rows(title, headers, tuple(rows), limit=24)


def _heaviest_first(
    weighed: Sequence[tuple[int, tuple[str, ...]]],
) -> tuple[tuple[str, ...], ...]:
    return tuple(row for _, row in sorted(weighed, key=lambda entry: -entry[0]))


def _spec_cells(param: ParamPlan) -> tuple[str, str, str]:
    compute, optimizer = (
        "" if spec == param.storage else spec_text(spec)
        for spec in (param.compute, param.optimizer)
    )
    return spec_text(param.storage), compute, optimizer


def _stages(params: Iterable[ParamPlan]) -> str:
    found = sorted({param.stage for param in params if param.stage is not None})
    if len(found) > 1:
        return f"{found[0]}-{found[-1]}"
    return str(found[0]) if found else ""


def _reason(reasons: Iterable[str]) -> str:
    """The first reason, and how many others there are."""
    first, *others = dict.fromkeys(reasons)
    return f"{first} (and {len(others)} more)" if others else first


def _value_text(where: str, value: Any) -> str:
    """A JSON value of the plan file for people; the unit is in the key path."""
    if value is None:
        return "-"
    if isinstance(value, int | float):
        keys = _QUOTED.sub("", where)
        units = (text for key, text in _UNITS if key.search(keys))
        return next(units, str)(value)
    if isinstance(value, dict) and where != "mesh":
        return "present"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _growth(change: Change) -> str:
    numbers = isinstance(change.before, int | float) and change.before > 0
    if not numbers or not isinstance(change.after, int | float):
        return ""
    return f"{100 * (change.after / change.before - 1):+.1f}%"
