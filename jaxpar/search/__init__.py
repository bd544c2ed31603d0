"""Exact search over discrete choices with pairwise costs and a memory limit."""

from jaxpar.search import elimination, exhaustive, ilp, mcmc  # noqa: F401 (registers)
from jaxpar.search.problem import (
    Edge,
    SearchProblem,
    Solution,
    evaluate,
    methods,
    register_method,
    solve,
)

__all__ = [
    "Edge",
    "SearchProblem",
    "Solution",
    "evaluate",
    "methods",
    "register_method",
    "solve",
]
