"""From a decision to a plan: the same answer in words that people read."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from jaxpar import __version__
from jaxpar.constraints import Constraint
from jaxpar.cost.problem import MeshProblem
from jaxpar.graph import GraphLeaf, OperatorGraph
from jaxpar.ledger import Entry, compute_seconds, entries, update_seconds
from jaxpar.plan import (
    ActivationPlan,
    AxisNote,
    BatchPlan,
    CollectivePlan,
    Machine,
    MemoryPrediction,
    OverlapPrediction,
    ParamPlan,
    Plan,
    Prediction,
    RematPlan,
    Replication,
    SearchReport,
    TaskPlan,
    model_print,
)
from jaxpar.planner import Decision
from jaxpar.reasons import idle_notes, leaf_reason
from jaxpar.sharding import Spec, axes_of, shards
from jaxpar.strategy import ROLES, spec_of
from jaxpar.timeline.play import play
from jaxpar.timeline.tasks import tasks

LARGE_BYTES = 2**20
ROLE_WORDS = {
    "data": "splits the batch",
    "fsdp": "splits the batch, and stores parameters and optimizer state",
    "tensor": "splits matrix multiplications",
    "sequence": "splits tokens",
    "expert": "splits experts and the batch",
}


def assemble(decision: Decision, found: tuple[Constraint, ...]) -> Plan:
    """The plan of a decision.

    Args:
        decision: What was chosen.
        found: Its constraints.
    """
    problem = decision.problem
    graph, topology = problem.graph, problem.mesh.topology
    sizes = problem.mesh.sizes
    reasons = [leaf_reason(decision, i) for i in range(len(graph.leaves))]
    ledger = entries(decision)
    predicted = _prediction(decision, ledger)
    timed = tasks(decision, ledger, predicted.optimizer_s)
    return Plan(
        jaxpar_version=__version__,
        topology=Machine(
            name=topology.name,
            devices=topology.devices,
            chip=topology.chip.name,
            slices=topology.slices,
            memory_bytes=topology.memory_bytes,
        ),
        mesh=sizes,
        axes={axis: _axis_note(decision, axis) for axis in sizes},
        model=model_print(*leaf_shapes(graph)),
        batch=_batch(decision),
        remat=RematPlan(
            level=decision.remat.level,
            saved=decision.remat.saved,
            reason=decision.remat_reason,
        ),
        predicted=replace(
            predicted, overlapped=_overlapped(decision, timed, predicted)
        ),
        search=_report(decision),
        notes=decision.notes + idle_notes(decision),
        params=_params(decision, reasons),
        state=_state(decision),
        activations=_activations(graph, found),
        replicated=_replicated(decision, reasons),
        collectives=tuple(_collective(entry) for entry in ledger),
        tasks=timed,
    )


def _placed(decision: Decision, *roles: str) -> Iterator[tuple[int, str]]:
    """Leaf index and path of every leaf of some roles."""
    for i, leaf in enumerate(decision.problem.graph.leaves):
        if leaf.role in roles:
            yield from ((i, path) for path in leaf.paths)


def _params(decision: Decision, reasons: list[str]) -> dict[str, ParamPlan]:
    sizes, found = decision.problem.mesh.sizes, {}
    for i, path in _placed(decision, "param"):
        leaf, strategy = decision.problem.graph.leaves[i], decision.leaves[i]
        found[path] = ParamPlan(
            shape=leaf.shape,
            dtype=leaf.dtype,
            storage=strategy.storage,
            compute=((),) * leaf.stacked + strategy.compute,
            optimizer=strategy.optimizer,
            bytes_per_device=round(leaf.bytes / shards(strategy.storage, sizes)),
            reason=reasons[i],
        )
    return found


def _state(decision: Decision) -> dict[str, Spec]:
    places = _placed(decision, "state", "rng")
    return {path: decision.leaves[i].storage for i, path in places}


def _batch(decision: Decision) -> dict[str, BatchPlan]:
    leaves = decision.problem.graph.leaves
    return {
        path: BatchPlan(
            shape=leaves[i].shape,
            dtype=leaves[i].dtype,
            spec=decision.leaves[i].storage,
        )
        for i, path in _placed(decision, "batch")
    }


def leaf_shapes(
    graph: OperatorGraph,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Shapes of parameters, and of all other leaves but the batch, by path."""
    params, others = {}, {}
    for leaf in graph.leaves:
        if leaf.role != "batch":
            section = params if leaf.role == "param" else others
            section.update(dict.fromkeys(leaf.paths, leaf.shape))
    return params, others


def _axis_note(decision: Decision, axis: str) -> AxisNote:
    mesh = decision.problem.mesh
    role = ROLE_WORDS.get(axis, "free") if axis in ROLES else "free"
    levels = mesh.link(axis).levels
    link = ", ".join(
        f"{level.size} over {level.link} at {level.bytes_per_s / 1e9:.3g} GB/s"
        for level in levels
    )
    return AxisNote(role=role, link=link)


def _collective(entry: Entry) -> CollectivePlan:
    return CollectivePlan(
        kind=entry.collective.kind,
        axes=entry.collective.axes,
        bytes=round(entry.collective.bytes),
        executions=entry.executions,
        phase=entry.phase,
        where=entry.where,
        reason=entry.reason,
    )


def _prediction(decision: Decision, ledger: list[Entry]) -> Prediction:
    problem = decision.problem
    compute = compute_seconds(decision)
    per_axis: dict[str, float] = {}
    for entry in ledger:
        key = "+".join(entry.collective.axes)
        per_axis[key] = per_axis.get(key, 0.0) + entry.seconds
    communication = sum(per_axis.values())
    optimizer = update_seconds(decision)
    step = compute + communication + optimizer
    flops = sum(op.flops * op.executions for op in problem.graph.operators if op.heavy)
    passes = 3 if problem.training else 1
    peak = problem.chip.flops_per_s(_main_dtype(problem.graph))
    devices = problem.mesh.devices
    tokens = _tokens(problem.graph)
    memory = decision.memory
    return Prediction(
        step_s=step,
        compute_s=compute,
        communication_s=per_axis,
        exposed_communication_s=communication,
        optimizer_s=optimizer,
        mfu=flops * passes / (step * devices * peak) if step else None,
        tokens_per_s=tokens / step if tokens and step else None,
        memory=MemoryPrediction(
            **{name: math.ceil(size) for name, size in vars(memory).items()},
            limit_bytes=problem.mesh.topology.memory_bytes,
        ),
    )


def _overlapped(
    decision: Decision, timed: tuple[TaskPlan, ...], alone: Prediction
) -> OverlapPrediction:
    """What the timeline gives where collectives run beside computation."""
    found = play(timed)
    faster = alone.step_s / found.step_s if found.step_s else 1.0
    mfu = None if alone.mfu is None else alone.mfu * faster
    heavy = [op for op in decision.problem.graph.operators if op.heavy]
    work = sum(op.flops * op.executions for op in heavy)
    again = sum(op.flops * op.executions for op in heavy if op.replayed)
    passes = 3 if decision.problem.training else 1
    extra = again / (passes * work) if work and decision.problem.training else 0.0
    return OverlapPrediction(
        step_s=found.step_s,
        exposed_communication_s=found.exposed_s,
        mfu=mfu,
        hfu=None if mfu is None else mfu * (1 + extra),
        tokens_per_s=None
        if alone.tokens_per_s is None
        else alone.tokens_per_s * faster,
    )


def _main_dtype(graph: OperatorGraph) -> str:
    """The dtype of most of the floating-point work."""
    work: dict[str, float] = {}
    for op in graph.operators:
        if op.heavy:
            dtype = graph.tensors[op.operands[0].uses[0].tensor].dtype
            work[dtype] = work.get(dtype, 0.0) + op.flops * op.executions
    return max(work, key=lambda d: work[d], default="float32")


def _tokens(graph: OperatorGraph) -> int | None:
    """Integers in the largest (batch, sequence) input: its tokens."""
    found = [
        math.prod(leaf.shape)
        for leaf in graph.leaves
        if leaf.role == "batch"
        and leaf.dtype.startswith("int")
        and len(leaf.shape) == 2
    ]
    return max(found, default=None)


def _report(decision: Decision) -> SearchReport:
    solution = decision.solution
    return SearchReport(
        method=solution.method,
        status=solution.status,
        objective_s=solution.objective_s,
        lower_bound_s=solution.lower_bound_s,
        candidates=solution.candidates,
        seconds=decision.seconds,
        meshes_tried=decision.tried,
    )


def _activations(
    graph: OperatorGraph, found: tuple[Constraint, ...]
) -> Mapping[str, ActivationPlan]:
    return {
        c.name: ActivationPlan(
            shape=graph.tensors[c.tensor].shape,
            dtype=graph.tensors[c.tensor].dtype,
            specs=c.specs,
            executions=c.executions,
            reason=c.reason,
        )
        for c in found
    }


def _replicated(decision: Decision, reasons: list[str]) -> dict[str, Replication]:
    """Every tensor over 1 MiB that all devices hold whole, and why."""
    problem = decision.problem
    if not problem.axes.sizes:
        return {}
    found: dict[str, Replication] = {}
    pairs = zip(problem.graph.leaves, decision.leaves, reasons, strict=True)
    for leaf, strategy, reason in pairs:
        if not axes_of(strategy.storage) and leaf.bytes > LARGE_BYTES:
            for path in leaf.paths:
                found[path] = Replication(
                    bytes=round(leaf.bytes), reason=_leaf_words(leaf, reason)
                )
    operators = zip(problem.graph.operators, decision.operators, strict=True)
    for op, strategy in operators:
        for result in op.results:
            tensor = problem.graph.tensors[result.tensor]
            spec = spec_of(result.dims, strategy)
            if not axes_of(spec) and tensor.bytes > LARGE_BYTES and tensor.shape:
                found[tensor.name] = Replication(
                    bytes=round(tensor.bytes), reason=_operator_words(op.name, problem)
                )
    return found


def _leaf_words(leaf: GraphLeaf, reason: str) -> str:
    return reason or f"{leaf.role} leaves stay whole"


def _operator_words(name: str, problem: MeshProblem) -> str:
    axes = ", ".join(f"{a}={n}" for a, n in problem.axes.sizes.items())
    return f"no axis of {axes} splits {name} at less cost"
