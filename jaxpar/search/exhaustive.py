"""Exhaustive search: the oracle for small problems."""

import math

import numpy as np

from jaxpar.errors import JaxparError
from jaxpar.search.problem import Incumbent, SearchProblem, Solution, register_method

CAP = 10_000_000
"""Combinations that are tried at most."""


@register_method("exhaustive")
def exhaustive(problem: SearchProblem) -> Solution:
    """Tries every combination of choices at once, as one table of all variables.

    Raises:
        JaxparError: for more than `CAP` combinations.
    """
    incumbent = Incumbent(problem)
    sizes = tuple(c.size for c in problem.cost_s)
    combinations = math.prod(sizes)
    if combinations > CAP:
        raise JaxparError(
            f"exhaustive search over {combinations:.3g} combinations of "
            f"{len(sizes)} variables; it takes at most {CAP:.0e}",
            hint="use method='elimination', which is exact too",
        )
    # Only variables with a choice get an axis: numpy has 64 at most.
    axis = {v: n for n, v in enumerate(v for v, k in enumerate(sizes) if k > 1)}
    shape = tuple(sizes[v] for v in axis)

    def spread(table: np.ndarray, *ends: int) -> np.ndarray:
        wide = [1] * len(shape)
        for end in ends:
            if end in axis:
                wide[axis[end]] = sizes[end]
        return table.reshape(wide)

    seconds, memory = np.full(shape, problem.constant_s), np.zeros(shape)
    for v in range(len(sizes)):
        seconds += spread(problem.cost_s[v], v)
        memory += spread(problem.memory_bytes[v], v)
    for edge in problem.edges:
        if edge.first < edge.second:
            seconds += spread(edge.cost_s, edge.first, edge.second)
        else:
            seconds += spread(edge.cost_s.T, edge.second, edge.first)
    least = float(memory[seconds < math.inf].min(initial=math.inf))
    if least == math.inf or not problem.fits(least):
        smallest = least if least < math.inf else None
        return incumbent.infeasible("exhaustive", smallest, {})
    fits = memory <= problem.memory_limit_bytes * (1 + 1e-12)
    best = int(np.where(fits, seconds, math.inf).argmin())
    place = np.unravel_index(best, shape) if shape else ()
    incumbent.offer(
        [int(place[axis[v]]) if v in axis else 0 for v in range(len(sizes))]
    )
    return incumbent.solution("exhaustive", incumbent.objective_s, {})
