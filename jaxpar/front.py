"""Memory against time: the fastest plan under every limit that changes it."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxpar.decision import Decision, Request
from jaxpar.planner import Candidates, all_candidates, fastest_within
from jaxpar.remat_choice import Remat

STEP = 0.9
"""Each limit that is tried is this share of what the last plan needed, or less."""


@dataclass(frozen=True, kw_only=True)
class ParetoPoint:
    """A plan than which no faster one of those tried needs less memory.

    Attributes:
        memory_bytes: Needed, per device.
        limit_bytes: `make_plan(memory_bytes=...)` of as much gives the plan.
        step_s: Predicted seconds of a step.
        slower: Share by which the step is slower than the fastest point's.
        mesh: Axis sizes.
        remat: Level of rematerialisation.
        saved: With level "named", what is kept.
        memory: Bytes per device by class.
        fits: Whether the machine has that much memory.
    """

    memory_bytes: int
    limit_bytes: int
    step_s: float
    slower: float
    mesh: Mapping[str, int]
    remat: str
    saved: tuple[str, ...]
    memory: Mapping[str, int]
    fits: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def pareto_front(request: Request, points: int) -> tuple[ParetoPoint, ...]:
    """The front over meshes, levels of rematerialisation and layouts.

    The limit falls from what the fastest plan needs; under each the fastest plan that
    fits is found anew, so every point is the planner's answer to its limit.

    Args:
        request: What is to be planned; its own memory limit only marks points.
        points: At most so many.

    Returns:
        From the fastest to the smallest.

    Raises:
        MeshError: if no mesh fits the batch.
    """
    found: list[ParetoPoint] = []
    for decision, limit in _descent(all_candidates(request), points):
        fastest_s = found[0].step_s if found else decision.solution.objective_s
        found.append(_point(decision, limit, fastest_s, request.topology.memory_bytes))
    return tuple(found)


def _descent(candidates: Candidates, points: int) -> Iterator[tuple[Decision, float]]:
    """Plans and the limits that they were found under."""
    best, below = fastest_within(candidates, math.inf), math.inf
    for _ in range(points):
        if best is None:
            return
        limit = math.floor(STEP * best.memory.total_bytes)
        smaller = fastest_within(candidates, limit)
        if smaller is None or not _is_better(smaller, best):
            yield best, below
        best, below = smaller, limit


def _is_better(a: Decision, b: Decision) -> bool:
    """Whether less memory costs no time."""
    return a.solution.objective_s <= b.solution.objective_s


def _point(
    found: Decision, limit: float, fastest_s: float, available_bytes: float
) -> ParetoPoint:
    sizes = {a: n for a, n in found.problem.mesh.sizes.items() if n > 1}
    remat: Remat = found.remat
    step_s, memory = found.solution.objective_s, found.memory
    needed = math.ceil(memory.total_bytes)
    return ParetoPoint(
        memory_bytes=needed,
        limit_bytes=needed if math.isinf(limit) else math.floor(limit),
        step_s=step_s,
        slower=step_s / fastest_s - 1,
        mesh=sizes or {"data": 1},
        remat=remat.level,
        saved=remat.saved,
        memory={k: math.ceil(v) for k, v in vars(memory).items()},
        fits=memory.total_bytes <= available_bytes,
    )
