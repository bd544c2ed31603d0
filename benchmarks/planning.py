"""Planning time by depth, form, number of axes and number of devices.

    python benchmarks/planning.py [--quick | --full] [--model llama-8b]

Every row is a process of its own. "cold" is the first plan of that process, imports
left out; "warm" the least of three more plans of the same model, made anew. The mesh is
given with one, two or three axes, or searched (over all three roles). Where
google-parallax is installed (pip install '.[bench]'), the time of its heuristic stands
beside unrolled rows of two axes: it weighs no costs and no memory, and takes neither
scanned nor rematerialised layers, so its model is the same without remat.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any
from unittest import mock

from rich.console import Console
from rich.progress import track
from rich.table import Table

LAYERS = (2, 8, 32, 96)
DEVICES = {
    8: "tpu-v5p-2x2x2",
    64: "tpu-v5p-4x4x4",
    512: "tpu-v5p-8x8x8",
    3072: "tpu-v4-12x16x16",
    6144: "tpu-v4-2x12x16x16",
}
AXES = (1, 2, 3, None)
TENSOR = 8
SEQUENCE = 2048
WARM_RUNS = 3
LIMIT_S = 600
PHASES = {
    "make_model": "jaxpar.subject",
    "trace": "jaxpar.subject",
    "lower": "jaxpar.subject",
    "plan_graph": "jaxpar.api",
}


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        model: Of the zoo.
        layers: Depth.
        scan: Whether the layers are scanned, or unrolled.
        devices: Of the machine; a key of `DEVICES`.
        axes: Of a given mesh; None searches it.
    """

    model: str
    layers: int
    scan: bool
    devices: int
    axes: int | None

    def sizes(self) -> dict[str, int] | None:
        """Axis sizes of the given mesh."""
        if self.axes is None:
            return None
        if self.axes == 1:
            return {"fsdp": self.devices}
        rest = self.devices // TENSOR
        if self.axes == len(("fsdp", "tensor")):
            return {"fsdp": rest, "tensor": TENSOR}
        data = 2 if rest > 1 else 1
        return {"data": data, "fsdp": rest // data, "tensor": TENSOR}

    def arguments(self, **overrides: Any) -> dict[str, Any]:
        """What `jaxpar.make_plan` takes, but the mesh."""
        from jaxpar.zoo import zoo  # noqa: PLC0415

        sizes = {"layers": self.layers, "scan": self.scan, "remat": "full"}
        batch = max(64, self.devices)
        return zoo(self.model, batch=batch, seq=SEQUENCE, **sizes | overrides)


# ---- in the process of a row


@contextmanager
def stopwatch() -> Iterator[Counter[str]]:
    """Seconds of each phase of planning, by the name of its function."""
    seconds: Counter[str] = Counter()
    with ExitStack() as stack:
        for name, module in PHASES.items():
            function = getattr(sys.modules[module], name)
            timed = _timed(function, name, seconds)
            stack.enter_context(mock.patch(f"{module}.{name}", timed))
        yield seconds


def _timed(function: Any, name: str, seconds: Counter[str]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - start

    return run


def measure(case: Case) -> dict[str, Any]:
    """The row's figures."""
    import jax  # noqa: PLC0415

    jax.config.update("jax_platforms", "cpu")
    import jaxpar.api  # noqa: PLC0415
    from jaxpar.machine import on_topology  # noqa: PLC0415
    from jaxpar.topology import get_topology  # noqa: PLC0415

    topology, sizes = get_topology(DEVICES[case.devices]), case.sizes()
    machine = topology if sizes is None else on_topology(topology, sizes)
    totals, plan, refused = [], None, ""
    with stopwatch() as seconds:
        for run in range(1 + WARM_RUNS):
            start = time.perf_counter()
            try:
                plan = jaxpar.make_plan(**case.arguments(), mesh=machine)
            except jaxpar.errors.JaxparError as error:
                refused = str(error).splitlines()[0]
            totals.append(time.perf_counter() - start)
            if run == 0:
                cold = dict(seconds)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {
        "trace_s": cold["make_model"] + cold["trace"],
        "lower_s": cold["lower"],
        "search_s": cold["plan_graph"],
        "rest_s": totals[0] - sum(cold.values()),
        "total_s": totals[0],
        "warm_s": min(totals[1:]),
        "peak_mib": peak_kib / 1024,
        "peer_s": peer_seconds(case),
        "refused": refused,
    }
    if plan is not None:
        lower_bound_s = plan.search.lower_bound_s
        found["gap"] = plan.search.objective_s / lower_bound_s - 1
        found["mesh"] = dict(plan.mesh)
    return found


def peer_seconds(case: Case) -> float | None:
    """Time of google-parallax's heuristic, where it knows the model."""
    from peer import INSTALLED, choose  # noqa: PLC0415

    if not INSTALLED or case.scan or case.axes != len(("data", "tensor")):
        return None
    import jax  # noqa: PLC0415

    start = time.perf_counter()
    arguments = case.arguments(remat="none")
    batch, length = arguments["batch"]["tokens"].shape
    tokens = jax.ShapeDtypeStruct((batch, length - 1), "int32")
    choose(arguments["model"], tokens, case.sizes() or {})
    return time.perf_counter() - start


# ---- in the process that prints


def cases(options: argparse.Namespace) -> list[Case]:
    """Rows in the order of the table."""
    forms = (True, False)
    if options.quick:
        grid = product((LAYERS[0], LAYERS[-1]), forms, (64,), (None,))
    elif options.full:
        grid = product(LAYERS, forms, DEVICES, AXES)
    else:
        depth = product(LAYERS, forms, (64,), (2, None))
        width = product((32,), (False,), DEVICES, AXES)
        grid = dict.fromkeys([*depth, *width])
    return [Case(options.model, *row) for row in grid]


def in_process(case: Case) -> dict[str, Any]:
    """Runs a row; an error is a figure too."""
    command = [sys.executable, __file__, "--row", json.dumps(asdict(case))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"refused": f"not done after {LIMIT_S} s"}
    except subprocess.CalledProcessError as error:
        return {"refused": error.stderr.strip().splitlines()[-1]}


def results(rows: list[tuple[Case, dict[str, Any]]]) -> Table:
    """One line a row; seconds."""
    table = Table(title="planning, seconds")
    for column in ("layers", "form", "devices", "axes"):
        table.add_column(column, justify="right")
    for column in ("trace", "lower", "search", "rest", "cold", "warm"):
        table.add_column(column, justify="right")
    for column in ("gap", "peak MiB", "parallax"):
        table.add_column(column, justify="right")
    table.add_column("mesh, or why there is none")
    for case, found in rows:
        table.add_row(
            str(case.layers),
            "scanned" if case.scan else "unrolled",
            str(case.devices),
            "searched" if case.axes is None else str(case.axes),
            *(_figure(found.get(key), "{:.2f}") for key in _SECONDS),
            _figure(found.get("gap"), "{:.1e}"),
            _figure(found.get("peak_mib"), "{:.0f}"),
            _figure(found.get("peer_s"), "{:.2f}"),
            found["refused"].partition(":")[0]
            or " ".join(f"{axis}={n}" for axis, n in found["mesh"].items()),
        )
    return table


_SECONDS = ("trace_s", "lower_s", "search_s", "rest_s", "total_s", "warm_s")


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def depth_ratios(rows: list[tuple[Case, dict[str, Any]]]) -> Iterator[str]:
    """Time of the deepest model over that of the shallowest, else equal."""
    found = {case: figures for case, figures in rows if "total_s" in figures}
    for case, deep in found.items():
        shallow = found.get(
            Case(case.model, LAYERS[0], case.scan, case.devices, case.axes)
        )
        if case.layers == LAYERS[-1] and shallow:
            form = "scanned" if case.scan else "unrolled"
            axes = "searched mesh" if case.axes is None else f"{case.axes} axes"
            yield (
                f"{case.layers} layers over {LAYERS[0]}, {form}, {axes}: "
                f"cold {deep['total_s'] / shallow['total_s']:.2f}, "
                f"warm {deep['warm_s'] / shallow['warm_s']:.2f}"
            )


def main() -> None:
    """Runs the rows and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="llama-8b", help="a decoder of the zoo")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="four rows")
    size.add_argument("--full", action="store_true", help="every combination")
    parser.add_argument("--json", help="write the figures to this file as well")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(Case(**json.loads(options.row)))))
        return
    todo = cases(options)
    rows = [(case, in_process(case)) for case in track(todo, "planning")]
    console = Console()
    console.print(results(rows))
    for line in depth_ratios(rows):
        console.print(line)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(case) | found for case, found in rows], file, indent=1)


if __name__ == "__main__":
    main()
