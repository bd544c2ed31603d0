"""What may be asked of a plan: each check is a function of a `Run`."""

import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from one_device import History, on_host, on_mesh

from jaxpar.errors import JaxparError
from jaxpar.pure import named_leaves
from jaxpar.runtime import Sharded, State
from jaxpar.sharding import Spec
from known_failures.situation import Situation

COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\b"
)


@dataclass(frozen=True)
class Leaf:
    """An array of the state or the batch, as planned."""

    path: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.NamedSharding

    @property
    def spec(self) -> Spec:
        """For every dim, its axes of more than one device."""
        sizes = self.sharding.mesh.shape
        dims = [d if isinstance(d, tuple) else (d,) for d in self.sharding.spec]
        dims += [()] * (len(self.shape) - len(dims))
        return tuple(tuple(a for a in dim if a and sizes[a] > 1) for dim in dims)

    def axes(self, dim: int | None) -> set[str]:
        """Axes that split a dim, or any dim."""
        return set().union(*(self.spec if dim is None else (self.spec[dim],)))

    @property
    def device_bytes(self) -> int:
        """Of one device's part."""
        return math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize


def leaves(arrays: Any, shardings: Any) -> dict[str, Leaf]:
    """Arrays, or structs, with their shardings, by path."""
    placed = named_leaves(shardings)
    found = named_leaves(arrays)
    assert found.keys() == placed.keys()
    return {p: Leaf(p, x.shape, x.dtype, placed[p]) for p, x in found.items()}


@dataclass(frozen=True)
class Run:
    """A situation, its plan, and the training that follows from it."""

    situation: Situation
    sharded: Sharded

    def _part(self, name: str) -> dict[str, Leaf]:
        parts = (self.sharded.abstract_state, self.sharded.state_shardings)
        return leaves(*(getattr(part, name) for part in parts))

    @cached_property
    def params(self) -> dict[str, Leaf]:
        """The trained parameters."""
        return self._part("params")

    @cached_property
    def model(self) -> dict[str, Leaf]:
        """All arrays of the model."""
        return self.params | self._part("model_state") | self._part("rngs")

    @cached_property
    def optimizer(self) -> dict[str, Leaf]:
        """The optimizer's arrays."""
        return self._part("opt_state")

    @cached_property
    def batch(self) -> dict[str, Leaf]:
        """The batch."""
        return leaves(self.situation.batch, self.sharded.batch_shardings)

    @property
    def kept(self) -> list[Leaf]:
        """All that a step keeps, but the random keys."""
        parts = (self.params, self._part("model_state"), self.optimizer)
        step = self._part("step")
        return [leaf for part in (*parts, step) for leaf in part.values()]

    @property
    def owned(self) -> Iterator[tuple[Leaf, Leaf]]:
        """Optimizer arrays, each with the array of the model that it is kept for."""
        for path, leaf in self.optimizer.items():
            owners = [p for p in self.model if f"/{path}".endswith(f"/{p}")]
            if owners:
                yield leaf, self.model[max(owners, key=len)]

    @cached_property
    def history(self) -> History:
        """Of as many updates as the situation asks; every state lies as planned."""
        situation, wanted = self.situation, named_leaves(self.sharded.state_shardings)

        def look(state: State) -> None:
            for path, x in named_leaves(state).items():
                assert x.sharding.is_equivalent_to(wanted[path], x.ndim), path

        return on_mesh(self.sharded, situation.batch, situation.updates, look=look)


Check = Callable[[Run], None]


def matching(found: dict[str, Leaf], pattern: str) -> list[Leaf]:
    """Those whose path has the pattern: one at least."""
    hits = [leaf for path, leaf in found.items() if re.search(pattern, path)]
    assert hits, f"no {pattern} among {list(found)}"
    return hits


def split(pattern: str, dim: int | None, axis: str | None = None) -> Check:
    """Every such array is split there: on that dim or any, over that axis or any."""

    def check(run: Run) -> None:
        for leaf in matching(run.model, pattern):
            axes = leaf.axes(dim)
            assert axis in axes if axis else axes, leaf

    return check


def whole(pattern: str, dim: int | None = None, axis: str | None = None) -> Check:
    """No such array is split there."""

    def check(run: Run) -> None:
        for leaf in matching(run.model, pattern):
            axes = leaf.axes(dim)
            assert axis not in axes if axis else not axes, leaf

    return check


def batch_split(pattern: str, axis: str) -> Check:
    """Such parts of the batch are split along their first dim, others not at all."""

    def check(run: Run) -> None:
        for leaf in run.batch.values():
            first = ((axis,), *((),) * (len(leaf.shape) - 1))
            wanted = first if re.search(pattern, leaf.path) else ((),) * len(leaf.shape)
            assert leaf.spec == wanted, leaf

    return check


def moments_follow(pattern: str = "") -> Check:
    """Optimizer arrays of a parameter's shape lie as it does; there are some."""

    def check(run: Run) -> None:
        pairs = [
            (leaf, owner)
            for leaf, owner in run.owned
            if leaf.shape == owner.shape and re.search(pattern, leaf.path)
        ]
        assert pairs
        for leaf, owner in pairs:
            assert leaf.spec == owner.spec, leaf

    return check


def optimized(pattern: str) -> Check:
    """Such arrays, all of them and no others, have optimizer state."""

    def check(run: Run) -> None:
        found = {owner.path for _, owner in run.owned}
        assert found == {leaf.path for leaf in matching(run.model, pattern)}

    return check


def one_array(pattern: str) -> Check:
    """One array of the model has the pattern."""

    def check(run: Run) -> None:
        assert len(matching(run.model, pattern)) == 1

    return check


def weights(total: int) -> Check:
    """So many numbers are trained."""

    def check(run: Run) -> None:
        assert sum(math.prod(leaf.shape) for leaf in run.params.values()) == total

    return check


def state_bytes(*, device: int | None = None, total: int | None = None) -> Check:
    """The state takes at most so much on a device, or exactly so much in all."""

    def check(run: Run) -> None:
        if device is not None:
            assert sum(leaf.device_bytes for leaf in run.kept) <= device
        if total is not None:
            assert sum(leaf.total_bytes for leaf in run.kept) == total

    return check


def init_bytes(limit: int) -> Check:
    """Making the model takes at most so much on a device, at any time."""

    def check(run: Run) -> None:
        memory = run.sharded.init.lower(0).compile().memory_analysis()
        peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
        peak += memory.temp_size_in_bytes
        at_rest = sum(leaf.device_bytes for leaf in run.optimizer.values())
        assert peak - at_rest <= limit

    return check


def only_between_slices(*axes: str) -> Check:
    """No other axis leaves a slice."""

    def check(run: Run) -> None:
        mesh = run.sharded.state_shardings.step.mesh
        slice_of = {
            device: position * run.situation.slices // run.situation.devices
            for position, device in enumerate(jax.devices())
        }
        slices = np.vectorize(slice_of.get)(mesh.devices)
        crossing = {
            axis
            for dim, axis in enumerate(mesh.axis_names)
            if (slices.max(dim) != slices.min(dim)).any()
        }
        assert crossing and crossing <= set(axes)

    return check


def no_collective(run: Run) -> None:
    """The compiled step is silent."""
    lowered = run.sharded.step.lower(run.sharded.abstract_state, run.situation.batch)
    assert not COLLECTIVE.search(lowered.compile().as_text())


def ends_as(pattern: str, value: Any) -> Check:
    """Such arrays have the value in the end."""

    def check(run: Run) -> None:
        for leaf in matching(run.model, pattern):
            np.testing.assert_array_equal(run.history.final[leaf.path], value)

    return check


def unchanged(pattern: str) -> Check:
    """Training leaves such arrays alone."""

    def check(run: Run) -> None:
        for leaf in matching(run.model, pattern):
            initial = run.history.initial[leaf.path]
            np.testing.assert_array_equal(run.history.final[leaf.path], initial)

    return check


def refuses(mesh: dict[str, int], *numbers: int) -> Check:
    """Another mesh is refused by a message with the numbers."""

    def check(run: Run) -> None:
        with pytest.raises(JaxparError) as caught:
            run.situation.shard(mesh)
        assert names(caught.value, *numbers)

    return check


def names(error: Exception, *numbers: int) -> bool:
    """Whether the numbers stand in the message, each by itself."""
    return set(map(str, numbers)) <= set(re.findall(r"\d+", str(error)))


def restored_on(mesh: dict[str, int]) -> Check:
    """A saved state is restored into another mesh's plan, and training goes on."""

    def check(run: Run) -> None:
        other, batch = run.situation.shard(mesh), run.situation.batch
        state = run.sharded.init(0)
        for _ in range(run.situation.updates):
            state, _ = run.sharded.step(state, batch)
        saved = on_host(named_leaves(state))
        with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as s:
            s.save(Path(folder) / "state", state)
            s.wait_until_finished()
            restored = s.restore(Path(folder) / "state", other.abstract_state)
        wanted = named_leaves(other.state_shardings)
        for path, x in named_leaves(restored).items():
            assert x.sharding == wanted[path]
        for path, x in on_host(named_leaves(restored)).items():
            np.testing.assert_array_equal(x, saved[path], err_msg=path)
        _, straight = run.sharded.step(state, batch)
        _, resumed = other.step(restored, batch)
        assert float(resumed["loss"]) == pytest.approx(
            float(straight["loss"]), rel=run.situation.tolerance
        )

    return check
