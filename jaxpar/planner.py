"""The outer search: every mesh of the topology, the best layout on each."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpar.cost.problem import MeshProblem
from jaxpar.decision import Decision, Model, Request, remat_reason
from jaxpar.errors import InfeasibleError, MeshError
from jaxpar.limited import bounded_decision, decide
from jaxpar.mesh import factorizations, logical_mesh
from jaxpar.pins import activation_pins, check_axes, leaf_pins
from jaxpar.plan import MeshTried
from jaxpar.refusals import check_roles, refuse_memory
from jaxpar.remat_choice import Remat
from jaxpar.strategy import BATCH_ROLES

SEARCHED_AXES = ("data", "fsdp", "tensor")
TIE = 1e-6
IDLE_SLACK = 0.05
"""Share of repeated work by which a mesh may exceed the least of all meshes."""
_SLOW = "slower even without a limit"
Tried = tuple[tuple[int, ...], Remat]


def plan_graph(request: Request) -> Decision:
    """The best layout over all meshes.

    Raises:
        MeshError: if the mesh does not fit the machine or the batch.
        InfeasibleError: if no layout fits the memory limit on any mesh.
    """
    started = time.perf_counter()
    candidates = _candidates(request)
    tried, limit = candidates.tried, request.topology.memory_bytes
    fastest = candidates.fastest
    best, refused = _within_memory(candidates, limit)
    if fastest is None or fastest.memory.total_bytes > limit:
        if any([_add(candidates, request, make, best) for make in request.harder]):
            best, refused = _within_memory(candidates, limit)
    if best is None:
        raise _nothing_found(request, refused, list(tried.values()))
    final = _renamed(best, candidates.asked[best.remat])
    return replace(
        final,
        tried=tuple(tried.values()),
        seconds=time.perf_counter() - started,
        remat_reason=remat_reason(final, fastest, len(candidates.asked)),
    )


@dataclass
class Candidates:
    """The best layout of every mesh and level, whatever memory it needs.

    Attributes:
        asked: What was to be planned, by level.
        free: The layouts.
        tried: What became of each mesh and level.
        bounded: (id of a layout, limit) -> the layout that fits in its place.
    """

    asked: dict[Remat, Request]
    free: list[Decision]
    tried: dict[Tried, MeshTried] = field(default_factory=dict)
    bounded: dict[tuple[int, float], Decision] = field(default_factory=dict)

    @property
    def fastest(self) -> Decision | None:
        """The fastest one."""
        return min(self.free, key=_order(self.free), default=None)


def all_candidates(request: Request) -> Candidates:
    """The best layouts on all meshes, under all levels of rematerialisation.

    Raises:
        MeshError: as `plan_graph`; also if there is no layout at all.
    """
    found = _candidates(request)
    for make in request.harder:
        _add(found, request, make, None)
    if not found.free:
        raise _nothing_found(request, None, list(found.tried.values()))
    return found


def fastest_within(candidates: Candidates, limit: float) -> Decision | None:
    """The fastest layout that needs no more bytes than the limit."""
    return _within_memory(candidates, limit)[0]


def _candidates(request: Request) -> Candidates:
    searched = request.mesh is None
    check_axes(request.wishes, request.mesh or {}, searched=searched)
    if not searched:
        check_roles(request.graph, request.mesh or {})
    found = Candidates({request.remat: request}, [])
    found.free += _free(request, found.tried, _meshes(request))
    return found


def _add(
    found: Candidates,
    request: Request,
    make: Callable[[], Model | None],
    best: Decision | None,
) -> bool:
    """Adds a level, but for meshes that are too slow even when they keep more."""
    model = make()
    if model is None:
        return False
    slow: list[Mapping[str, int]] = []
    if best is not None and not _order(found.free)(best)[0]:
        most = best.solution.objective_s * (1 + TIE)
        slow = [
            d.problem.mesh.sizes
            for d in found.free
            if d.remat == request.remat and d.solution.objective_s > most
        ]
    again = found.asked[model.remat] = _under(request, model)
    for sizes in slow:
        _note(found.tried, sizes, model.remat, refused=_SLOW)
    left = [sizes for sizes in _meshes(again) if sizes not in slow]
    found.free += _free(again, found.tried, left)
    return True


def _under(request: Request, model: Model) -> Request:
    return replace(
        request, graph=model.graph, workload=model.workload, remat=model.remat
    )


def _free(
    request: Request,
    tried: dict[Tried, MeshTried],
    meshes: Sequence[Mapping[str, int]],
) -> list[Decision]:
    """The best layout on every mesh without a memory limit."""
    found: list[Decision] = []
    for done, sizes in enumerate(meshes):
        decision = _on_mesh(request, sizes, searched=request.mesh is None)
        if request.progress:
            request.progress(done + 1, len(meshes))
        if isinstance(decision, str):
            _note(tried, sizes, request.remat, refused=decision)
        else:
            found.append(decision)
    return found


def _note(
    tried: dict[Tried, MeshTried],
    sizes: Mapping[str, int],
    remat: Remat,
    **outcome: Any,
) -> None:
    tried[tuple(sizes.values()), remat] = MeshTried(
        mesh=sizes, remat=remat.level, **outcome
    )


def _order(free: Sequence[Decision]) -> Callable[[Decision], tuple[bool, float]]:
    """Meshes on which devices repeat each other's work come last."""
    least = min(map(repeated_share, free), default=0.0) + IDLE_SLACK
    return lambda d: (repeated_share(d) > least, d.solution.objective_s)


def _within_memory(
    candidates: Candidates, limit: float
) -> tuple[Decision | None, Decision | None]:
    """The best decision that fits, and the smallest one that does not.

    A plan found without the limit bounds from below what its mesh can reach with
    it, so meshes are taken in that order until none can be better. Meshes on which
    devices repeat each other's work come last, however little it would cost.
    """
    best: Decision | None = None
    refused: Decision | None = None
    order, tried = _order(candidates.free), candidates.tried
    for found in sorted(candidates.free, key=order):
        if best is not None and order(found)[0]:
            break
        request = candidates.asked[found.remat]
        place = (found.problem.mesh.sizes, found.remat)
        reached = found.solution.objective_s
        if best is not None and reached > best.solution.objective_s * (1 + TIE):
            _note(tried, *place, refused=_SLOW)
            continue
        key = id(found), limit
        if key not in candidates.bounded:
            candidates.bounded[key] = bounded_decision(found, limit, request)
        bounded = candidates.bounded[key]
        if bounded.memory.total_bytes > limit:
            _note(tried, *place, refused=_too_large(bounded))
            refused = _smaller(refused, bounded)
            continue
        _note(tried, *place, objective_s=bounded.solution.objective_s)
        best = _better(best, bounded)
    return best, refused


def repeated_share(decision: Decision) -> float:
    """Share of the matrix multiplications that some axis does not split."""
    problem = decision.problem
    total = repeated = 0.0
    for op, strategy in zip(problem.graph.operators, decision.operators, strict=True):
        if op.heavy and not op.parameter_only:
            work = op.flops * op.executions
            used = {axis for axes in strategy for axis in axes}
            total += work
            repeated += work if problem.axes.sizes.keys() - used else 0.0
    return repeated / total if total else 0.0


def _meshes(request: Request) -> list[dict[str, int]]:
    topology = request.topology
    if request.mesh is not None:
        return [dict(request.mesh)]
    batch = request.graph.batch_size
    widest = max((c.granularity for c in request.graph.classes), default=1)
    found = factorizations(topology.devices, SEARCHED_AXES, topology.slices)
    kept = [
        sizes
        for sizes in found
        if batch % math.prod(sizes[a] for a in BATCH_ROLES) == 0
        and sizes["tensor"] <= widest
    ]
    return kept or found


def _on_mesh(
    request: Request, sizes: Mapping[str, int], *, searched: bool
) -> Decision | str:
    """The best layout on one mesh, or why there is none."""
    graph, topology = request.graph, request.topology
    parts = math.prod(n for a, n in sizes.items() if a in BATCH_ROLES)
    if graph.batch_size % parts:
        reason = _uneven(graph.batch_size, sizes)
        if searched:
            return reason
        raise MeshError(
            reason,
            hint=f"use a batch that is a multiple of {parts}, or other axis sizes",
        )
    mesh = logical_mesh(topology, sizes)
    wide = {a: n for a, n in sizes.items() if n > 1}
    pins, notes = leaf_pins(graph, request.wishes, wide if searched else sizes)
    must = () if searched else tuple(a for a in wide if a == "fsdp")
    problem = MeshProblem(
        graph,
        mesh,
        request.workload,
        pins=pins,
        must_store=must,
        weights_first=not searched,
        bound=activation_pins(graph, request.wishes, wide if searched else sizes),
        zero=request.zero,
    )
    if unmet := problem.unmet:
        reason = f"no strategy of {unmet} obeys its pins on mesh {dict(sizes)}"
        if searched:
            return reason
        raise MeshError(reason, hint="pin fewer dims, or give the axis another name")
    tables = problem.build()
    found = decide(problem, tables, request, notes)
    if found.solution.choice is None:
        return "no layout obeys all pins"
    return found


def _uneven(batch: int, sizes: Mapping[str, int]) -> str:
    used = {a: n for a, n in sizes.items() if a in BATCH_ROLES and n > 1}
    axes = " x ".join(f"{a}={n}" for a, n in used.items())
    return (
        f"global batch of {batch} does not divide by the batch axes {axes} "
        f"({math.prod(used.values())})"
    )


def _too_large(found: Decision) -> str:
    gib = found.memory.total_bytes / 2**30
    return f"needs {gib:.3g} GiB per device"


def _smaller(a: Decision | None, b: Decision) -> Decision:
    if a is None or b.memory.total_bytes < a.memory.total_bytes:
        return b
    return a


def _better(a: Decision | None, b: Decision) -> Decision:
    """The faster plan; of nearly equal ones the one of fewer and simpler axes."""
    if a is None:
        return b
    old, new = a.solution.objective_s, b.solution.objective_s
    if math.isclose(old, new, rel_tol=TIE):
        return min(a, b, key=_complexity)
    return a if old < new else b


def _complexity(found: Decision) -> tuple[int, int]:
    sizes = found.problem.mesh.sizes
    wide = [a for a, n in sizes.items() if n > 1]
    return len(wide), sum(SEARCHED_AXES.index(a) for a in wide if a in SEARCHED_AXES)


def _nothing_found(
    request: Request, refused: Decision | None, tried: Sequence[MeshTried]
) -> InfeasibleError | MeshError:
    if refused is not None:
        return refuse_memory(
            request.graph,
            request.topology,
            refused.memory,
            refused.problem,
            refused.remat,
        )
    reasons = "; ".join(dict.fromkeys(str(t.refused) for t in tried[:3]))
    return MeshError(
        f"no mesh of {request.topology.devices} devices fits: {reasons}",
        hint="change the batch size or the number of devices",
    )


def _renamed(best: Decision, request: Request) -> Decision:
    """Solves again without axes of one device, which a searched mesh leaves out."""
    if request.mesh is not None:
        return best
    sizes = {a: n for a, n in best.problem.mesh.sizes.items() if n > 1}
    if sizes == best.problem.mesh.sizes:
        return best
    found = _on_mesh(request, sizes or {"data": 1}, searched=True)
    if isinstance(found, str):
        return best
    return bounded_decision(found, request.topology.memory_bytes, request)
