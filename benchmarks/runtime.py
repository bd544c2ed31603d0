"""Step time and communication: auto_shard against layouts written by hand.

    python benchmarks/runtime.py [--model gpt-tiny] [--data 2] [--tensor 4]

All variants train the same model from the same parameters on the same batch, on
simulated CPU devices of this process; their steps take turns, so that a busy machine
slows all alike. Times are of simulated devices that share a few cores: only the
ratios mean something. Bytes are read from the compiled programs.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from hand_sharded import Layout, layouts, training
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxpar
from jaxpar.hlo import CompiledMemory, HloCollective, collectives, memory_of
from jaxpar.topology import get_topology
from jaxpar.zoo import find, zoo

MIB = 2**20
SAME_LOSS = 1e-4


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
        seconds: Of every timed step.
        losses: Of every step.
    """

    name: str
    mesh: dict[str, int]
    step: Any
    state: Any
    batch: Any
    found: tuple[HloCollective, ...]
    memory: CompiledMemory
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def wire_bytes(self) -> float:
        """What one device sends in one step."""
        return sum(c.total_wire_bytes for c in self.found)

    def run(self) -> None:
        """One step."""
        start = time.perf_counter()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(metrics["loss"]))


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


@dataclass(frozen=True)
class Subject:
    """What is trained.

    Attributes:
        arguments: Of `jaxpar.auto_shard`.
        config: Of the zoo's decoder.
        params: First values, on the host: steps donate what lies on devices.
        batch: The global batch.
    """

    arguments: dict[str, Any]
    config: Any
    params: Any
    batch: Any

    @classmethod
    def of(cls, model: str, seed: int, **overrides: Any) -> "Subject":
        """A decoder of the zoo and a batch of random tokens."""
        arguments = zoo(model, **overrides)
        entry = find(model)
        sizes = {k: v for k, v in overrides.items() if k not in ("batch", "seq")}
        config = replace(entry.config, **sizes)
        shape = arguments["batch"]["tokens"].shape
        tokens = np.random.default_rng(seed).integers(config.vocab, size=shape)
        state = nnx.state(arguments["model"](nnx.Rngs(seed)), nnx.Param)
        batch = {"tokens": tokens.astype(np.int32)}
        params = jax.device_get(nnx.to_pure_dict(state))
        return cls(arguments, config, params, batch)


def by_hand(subject: Subject, layout: Layout) -> Variant:
    """The step of a layout written by hand."""
    made = training(
        subject.config,
        layout,
        subject.arguments["optimizer"],
        subject.params,
        subject.arguments["batch"],
    )
    batch = jax.device_put(subject.batch, jax.tree.map(_sharding, made.batch))
    lowered = made.step.lower(made.state, made.batch)
    return variant(layout.name, layout.axes, lowered, made.put(subject.params), batch)


def by_jaxpar(subject: Subject, name: str, sharded: Any, seed: int) -> Variant:
    """The step of `auto_shard` or `apply_plan`."""
    batch = jax.device_put(subject.batch, sharded.batch_shardings)
    lowered = sharded.step.lower(sharded.abstract_state, subject.arguments["batch"])
    return variant(name, sharded.plan.mesh, lowered, sharded.init(seed), batch)


def slow_links(devices: int) -> jaxpar.Topology:
    """Simulated devices on which bytes alone decide."""
    topology = get_topology(f"cpu-{devices}")
    links = tuple(
        replace(link, bytes_per_s=link.bytes_per_s / 1000) for link in topology.links
    )
    return replace(topology, links=links)


def _sharding(x: jax.ShapeDtypeStruct) -> Any:
    return x.sharding


def variants(options: argparse.Namespace) -> list[Variant]:
    """Everything that is compared; a hand-written layout precedes its twin."""
    overrides = {
        name: value
        for name in ("layers", "batch", "seq", "scan", "remat")
        if (value := getattr(options, name)) is not None
    }
    subject = Subject.of(options.model, options.seed, **overrides)
    jobs: list[Callable[[], Variant]] = []
    for layout in layouts(options.data, options.tensor):
        jobs.append(lambda layout=layout: by_hand(subject, layout))
        jobs.append(
            lambda layout=layout: by_jaxpar(
                subject,
                "auto_shard, same mesh",
                jaxpar.auto_shard(**subject.arguments, mesh=dict(layout.axes)),
                options.seed,
            )
        )

    def searched() -> Variant:
        sharded = jaxpar.auto_shard(**subject.arguments)
        return by_jaxpar(subject, "auto_shard, any mesh", sharded, options.seed)

    def fewest_bytes() -> Variant:
        topology = slow_links(options.data * options.tensor)
        plan = jaxpar.make_plan(**subject.arguments, mesh=topology)
        sharded = jaxpar.apply_plan(plan, **subject.arguments)
        return by_jaxpar(subject, "auto_shard, fewest bytes", sharded, options.seed)

    jobs += [searched, fewest_bytes]
    return [job() for job in track(jobs, "compiling", transient=True)]


def race(racers: list[Variant], rounds: int) -> None:
    """Runs every variant once a round, after a round that is not timed."""
    for racer in racers:
        racer.run()
        racer.seconds.clear()
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
    """One row a variant; ratios are medians over the rounds."""
    table = Table(title="one training step")
    for column in ("variant", "mesh"):
        table.add_column(column)
    for column in ("ms, least", "ms, median", "ratio", "MiB sent", "ratio", "temp MiB"):
        table.add_column(column, justify="right")
    table.add_column("MiB sent, by kind")
    hand = racers[0]
    for racer in racers:
        automatic = racer.name.startswith("auto_shard")
        if not automatic:
            hand = racer
        elif "same mesh" not in racer.name:
            hand = None
        table.add_row(*_row(racer, hand if automatic else None, racers))
        if automatic:
            table.add_section()
    return table


def _row(racer: Variant, hand: Variant | None, racers: list[Variant]) -> list[str]:
    by_hand = [r for r in racers if not r.name.startswith("auto_shard")]
    if hand is None and racer.name.startswith("auto_shard"):
        fastest = min(by_hand, key=lambda r: statistics.median(r.seconds))
        time_ratio = _ratio(racer, fastest)
        byte_ratio = racer.wire_bytes / min(r.wire_bytes for r in by_hand)
    elif hand is not None:
        time_ratio = _ratio(racer, hand)
        byte_ratio = racer.wire_bytes / hand.wire_bytes
    else:
        time_ratio = byte_ratio = None
    return [
        racer.name,
        " ".join(f"{axis}={n}" for axis, n in racer.mesh.items()),
        f"{min(racer.seconds) * 1e3:.1f}",
        f"{statistics.median(racer.seconds) * 1e3:.1f}",
        "" if time_ratio is None else f"{time_ratio:.3f}",
        f"{racer.wire_bytes / MIB:.3f}",
        "" if byte_ratio is None else f"{byte_ratio:.3f}",
        f"{racer.memory.temporaries_bytes / MIB:.2f}",
        _kinds(racer.found),
    ]


def _ratio(a: Variant, b: Variant) -> float:
    """Median over the rounds of one step's time over the other's."""
    pairs = zip(a.seconds, b.seconds, strict=True)
    return statistics.median(x / y for x, y in pairs)


def _kinds(found: tuple[HloCollective, ...]) -> str:
    sent: Counter[str] = Counter()
    for collective in found:
        sent[collective.kind] += collective.total_wire_bytes
    parts = [f"{kind} {n / MIB:.3f}" for kind, n in sent.most_common() if n]
    return ", ".join(parts) or "nothing"


def main() -> None:
    """Reads the command line, runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="gpt-tiny", help="a decoder of the zoo")
    parser.add_argument("--data", type=int, default=2, help="devices along the batch")
    parser.add_argument("--tensor", type=int, default=4, help="devices per matrix")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, help="sequences in the global batch")
    parser.add_argument("--seq", type=int, help="tokens in a sequence")
    parser.add_argument("--scan", action="store_true", default=None)
    parser.add_argument("--remat", choices=("none", "full"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.data * options.tensor)
    racers = variants(options)
    race(racers, options.rounds)
    check_losses(racers)
    Console().print(results(racers))


if __name__ == "__main__":
    main()
