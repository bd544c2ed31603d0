"""The plan: the whole answer, as a value and as a JSON file.

A plan is read, written, compared and drawn without JAX.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpar.errors import PlanError
from jaxpar.plan_json import codec, dumps, error, member, near, parse
from jaxpar.plan_parts import (
    COLLECTIVES,
    MOMENTS,
    PHASES,
    ActivationPlan,
    AxisNote,
    BatchPlan,
    CollectivePlan,
    Machine,
    MemoryPrediction,
    MeshTried,
    ModelPrint,
    OverlapPrediction,
    ParamPlan,
    Prediction,
    RematPlan,
    Replication,
    SearchReport,
    TaskPlan,
)
from jaxpar.remat_choice import WORDS
from jaxpar.sharding import Spec

__all__ = [
    "VERSION",
    "ActivationPlan",
    "AxisNote",
    "BatchPlan",
    "Change",
    "CollectivePlan",
    "Machine",
    "MemoryPrediction",
    "MeshTried",
    "ModelPrint",
    "OverlapPrediction",
    "ParamPlan",
    "Plan",
    "PlanDiff",
    "Prediction",
    "RematPlan",
    "Replication",
    "SearchReport",
    "TaskPlan",
    "check",
    "check_model",
    "diff",
    "load_plan",
    "model_print",
]

VERSION = 1
_SHOWN = 3  # differences in one error message


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where every array lives, what the step will cost, and why.

    Attributes:
        version: Of the file format.
        jaxpar_version: Of the package that made the plan.
        topology: The machine.
        mesh: Size of each axis, outermost axis first.
        axes: Notes on axes.
        model: Tells whether a plan belongs to a model.
        batch: Arrays of the global batch by path.
        remat: What repeated blocks keep for the backward pass.
        predicted: Time and memory.
        search: How the plan was found.
        notes: Warnings: names without effect, dims that did not divide.
        params: Parameters by path.
        state: Specs of model state and random state by path.
        activations: Constraints by stable name, in the order of the forward pass.
        replicated: By path or name, large tensors that every device holds whole.
        collectives: What the step will communicate.
        tasks: What takes time in the step, in the order of computation; the simulated
            timeline plays them.

    Raises:
        PlanError: The parts contradict each other (see `check`).
    """

    version: int = VERSION
    jaxpar_version: str = ""
    topology: Machine
    mesh: Mapping[str, int]
    axes: Mapping[str, AxisNote] = field(default_factory=dict)
    model: ModelPrint
    batch: Mapping[str, BatchPlan]
    remat: RematPlan = field(default_factory=RematPlan)
    predicted: Prediction
    search: SearchReport
    notes: tuple[str, ...] = ()
    params: Mapping[str, ParamPlan]
    state: Mapping[str, Spec] = field(default_factory=dict)
    activations: Mapping[str, ActivationPlan] = field(default_factory=dict)
    replicated: Mapping[str, Replication] = field(default_factory=dict)
    collectives: tuple[CollectivePlan, ...] = ()
    tasks: tuple[TaskPlan, ...] = ()

    def __post_init__(self):
        check(self)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values; keys are the attribute names."""
        return codec(Plan).encode(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan in plain JSON values.

        Raises:
            PlanError: Names the key path and what is wrong there.
        """
        if isinstance(data, Mapping):
            _check_version(data)
        return codec(Plan).decode(data)

    def dumps(self) -> str:
        """The text of the plan file.

        Raises:
            PlanError: A value could not be read back, such as a negative time.
        """
        data = self.to_json()
        Plan.from_json(data)
        return dumps(data) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan file; same errors as `dumps`, and OSError."""
        Path(path).write_text(self.dumps(), encoding="utf-8")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan file.

    Raises:
        PlanError: There is no such file, or it is no valid plan; names file, key
            path and what is wrong there.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return Plan.from_json(parse(text))
    except (OSError, UnicodeDecodeError) as problem:
        raise PlanError(f"{path}: cannot be read: {problem}") from problem
    except PlanError as problem:
        raise PlanError(f"{path}: {problem.message}", hint=problem.hint) from None


def model_print(
    params: Mapping[str, tuple[int, ...]], state: Mapping[str, tuple[int, ...]]
) -> ModelPrint:
    """The fingerprint of a model, from the shapes of its leaves by path."""
    leaves = sorted((path, tuple(shape)) for path, shape in {**state, **params}.items())
    text = "\n".join(f"{path} {shape}" for path, shape in leaves)
    return ModelPrint(
        parameters=sum(math.prod(shape) for shape in params.values()),
        leaves=len(leaves),
        digest=hashlib.sha256(text.encode()).hexdigest()[:16],
    )


def check_model(
    plan: Plan,
    params: Mapping[str, tuple[int, ...]],
    state: Mapping[str, tuple[int, ...]],
) -> None:
    """Refuses a plan that was made for another model.

    Args:
        plan: The plan.
        params: Shapes of the model's parameters by path.
        state: Shapes of its other leaves by path.

    Raises:
        PlanError: Names the first leaves that differ.
    """
    planned = {path: param.shape for path, param in plan.params.items()}
    found = [
        f"{member('params', path)} is {list(shape)} in the plan, "
        f"{list(params[path])} in the model"
        for path, shape in planned.items()
        if path in params and shape != tuple(params[path])
    ]
    for section, ours, theirs in (
        ("params", planned, params),
        ("state", plan.state, state),
    ):
        for path in sorted(set(ours) ^ set(theirs)):
            side = "model" if path in ours else "plan"
            found.append(f"{member(section, path)} is not in the {side}")
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise PlanError(
            f"the plan is of another model: {'; '.join(found[:_SHOWN])}{more}",
            hint="make a new plan for this model",
        )


def check(plan: Plan) -> None:
    """Refuses a plan whose parts contradict each other.

    Raises:
        PlanError: An axis that the mesh lacks or that is used twice, a spec of
            another rank than its shape, a dim that its axes do not divide, a mesh of
            more devices than there are; names the key path.
    """
    _check_version({"version": plan.version})
    _check_mesh("mesh", plan.mesh, plan.topology.devices)
    for where, spec, shape in codec(Plan).specs(plan):
        _check_spec(where, spec, shape, plan.mesh)
    for axis in plan.axes:
        _check_axes("axes", [axis], plan.mesh)
    for key in plan.predicted.communication_s:
        _check_axes("predicted.communication_s", key.split("+"), plan.mesh)
    for i, collective in enumerate(plan.collectives):
        where = f"collectives[{i}]"
        _check_axes(f"{where}.axes", collective.axes, plan.mesh)
        _check_word(f"{where}.kind", collective.kind, COLLECTIVES)
        _check_word(f"{where}.phase", collective.phase, PHASES)
    for i, task in enumerate(plan.tasks):
        where = f"tasks[{i}]"
        _check_axes(f"{where}.axes", task.axes, plan.mesh)
        _check_word(f"{where}.kind", task.kind, ("compute", *COLLECTIVES))
        _check_word(f"{where}.phase", task.phase, PHASES)
        _check_word(f"{where}.when", task.when, MOMENTS)
    _check_word("remat.level", plan.remat.level, WORDS)
    if bool(plan.remat.saved) != (plan.remat.level == "named"):
        found = f"{len(plan.remat.saved)} names with level {plan.remat.level!r}"
        raise error("remat.saved", found, 'level "named" has names, no other has any')
    for path, param in plan.params.items():
        if param.stage is not None and "pipeline" not in plan.mesh:
            where = member(member("params", path), "stage")
            raise error(where, f"{param.stage}, but the mesh has no axis 'pipeline'")


def _check_version(data: Mapping[str, Any]) -> None:
    version = data.get("version")
    if "version" not in data:
        raise error("", "missing key 'version'", f'add "version": {VERSION}')
    if isinstance(version, bool) or version != VERSION:
        found = f"{json.dumps(version, default=repr)}, but this jaxpar reads {VERSION}"
        raise error("version", found, "make the plan again with this version of jaxpar")


def _check_mesh(where: str, mesh: Mapping[str, int], devices: int) -> None:
    for axis, size in mesh.items():
        if size < 1:
            raise error(member(where, axis), f"size must be at least 1, found {size}")
    if math.prod(mesh.values()) > devices:
        found = f"{math.prod(mesh.values())} devices, but topology.devices is {devices}"
        raise error(where, found)


def _check_spec(
    where: str, spec: Spec, shape: tuple[int, ...] | None, mesh: Mapping[str, int]
) -> None:
    if shape is not None and len(spec) != len(shape):
        found = f"{len(spec)} dims, but shape {list(shape)} has {len(shape)}"
        raise error(where, found, "give every dim an entry; null leaves it whole")
    seen: list[str] = []
    for i, dim in enumerate(spec):
        seen += dim
        _check_axes(f"{where}[{i}]", dim, mesh)
        if len(set(seen)) < len(seen):
            axis = next(axis for axis in dim if seen.count(axis) > 1)
            raise error(f"{where}[{i}]", f"axis {axis!r} is used twice in one spec")
        parts = math.prod(mesh[axis] for axis in dim)
        if shape is not None and shape[i] % parts:
            axes = " x ".join(f"{axis} ({mesh[axis]})" for axis in dim)
            raise error(f"{where}[{i}]", f"{axes} does not divide {shape[i]}")


def _check_axes(where: str, axes: Sequence[str], mesh: Mapping[str, int]) -> None:
    for axis in axes:
        if axis not in mesh:
            found = f"unknown axis {axis!r}; axes are {', '.join(mesh) or 'none'}"
            raise error(where, found, near(axis, mesh))
    if len(set(axes)) < len(axes):
        raise error(where, f"an axis is there twice: {', '.join(axes)}")


def _check_word(where: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        found = f"unknown word {word!r}; words are {', '.join(known)}"
        raise error(where, found, near(word, known))


@dataclass(frozen=True)
class Change:
    """One value that differs.

    Attributes:
        where: Key path in the plan file.
        before: In the first plan, as in its JSON; None where it has no such value.
        after: In the second plan.
    """

    where: str
    before: Any
    after: Any


@dataclass(frozen=True)
class PlanDiff:
    """What differs between two plans; false where nothing does.

    Attributes:
        setup: Machine, mesh, model and batch.
        params: Shapes, specs and stages of parameters.
        specs: Specs of state and activations.
        collectives: Bytes per device and step, by kind and axes.
        predicted: Step time by part and memory by class.
    """

    setup: tuple[Change, ...]
    params: tuple[Change, ...]
    specs: tuple[Change, ...]
    collectives: tuple[Change, ...]
    predicted: tuple[Change, ...]

    def __bool__(self) -> bool:
        return any(vars(self).values())


def diff(before: Plan, after: Plan) -> PlanDiff:
    """What differs between two plans, reasons, notes and search statistics aside."""
    old, new = before.to_json(), after.to_json()

    def changes(*sections: str) -> tuple[Change, ...]:
        found = (_changes(name, old[name], new[name]) for name in sections)
        return tuple(change for section in found for change in section)

    mesh = ()
    if list(before.mesh.items()) != list(after.mesh.items()):
        mesh = (Change("mesh", old["mesh"], new["mesh"]),)
    traffic = _changes("collectives", _traffic(before), _traffic(after))
    return PlanDiff(
        setup=mesh + changes("topology", "model", "batch", "remat"),
        params=changes("params"),
        specs=changes("state", "activations"),
        collectives=tuple(traffic),
        predicted=changes("predicted"),
    )


def _changes(where: str, old: Any, new: Any) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            if key != "reason":
                yield from _changes(member(where, key), old.get(key), new.get(key))
    elif old != new:
        yield Change(where, old, new)


def _traffic(plan: Plan) -> dict[str, int]:
    totals: dict[str, int] = {}
    for collective in plan.collectives:
        key = f"{collective.kind} over {', '.join(collective.axes)}"
        totals[key] = totals.get(key, 0) + collective.total_bytes
    return totals
