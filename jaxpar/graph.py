"""The operator graph: what the search sees of a model.

The graph holds the forward pass only; factor rules say what the backward pass
does. Blocks that repeat (scanned or unrolled) stand in it once, with the number
of their executions.
"""

import math
from dataclasses import dataclass, field

from jaxpar.rules.rule import Dims, Factor, FactorKind


@dataclass(frozen=True)
class Tensor:
    """One array of the forward pass.

    Attributes:
        name: Stable name, for plans and messages.
        shape: Global shape; inside a repeated block, of one execution.
        dtype: Name of the dtype.
        itemsize: Bytes per element.
        active: Whether a gradient flows through it.
        leaf: Index into `OperatorGraph.leaves` if it is an input, else None.
        classes: Per dim, the class of dims that it is one with (see `DimClass`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    active: bool
    leaf: int | None = None
    classes: tuple[int, ...] = ()

    @property
    def bytes(self) -> float:
        """Bytes of the whole, unsharded tensor."""
        return float(math.prod(self.shape)) * self.itemsize


@dataclass(frozen=True)
class DimClass:
    """Dims that share factors, and so split alike.

    Attributes:
        granularity: Greatest count that divides every factor of the class; the
            number of parts must divide it (heads must not be cut in the middle).
        batch: Whether it holds the batch dim of an input.
        token: Whether it is a dim of activations only: neither batch nor a dim of
            a weight that is contracted or looked up.
        expert: Whether it is a batch dim of a contraction with weights.
    """

    granularity: int
    batch: bool = False
    token: bool = False
    expert: bool = False


@dataclass(frozen=True)
class Use:
    """A tensor read by an operand slot, and how often in one forward pass."""

    tensor: int
    executions: int


@dataclass(frozen=True)
class Operand:
    """An operand slot of an operator.

    Attributes:
        uses: What is read; several tensors where blocks repeat (the first block
            reads what came before, the others read the block before them).
        dims: Per dim, the factor that splits it or None.
        lacks: Factors of the operator that this operand does not run over: its
            cotangent is a partial sum over the axes that split them.
        saved: Whether the backward pass needs its value.
        replayed: Whether a checkpoint asks for it again in the backward pass.
    """

    uses: tuple[Use, ...]
    dims: Dims
    lacks: tuple[int, ...]
    saved: bool = False
    replayed: bool = False


@dataclass(frozen=True)
class Result:
    """A result of an operator; `sums` are the factors it is a partial sum over."""

    tensor: int
    dims: Dims
    sums: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reduction:
    """A partial sum inside a cluster of equations, resolved where it arises.

    Attributes:
        dims: Factors that the reduced value still runs over.
        over: Factors that were summed away.
        bytes: Of the whole value.
        backward: Whether it belongs to the backward pass.
    """

    dims: tuple[int, ...]
    over: tuple[int, ...]
    bytes: float
    backward: bool


@dataclass(frozen=True)
class Saved:
    """A value inside a cluster that the backward pass needs.

    Attributes:
        dims: Factors that it runs over.
        bytes: Of the whole value.
        named: Whether a checkpoint's policy keeps it, block by block.
    """

    dims: tuple[int, ...]
    bytes: float
    named: bool = False


@dataclass(frozen=True)
class Operator:
    """One equation, or a cluster of equations that split alike.

    Attributes:
        name: Stable name.
        kind: Primitive, or "pointwise" (cluster), "view" (one tensor read by
            several operators), "loop_carry".
        factors: Loop indices.
        operands: Inputs from other operators or leaves.
        results: Outputs that others read.
        reductions: Partial sums inside.
        saved: Values inside that the backward pass needs.
        flops: Of one unsharded forward execution.
        executions: How often it runs in one forward pass.
        recomputed: Whether it is part of a checkpoint (rematerialised).
        replayed: Whether it runs again in the backward pass: not all of a checkpoint
            does.
        parameter_only: Whether it depends on parameters alone.
        active: Whether gradients flow through it.
        weighted: Whether an operand is made of parameters alone.
        classes: Per factor, its class of dims.
    """

    name: str
    kind: str
    factors: tuple[Factor, ...]
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    reductions: tuple[Reduction, ...] = ()
    saved: tuple[Saved, ...] = ()
    flops: float = 0.0
    executions: int = 1
    recomputed: bool = False
    replayed: bool = False
    parameter_only: bool = False
    active: bool = True
    weighted: bool = False
    classes: tuple[int, ...] = ()

    @property
    def heavy(self) -> bool:
        """Whether it is a matrix multiplication or convolution."""
        return self.kind in HEAVY


HEAVY = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
)


@dataclass(frozen=True)
class GraphLeaf:
    """An input of the model, or the same input of all repeats of a block.

    Attributes:
        paths: Leaf paths; more than one where an unrolled block repeats.
        role: "param", "state", "rng" or "batch".
        shape: Of each leaf.
        dtype: Name of the dtype.
        itemsize: Bytes per element.
        stacked: Whether dim 0 counts the layers of a scan; never sharded.
        tensor: Index of the tensor that operators read; where the leaf is
            stacked, a slice of it, one rank lower.
        trained: Whether it gets a gradient.
        names: Logical or physical names of its dims as annotated, or None.
        names_kind: "logical" or "physical".
    """

    paths: tuple[str, ...]
    role: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    stacked: bool
    tensor: int
    trained: bool
    names: tuple[str | tuple[str, ...] | None, ...] | None = None
    names_kind: str | None = None

    @property
    def bytes(self) -> float:
        """Bytes of one leaf, whole."""
        return float(math.prod(self.shape)) * self.itemsize


@dataclass(frozen=True)
class OperatorGraph:
    """Operators, tensors and leaves of one forward pass."""

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    leaves: tuple[GraphLeaf, ...]
    classes: tuple[DimClass, ...]
    batch_size: int
    notes: tuple[str, ...] = field(default=())


def check(graph: OperatorGraph) -> None:
    """Raises ValueError where the graph contradicts itself."""
    written: set[int] = {leaf.tensor for leaf in graph.leaves}
    for op in graph.operators:
        for result in op.results:
            if result.tensor in written:
                raise ValueError(f"{op.name}: tensor {result.tensor} written twice")
            written.add(result.tensor)
    for op in graph.operators:
        ends = [(u.tensor, o.dims) for o in op.operands for u in o.uses]
        ends += [(r.tensor, r.dims) for r in op.results]
        for index, dims in ends:
            tensor = graph.tensors[index]
            if index not in written:
                raise ValueError(f"{op.name}: {tensor.name} is never written")
            if len(dims) != len(tensor.shape):
                raise ValueError(f"{op.name}: {tensor.name} has {tensor.shape}")
            _check_sizes(op, tensor, dims)


def _check_sizes(op: Operator, tensor: Tensor, dims: Dims) -> None:
    for n, f in zip(tensor.shape, dims, strict=True):
        if f is None or op.factors[f].kind is FactorKind.WHOLE:
            continue
        if n % op.factors[f].size:
            raise ValueError(
                f"{op.name}: factor of {op.factors[f].size} on {tensor.name}, dim {n}"
            )
