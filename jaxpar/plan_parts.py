"""The parts of a plan: one frozen dataclass per concept, which is also one JSON object.

Each `*_bytes` is per device unless it says otherwise, each `*_s` is of one training
step. A `Spec` has one entry per dim: the mesh axes that split it, major axis first.
Fields without a default must be in a plan file; `DERIVED` properties are written to
it for readers, and may be left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxpar.sharding import Spec

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
PHASES = ("forward", "backward", "update")
MOMENTS = ("here", "before", "after")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The topology that the plan was made for.

    Attributes:
        name: Name of the topology, such as "tpu-v5e-4x4".
        devices: How many it has; the mesh may use fewer.
        chip: Name of the chip.
        slices: Equal groups of devices joined by the slow network.
        memory_bytes: Of one device.
    """

    name: str
    devices: int
    chip: str
    slices: int = 1
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class AxisNote:
    """What an axis of the mesh is for, and the link behind it; for readers."""

    role: str
    link: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelPrint:
    """What tells one model from another (see `model_print`).

    Attributes:
        parameters: Elements of all parameters together.
        leaves: Arrays among parameters and state.
        digest: Hash of their paths and shapes; None in a plan written by hand.
    """

    parameters: int
    leaves: int
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One array of the global batch."""

    shape: tuple[int, ...]
    dtype: str
    spec: Spec


@dataclass(frozen=True, kw_only=True)
class ParamPlan:
    """One parameter.

    Attributes:
        shape: Global shape.
        dtype: Name of the dtype.
        storage: How it rests between steps; its gradient ends up the same way.
        compute: How the operators read it.
        optimizer: How optimizer state of its shape rests.
        bytes_per_device: Of the parameter at rest.
        stage: Stage of its layer, from 0; None without a pipeline.
        reason: Why it lies so.
    """

    shape: tuple[int, ...]
    dtype: str
    storage: Spec
    compute: Spec
    optimizer: Spec
    bytes_per_device: int
    stage: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ActivationPlan:
    """A constraint on one value of the forward pass.

    Attributes:
        shape: Global shape; inside a repeated block, of one execution.
        dtype: Name of the dtype.
        specs: Layouts that it takes one after the other; the last one stays.
        executions: How often it is computed in one forward pass.
        reason: Why it lies so.
    """

    shape: tuple[int, ...]
    dtype: str
    specs: tuple[Spec, ...]
    executions: int = 1
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Replication:
    """A tensor that every device holds whole.

    Attributes:
        bytes: Of the whole tensor, which is what each device spends.
        wanted: The layout that was asked for, in the words of who asked.
        reason: Why it could not, or should not, be split.
    """

    bytes: int
    wanted: str = ""
    reason: str


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Peak bytes per device by class, and the limit that they must keep to.

    Attributes:
        parameters_bytes: Parameters at rest, frozen ones included.
        gradients_bytes: Gradients in the layout of the storage.
        optimizer_bytes: Optimizer state, its counters included.
        model_state_bytes: Model state, random state and the step counter.
        residuals_bytes: What the forward pass keeps for the backward pass.
        transients_bytes: Gathered weights, logits and other short-lived values.
        batch_bytes: The batch.
        limit_bytes: What a device offers.
    """

    DERIVED: ClassVar = ("total_bytes",)
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    model_state_bytes: int
    residuals_bytes: int
    transients_bytes: int
    batch_bytes: int
    limit_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of all classes."""
        return sum(size for _, size in self.classes())

    def classes(self) -> Iterator[tuple[str, int]]:
        """Name and bytes of each class, in the order of the fields."""
        for name, size in vars(self).items():
            if name != "limit_bytes":
                yield name.removesuffix("_bytes"), size


@dataclass(frozen=True, kw_only=True)
class OverlapPrediction:
    """What the simulated timeline expects, where collectives run beside computation.

    Attributes:
        step_s: The whole step.
        exposed_communication_s: Per axis, what computation waits for; keys as in
            `Prediction.communication_s`.
        mfu: Model FLOPs over peak FLOPs, 0 to 1; None where the peak is unknown.
        hfu: The same with what is computed twice.
        tokens_per_s: Tokens of the global batch per second; None without tokens.
    """

    step_s: float
    exposed_communication_s: Mapping[str, float]
    mfu: float | None = None
    hfu: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the cost model expects of one training step.

    Attributes:
        step_s: The whole step: compute, exposed communication and optimizer.
        compute_s: Forward and backward computation.
        communication_s: Per axis, all its collectives back to back; a group over
            several axes at once has the key "axis+axis".
        exposed_communication_s: The part of them that no computation hides.
        optimizer_s: The update.
        mfu: Model FLOPs over peak FLOPs, 0 to 1; None where the peak is unknown.
        tokens_per_s: Tokens of the global batch per second; None without tokens.
        memory: Peak bytes per device.
        overlapped: The same with overlap; `step_s` and the search know of none.
    """

    step_s: float
    compute_s: float
    communication_s: Mapping[str, float]
    exposed_communication_s: float
    optimizer_s: float
    mfu: float | None = None
    tokens_per_s: float | None = None
    memory: MemoryPrediction
    overlapped: OverlapPrediction | None = None


@dataclass(frozen=True, kw_only=True)
class CollectivePlan:
    """A collective operation that the step will run.

    Attributes:
        kind: One of `COLLECTIVES`, as compiled programs call them.
        axes: Mesh axes that its groups span.
        bytes: Per device and execution: of the result of an all-gather, of the
            operand of the others.
        executions: How often it runs in one step.
        phase: One of `PHASES`.
        where: Name of the operator, tensor or parameter.
        reason: What makes it necessary.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    executions: int
    phase: str
    where: str
    reason: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all executions in one step."""
        return self.bytes * self.executions


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """Something that takes time in a step: computation, or collectives of one kind.

    Attributes:
        name: Of the operator, tensor or parameter.
        phase: One of `PHASES`.
        block: Tasks of one block in a row are repeated together.
        rounds: How often the block runs.
        seconds: In one round.
        kind: "compute", or one of `COLLECTIVES`.
        axes: Mesh axes; () for computation.
        streams: Classes of links that carry it, such as "ici data" or "network".
        when: One of `MOMENTS`: computation waits for it where it stands ("here");
            it may start before, or end after.
        slack: By how many rounds before or after; from 1 on, "after" means until
            the update.
    """

    name: str
    phase: str
    block: int = 0
    rounds: int = 1
    seconds: float
    kind: str = "compute"
    axes: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    when: str = "here"
    slack: int = 0


@dataclass(frozen=True, kw_only=True)
class MeshTried:
    """A mesh that the search looked at: its best step time, or why it was refused."""

    mesh: Mapping[str, int]
    remat: str | None = None
    objective_s: float | None = None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class RematPlan:
    """What repeated blocks keep for the backward pass, and why.

    Attributes:
        level: "none": all that it reads. "selective": all but what attention cores
            make. "full": their input. "named": their input and the values in `saved`.
            "model": as the model has it; what the model itself rematerialises stays
            as it is under the other levels too.
        saved: For "named": keys of `activations` of the same model, or names of other
            values in it.
        reason: Why.
    """

    level: str = "model"
    saved: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class SearchReport:
    """How the plan was found, and how good it is known to be.

    Attributes:
        method: Name of the search method.
        status: "optimal" where nothing better exists within the model of cost,
            "feasible" where only the bound is known, or the method's own word.
        objective_s: Modelled step time that the search minimised.
        lower_bound_s: No plan on this mesh is faster; None where none is known.
        candidates: Strategies over all operators.
        seconds: Time spent planning.
        meshes_tried: Every mesh that was looked at, or refused.
    """

    DERIVED: ClassVar = ("gap",)
    method: str
    status: str
    objective_s: float
    lower_bound_s: float | None = None
    candidates: int
    seconds: float
    meshes_tried: tuple[MeshTried, ...] = ()

    @property
    def gap(self) -> float | None:
        """How far above the bound the plan may be, as a share of its own time."""
        if self.lower_bound_s is None:
            return None
        excess = max(0.0, self.objective_s - self.lower_bound_s)
        return excess / self.objective_s if excess else 0.0
