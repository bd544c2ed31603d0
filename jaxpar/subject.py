"""What is planned and applied: a traced, lowered model with its optimizer."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx

from jaxpar.cost.operators import UpdateSum, Workload
from jaxpar.errors import ModelError
from jaxpar.graph import OperatorGraph
from jaxpar.lower import Lowered, lower
from jaxpar.model import make_model
from jaxpar.optimizer_state import optimizer_leaves
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
        abstract_opt_state: Of the optimizer, or ().
    """

    traced: Traced
    lowered: Lowered
    optimizer: optax.GradientTransformation | None
    abstract_opt_state: Any

    @property
    def graph(self) -> OperatorGraph:
        """The operator graph."""
        return self.lowered.graph

    def workload(self) -> Workload:
        """Optimizer bytes per parameter byte, by leaf of the graph."""
        shapes = {p.path: p.shape for p in self.traced.leaves if p.role == "param"}
        owned: dict[str, float] = {}
        unowned = 0.0
        for leaf in optimizer_leaves(self.abstract_opt_state, shapes):
            size = float(leaf.dtype.itemsize)
            for n in leaf.shape:
                size *= n
            if leaf.parameter is None or not any(d is not None for d in leaf.dims):
                unowned += size
            else:
                owned[leaf.parameter] = owned.get(leaf.parameter, 0.0) + size
        ratios = {
            i: sum(owned.get(p, 0.0) for p in leaf.paths)
            / max(leaf.bytes * len(leaf.paths), 1.0)
            for i, leaf in enumerate(self.graph.leaves)
            if leaf.role == "param"
        }
        return Workload(self.optimizer is not None, ratios, unowned, self._sums())

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
    if not all(uniform(paths, patterns) for paths in groups):
        lowered = lower(traced, size, folded=False)
    return Subject(traced, lowered, optimizer, _opt_state(optimizer, face.abstract[0]))


def _opt_state(optimizer: optax.GradientTransformation | None, params: Any) -> Any:
    if optimizer is None:
        return ()
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise ModelError(
            f"optimizer is {type(optimizer).__name__}, not an optax transformation",
            hint="pass optax.adamw(...), say, or None for inference",
        )
    try:
        return jax.eval_shape(optimizer.init, params)
    except Exception as problem:
        raise ModelError(
            f"the optimizer's init fails on the parameters: {problem}",
            hint="it gets nested dicts of arrays",
        ) from problem


def global_batch_size(traced: Traced) -> int:
    """The leading size that most arrays of the batch share; 1 without arrays."""
    sizes = Counter(p.shape[0] for p in traced.leaves if p.role == "batch" and p.shape)
    return sizes.most_common(1)[0][0] if sizes else 1
