"""Exact integer program (HiGHS): an independent certificate, and the last resort."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from jaxpar.search.network import Network, network_of, propagate
from jaxpar.search.problem import Incumbent, SearchProblem, Solution, register_method

OPTIMAL, STOPPED, INFEASIBLE = 0, 1, 2
"""Status numbers of `scipy.optimize.milp`."""

SCALE = 1e4
"""Objective and memory row are brought to this size: HiGHS's tolerances (1e-6) are
absolute."""


@register_method("ilp")
def ilp(problem: SearchProblem, *, time_limit_s: float = 60.0) -> Solution:
    """Solves a problem by the local-polytope integer program.

    Args:
        problem: What to minimise.
        time_limit_s: After this the best plan so far is returned, with its gap.
    """
    incumbent = Incumbent(problem)
    network = propagate(network_of(problem), problem.memory_limit_bytes)
    if network is None:
        return incumbent.infeasible("ilp", least_bytes(problem), {})
    bound = certify(network, incumbent, time_limit_s)
    stats = {"choices": network.candidates}
    if bound == math.inf and incumbent.choice is None:
        return incumbent.infeasible("ilp", least_bytes(problem), stats)
    return incumbent.solution("ilp", bound, stats)
