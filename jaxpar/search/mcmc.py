"""Simulated annealing over single variables: the baseline to beat."""

import math

import numpy as np

from jaxpar.search.problem import Incumbent, SearchProblem, Solution, register_method

FORBIDDEN = 1e3
"""A forbidden choice or pair, in multiples of the typical total cost."""


@register_method("mcmc")
def mcmc(
    problem: SearchProblem,
    *,
    seed: int = 0,
    moves: int = 20_000,
    hot: float = 0.1,
    cold: float = 1e-5,
) -> Solution:
    """Anneals single-variable moves (heat bath), from the cheapest choices alone.

    No bound comes with it: the gap is inf.

    Args:
        problem: What to minimise.
        seed: Of the random numbers.
        moves: Variables redrawn, one at a time.
        hot: First temperature, as a share of the first plan's cost.
        cold: Last temperature, likewise.
    """
    incumbent = Incumbent(problem)
    walk = _Walk(problem, np.random.default_rng(seed))
    incumbent.offer(walk.choice)
    best = walk.objective()
    cooling = (cold / hot) ** (1 / max(moves - 1, 1))
    temperature = hot * walk.scale
    variables = walk.rng.integers(0, max(len(problem.names), 1), moves).tolist()
    for v in variables if problem.names else ():
        walk.redraw(v, temperature)
        temperature *= cooling
        if walk.value < best - 1e-12 * walk.scale:
            best = walk.value
            incumbent.offer(walk.choice)
    return incumbent.solution("mcmc", -math.inf, {"moves": moves, "seed": seed})


class _Walk:
    """The present choice and its penalised cost.

    Forbidden things cost `FORBIDDEN` times the typical total, and so does every
    full limit's worth of bytes above the limit.
    """

    def __init__(self, problem: SearchProblem, rng: np.random.Generator):
        self.problem, self.rng = problem, rng
        finite = [c[c < math.inf] for c in problem.cost_s]
        finite += [e.cost_s[e.cost_s < math.inf] for e in problem.edges]
        self.scale = sum(float(np.abs(f).mean()) for f in finite if f.size) or 1.0
        wall = FORBIDDEN * self.scale
        self.unary = [np.minimum(c, wall) for c in problem.cost_s]
        self.tables: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.names]
        for edge in problem.edges:
            table = np.minimum(edge.cost_s, wall)
            self.tables[edge.first].append((edge.second, table.T))
            self.tables[edge.second].append((edge.first, table))
        self.choice = [int(u.argmin()) for u in self.unary]
        self.limit = problem.memory_limit_bytes
        self.price = wall / self.limit if 0 < self.limit < math.inf else 0.0
        self.bytes = sum(
            float(m[k]) for m, k in zip(problem.memory_bytes, self.choice, strict=True)
        )
        self.value = self.objective()

    def objective(self) -> float:
        """Penalised seconds of the present choice, from scratch."""
        total = [float(u[k]) for u, k in zip(self.unary, self.choice, strict=True)]
        for v, near in enumerate(self.tables):
            k = self.choice[v]
            total += [float(t[self.choice[u], k]) / 2 for u, t in near]
        return math.fsum(total) + self.price * max(self.bytes - self.limit, 0.0)

    def redraw(self, v: int, temperature: float) -> None:
        """Draws one variable anew from its Boltzmann distribution."""
        local = self.unary[v]
        for other, table in self.tables[v]:
            local = local + table[self.choice[other]]
        old, memory = self.choice[v], self.problem.memory_bytes[v]
        if self.price:
            total = self.bytes - memory[old] + memory
            local = local + self.price * np.maximum(total - self.limit, 0.0)
        noise = self.rng.gumbel(size=local.size)
        new = int((noise - local / temperature).argmax())
        self.choice[v] = new
        self.value += float(local[new] - local[old])
        self.bytes += float(memory[new] - memory[old])
