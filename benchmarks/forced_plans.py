"""Every collective of forced plans: predicted against the partitioned program.

    python benchmarks/forced_plans.py [--model gpt-tiny] [--layers 2,4]
        [--only fsdp] [--form scanned] [--work training] [--rows]

Each plan is forced on a small decoder by its mesh, by a stage of ZeRO, or by pins; then
compiled for simulated CPU devices. One row per plan: kinds of collectives (kind, axes,
bytes), executions predicted and compiled, bytes of one step of both, and how many kinds
differ in their executions. Collectives are read right after the partitioner.
"""

import argparse
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import jaxpar
from jaxpar.verify import Check, Row
from jaxpar.zoo import zoo

DEVICES = 8
RESIDUAL = r"^positions:add$|attn/out/bias:pointwise$|mlp/down/bias:(pointwise|loop_c)"
"""Names of the activations between the parts of a block, and between blocks."""


@dataclass(frozen=True)
class Forced:
    """A plan that leaves the search little choice.

    Attributes:
        mesh: Axis sizes.
        zero: Stage of ZeRO that the fsdp axis is for.
        pins: Regex -> entries of a PartitionSpec.
    """

    mesh: Mapping[str, int]
    zero: int | None = None
    pins: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """What `make_plan` takes."""
        return {"mesh": dict(self.mesh), "zero": self.zero, "pin": dict(self.pins)}


FORCED = {
    "data": Forced({"data": 8}),
    "zero-1": Forced({"fsdp": 8}, zero=1),
    "zero-2": Forced({"fsdp": 8}, zero=2),
    "zero-3": Forced({"fsdp": 8}, zero=3),
    "tensor": Forced({"tensor": 4}),
    "data x tensor": Forced({"data": 2, "tensor": 4}),
    "tensor + sequence": Forced(
        {"data": 2, "tensor": 4}, pins={RESIDUAL: ("data", "tensor", None)}
    ),
    "fsdp x tensor": Forced({"fsdp": 4, "tensor": 2}),
    "data x fsdp": Forced({"data": 2, "fsdp": 4}, zero=3),
    "zero-1 x tensor": Forced({"fsdp": 4, "tensor": 2}, zero=1),
    "data x fsdp x tensor": Forced({"data": 2, "fsdp": 2, "tensor": 2}),
    "data x sequence": Forced({"data": 4, "sequence": 2}),
}
FORMS = {"unrolled": False, "scanned": True}
WORKS = ("training", "inference")


@dataclass(frozen=True)
class Case:
    """One compilation.

    Attributes:
        plan: A key of `FORCED`.
        form: A key of `FORMS`.
        work: One of `WORKS`.
        layers: Of the decoder.
        model: Of the zoo; an unrolled or scanned decoder.
    """

    plan: str
    form: str
    work: str
    layers: int = 2
    model: str = "gpt-tiny"

    def check(self) -> Check:
        """Plans, compiles and compares."""
        given = zoo(self.model, layers=self.layers, scan=FORMS[self.form])
        if self.work == "inference":
            given["optimizer"] = None
        forced = FORCED[self.plan].options()
        return jaxpar.verify_plan(jaxpar.auto_shard(**given, **forced))


def unequal(check: Check) -> list[Row]:
    """Rows of collectives that are predicted or compiled more often."""
    return [row for row in check.rows if row.predicted != row.compiled]


def main() -> None:
    arguments = _arguments()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    table = Table(title="collectives of one step, predicted and compiled")
    for header in ("plan", "form", "work", "layers", "kinds", "runs", "MiB", "differ"):
        table.add_column(header)
    console, wrong, done = Console(), 0, 0
    for case in _cases(arguments):
        started = time.perf_counter()
        check = case.check()
        different = unequal(check)
        wrong, done = wrong + bool(different), done + 1
        table.add_row(case.plan, case.form, case.work, str(case.layers), *_cells(check))
        shown = check.rows if arguments.rows else different
        seconds = time.perf_counter() - started
        print(f"{case}: {len(different)} differ, {seconds:.1f} s", flush=True)
        for row in shown:
            print("   ", row, flush=True)
    console.print(table)
    console.print(f"{done - wrong} of {done} programs are exactly as predicted")


def _cells(check: Check) -> tuple[str, ...]:
    runs = [sum(getattr(row, side) for row in check.rows) for side in _SIDES]
    sent = [sum(r.bytes * getattr(r, side) for r in check.rows) for side in _SIDES]
    return (
        str(len(check.rows)),
        _pair(*runs),
        _pair(*(f"{size / 2**20:.3f}" for size in sent)),
        str(len(unequal(check)) or ""),
    )


_SIDES = ("predicted", "compiled")


def _pair(predicted: Any, compiled: Any) -> str:
    return f"{predicted}" if predicted == compiled else f"{predicted} / {compiled}"


def _cases(arguments: argparse.Namespace) -> Iterable[Case]:
    layers = map(int, arguments.layers.split(","))
    for depth, plan, form, work in product(layers, FORCED, FORMS, WORKS):
        if (
            arguments.only in (None, plan)
            and arguments.form in (None, form)
            and arguments.work in (None, work)
        ):
            yield Case(plan, form, work, depth, arguments.model)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--layers", default="2,4")
    parser.add_argument("--only", choices=FORCED)
    parser.add_argument("--form", choices=FORMS)
    parser.add_argument("--work", choices=WORKS)
    parser.add_argument("--rows", action="store_true", help="all kinds of collectives")
    return parser.parse_args()


if __name__ == "__main__":
    main()
