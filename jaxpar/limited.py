"""The best layout on one mesh, and the best that keeps to a memory limit."""

from dataclasses import replace

from jaxpar.cost.memory import Memory, memory_of
from jaxpar.cost.problem import MeshProblem
from jaxpar.decision import Decision, Request
from jaxpar.search.problem import SearchProblem, evaluate, solve

THRESHOLDS = 4
"""Levels of working memory that are tried."""


def decide(
    problem: MeshProblem,
    tables: SearchProblem,
    request: Request,
    notes: tuple[str, ...],
) -> Decision:
    """The fastest layout by the tables of a mesh."""
    options = {"seed": request.seed} if request.method == "mcmc" else {}
    solution = solve(tables, request.method, **options)
    memory = Memory.unknown()
    if solution.choice is not None:
        memory = memory_of(problem, solution.choice)
    return Decision(
        problem, tables, solution, memory, (), notes, 0.0, remat=request.remat
    )


def bounded_decision(free: Decision, limit: float, request: Request) -> Decision:
    """The best decision on a mesh within the memory limit.

    Peak memory is a sum over variables plus the most that one of them needs while
    it runs. The sum is limited in the search; for the other part, thresholds are
    tried from what the free plan needs downwards, and choices above them struck
    out. Where the peak is more than what the search adds up, and so nothing that it
    finds fits, the limit is lowered by the difference, and all is tried once more.

    Returns:
        The fastest decision that fits, or the one of least memory that was found.
    """
    if free.memory.total_bytes <= limit:
        return free
    tried = _under(free, limit, request)
    fits = [d for d in tried if d.memory.total_bytes <= limit]
    if not fits and (missed := max(map(_missed, tried))) > 0:
        tried += _under(free, limit - missed, request)
        fits = [d for d in tried if d.memory.total_bytes <= limit]
    if fits:
        return min(fits, key=lambda d: d.solution.objective_s)
    return min([free, *tried], key=lambda d: d.memory.total_bytes)


def _under(free: Decision, limit: float, request: Request) -> list[Decision]:
    """What the search finds under a limit on what it adds up."""
    problem, found = free.problem, []
    for threshold in _thresholds(problem, free.memory.transients_bytes):
        tables = problem.limited(free.search_problem, limit, threshold)
        decision = decide(problem, tables, request, free.notes)
        if decision.solution.choice is None:
            decision = _smallest(free, tables, request)
        found.append(decision)
    return found


def _missed(decision: Decision) -> float:
    """Bytes of the peak that the search did not add up."""
    choice = decision.solution.choice
    if choice is None:
        return 0.0
    _, added = evaluate(decision.search_problem, choice)
    fixed = decision.problem.workload.unowned_bytes + decision.memory.transients_bytes
    return decision.memory.total_bytes - added - fixed


def _smallest(free: Decision, tables: SearchProblem, request: Request) -> Decision:
    """The decision of least memory, with its time in place of its bytes."""
    problem = free.problem
    found = decide(problem, problem.by_memory(tables), request, free.notes)
    if found.solution.choice is None:
        return found
    seconds, _ = evaluate(free.search_problem, found.solution.choice)
    solution = replace(
        found.solution,
        objective_s=seconds,
        lower_bound_s=free.solution.lower_bound_s,
        status="feasible",
    )
    return replace(found, solution=solution, search_problem=tables)


def _thresholds(problem: MeshProblem, most: float) -> list[float]:
    """A few levels of working memory, from `most` down to the least possible."""
    least = max((float(w.min()) for w in problem.working), default=0.0)
    steps = [most * 0.5**k for k in range(THRESHOLDS - 1)]
    return [*(t for t in steps if t > least), least]
