"""The functions that people call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from rich.console import Console
from rich.progress import Progress

from jaxpar.assemble import assemble, leaf_shapes
from jaxpar.constraints import constraints
from jaxpar.decision import Decision, Model, Request
from jaxpar.errors import MeshError, PlanError
from jaxpar.front import ParetoPoint, pareto_front
from jaxpar.machine import Target, jax_mesh, target
from jaxpar.pins import wishes
from jaxpar.plan import Plan, check_model
from jaxpar.plan_json import near
from jaxpar.planner import plan_graph
from jaxpar.remat_choice import Remat, choices
from jaxpar.rewrite import Site
from jaxpar.runtime import Placement, Sharded, build
from jaxpar.sharding import Spec
from jaxpar.subject import Subject, prepare
from jaxpar.variants import under

__all__ = ["apply_plan", "auto_shard", "make_plan", "pareto"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `make_plan` and `auto_shard` take besides model and mesh.

    Attributes:
        init: Linen only: init(module, key, batch) -> variables.
        wrt: What is trained: an NNX filter; Linen: a collection or path predicate.
        mutable: Linen only: collections that the loss updates and returns.
        rules: Logical name -> axis or axes, as pairs or a mapping; binding.
        pin: {"regex over parameter path": PartitionSpec}; binding. A regex that
            matches no parameter binds the activations whose names it matches.
        zero: What an fsdp axis is for, by stage of ZeRO: 0 nothing stored over it,
            1 or 2 gradients and optimizer state, 3 parameters too; None: searched.
        memory_bytes: Limit per device; default from the topology.
        slices: Equal groups of devices that only the slow network joins.
        method: Search method: "auto", "elimination", "ilp", "exhaustive", "mcmc".
        remat: What repeated blocks keep for the backward pass: "none" (all),
            "selective" (all but what attention cores make), "full" (their input), a
            list of names of activations; "auto": what the fastest plan that fits in
            memory keeps; None: as the model has it. What the model itself
            rematerialises stays as it is.
        pipeline: "auto" or None: no stages in this version.
        microbatches: None: one; nothing else in this version.
        seed: Of randomised search methods.
    """

    init: Callable[..., Any] | None = None
    wrt: Any = nnx.Param
    mutable: str | tuple[str, ...] = ()
    rules: Any = None
    pin: Mapping[str, Any] | None = None
    zero: int | None = None
    memory_bytes: int | None = None
    slices: int = 1
    method: str = "auto"
    remat: Any = "auto"
    pipeline: Any = "auto"
    microbatches: int | None = None
    seed: int = 0

    def __post_init__(self):
        if self.zero not in (None, 0, 1, 2, 3):
            raise PlanError(
                f"zero={self.zero!r} is no stage of ZeRO",
                hint="use 0, 1, 2 or 3, or None to leave it to the search",
            )
        for name, known in (
            ("pipeline", ("auto", None)),
            ("microbatches", (None, 1)),
        ):
            if getattr(self, name) not in known:
                raise PlanError(
                    f"{name}={getattr(self, name)!r} is not supported by this version",
                    hint=f"leave {name} out",
                )


def make_plan(
    model: Any,
    optimizer: optax.GradientTransformation | None,
    loss: Callable[..., Any],
    batch: Any,
    mesh: Any = None,
    **options: Any,
) -> Plan:
    """Plans the layout of a model on a machine that need not be there.

    Args:
        model: NNX: a callable (nnx.Rngs) -> nnx.Module, or an nnx.Module. Linen: a
            module.
        optimizer: An optax transformation, or None for inference.
        loss: NNX: loss(model, batch[, rngs]). Linen: loss(module, variables, batch[,
            rngs]). Returns a scalar or (scalar, aux).
        batch: The global batch: arrays or `jax.ShapeDtypeStruct`.
        mesh: None (the local devices, shape searched), a jax Mesh, axis sizes, a
            topology's name, or a Topology.
        **options: The fields of `Options`: init, wrt, mutable, rules, pin,
            zero, memory_bytes, slices, method, remat, pipeline, microbatches, seed.

    Raises:
        ModelError, MeshError, RuleError, InfeasibleError, PlanError: before anything
            is compiled; each says what was found, where, and what to do.
    """
    return _planned(model, optimizer, loss, batch, mesh, Options(**options))[2]


def auto_shard(
    model: Any,
    optimizer: optax.GradientTransformation | None,
    loss: Callable[..., Any],
    batch: Any,
    mesh: Any = None,
    **options: Any,
) -> Sharded:
    """Plans the layout of a model, and returns its sharded functions.

    Takes the arguments of `make_plan`. Nothing is compiled before `init` or `step`
    is called.

    Raises:
        ModelError, MeshError, RuleError, InfeasibleError, PlanError: as `make_plan`;
            MeshError also where the machine's devices are not there.
    """
    return _applied(*_planned(model, optimizer, loss, batch, mesh, Options(**options)))


def apply_plan(
    plan: Plan,
    model: Any,
    optimizer: optax.GradientTransformation | None,
    loss: Callable[..., Any],
    batch: Any,
    mesh: Any = None,
    *,
    init: Callable[..., Any] | None = None,
    wrt: Any = nnx.Param,
    mutable: str | tuple[str, ...] = (),
) -> Sharded:
    """The sharded functions of a plan made before, or edited by hand.

    Args:
        plan: From `make_plan` or `load_plan`.
        model: As in `make_plan`, like `optimizer`, `loss` and `batch`.
        optimizer: As in `make_plan`.
        loss: As in `make_plan`.
        batch: As in `make_plan`.
        mesh: None for the plan's own mesh over the local devices, or a jax Mesh of
            the same axes. Over an AbstractMesh nothing runs, but all can be lowered
            and exported.
        init: As in `make_plan`.
        wrt: As in `make_plan`.
        mutable: As in `make_plan`.

    Raises:
        PlanError: if the plan is of another model, or names a value it has not.
        MeshError: if the devices are not there.
    """
    subject = prepare(
        model, optimizer, loss, batch, init=init, wrt=wrt, mutable=mutable
    )
    subject = under(subject, Remat(plan.remat.level, plan.remat.saved))
    if isinstance(mesh, AbstractMesh):
        _check_axes(plan, dict(mesh.shape))
        return _built(subject, mesh, plan)
    chosen = plan.mesh if mesh is None else mesh
    where = target(
        chosen, slices=plan.topology.slices, memory_bytes=plan.topology.memory_bytes
    )
    if where.sizes is not None:
        _check_axes(plan, where.sizes)
    return _applied(subject, where, plan)


def _check_axes(plan: Plan, sizes: Mapping[str, int]) -> None:
    if dict(sizes) != dict(plan.mesh):
        raise MeshError(f"the plan is for mesh {dict(plan.mesh)}, not {dict(sizes)}")


def _planned(
    model: Any,
    optimizer: optax.GradientTransformation | None,
    loss: Callable[..., Any],
    batch: Any,
    mesh: Any,
    options: Options,
) -> tuple[Subject, Target, Plan]:
    request, variant, where = _request(model, optimizer, loss, batch, mesh, options)
    decision = _searched(request)
    return variant(decision.remat), where, assemble(decision, constraints(decision))


def _request(
    model: Any,
    optimizer: optax.GradientTransformation | None,
    loss: Callable[..., Any],
    batch: Any,
    mesh: Any,
    options: Options,
) -> tuple[Request, Callable[[Remat], Subject], Target]:
    """What the planner is asked, and the subject under each level that it may take."""
    where = target(mesh, slices=options.slices, memory_bytes=options.memory_bytes)
    wanted = wishes(options.pin, options.rules)
    subject = prepare(
        model,
        optimizer,
        loss,
        batch,
        init=options.init,
        wrt=options.wrt,
        mutable=options.mutable,
        wanted=wanted,
    )
    own = any(op.recomputed for op in subject.graph.operators)
    admitted = choices(options.remat, own=own)
    variant = cache(partial(under, subject))
    first = variant(admitted[0])
    harder = admitted[1:] if subject.optimizer is not None else ()
    request = Request(
        graph=first.graph,
        topology=where.topology,
        mesh=where.sizes,
        workload=first.workload(),
        remat=admitted[0],
        harder=tuple(partial(_model, subject, variant, r) for r in harder),
        wishes=wanted,
        zero=options.zero,
        method=options.method,
        seed=options.seed,
    )
    return request, variant, where


def _model(
    subject: Subject, variant: Callable[[Remat], Subject], remat: Remat
) -> Model | None:
    """The model under a choice, if that changes anything."""
    found = variant(remat)
    if found is subject:
        return None
    return Model(found.graph, found.workload(), remat)


def _searched(request: Request) -> Decision:
    """Plans under a progress bar, on a terminal."""
    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("searching meshes", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return plan_graph(replace(request, progress=show))


def pareto(
    model: Any,
    optimizer: optax.GradientTransformation | None,
    loss: Callable[..., Any],
    batch: Any,
    mesh: Any = None,
    *,
    points: int = 12,
    **options: Any,
) -> tuple[ParetoPoint, ...]:
    """Memory against time: the fastest plan under every limit that changes it.

    Takes the arguments of `make_plan`. The memory limit only marks what fits.

    Args:
        model: As in `make_plan`, like the next four.
        optimizer: As in `make_plan`.
        loss: As in `make_plan`.
        batch: As in `make_plan`.
        mesh: As in `make_plan`.
        points: At most so many.
        **options: As in `make_plan`.

    Returns:
        From the fastest plan to the smallest.

    Raises:
        ModelError, MeshError, RuleError, PlanError: as `make_plan`.
    """
    asked = _request(model, optimizer, loss, batch, mesh, Options(**options))[0]
    return pareto_front(asked, points)


def _applied(subject: Subject, where: Target, plan: Plan) -> Sharded:
    return _built(subject, jax_mesh(where, plan.mesh), plan)


def _built(subject: Subject, mesh: Mesh | AbstractMesh, plan: Plan) -> Sharded:
    check_model(plan, *leaf_shapes(subject.graph))
    _check_batch(plan, subject)
    return build(
        subject.traced,
        subject.optimizer,
        mesh,
        Placement(
            storage={path: p.storage for path, p in plan.params.items()},
            optimizer_storage={path: p.optimizer for path, p in plan.params.items()},
            constraints=_sites(subject, plan),
            state=plan.state,
            batch={path: b.spec for path, b in plan.batch.items()},
        ),
        plan=plan,
    )


def _check_batch(plan: Plan, subject: Subject) -> None:
    found = {p.path: p.shape for p in subject.traced.leaves if p.role == "batch"}
    for path in sorted(found.keys() | plan.batch.keys()):
        planned = plan.batch[path].shape if path in plan.batch else None
        if planned != found.get(path):
            raise PlanError(
                f"batch.{path or 'batch'}: {planned} in the plan, {found.get(path)} "
                "in the batch",
                hint="make a new plan for this batch",
            )


def _sites(subject: Subject, plan: Plan) -> dict[Site, tuple[Spec, ...]]:
    known = subject.sites()
    found: dict[Site, tuple[Spec, ...]] = {}
    for name, activation in plan.activations.items():
        if name not in known:
            raise PlanError(
                f'activations."{name}": the model has no such value',
                hint=near(name, known),
            )
        found.update((site, activation.specs) for site in known[name])
    return found
