"""What is asked of the planner, and what it answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxpar.cost.memory import Memory
from jaxpar.cost.operators import Workload
from jaxpar.cost.problem import MeshProblem
from jaxpar.graph import OperatorGraph
from jaxpar.hardware import Topology
from jaxpar.pins import Wishes
from jaxpar.plan import MeshTried
from jaxpar.remat_choice import AS_IT_IS, Remat
from jaxpar.search.problem import SearchProblem, Solution
from jaxpar.strategy import LeafStrategy, Strategy


@dataclass(frozen=True)
class Model:
    """A model under one choice of rematerialisation."""

    graph: OperatorGraph
    workload: Workload
    remat: Remat


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        graph: The model.
        topology: The machine; its `memory_bytes` is the limit.
        mesh: Axis sizes, or None to search them.
        workload: Training or inference, and optimizer bytes.
        remat: What the model's blocks keep for the backward pass.
        harder: The model again, keeping less and less, or None where that is the
            same; tried where `graph` does not fit in its fastest layout.
        wishes: Pins and rules.
        zero: Stage of ZeRO that an fsdp axis is for; None leaves it to the search.
        method: Search method.
        seed: Of randomised search methods.
        progress: Called with (meshes done, meshes in all).
    """

    graph: OperatorGraph
    topology: Topology
    mesh: Mapping[str, int] | None
    workload: Workload
    remat: Remat = AS_IT_IS
    harder: tuple[Callable[[], Model | None], ...] = ()
    wishes: Wishes = field(default_factory=Wishes)
    zero: int | None = None
    method: str = "auto"
    seed: int = 0
    progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True)
class Decision:
    """The best layout found, and how it was found.

    Attributes:
        problem: The choices and prices of its mesh.
        search_problem: The tables that were minimised.
        solution: The search's answer.
        memory: Bytes per device by class.
        tried: Every mesh that was looked at.
        notes: What had no effect, and what did not divide.
        seconds: Time spent.
        remat: What blocks keep for the backward pass.
        remat_reason: Why.
    """

    problem: MeshProblem
    search_problem: SearchProblem
    solution: Solution
    memory: Memory
    tried: tuple[MeshTried, ...]
    notes: tuple[str, ...]
    seconds: float
    remat: Remat = AS_IT_IS
    remat_reason: str = ""

    @property
    def leaves(self) -> tuple[LeafStrategy, ...]:
        """Chosen layouts of the leaves."""
        choice = self.solution.choice or ()
        return tuple(
            found[k] for found, k in zip(self.problem.leaves, choice, strict=False)
        )

    @property
    def operators(self) -> tuple[Strategy, ...]:
        """Chosen strategies of the operators."""
        choice = (self.solution.choice or ())[len(self.problem.leaves) :]
        return tuple(
            found[k] for found, k in zip(self.problem.operators, choice, strict=True)
        )


def remat_reason(chosen: Decision, fastest: Decision | None, levels: int) -> str:
    """Why blocks keep what they keep.

    Args:
        chosen: The plan.
        fastest: The fastest layout of the first level, whatever memory it needs.
        levels: How many were tried.
    """
    if levels == 1:
        need = chosen.memory.total_bytes / 2**30
        limit = chosen.problem.mesh.topology.memory_bytes / 2**30
        fits = f"the plan needs {need:.3g} of {limit:.3g} GiB per device"
        keeping = chosen.remat.level in ("none", "model")
        return fits if keeping else "as asked"
    if fastest is None:
        return "the only choice for which there is a layout"
    slower = chosen.solution.objective_s / fastest.solution.objective_s - 1
    return (
        f"with level {fastest.remat.level!r} the fastest layout needs "
        f"{fastest.memory.total_bytes / 2**30:.3g} GiB per device, too much; this is "
        f"the fastest plan that fits, {slower:.1%} slower than that would be"
    )
