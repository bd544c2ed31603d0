"""Step time and communication: auto_shard against layouts written by hand.

    python benchmarks/runtime.py [--model gpt-tiny] [--data 2] [--tensor 4]

All variants train the same model from the same parameters on the same batch, on
simulated CPU devices of this process; their steps take turns, so that a busy machine
slows all alike. Simulated devices share a few cores: of the times only the ratios
mean something. Bytes are read from the compiled programs, where XLA for CPU has no
reduce-scatter, and all-reduces instead.

A row of auto_shard is compared with the row by hand above it, of the same mesh; the
last ones, with a mesh of their own, with the best row by hand.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from hand_sharded import Layout, Training, hand_training, layouts
from peer import INSTALLED, peer_training
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxpar
from jaxpar.hlo import CompiledMemory, HloCollective, collectives, memory_of
from jaxpar.machine import on_topology
from jaxpar.topology import get_topology
from jaxpar.zoo import find, zoo

MIB = 2**20
SAME_LOSS = 1e-4
SLOWER_LINKS = 1000
COLUMNS = (
    "least ms",
    "median ms",
    "ratio",
    "CPU ms",
    "ratio",
    "MiB sent",
    "ratio",
    "temp MiB",
)


@dataclass
class Variant:
    """A compiled step and what was measured of it.

    Attributes:
        name: For people.
        mesh: Axes and sizes.
        step: Compiled: (state, batch) -> (state, metrics).
        state: Of the next step.
        batch: On the devices.
        found: The collectives of one step.
        memory: Of the compiled step.
        hand: Whether people wrote it, and others are compared with it.
        same_mesh: Whether it is compared with the last one by hand, else the best.
        seconds: Of every timed step.
        cpu_seconds: The same, of all threads: what others do on the machine at the
            same time disturbs it less.
        losses: Of every step.
    """

    name: str
    mesh: dict[str, int]
    step: Any
    state: Any
    batch: Any
    found: tuple[HloCollective, ...]
    memory: CompiledMemory
    hand: bool = False
    same_mesh: bool = False
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def wire_bytes(self) -> float:
        """What one device sends in one step."""
        return sum(c.total_wire_bytes for c in self.found)

    @property
    def median_s(self) -> float:
        """Of a step."""
        return statistics.median(self.seconds)

    def run(self) -> None:
        """One step."""
        start, cpu_start = time.perf_counter(), time.process_time()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu_start)
        self.losses.append(float(metrics["loss"]))

    def time_ratios(self, other: "Variant") -> tuple[float, float]:
        """Medians over the rounds of one step's times over the other's: wall, CPU."""
        return (
            _median_ratio(self.seconds, other.seconds),
            _median_ratio(self.cpu_seconds, other.cpu_seconds),
        )


def _median_ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        arguments: Of `jaxpar.auto_shard`.
        config: Of the zoo's decoder.
        params: First values, on the host: a step takes what lies on devices.
        batch: The global batch, on the host.
        seed: Of the parameters.
    """

    arguments: dict[str, Any]
    config: Any
    params: Any
    batch: Any
    seed: int

    @classmethod
    def of(cls, model: str, seed: int, **overrides: Any) -> "Subject":
        """A decoder of the zoo and a batch of random tokens."""
        arguments = zoo(model, **overrides)
        sizes = {k: v for k, v in overrides.items() if k not in ("batch", "seq")}
        config = replace(find(model).config, **sizes)
        shape = arguments["batch"]["tokens"].shape
        tokens = np.random.default_rng(seed).integers(config.vocab, size=shape)
        state = nnx.state(arguments["model"](nnx.Rngs(seed)), nnx.Param)
        params = jax.device_get(nnx.to_pure_dict(state))
        return cls(arguments, config, params, {"tokens": np.int32(tokens)}, seed)

    def by_hand(self, layout: Layout) -> Variant:
        """The step of a layout that people wrote."""
        optimizer, batch = self.arguments["optimizer"], self.arguments["batch"]
        made = hand_training(self.config, layout, optimizer, self.params, batch)
        return replace(self._trained(layout.name, layout.axes, made), hand=True)

    def by_peer(self, axes: dict[str, int]) -> Variant:
        """The step with the specs of google-parallax."""
        made = peer_training(self.arguments, self.params, axes)
        return self._trained("google-parallax", axes, made)

    def _trained(self, name: str, axes: Any, made: Training) -> Variant:
        batch = jax.device_put(self.batch, jax.tree.map(_sharding, made.batch))
        lowered = made.step.lower(made.state, made.batch)
        return variant(name, axes, lowered, made.put(self.params), batch)

    def by_jaxpar(self, mesh: Any, name: str) -> Variant:
        """The step of `auto_shard`, or of a plan for a machine that is not there."""
        if mesh is None:
            sharded = jaxpar.auto_shard(**self.arguments)
        else:
            plan = jaxpar.make_plan(**self.arguments, mesh=mesh)
            sharded = jaxpar.apply_plan(plan, **self.arguments)
        batch = jax.device_put(self.batch, sharded.batch_shardings)
        lowered = sharded.step.lower(sharded.abstract_state, self.arguments["batch"])
        made = variant(name, sharded.plan.mesh, lowered, sharded.init(self.seed), batch)
        return replace(made, same_mesh=mesh is not None)


def variant(name: str, mesh: Any, lowered: Any, state: Any, batch: Any) -> Variant:
    """Compiles a lowered step."""
    compiled = lowered.compile()
    return Variant(
        name=name,
        mesh=dict(mesh),
        step=compiled,
        state=state,
        batch=batch,
        found=collectives(compiled.as_text()),
        memory=memory_of(compiled),
    )


def _sharding(x: jax.ShapeDtypeStruct) -> Any:
    return x.sharding


def machine(devices: int, *, fewest_bytes: bool) -> jaxpar.Topology:
    """Simulated devices; or such with links so slow that bytes alone decide."""
    topology = get_topology(f"cpu-{devices}")
    if not fewest_bytes:
        return topology
    links = (
        replace(link, bytes_per_s=link.bytes_per_s / SLOWER_LINKS)
        for link in topology.links
    )
    return replace(topology, links=tuple(links))


def jobs(subject: Subject, options: argparse.Namespace) -> Iterable[Any]:
    """What makes the variants; a layout by hand stands before its twin."""
    devices = options.data * options.tensor
    topology = machine(devices, fewest_bytes=options.fewest_bytes)
    for layout in layouts(options.data, options.tensor):
        yield partial(subject.by_hand, layout)
        mesh = on_topology(topology, layout.axes)
        yield partial(subject.by_jaxpar, mesh, "jaxpar, same mesh")
    if not options.fewest_bytes:
        yield partial(subject.by_jaxpar, None, "jaxpar, any mesh")
    if INSTALLED and not (options.scan or options.remat == "full"):
        axes = {"data": options.data, "tensor": options.tensor}
        yield partial(subject.by_peer, axes)


def race(racers: list[Variant], rounds: int) -> None:
    """Runs every variant once a round, after a round that is not timed."""
    for racer in racers:
        racer.run()
        racer.seconds.clear()
        racer.cpu_seconds.clear()
    for _ in track(range(rounds), "running", transient=True):
        for racer in racers:
            racer.run()


def check_losses(racers: list[Variant]) -> None:
    """Refuses to compare programs that do not train the same model."""
    first = np.array(racers[0].losses)
    for racer in racers:
        if not np.allclose(racer.losses, first, rtol=SAME_LOSS):
            raise SystemExit(f"{racer.name}: losses {racer.losses} are not {first}")


def results(racers: list[Variant]) -> Table:
    """One row a variant."""
    table = Table(title="one training step; ratios against layouts written by hand")
    table.add_column("variant")
    table.add_column("mesh")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("MiB sent by kind")
    by_hand = [racer for racer in racers if racer.hand]
    fastest = min(by_hand, key=lambda racer: racer.median_s)
    leanest = min(by_hand, key=lambda racer: racer.wire_bytes)
    above = racers[0]
    for racer in racers:
        above = racer if racer.hand else above
        rivals = (above, above) if racer.same_mesh else (fastest, leanest)
        table.add_row(*_row(racer, *rivals), end_section=not racer.hand)
    return table


def _row(racer: Variant, rival: Variant, rival_in_bytes: Variant) -> list[str]:
    ratios = ("", "", "")
    if not racer.hand:
        wall, cpu = racer.time_ratios(rival)
        bytes_ratio = racer.wire_bytes / rival_in_bytes.wire_bytes
        ratios = (f"{wall:.3f}", f"{cpu:.3f}", f"{bytes_ratio:.4f}")
    sent: Counter[str] = Counter()
    for collective in racer.found:
        sent[collective.kind] += collective.total_wire_bytes
    kinds = (f"{kind} {n / MIB:.3f}" for kind, n in sent.most_common() if n)
    return [
        racer.name,
        " ".join(f"{axis}={n}" for axis, n in racer.mesh.items()),
        f"{min(racer.seconds) * 1e3:.1f}",
        f"{racer.median_s * 1e3:.1f}",
        ratios[0],
        f"{statistics.median(racer.cpu_seconds) * 1e3:.1f}",
        ratios[1],
        f"{racer.wire_bytes / MIB:.4f}",
        ratios[2],
        f"{racer.memory.temporaries_bytes / MIB:.2f}",
        ", ".join(kinds) or "nothing",
    ]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="gpt-tiny", help="a decoder of the zoo")
    parser.add_argument("--data", type=int, default=2, help="devices along the batch")
    parser.add_argument("--tensor", type=int, default=4, help="devices per matrix")
    parser.add_argument(
        "--fewest-bytes",
        action="store_true",
        help=f"plan for links {SLOWER_LINKS} times slower",
    )
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, help="sequences in the global batch")
    parser.add_argument("--seq", type=int, help="tokens in a sequence")
    parser.add_argument("--scan", action="store_true", default=None)
    parser.add_argument("--remat", choices=("none", "full"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Compiles all variants, runs them in turn and prints the table."""
    options = parse()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.data * options.tensor)
    overrides = {
        name: getattr(options, name)
        for name in ("layers", "batch", "seq", "scan", "remat")
        if getattr(options, name) is not None
    }
    subject = Subject.of(options.model, options.seed, **overrides)
    todo: list[Callable[[], Variant]] = list(jobs(subject, options))
    racers = [job() for job in track(todo, "compiling", transient=True)]
    race(racers, options.rounds)
    check_losses(racers)
    Console().print(results(racers))


if __name__ == "__main__":
    main()
