"""What a search is asked, what it answers, and the only judge of the answer."""

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxpar.errors import JaxparError

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

CERTAIN = 1e-9
"""Relative difference of seconds below which two plans count as equally good."""


@dataclass(frozen=True, eq=False)
class Edge:
    """Seconds that depend on the choices of two variables.

    Attributes:
        first: Number of one variable.
        second: Number of the other (the same one is allowed).
        cost_s: Seconds, shape (choices of first, choices of second); inf forbids.
    """

    first: int
    second: int
    cost_s: np.ndarray

    def __post_init__(self):
        object.__setattr__(self, "cost_s", _frozen(self.cost_s))


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """Choose one choice per variable: least seconds, within a limit on bytes.

    Attributes:
        names: One name per variable, for messages.
        cost_s: Per variable, the seconds of each choice; inf forbids a choice.
        edges: Seconds of pairs of choices. Edges between the same two variables
            add up; an edge from a variable to itself is folded into its `cost_s`.
        memory_bytes: Per variable, the finite bytes of each choice.
        memory_limit_bytes: The chosen bytes may not add up to more than this.
        constant_s: Seconds that no choice changes.

    Raises:
        JaxparError: if lengths or shapes disagree, a variable has no choice, a cost
            is nan or -inf, or bytes are not finite.
    """

    names: tuple[str, ...]
    cost_s: tuple[np.ndarray, ...]
    edges: tuple[Edge, ...]
    memory_bytes: tuple[np.ndarray, ...]
    memory_limit_bytes: float = math.inf
    constant_s: float = 0.0

    def __post_init__(self):
        set_field = object.__setattr__
        set_field(self, "names", tuple(self.names))
        set_field(self, "cost_s", tuple(_frozen(c) for c in self.cost_s))
        set_field(self, "memory_bytes", tuple(_frozen(m) for m in self.memory_bytes))
        self._check_variables()
        self._check_edges()
        self._fold_self_edges()

    def _check_variables(self) -> None:
        count = len(self.names)
        if len(self.cost_s) != count or len(self.memory_bytes) != count:
            raise JaxparError(
                f"search problem with {count} names has {len(self.cost_s)} cost "
                f"vectors and {len(self.memory_bytes)} memory vectors",
                hint="give one of each per variable",
            )
        for name, cost, memory in zip(
            self.names, self.cost_s, self.memory_bytes, strict=True
        ):
            if cost.ndim != 1 or not cost.size or cost.shape != memory.shape:
                raise JaxparError(
                    f"variable {name!r} has costs of shape {cost.shape} and bytes of "
                    f"shape {memory.shape}",
                    hint="both need one entry per choice, and at least one choice",
                )
        if count:
            _check_costs(np.concatenate(self.cost_s), "a variable's cost_s")
            if not np.isfinite(np.concatenate(self.memory_bytes)).all():
                raise JaxparError(
                    "memory_bytes holds nan or inf",
                    hint="forbid a choice by cost_s = inf instead",
                )
        if math.isnan(self.memory_limit_bytes) or not math.isfinite(self.constant_s):
            raise JaxparError("memory_limit_bytes is nan or constant_s is not finite")

    def _check_edges(self) -> None:
        sizes = [c.size for c in self.cost_s]
        for edge in self.edges:
            ends = (edge.first, edge.second)
            if not all(0 <= end < len(sizes) for end in ends):
                raise JaxparError(
                    f"edge between variables {ends}, but there are {len(sizes)}"
                )
            if edge.cost_s.shape != (sizes[edge.first], sizes[edge.second]):
                raise JaxparError(
                    f"edge between {self.names[edge.first]!r} and "
                    f"{self.names[edge.second]!r} has a table of shape "
                    f"{edge.cost_s.shape}; the variables have {sizes[edge.first]} and "
                    f"{sizes[edge.second]} choices"
                )
            _check_costs(edge.cost_s, "an edge's cost_s")

    def _fold_self_edges(self) -> None:
        loops = [e for e in self.edges if e.first == e.second]
        if not loops:
            return
        cost = list(self.cost_s)
        for loop in loops:
            cost[loop.first] = _frozen(cost[loop.first] + loop.cost_s.diagonal())
        object.__setattr__(self, "cost_s", tuple(cost))
        pairs = tuple(e for e in self.edges if e.first != e.second)
        object.__setattr__(self, "edges", pairs)

    def fits(self, memory_bytes: float) -> bool:
        """Whether bytes are within the limit (to rounding of a float64 sum)."""
        return memory_bytes <= self.memory_limit_bytes * (1 + 1e-14)


def _frozen(values: np.ndarray) -> np.ndarray:
    """A read-only float64 view of the caller's array (a copy only if it must be)."""
    view = np.asarray(values, dtype=np.float64).view()
    view.flags.writeable = False
    return view


def _check_costs(costs: np.ndarray, what: str) -> None:
    # The minimum is nan as soon as one entry is: one pass finds both faults.
    if costs.size and not costs.min() > -math.inf:
        raise JaxparError(f"{what} holds nan or -inf", hint="inf forbids a choice")


@dataclass(frozen=True, eq=False)
class Solution:
    """What a search method found.

    Attributes:
        choice: Per variable, the number of its choice; None where none was found.
        objective_s: Seconds of the choice (inf without one).
        lower_bound_s: No allowed choice costs less; the objective itself if optimal.
        memory_bytes: Bytes of the choice (inf without one).
        status: "optimal" (certified), "feasible" (certified within `gap`),
            "infeasible" (certified), or "unknown" (stopped before any choice).
        method: Name of the method.
        seconds: Wall-clock time of the search.
        candidates: Total number of choices of all variables.
        least_memory_bytes: If infeasible, the least bytes of any allowed choice;
            None if there is no allowed choice at whatever memory.
        stats: Method-specific counts, for people.
    """

    choice: tuple[int, ...] | None
    objective_s: float
    lower_bound_s: float
    memory_bytes: float
    status: Status
    method: str
    seconds: float
    candidates: int
    least_memory_bytes: float | None = None
    stats: Mapping[str, float] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """(objective - lower bound) / |objective|: 0 if certified optimal."""
        difference = self.objective_s - self.lower_bound_s
        if self.choice is None or math.isinf(difference):
            return 0.0 if self.status == "infeasible" else math.inf
        if difference <= 0.0:
            return 0.0
        return difference / abs(self.objective_s) if self.objective_s else math.inf


def evaluate(problem: SearchProblem, choice: Sequence[int]) -> tuple[float, float]:
    """Seconds and bytes of one choice: the only judge of every method.

    The sums are correctly rounded, so that they do not depend on the order of the
    variables or edges.
    """
    terms = [float(c[k]) for c, k in zip(problem.cost_s, choice, strict=True)]
    terms += [float(e.cost_s[choice[e.first], choice[e.second]]) for e in problem.edges]
    terms.append(problem.constant_s)
    pairs = zip(problem.memory_bytes, choice, strict=True)
    return math.fsum(terms), math.fsum(float(m[k]) for m, k in pairs)


Method = Callable[..., Solution]
_METHODS: dict[str, Method] = {}


def register_method(name: str) -> Callable[[Method], Method]:
    """Registers a search method: a function of a problem and keyword options."""

    def register(method: Method) -> Method:
        _METHODS[name] = method
        return method

    return register


def methods() -> tuple[str, ...]:
    """Names of the registered methods."""
    return tuple(sorted(_METHODS))


def solve(problem: SearchProblem, method: str = "auto", **options: Any) -> Solution:
    """Solves a problem by a registered method.

    Args:
        problem: What to minimise.
        method: A name from `methods()`; "auto" is elimination, the fastest exact one.
        **options: Keyword options of that method; see its own docstring.

    Raises:
        JaxparError: for an unknown method or option, or a problem too large for it.
    """
    name = "elimination" if method == "auto" else method
    if name not in _METHODS:
        raise JaxparError(
            f"unknown search method {method!r}",
            hint=f"use 'auto' or one of: {', '.join(methods())}",
        )
    _check_options(name, options)
    return _METHODS[name](problem, **options)


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    if not options:
        return
    known = list(inspect.signature(_METHODS[name]).parameters)[1:]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise JaxparError(
            f"search method {name!r} has no option {', '.join(unknown)}",
            hint=f"it takes: {', '.join(known) or 'none'}",
        )


class Incumbent:
    """The best allowed choice met so far, by the word of `evaluate`.

    Attributes:
        choice: The best choice, or None.
        objective_s: Its seconds; inf without one.
        memory_bytes: Its bytes; inf without one.
    """

    def __init__(self, problem: SearchProblem):
        self.problem = problem
        self.started = time.perf_counter()
        self.choice: tuple[int, ...] | None = None
        self.objective_s = math.inf
        self.memory_bytes = math.inf

    def offer(self, choice: Sequence[int]) -> tuple[float, float]:
        """Evaluates a choice and keeps it if it is allowed and the best so far."""
        seconds, memory = evaluate(self.problem, choice)
        if seconds < self.objective_s and self.problem.fits(memory):
            self.choice = tuple(int(k) for k in choice)
            self.objective_s, self.memory_bytes = seconds, memory
        return seconds, memory

    def solution(
        self, method: str, lower_bound_s: float, stats: Mapping[str, float]
    ) -> Solution:
        """The incumbent as an answer, optimal if the bound reaches it."""
        best = self.objective_s
        if self.choice is None:
            status: Status = "unknown"
        elif lower_bound_s >= best - CERTAIN * abs(best):
            status, lower_bound_s = "optimal", best
        else:
            status = "feasible"
        return self._answer(method, lower_bound_s, status, None, stats)

    def infeasible(
        self,
        method: str,
        least_memory_bytes: float | None,
        stats: Mapping[str, float],
    ) -> Solution:
        """The certified answer that no choice is allowed."""
        return self._answer(method, math.inf, "infeasible", least_memory_bytes, stats)

    def _answer(
        self,
        method: str,
        lower_bound_s: float,
        status: Status,
        least_memory_bytes: float | None,
        stats: Mapping[str, float],
    ) -> Solution:
        return Solution(
            choice=self.choice,
            objective_s=self.objective_s,
            lower_bound_s=lower_bound_s,
            memory_bytes=self.memory_bytes,
            status=status,
            method=method,
            seconds=time.perf_counter() - self.started,
            candidates=sum(c.size for c in self.problem.cost_s),
            least_memory_bytes=least_memory_bytes,
            stats=stats,
        )
