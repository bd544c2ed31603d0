"""What made other tools fail is planned here, or refused in so many words."""

import re
from collections.abc import Iterator

import jax
import pytest
from known_failures import SITUATIONS, Situation
from known_failures.checks import Run, names
from one_device import Plain, course, relative_error

from jaxpar.errors import JaxparError
from jaxpar.runtime import Sharded

LEAST = 1e-3
"""What smaller numbers are compared as."""


@pytest.fixture
def programs() -> Iterator[list[str]]:
    """Names of the programs compiled while a test runs."""
    found: list[str] = []

    def listen(event: str, _seconds: float, **info: object) -> None:
        if event.endswith("/backend_compile_duration"):
            found.append(str(info.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    "situation", SITUATIONS, ids=[re.sub(r"\W+", "-", s.name) for s in SITUATIONS]
)
def test_known_failure(
    situation: Situation, programs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    present = jax.devices()[: situation.devices]
    monkeypatch.setattr(jax, "devices", lambda: present)
    sharded = planned_or_refused(situation)
    assert not programs
    if sharded is None:
        return
    run = Run(situation, sharded)
    check_shardings(run)
    check_memory(run)
    check_parity(run)
    for check in situation.checks:
        check(run)


def planned_or_refused(situation: Situation) -> Sharded | None:
    """The plan; None where the situation is refused, as it must be."""
    if not situation.refusal:
        return situation.shard(situation.mesh)
    with pytest.raises(JaxparError) as caught:
        situation.shard(situation.mesh)
    assert names(caught.value, *situation.refusal)
    return None


def check_shardings(run: Run) -> None:
    """All dims divide, and plan, shardings and wish are of one mesh."""
    plan, mesh = run.sharded.plan, run.sharded.state_shardings.step.mesh
    assert dict(mesh.shape) == dict(plan.mesh)
    assert mesh.size == run.situation.devices
    if run.situation.mesh:
        assert dict(plan.mesh) == run.situation.mesh
    for leaves in (run.model, run.optimizer, run.batch):
        for leaf in leaves.values():
            assert len(leaf.sharding.spec) <= len(leaf.shape), leaf
            leaf.sharding.shard_shape(leaf.shape)
    for path, leaf in run.params.items():
        storage = plan.params[path].storage
        wide = tuple(tuple(a for a in dim if mesh.shape[a] > 1) for dim in storage)
        assert leaf.spec == wide, leaf


def check_memory(run: Run) -> None:
    """The predicted memory covers what rests on a device, and keeps to the limit."""
    predicted = run.sharded.plan.predicted.memory.total_bytes
    assert sum(leaf.device_bytes for leaf in run.kept) <= predicted
    if run.situation.memory_bytes:
        assert predicted <= run.situation.memory_bytes


def check_parity(run: Run) -> None:
    """Start, losses, gradient norms and untrained state equal one device's."""
    s = run.situation
    plain = Plain.of(s.model, s.loss, s.batch, init=s.init, wrt=s.wrt)
    start = jax.jit(plain.build)()
    wanted = plain.train(start, s.optimizer, s.batch, s.updates)
    found = run.history
    pairs = list(zip(course(found), course(wanted), strict=True))
    numbers = [(name, a, b) for (name, a), (_, b) in pairs]
    numbers += [(p, found.initial[p], x) for p, x in wanted.initial.items()]
    # Not so the trained arrays: Adam moves what has no gradient by rounding noise.
    untrained = wanted.final.keys() - plain.trained
    numbers += [(p, found.final[p], wanted.final[p]) for p in untrained]
    for name, a, b in numbers:
        assert relative_error(a, b, LEAST) <= s.tolerance, name
