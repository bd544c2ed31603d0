"""The exact method: cut down, contract, read back; with a price on bytes if needed.

Variable elimination is exact and fast where its tables are small. Where they are
not, message passing and bounds strike out choices first. A memory limit becomes a
price on bytes, and what gap the price leaves is closed by labels or, at last, by an
integer program.
"""

import math
import time
from collections.abc import Mapping

import numpy as np

from jaxpar.search.contraction import Contraction, find_order, make_schedule
from jaxpar.search.frontier import Frontier, TooManyLabels
from jaxpar.search.ilp import IntegerProgram
from jaxpar.search.lagrange import ascend, least_memory
from jaxpar.search.network import Network, network_of, propagate, restrict
from jaxpar.search.problem import (
    CERTAIN,
    Incumbent,
    SearchProblem,
    Solution,
    register_method,
)
from jaxpar.search.shrink import CHEAP, shrink

NAME = "elimination"
