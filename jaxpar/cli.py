"""The command line: plan, train, verify, simulate, explain, diff, topologies, zoo.

Exit status: 0 done, 2 bad input, 3 no layout fits, 4 compiled is not as predicted.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxpar.cli_compare import as_published, compare
from jaxpar.cli_simulate import simulate as simulate_plan
from jaxpar.cli_values import limits, machine, remat_of, simulate, topology_of
from jaxpar.errors import InfeasibleError, JaxparError, PlanError

app = typer.Typer(
    help="Plans how a Flax model is laid out on a machine, and trains it so.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("simulate")(simulate_plan)
app.command()(compare)
ModelArgument = Annotated[
    str, typer.Argument(help="zoo:NAME, or file.py:function", metavar="MODEL")
]
TopologyOption = Annotated[
    str | None,
    typer.Option(help="A name (cpu-8, tpu-v5e-4x4) or a .toml file"),
]
MeshOption = Annotated[
    str | None, typer.Option(help="Axis sizes, as data=2,tensor=4; else searched")
]
BatchOption = Annotated[int | None, typer.Option(help="Global batch")]
SeqOption = Annotated[int | None, typer.Option(help="Tokens per sequence")]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        help="REGEX=SPEC: binds parameters; SPEC has one entry per dim, as "
        "fsdp,- or -,data+tensor",
    ),
]
ZeroOption = Annotated[
    int | None,
    typer.Option(help="Stage of ZeRO that an fsdp axis is for, 0 to 3; else searched"),
]
MemoryOption = Annotated[
    str | None, typer.Option(help="Limit per device, as 16GiB; else the topology's")
]
RematOption = Annotated[
    str | None,
    typer.Option(
        help="auto, none, selective, full, model (as it has it), or names of "
        "activations to keep, with commas between them",
    ),
]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="A plan made before")]
ResumeOption = Annotated[bool, typer.Option(help="Go on from the newest checkpoint")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, nothing else")]


@app.command()
def plan(
    model: ModelArgument,
    topology: TopologyOption = None,
    mesh: MeshOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    pin: PinOption = None,
    memory: MemoryOption = None,
    zero: ZeroOption = None,
    remat: RematOption = None,
    method: Annotated[str, typer.Option(help="Search method")] = "auto",
    pareto: Annotated[
        bool, typer.Option(help="Memory against time, in place of one plan")
    ] = False,
    published: Annotated[
        bool, typer.Option("--as-published", help="Machine and layout of the paper")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the plan file here")] = None,
    verbose: Annotated[bool, typer.Option(help="All rows, with reasons")] = False,
    as_json: JsonOption = False,
) -> None:
    """Plans the layout of a model; needs no device of the topology."""
    import jaxpar
    from jaxpar.zoo import load_model

    given = load_model(model, batch=batch, seq=seq)
    wishes = limits(given, pin, memory) | remat_of(given, remat)
    wishes |= {"zero": zero, "method": method}
    given |= {"mesh": machine(topology, mesh) or given.get("mesh")}
    if pareto:
        _front(given | wishes, as_json=as_json)
        return
    made = as_published(model)[1] if published else jaxpar.make_plan(**given, **wishes)
    _shown(made, out, as_json=as_json, verbose=verbose)


def _shown(made: Any, out: Path | None, *, as_json: bool, verbose: bool) -> None:
    """Writes a plan where it is wanted, and prints it."""
    from jaxpar.report.table import print_plan

    if out is not None:
        made.save(out)
    if as_json:
        print(made.dumps(), end="")
    else:
        print_plan(made, Console(), verbose=verbose)


def _front(arguments: dict[str, Any], *, as_json: bool) -> None:
    import jaxpar
    from jaxpar.report.front import print_front

    points = jaxpar.pareto(**arguments)
    if as_json:
        print(json.dumps([point.to_json() for point in points], indent=1))
    else:
        print_front(points, Console())


@app.command()
def train(
    model: ModelArgument,
    topology: TopologyOption = None,
    mesh: MeshOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    pin: PinOption = None,
    memory: MemoryOption = None,
    remat: RematOption = None,
    steps: Annotated[int, typer.Option(help="Steps in all")] = 100,
    plan_file: PlanOption = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints")
    ] = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plans a model, shows the plan, and trains it on the devices at hand.

    The topology cpu-N sets up N simulated devices itself.
    """
    simulate(topology)
    from jaxpar.data import batches_like
    from jaxpar.report.table import print_plan
    from jaxpar.train import train as run
    from jaxpar.zoo import load_model

    given = load_model(model, batch=batch, seq=seq)
    console = Console(stderr=as_json)
    given["mesh"] = machine(topology, mesh) or given.get("mesh")
    wishes = limits(given, pin, memory) | remat_of(given, remat)
    sharded = _sharded(given, wishes, plan_file)
    print_plan(sharded.plan, console)
    done = run(
        sharded,
        batches_like(given["batch"]),
        steps,
        checkpoint=checkpoint,
        resume=resume,
        console=console,
    )
    if as_json:
        print(json.dumps({k: v for k, v in vars(done).items() if k != "state"}))


def _sharded(
    given: dict[str, Any], wishes: dict[str, Any], plan_file: Path | None
) -> Any:
    import jaxpar

    if plan_file is None:
        return jaxpar.auto_shard(**given, **wishes)
    subject = {k: v for k, v in given.items() if k in _SUBJECT}
    return jaxpar.apply_plan(jaxpar.load_plan(plan_file), **subject)


_SUBJECT = ("model", "optimizer", "loss", "batch", "init", "wrt", "mutable")


@app.command()
def verify(
    model: ModelArgument,
    topology: TopologyOption = None,
    mesh: MeshOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    pin: PinOption = None,
    memory: MemoryOption = None,
    zero: ZeroOption = None,
    remat: RematOption = None,
    plan_file: PlanOption = None,
    backend: Annotated[str, typer.Option(help="cpu or tpu")] = "cpu",
    tier: Annotated[
        str, typer.Option(help="For tpu: partitioned, optimised or full")
    ] = "full",
    as_json: JsonOption = False,
) -> None:
    """Compiles a plan, and compares what was predicted with the program.

    Status 4 says that they differ. No TPU is needed for the backend tpu.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    import jaxpar
    from jaxpar.report.checks import print_check
    from jaxpar.zoo import load_model

    given = load_model(model, batch=batch, seq=seq)
    wishes = limits(given, pin, memory) | remat_of(given, remat) | {"zero": zero}
    made = _plan(given, topology, mesh, wishes, plan_file)
    if backend == "cpu":
        jax.config.update("jax_num_cpu_devices", math.prod(made.mesh.values()))
    with Console(stderr=True).status(f"compiling for {backend}"):
        check = jaxpar.verify_plan(
            made,
            **{k: v for k, v in given.items() if k in _SUBJECT},
            backend=backend,
            tier=tier,
            topology=None if topology is None else topology_of(topology),
        )
    print(json.dumps(check.to_json(), indent=1)) if as_json else print_check(check)
    sys.exit(0 if check.agrees else 4)


def _plan(
    given: dict[str, Any],
    topology: str | None,
    mesh: str | None,
    wishes: dict[str, Any],
    plan_file: Path | None,
) -> Any:
    import jaxpar

    if plan_file is not None:
        return jaxpar.load_plan(plan_file)
    simulate(topology)
    given["mesh"] = machine(topology, mesh) or given.get("mesh")
    return jaxpar.make_plan(**given, **wishes)


@app.command()
def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file")],
    path: Annotated[
        str | None, typer.Argument(help="A parameter, or a pattern over their paths")
    ] = None,
) -> None:
    """Says why each parameter, or one, lies where it does."""
    from jaxpar.plan import load_plan
    from jaxpar.report.table import print_plan, print_table
    from jaxpar.report.units import bytes_text, spec_text

    made = load_plan(plan_file)
    if path is None:
        print_plan(made, Console(), verbose=True)
        return
    rows = [
        (
            name,
            spec_text(p.storage),
            spec_text(p.compute),
            bytes_text(p.bytes_per_device),
            p.reason,
        )
        for name, p in made.params.items()
        if name == path or re.search(path, name)
    ]
    if not rows:
        raise PlanError(f"{plan_file}: no parameter matches {path!r}")
    headers = ("parameter", "storage", "compute", "per device", "why")
    print_table(f"{len(rows)} parameters", headers, rows, Console())


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(help="A plan file")],
    after: Annotated[Path, typer.Argument(help="Another plan file")],
) -> None:
    """Says how two plans differ."""
    from jaxpar.plan import diff as compare
    from jaxpar.plan import load_plan
    from jaxpar.report.table import print_diff

    print_diff(compare(load_plan(before), load_plan(after)), Console())


@app.command()
def topologies(as_json: JsonOption = False) -> None:
    """Lists machines by name; other sizes of the same families work as well."""
    from jaxpar.report.table import print_table
    from jaxpar.report.units import bytes_text, flops_text
    from jaxpar.topology import topologies as known

    if as_json:
        print(json.dumps([_topology_json(t) for t in known()], indent=1))
        return
    rows = [
        (
            t.name,
            str(t.devices),
            t.chip.name,
            bytes_text(t.memory_bytes),
            flops_text(t.chip.flops_per_s("bfloat16")) + "/s",
            ", ".join(
                f"{n} {link.name}{' ring' if link.wrap else ''}"
                for n, link in zip(t.shape, t.links, strict=True)
            ),
        )
        for t in known()
    ]
    headers = ("name", "devices", "chip", "memory", "bf16 peak", "links")
    print_table("topologies", headers, rows, Console())


def _topology_json(topology: Any) -> dict[str, Any]:
    return {
        "name": topology.name,
        "devices": topology.devices,
        "chip": topology.chip.name,
        "slices": topology.slices,
        "shape": topology.shape,
        "memory_bytes": topology.memory_bytes,
        "peak_flops_per_s": dict(topology.chip.peak_flops_per_s),
    }


@app.command()
def zoo(as_json: JsonOption = False) -> None:
    """Lists the models that come with jaxpar."""
    from jaxpar.report.table import print_table
    from jaxpar.zoo import entries

    listed = entries().values()
    if as_json:
        rows = [
            {
                "name": e.name,
                "family": e.family,
                "batch": e.batch,
                "seq": e.seq,
                "description": e.description,
                "source": e.source,
            }
            for e in listed
        ]
        print(json.dumps(rows, indent=1))
        return
    cells = [
        (f"zoo:{e.name}", e.family, str(e.batch), str(e.seq or ""), e.description)
        for e in listed
    ]
    headers = ("name", "family", "batch", "sequence", "description")
    print_table("models", headers, cells, Console())


def main() -> None:
    """Runs the command line; errors become one message and an exit status."""
    try:
        app(standalone_mode=True)
    except InfeasibleError as problem:
        _fail(problem, 3)
    except JaxparError as problem:
        _fail(problem, 2)


def _fail(problem: JaxparError, status: int) -> None:
    console = Console(stderr=True)
    console.print(
        "error:",
        problem.message,
        style="bold red",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    if problem.hint:
        console.print(
            "hint:", problem.hint, soft_wrap=True, highlight=False, markup=False
        )
    sys.exit(status)


if __name__ == "__main__":
    main()
