"""The command line: plan, train, explain, diff, topologies, zoo.

Exit status: 0 done, 2 bad input, 3 no layout fits.
"""

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxpar.errors import InfeasibleError, JaxparError, MeshError, PlanError

app = typer.Typer(
    help="Plans how a Flax model is laid out on a machine, and trains it so.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
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
MemoryOption = Annotated[
    str | None, typer.Option(help="Limit per device, as 16GiB; else the topology's")
]
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
    method: Annotated[str, typer.Option(help="Search method")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write the plan file here")] = None,
    verbose: Annotated[bool, typer.Option(help="All rows, with reasons")] = False,
    as_json: JsonOption = False,
) -> None:
    """Plans the layout of a model; needs no device of the topology."""
    import jaxpar
    from jaxpar.report.table import print_plan
    from jaxpar.zoo import load_model

    given = load_model(model, batch=batch, seq=seq)
    made = jaxpar.make_plan(
        **given | {"mesh": _machine(topology, mesh) or given.get("mesh")},
        **_limits(given, pin, memory),
        method=method,
    )
    if out is not None:
        made.save(out)
    if as_json:
        print(made.dumps(), end="")
    else:
        print_plan(made, Console(), verbose=verbose)


@app.command()
def train(
    model: ModelArgument,
    topology: TopologyOption = None,
    mesh: MeshOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    pin: PinOption = None,
    memory: MemoryOption = None,
    steps: Annotated[int, typer.Option(help="Steps in all")] = 100,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="A plan made before")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints")
    ] = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plans a model, shows the plan, and trains it on the devices at hand.

    The topology cpu-N sets up N simulated devices itself.
    """
    _simulate(topology)
    from jaxpar.data import batches_like
    from jaxpar.report.table import print_plan
    from jaxpar.train import train as run
    from jaxpar.zoo import load_model

    given = load_model(model, batch=batch, seq=seq)
    console = Console(stderr=as_json)
    given["mesh"] = _machine(topology, mesh) or given.get("mesh")
    sharded = _sharded(given, _limits(given, pin, memory), plan_file)
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
    given: dict[str, Any], limits: dict[str, Any], plan_file: Path | None
) -> Any:
    import jaxpar

    if plan_file is None:
        return jaxpar.auto_shard(**given, **limits)
    subject = {k: v for k, v in given.items() if k in _SUBJECT}
    return jaxpar.apply_plan(jaxpar.load_plan(plan_file), **subject)


_SUBJECT = ("model", "optimizer", "loss", "batch", "init", "wrt", "mutable")


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


def _machine(topology: str | None, mesh: str | None) -> Any:
    """What `make_plan` takes as mesh, from the two options."""
    from jaxpar.topology import get_topology, load_topology

    sizes = _mesh_sizes(mesh) if mesh else None
    if topology is None:
        return sizes
    found = (
        load_topology(topology)
        if topology.endswith(".toml")
        else get_topology(topology)
    )
    if sizes is None:
        return found
    from jaxpar.machine import on_topology

    return on_topology(found, sizes)


def _mesh_sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not axis or not size.isdigit() or axis in sizes:
            raise MeshError(
                f"--mesh {text!r}: {part!r} is not axis=size",
                hint="write it like data=2,tensor=4",
            )
        sizes[axis.strip()] = int(size)
    return sizes


def _limits(
    given: dict[str, Any], pin: list[str] | None, memory: str | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if pin:
        found["pin"] = dict(given.get("pin") or {}) | dict(map(_pin, pin))
        given.pop("pin", None)
    if memory is not None:
        found["memory_bytes"] = _bytes(memory)
        given.pop("memory_bytes", None)
    return found


def _pin(text: str) -> tuple[str, tuple[tuple[str, ...], ...]]:
    pattern, found, spec = text.rpartition("=")
    if not found or not pattern:
        raise PlanError(
            f"--pin {text!r} is not REGEX=SPEC", hint="write it like 'mlp/up=-,tensor'"
        )
    dims = spec.split(",") if spec else []
    return pattern, tuple(
        () if dim in ("-", "") else tuple(dim.split("+")) for dim in dims
    )


_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise MeshError(
            f"--memory {text!r} is no size", hint="write it like 16GiB or 8000000000"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _simulate(topology: str | None) -> None:
    """Sets up simulated devices for cpu-N, before JAX starts its backend."""
    match = re.fullmatch(r"cpu-(?:\d+x)?(\d+)", topology or "")
    if match is None:
        return
    import jax

    from jaxpar.topology import get_topology

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", get_topology(topology or "").devices)


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
