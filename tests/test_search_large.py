"""Transformer-like problems of real size: certified, and fast enough to ask for."""

import dataclasses
import math

import pytest
from search_problems import transformer

from jaxpar.search import evaluate, solve


def share_of_memory(problem, share):
    """The problem with a limit between the least bytes and those of the fastest."""
    least = sum(m.min() for m in problem.memory_bytes)
    free = solve(problem).memory_bytes
    limit = float(least + share * (free - least))
    return dataclasses.replace(problem, memory_limit_bytes=limit)


@pytest.mark.parametrize("share", [None, 0.9, 0.5, 0.2, 0.05, 0.0])
def test_role_named_axes(share):
    problem = transformer(4, (2, 4), free=False)
    if share is not None:
        problem = share_of_memory(problem, share)
    found = solve(problem)
    assert (found.status, found.gap) == ("optimal", 0.0)
    assert found.memory_bytes <= problem.memory_limit_bytes
    assert evaluate(problem, found.choice) == (found.objective_s, found.memory_bytes)


def test_elimination_agrees_with_the_integer_program():
    problem = share_of_memory(transformer(2, (2, 2), free=False), 0.5)
    exact, program = solve(problem), solve(problem, "ilp")
    assert program.status == "optimal"
    assert exact.objective_s == pytest.approx(program.objective_s, rel=1e-8)
    walk = solve(problem, "mcmc", moves=5_000)
    assert walk.objective_s >= exact.objective_s


def test_thirty_thousand_choices():
    problem = transformer(12, (2, 2, 2))
    assert len(problem.names) > 250
    assert sum(c.size for c in problem.cost_s) > 29_000
    found = solve(problem)
    assert (found.status, found.gap) == ("optimal", 0.0)
    assert found.lower_bound_s == found.objective_s


def test_hubs_that_elimination_alone_could_not_hold():
    problem = transformer(12, (2, 2, 2), tangled=True)
    found = solve(problem)
    assert (found.status, found.gap) == ("optimal", 0.0)
    assert found.stats["rounds"] >= 1


@pytest.mark.parametrize("share", [0.5, 0.05])
def test_hubs_within_a_memory_limit(share):
    problem = share_of_memory(transformer(2, (2, 2, 2), tangled=True), share)
    found = solve(problem)
    assert (found.status, found.gap) == ("optimal", 0.0)
    assert found.memory_bytes <= problem.memory_limit_bytes


def test_memory_that_no_plan_has():
    problem = transformer(4, (2, 4), free=False)
    least = sum(m.min() for m in problem.memory_bytes)
    tight = dataclasses.replace(problem, memory_limit_bytes=least * 0.999)
    found = solve(tight)
    assert (found.status, found.choice) == ("infeasible", None)
    assert found.least_memory_bytes == pytest.approx(least, rel=1e-12)
    assert found.objective_s == math.inf


def test_runs_are_repeatable():
    problem = share_of_memory(transformer(2, (2, 2, 2), tangled=True), 0.2)
    assert solve(problem).choice == solve(problem).choice


def test_a_wanted_gap_saves_the_proof():
    problem = share_of_memory(transformer(4, (2, 4), free=False), 0.01)
    rough, exact = solve(problem, relative_gap=0.05), solve(problem)
    assert rough.gap <= 0.05
    assert rough.lower_bound_s <= exact.objective_s <= rough.objective_s
