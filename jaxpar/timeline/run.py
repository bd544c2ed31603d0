"""A whole training run at the pace of a timeline: time and money."""

from dataclasses import dataclass

from jaxpar.errors import PlanError
from jaxpar.plan import Plan
from jaxpar.timeline.play import Timeline, play

HOUR_S = 3600.0


@dataclass(frozen=True)
class Pace:
    """Rates of one step.

    Attributes:
        step_s: The step.
        mfu: Model FLOPs over peak FLOPs; None where the peak is unknown.
        hfu: The same with what is computed twice.
        tokens_per_s: None where the batch has no tokens.
    """

    step_s: float
    mfu: float | None
    hfu: float | None
    tokens_per_s: float | None


@dataclass(frozen=True)
class Run:
    """Training on a number of tokens.

    Attributes:
        tokens: In all.
        steps: Of the plan's batch.
        hours: On the clock.
        device_hours: Of all devices together.
        price: In the currency of the price of a device hour; None without one.
    """

    tokens: float
    steps: float
    hours: float
    device_hours: float
    price: float | None


def timeline_of(plan: Plan, *, overlap: bool = True) -> Timeline:
    """The timeline of a plan's step.

    Raises:
        PlanError: if the plan lists no tasks.
    """
    if not plan.tasks:
        raise PlanError(
            "tasks: the plan lists none, so there is no timeline to play",
            hint="make the plan again with this version of jaxpar",
        )
    return play(plan.tasks, overlap=overlap)


def pace(plan: Plan, timeline: Timeline) -> Pace:
    """The rates of a plan at the pace of a timeline."""
    alone = plan.predicted
    faster = alone.step_s / timeline.step_s if timeline.step_s else 1.0
    mfu = None if alone.mfu is None else alone.mfu * faster
    hfu, both = None, alone.overlapped
    if mfu is not None and both is not None and both.mfu and both.hfu:
        hfu = mfu * both.hfu / both.mfu
    tokens = None if alone.tokens_per_s is None else alone.tokens_per_s * faster
    return Pace(timeline.step_s, mfu, hfu, tokens)


def run_of(plan: Plan, rates: Pace, tokens: float, price: float | None = None) -> Run:
    """What a run on some tokens takes.

    Args:
        plan: Its batch and machine.
        rates: From `pace`.
        tokens: To train on.
        price: Of one device for one hour.

    Raises:
        PlanError: if the batch has no tokens, or tokens or price are below zero.
    """
    if not rates.tokens_per_s:
        raise PlanError("the plan's batch has no tokens to count a run by")
    if tokens <= 0 or (price is not None and price < 0):
        raise PlanError(
            f"a run of {tokens:g} tokens at a price of {price} is none",
            hint="give a positive number of tokens, and a price of at least 0",
        )
    seconds = tokens / rates.tokens_per_s
    hours = seconds / HOUR_S
    devices = plan.topology.devices
    return Run(
        tokens=tokens,
        steps=seconds / rates.step_s,
        hours=hours,
        device_hours=hours * devices,
        price=None if price is None else hours * devices * price,
    )
