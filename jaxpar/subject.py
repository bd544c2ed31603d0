"""What is planned and applied: a traced, lowered model with its optimizer."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import optax
from flax import nnx

from jaxpar.cost.operators import UpdateSum, Workload
from jaxpar.errors import ModelError
from jaxpar.graph import OperatorGraph
from jaxpar.lower import Lowered, lower
from jaxpar.model import make_model
from jaxpar.optimizer_state import StateBytes, state_bytes
from jaxpar.optimizer_sums import optimizer_sums
from jaxpar.pins import Wishes, uniform
from jaxpar.rewrite import Site
from jaxpar.trace import Traced, trace


@dataclass(frozen=True)
class Subject:
    """A model, traced and lowered, and its optimizer.

    Attributes:
        traced: The loss.
        lowered: Its operator graph.
        optimizer: None for inference.
        state: Bytes of the optimizer's state, by parameter of the graph.
        folded: Whether repeated blocks share their strategies.
    """

    traced: Traced
    lowered: Lowered
    optimizer: optax.GradientTransformation | None
    state: StateBytes
    folded: bool = True

    @property
    def graph(self) -> OperatorGraph:
        """The operator graph."""
        return self.lowered.graph

    def workload(self) -> Workload:
        """Optimizer bytes per parameter byte, by leaf of the graph."""
        trained = [
            (i, leaf)
            for i, leaf in enumerate(self.graph.leaves)
            if leaf.role == "param"
        ]
        ratios = {
            i: owned / max(leaf.bytes * len(leaf.paths), 1.0)
            for (i, leaf), owned in zip(trained, self.state.owned, strict=True)
        }
        return Workload(
            self.optimizer is not None, ratios, self.state.unowned, self._sums()
        )

    def _sums(self) -> tuple[UpdateSum, ...]:
        if self.optimizer is None:
            return ()
        leaves = enumerate(self.graph.leaves)
        index = {leaf.paths[0]: i for i, leaf in leaves if leaf.role == "param"}
        params = self.traced.model.abstract[0]
        return tuple(
            UpdateSum(index[s.parameter], s.kept, s.over, s.bytes, s.stored)
            for s in optimizer_sums(self.optimizer, params, tuple(index))
        )

    def sites(self) -> Mapping[str, tuple[Site, ...]]:
        """Stable name of a constraint -> where in the traced jaxpr it goes."""
        found: dict[str, tuple[Site, ...]] = {}
        graph = self.graph
        for tensor, places in self.lowered.after.items():
            found[graph.tensors[tensor].name] = tuple(Site(*p) for p in places)
        for (op, operand), places in self.lowered.before.items():
            sites = tuple(Site(*p) for p in places)
            for use in graph.operators[op].operands[operand].uses:
                name = f"{graph.tensors[use.tensor].name} -> {graph.operators[op].name}"
                found[name] = sites
        return found


@contextmanager
def _no_collection() -> Iterator[None]:
    """Puts off the search for cyclic garbage.

    Tracing makes many objects that live on; on every few of them Python would look
    through all that JAX holds, which takes as long as the tracing itself.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@_no_collection()
def prepare(
    model: Any,
    optimizer: optax.GradientTransformation | None,
    loss: Callable[..., Any],
    batch: Any,
    *,
    init: Callable[..., Any] | None = None,
    wrt: Any = nnx.Param,
    mutable: str | tuple[str, ...] = (),
    wanted: Wishes | None = None,
) -> Subject:
    """Traces and lowers a model.

    Raises:
        ModelError: if the arguments do not fit one another.
        RuleError: for a primitive without a factor rule.
    """
    face = make_model(model, batch, loss, init=init, wrt=wrt, mutable=mutable)
    traced = trace(face, batch)
    patterns = wanted.pins if wanted else {}
    size = global_batch_size(traced)
    lowered = lower(traced, size)
    groups = [leaf.paths for leaf in lowered.graph.leaves]
    folded = all(uniform(paths, patterns) for paths in groups)
    if not folded:
        lowered = lower(traced, size, folded=False)
    state = _state_bytes(optimizer, face.abstract[0], lowered.graph)
    return Subject(traced, lowered, optimizer, state, folded)


def relowered(subject: Subject, traced: Traced) -> Subject:
    """The subject with another form of its loss."""
    lowered = lower(traced, subject.graph.batch_size, folded=subject.folded)
    params = traced.model.abstract[0]
    state = _state_bytes(subject.optimizer, params, lowered.graph)
    return replace(subject, traced=traced, lowered=lowered, state=state)


def _state_bytes(
    optimizer: optax.GradientTransformation | None, params: Any, graph: OperatorGraph
) -> StateBytes:
    groups = [leaf.paths for leaf in graph.leaves if leaf.role == "param"]
    if optimizer is None:
        return StateBytes((0.0,) * len(groups), 0.0)
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise ModelError(
            f"optimizer is {type(optimizer).__name__}, not an optax transformation",
            hint="pass optax.adamw(...), say, or None for inference",
        )
    return state_bytes(optimizer, params, groups)


def global_batch_size(traced: Traced) -> int:
    """The leading size that most arrays of the batch share; 1 without arrays."""
    sizes = Counter(p.shape[0] for p in traced.leaves if p.role == "batch" and p.shape)
    return sizes.most_common(1)[0][0] if sizes else 1
