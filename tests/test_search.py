"""Every search method against the exhaustive oracle, and relations between them."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_problems import random_problem

from jaxpar.errors import JaxparError
from jaxpar.search import (
    Edge,
    SearchProblem,
    Solution,
    evaluate,
    methods,
    register_method,
    solve,
)
from jaxpar.search.problem import _METHODS

RELATIVE = 1e-8
LIMITS = ("none", "loose", "middle", "tight", "least", "infeasible")


@st.composite
def problems(draw, limits=LIMITS):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    problem = random_problem(
        rng,
        variables=draw(st.integers(1, 8)),
        choices=draw(st.integers(1, 4)),
        edges=draw(st.integers(0, 16)),
        forbidden=draw(st.sampled_from([0.0, 0.0, 0.1, 0.4])),
    )
    least = sum(m.min() for m in problem.memory_bytes)
    most = sum(m.max() for m in problem.memory_bytes)
    share = {"loose": 1.0, "middle": 0.5, "tight": 0.1, "least": 0.0}
    limit = draw(st.sampled_from(limits))
    if limit == "none":
        return problem
    if limit == "infeasible":
        return dataclasses.replace(problem, memory_limit_bytes=least - 1)
    bytes_ = least + share[limit] * (most - least)
    return dataclasses.replace(problem, memory_limit_bytes=bytes_)


def check(problem: SearchProblem, solution: Solution) -> None:
    """What must hold of every answer, judged by `evaluate` alone."""
    assert solution.candidates == sum(c.size for c in problem.cost_s)
    if solution.choice is None:
        assert solution.status in ("infeasible", "unknown")
        return
    seconds, memory = evaluate(problem, solution.choice)
    assert (seconds, memory) == (solution.objective_s, solution.memory_bytes)
    assert memory <= problem.memory_limit_bytes
    assert solution.lower_bound_s <= solution.objective_s
    assert solution.gap >= 0.0
    if solution.status == "optimal":
        assert solution.lower_bound_s == solution.objective_s
        assert solution.gap == 0.0


def agree(problem: SearchProblem, found: Solution) -> None:
    """The answer is certified, and the oracle's."""
    check(problem, found)
    oracle = solve(problem, "exhaustive")
    check(problem, oracle)
    assert found.status == oracle.status
    assert found.least_memory_bytes == oracle.least_memory_bytes
    if oracle.choice is not None:
        assert found.objective_s == pytest.approx(oracle.objective_s, rel=RELATIVE)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_elimination_is_exhaustive_search(problem):
    agree(problem, solve(problem))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_ilp_is_exhaustive_search(problem):
    agree(problem, solve(problem, "ilp"))


@settings(max_examples=200, deadline=None)
@given(problems())
def test_message_passing_and_bounds_lose_nothing(problem):
    # Here even tiny problems count as too large for elimination at once.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.search.elimination.CHEAP", -1.0)
        patch.setattr("jaxpar.search.shrink.CHEAP", -1.0)
        patch.setattr("jaxpar.search.shrink.CALL", 0)
        agree(problem, solve(problem))


@settings(max_examples=100, deadline=None)
@given(problems())
def test_integer_program_closes_the_gap_where_labels_run_out(problem):
    agree(problem, solve(problem, most_labels=0))


@settings(max_examples=100, deadline=None)
@given(problems())
def test_bounds_hold_where_tables_are_too_large(problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.search.elimination.CHEAP", -1.0)
        found = solve(problem, largest_table=0)
    check(problem, found)
    oracle = solve(problem, "exhaustive")
    assert (found.choice is None) == (oracle.choice is None)
    slack = RELATIVE * abs(oracle.objective_s)
    if oracle.choice is not None:
        assert found.lower_bound_s <= oracle.objective_s + slack
        assert found.objective_s >= oracle.objective_s - slack


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([0.01, 0.5]))
def test_a_wanted_gap_is_kept(problem, gap):
    found = solve(problem, relative_gap=gap)
    check(problem, found)
    oracle = solve(problem, "exhaustive")
    assert (found.choice is None) == (oracle.choice is None)
    if oracle.choice is not None:
        assert found.gap <= gap
        assert found.lower_bound_s <= oracle.objective_s * (1 + RELATIVE)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_mcmc_never_beats_the_optimum(problem):
    best = solve(problem)
    walk = solve(problem, "mcmc", moves=300)
    check(problem, walk)
    assert walk.objective_s >= best.objective_s * (1 - RELATIVE)
    again = solve(problem, "mcmc", moves=300)
    assert again.choice == walk.choice


@settings(max_examples=60, deadline=None)
@given(problems(limits=("none",)))
def test_looser_memory_never_costs_more(problem):
    least = sum(m.min() for m in problem.memory_bytes)
    most = sum(m.max() for m in problem.memory_bytes)
    before = math.inf
    for limit in np.linspace(least, most, 6):
        found = solve(dataclasses.replace(problem, memory_limit_bytes=float(limit)))
        check(problem, found)
        assert found.objective_s <= before * (1 + RELATIVE)
        before = found.objective_s


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 2**32))
def test_relabelling_changes_nothing(problem, seed):
    rng = np.random.default_rng(seed)
    count = len(problem.names)
    order = rng.permutation(count)
    place = np.argsort(order)
    shuffle = [rng.permutation(problem.cost_s[v].size) for v in range(count)]

    def relabel(edge: Edge) -> Edge:
        i, j = edge.first, edge.second
        table = edge.cost_s[np.ix_(shuffle[i], shuffle[j])]
        if rng.random() < 0.5:
            i, j, table = j, i, table.T
        return Edge(int(place[i]), int(place[j]), table)

    other = SearchProblem(
        names=tuple(problem.names[v] for v in order),
        cost_s=tuple(problem.cost_s[v][shuffle[v]] for v in order),
        edges=tuple(
            relabel(problem.edges[e]) for e in rng.permutation(len(problem.edges))
        ),
        memory_bytes=tuple(problem.memory_bytes[v][shuffle[v]] for v in order),
        memory_limit_bytes=problem.memory_limit_bytes,
        constant_s=problem.constant_s,
    )
    one, two = solve(problem), solve(other)
    assert one.status == two.status
    assert one.least_memory_bytes == two.least_memory_bytes
    if one.choice is not None:
        assert two.objective_s == pytest.approx(one.objective_s, rel=RELATIVE)


@pytest.mark.parametrize("method", sorted({*methods(), "auto"}))
@pytest.mark.parametrize("limit", [math.inf, 0.0])
def test_nothing_to_choose(method, limit):
    empty = SearchProblem((), (), (), (), limit, constant_s=2.5)
    found = solve(empty, method)
    assert (found.choice, found.objective_s, found.memory_bytes) == ((), 2.5, 0.0)
    single = SearchProblem(
        names=("a", "b"),
        cost_s=(np.array([1.0]), np.array([2.0])),
        edges=(Edge(1, 0, np.array([[4.0]])),),
        memory_bytes=(np.zeros(1), np.zeros(1)),
        memory_limit_bytes=limit,
    )
    assert solve(single, method).objective_s == 7.0


@pytest.mark.parametrize("method", ["elimination", "ilp", "exhaustive"])
def test_forbidden_pairs_shape_the_least_memory(method):
    wall = np.array([[math.inf, 0.0], [0.0, 0.0]])
    problem = SearchProblem(
        names=("a", "b"),
        cost_s=(np.zeros(2), np.zeros(2)),
        edges=(Edge(0, 1, wall),),
        memory_bytes=(np.array([1.0, 10.0]), np.array([2.0, 50.0])),
        memory_limit_bytes=11.0,
    )
    found = solve(problem, method)
    assert (found.status, found.least_memory_bytes) == ("infeasible", 12.0)
    exact = dataclasses.replace(problem, memory_limit_bytes=12.0)
    assert solve(exact, method).choice == (1, 0)


@pytest.mark.parametrize("method", ["elimination", "ilp", "exhaustive"])
def test_a_contradiction_has_no_least_memory(method):
    never = Edge(0, 1, np.array([[math.inf, 0.0], [0.0, math.inf]]))
    always = Edge(0, 1, np.array([[0.0, math.inf], [math.inf, 0.0]]))
    problem = SearchProblem(
        names=("a", "b"),
        cost_s=(np.zeros(2), np.zeros(2)),
        edges=(never, always),
        memory_bytes=(np.ones(2), np.ones(2)),
    )
    found = solve(problem, method)
    assert (found.status, found.least_memory_bytes) == ("infeasible", None)
    assert found.gap == 0.0


def test_costs_over_ten_orders_of_magnitude():
    # The tiny variable is decided by nanoseconds beside a cost of ten seconds.
    problem = SearchProblem(
        names=("large", "tiny"),
        cost_s=(np.array([10.0, 11.0]), np.array([2e-9, 1e-9, 3e-9])),
        edges=(Edge(0, 1, np.zeros((2, 3))),),
        memory_bytes=(np.zeros(2), np.zeros(3)),
    )
    assert solve(problem).choice == (0, 1)


def test_self_edges_and_parallel_edges_add_up():
    table = np.array([[1.0, 9.0], [9.0, 3.0]])
    pair = np.array([[0.0, 5.0], [2.0, 7.0]])
    problem = SearchProblem(
        names=("a", "b"),
        cost_s=(np.array([0.5, 0.5]), np.zeros(2)),
        edges=(Edge(0, 0, table), Edge(0, 1, pair), Edge(1, 0, pair)),
        memory_bytes=(np.zeros(2), np.zeros(2)),
    )
    assert problem.cost_s[0].tolist() == [1.5, 3.5]
    assert evaluate(problem, (0, 1)) == (1.5 + 5.0 + 2.0, 0.0)


def test_arrays_of_the_caller_stay_writable():
    cost = np.zeros(2)
    SearchProblem(("a",), (cost,), (), (cost,))
    cost[0] = 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ("a",)}, "1 names"),
        ({"cost_s": (np.zeros(2), np.zeros(2))}, "'b' has costs of shape"),
        ({"cost_s": (np.zeros(2), np.full(3, math.nan))}, "nan or -inf"),
        ({"memory_bytes": (np.zeros(2), np.full(3, math.inf))}, "nan or inf"),
        ({"memory_limit_bytes": math.nan}, "memory_limit_bytes is nan"),
        ({"edges": (Edge(0, 2, np.zeros((2, 2))),)}, r"variables \(0, 2\)"),
        ({"edges": (Edge(0, 1, np.zeros((3, 2))),)}, "'a' and 'b' has a table"),
        ({"edges": (Edge(0, 1, np.full((2, 3), -math.inf)),)}, "nan or -inf"),
    ],
)
def test_malformed_problems_are_refused(change, message):
    fine = {
        "names": ("a", "b"),
        "cost_s": (np.zeros(2), np.zeros(3)),
        "edges": (),
        "memory_bytes": (np.zeros(2), np.zeros(3)),
    }
    SearchProblem(**fine)
    with pytest.raises(JaxparError, match=message):
        SearchProblem(**{**fine, **change})


def test_unknown_methods_and_options_are_refused():
    problem = SearchProblem(("a",), (np.zeros(2),), (), (np.zeros(2),))
    with pytest.raises(JaxparError, match=r"'magic'[\s\S]*elimination"):
        solve(problem, "magic")
    with pytest.raises(JaxparError, match=r"no option speed[\s\S]*time_limit_s"):
        solve(problem, "ilp", speed=1)


def test_exhaustive_search_knows_its_limits():
    count = 30
    problem = SearchProblem(
        names=tuple(f"v{n}" for n in range(count)),
        cost_s=(np.zeros(2),) * count,
        edges=(),
        memory_bytes=(np.zeros(2),) * count,
    )
    with pytest.raises(JaxparError, match="30 variables"):
        solve(problem, "exhaustive")


def test_methods_can_be_registered():
    @register_method("first")
    def first(problem):
        choice = (0,) * len(problem.names)
        seconds, memory = evaluate(problem, choice)
        return Solution(choice, seconds, -math.inf, memory, "feasible", "first", 0.0, 2)

    try:
        problem = SearchProblem(("a",), (np.ones(2),), (), (np.zeros(2),))
        assert solve(problem, "first").gap == math.inf
    finally:
        del _METHODS["first"]
