"""The parts of the exact search, each against brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_problems import random_problem, transformer

from jaxpar.search import Edge, SearchProblem, evaluate
from jaxpar.search.contraction import Contraction, find_order, make_schedule
from jaxpar.search.messages import MessagePassing
from jaxpar.search.network import network_of, propagate, restrict, undominated


def small_problem(seed: int, forbidden: float = 0.0):
    rng = np.random.default_rng(seed)
    return random_problem(rng, 6, 4, int(rng.integers(3, 12)), forbidden)


def marginals(problem):
    """Per variable, the least cost of any plan with each choice; by enumeration."""
    least = [np.full(c.size, math.inf) for c in problem.cost_s]
    for choice in itertools.product(*(range(c.size) for c in problem.cost_s)):
        seconds, _ = evaluate(problem, choice)
        for v, k in enumerate(choice):
            least[v][k] = min(least[v][k], seconds)
    return least


seeds = st.integers(0, 10**6)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([0.0, 0.3]))
def test_beliefs_are_the_least_costs_of_every_choice(seed, forbidden):
    problem = small_problem(seed, forbidden)
    network = propagate(network_of(problem), math.inf)
    exact = marginals(problem)
    if network is None:
        assert all(m.min() == math.inf for m in exact)
        return
    order = find_order(network.sizes, network.neighbours)
    contraction = Contraction(network, make_schedule(network, order))
    total = contraction.run(network.unary)
    optimum = min(m.min() for m in exact)
    if optimum == math.inf:
        assert total == math.inf
        return
    for step, belief in zip(
        contraction.schedule.steps, contraction.beliefs(), strict=True
    ):
        flat = belief.reshape(belief.shape[0], -1).min(axis=1)
        kept = exact[step.variable][network.kept[step.variable]]
        np.testing.assert_allclose(flat - flat.min(), kept - optimum, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([0.0, 0.3]))
def test_message_bounds_hold_for_every_choice_and_never_fall(seed, forbidden):
    problem = small_problem(seed, forbidden)
    exact = marginals(problem)
    network = propagate(network_of(problem), math.inf)
    if network is None or min(m.min() for m in exact) == math.inf:
        return
    passing = MessagePassing(network, network.unary)
    before = -math.inf
    for _ in range(6):
        last = passing.sweep()
        assert before <= last.lower_bound_s
        before = last.lower_bound_s
        bound = last.lower_bound_s + problem.constant_s
        assert bound <= min(m.min() for m in exact) + 1e-9
        for v in last.slack:
            conditional = last.conditional(v) + problem.constant_s
            assert (conditional <= exact[v][network.kept[v]] + 1e-9).all()
    choice = network.original(passing.decode())
    assert evaluate(problem, choice)[0] >= min(m.min() for m in exact) - 1e-9


def test_messages_are_exact_on_a_chain():
    rng = np.random.default_rng(3)
    sizes = [3, 5, 2, 4, 3]
    problem = SearchProblem(
        names=tuple("abcde"),
        cost_s=tuple(rng.random(k) for k in sizes),
        edges=tuple(
            Edge(n, n + 1, rng.random((sizes[n], sizes[n + 1]))) for n in range(4)
        ),
        memory_bytes=tuple(np.zeros(k) for k in sizes),
    )
    network = network_of(problem)
    passing = MessagePassing(network, network.unary)
    passing.sweep()
    last = passing.sweep()
    for v, exact in enumerate(marginals(problem)):
        np.testing.assert_allclose(last.conditional(v), exact, rtol=1e-12)
    assert evaluate(problem, passing.decode())[0] == pytest.approx(last.lower_bound_s)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from([0.0, 0.3]))
def test_dominance_keeps_an_optimum(seed, forbidden):
    problem = small_problem(seed, forbidden)
    network = propagate(network_of(problem), math.inf)
    if network is None:
        return
    left = undominated(network, range(len(network.sizes)))
    kept = [range(k.size) for k in left.kept]
    best = min(
        evaluate(problem, left.original(choice))[0]
        for choice in itertools.product(*kept)
    )
    assert best == min(m.min() for m in marginals(problem))


def test_equal_choices_are_dominated_down_to_one():
    problem = SearchProblem(
        names=("a", "b"),
        cost_s=(np.zeros(3), np.zeros(2)),
        edges=(Edge(0, 1, np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])),),
        memory_bytes=(np.array([1.0, 1.0, 2.0]), np.zeros(2)),
    )
    left = undominated(network_of(problem), [0])
    assert left.kept[0].tolist() == [0]


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_restricting_keeps_costs(seed):
    problem = small_problem(seed)
    network = network_of(problem)
    rng = np.random.default_rng(seed)
    keep = {}
    for v, size in enumerate(network.sizes):
        mask = rng.random(size) < 0.5
        mask[rng.integers(size)] = True
        keep[v] = mask
    left = restrict(network, keep)
    for _ in range(5):
        choice = [int(rng.integers(k)) for k in left.sizes]
        total = [u[k] for u, k in zip(left.unary, choice, strict=True)]
        total += [t[choice[i], choice[j]] for (i, j), t in left.edges.items()]
        seconds, _ = evaluate(problem, left.original(choice))
        assert sum(total) + problem.constant_s == pytest.approx(seconds)
        assert left.local(left.original(choice)) == choice


def test_large_tables_are_joined_in_blocks():
    rng = np.random.default_rng(0)
    sizes = [40, 30, 20, 25]
    pairs = list(itertools.combinations(range(4), 2))
    problem = SearchProblem(
        names=tuple("abcd"),
        cost_s=tuple(rng.random(k) for k in sizes),
        edges=tuple(Edge(i, j, rng.random((sizes[i], sizes[j]))) for i, j in pairs),
        memory_bytes=tuple(np.zeros(k) for k in sizes),
    )
    network = network_of(problem)
    order = find_order(network.sizes, network.neighbours)
    contraction = Contraction(network, make_schedule(network, order))
    least = contraction.run(network.unary)
    whole = np.zeros(sizes)
    for v, k in enumerate(sizes):
        whole += problem.cost_s[v].reshape([k if u == v else 1 for u in range(4)])
    for edge in problem.edges:
        ends = (edge.first, edge.second)
        shape = [sizes[u] if u in ends else 1 for u in range(4)]
        whole += edge.cost_s.reshape(shape)
    assert least == pytest.approx(whole.min(), rel=1e-12)
    choice = contraction.assignment()
    assert whole[tuple(choice)] == pytest.approx(whole.min(), rel=1e-12)


def test_a_cap_fixes_variables_and_other_ones_next_time():
    network = network_of(transformer(2, (4, 4), tangled=True))
    free = find_order(network.sizes, network.neighbours)
    worn = [0] * len(network.sizes)
    cap = free.work / 1e4
    first = find_order(network.sizes, network.neighbours, cap, worn)
    assert first.fixed
    assert first.largest <= cap
    assert sorted(first.variables + first.fixed) == sorted(free.variables)
    for v in first.fixed:
        worn[v] += 1
    second = find_order(network.sizes, network.neighbours, cap, worn)
    assert set(second.fixed) != set(first.fixed)
