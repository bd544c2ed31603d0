"""A training loop with a progress bar, checkpoints and resumption."""

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from jaxpar.checkpoint import Checkpoints
from jaxpar.data import Batches
from jaxpar.errors import JaxparError, ModelError
from jaxpar.runtime import Sharded, State


@dataclass(frozen=True)
class Training:
    """What a training run ends with.

    Attributes:
        state: The last one.
        first_step: Steps that were made before this run.
        steps: Steps made in all.
        first_loss: Of the first step of this run; None if it made none.
        last_loss: Of its last step.
        rate_per_s: Tokens (or examples) a second, without the first step.
        unit: "tokens" or "examples".
    """

    state: State
    first_step: int
    steps: int
    first_loss: float | None = None
    last_loss: float | None = None
    rate_per_s: float | None = None
    unit: str = "tokens"


def train(  # noqa: PLR0913
    sharded: Sharded,
    batches: Batches,
    steps: int,
    *,
    log_every: int = 10,
    checkpoint: str | Path | None = None,
    save_every: int | None = None,
    resume: bool = False,
    seed: int = 0,
    console: Console | None = None,
) -> Training:
    """Trains up to a step, showing loss, speed and the time that is left.

    Args:
        sharded: From `jaxpar.auto_shard` or `jaxpar.apply_plan`.
        batches: Such as `jaxpar.data.text_batches`; of the planned shapes.
        steps: Steps in all, those before a resumption included.
        log_every: Steps between two looks at the loss.
        checkpoint: Folder for checkpoints and the plan; the last step is saved.
        save_every: Steps between two checkpoints; None saves the last one only.
        resume: Go on from the newest checkpoint, if there is one.
        seed: Of the first state.
        console: Where to write.

    Raises:
        ModelError: if the loss is not finite.
        JaxparError: if the folder holds checkpoints and `resume` is not set, or they
            are of another model.
    """
    console = console or Console()
    folder = nullcontext() if checkpoint is None else Checkpoints(checkpoint)
    with folder as checkpoints:
        state, first = _first_state(sharded, checkpoints, resume, seed, console)
        run = _Run(sharded, batches, console, log_every, save_every, checkpoints)
        return run.until(steps, state, first)


def _first_state(
    sharded: Sharded,
    checkpoints: Checkpoints | None,
    resume: bool,
    seed: int,
    console: Console,
) -> tuple[State, int]:
    """The state to start from, and how many steps it has behind it."""
    if checkpoints is None:
        if resume:
            raise JaxparError(
                "cannot resume without a folder of checkpoints", hint="name it"
            )
        return sharded.init(seed), 0
    found = checkpoints.latest_step
    if found is not None and not resume:
        raise JaxparError(
            f"{checkpoints.folder} holds a checkpoint of step {found}",
            hint="resume from it, or name another folder",
        )
    checkpoints.save_plan(sharded.plan)
    if found is None:
        if resume:
            console.print(f"no checkpoint in {checkpoints.folder}: starting anew")
        return sharded.init(seed), 0
    console.print(f"resumed from step {found} in {checkpoints.folder}")
    return checkpoints.restore(sharded.abstract_state), found


@dataclass(frozen=True)
class _Run:
    """One run's constants."""

    sharded: Sharded
    batches: Batches
    console: Console
    log_every: int
    save_every: int | None
    checkpoints: Checkpoints | None

    def until(self, steps: int, state: State, first: int) -> Training:
        if first >= steps:
            self.console.print(f"nothing to do: {first} of {steps} steps are made")
            return Training(state, first, first)
        losses, meter, rate = [], None, None
        with _Display(self.console, first, steps) as display:
            for step in range(first, steps):
                batch = self.batches.batch_at(step)
                meter = meter or _Meter.of(batch)
                batch = jax.device_put(batch, self.sharded.batch_shardings)
                state, metrics = self.sharded.step(state, batch)
                made = step + 1
                if step == first or made % self.log_every == 0 or made == steps:
                    losses.append(_finite(metrics["loss"], made))
                    rate = meter.rate(made - first)
                    display.show(made, losses[-1], rate)
                else:
                    _keep_up(metrics["loss"])
                self._save(made, made == steps, state)
        unit = meter.unit if meter else "tokens"
        done = Training(state, first, steps, losses[0], losses[-1], rate, unit)
        _summarise(done, self.console)
        return done

    def _save(self, made: int, last: bool, state: State) -> None:
        due = last or (self.save_every and made % self.save_every == 0)
        if due and self.checkpoints is not None:
            self.checkpoints.save(made, state)


class _Meter:
    """Counts tokens or examples a second from the end of the first step on."""

    def __init__(self, size: int, unit: str):
        self.size, self.unit = size, unit
        self._start_s: float | None = None

    @classmethod
    def of(cls, batch: Any) -> "_Meter":
        if isinstance(batch, Mapping) and "tokens" in batch:
            rows, length = batch["tokens"].shape
            return cls(rows * (length - 1), "tokens")
        return cls(jax.tree.leaves(batch)[0].shape[0], "examples")

    def rate(self, made: int) -> float | None:
        """Per second; None after the first step, which is mostly compilation."""
        now_s = time.perf_counter()
        if self._start_s is None:
            self._start_s = now_s
        return (made - 1) * self.size / (now_s - self._start_s) if made > 1 else None


class _Display:
    """A progress bar on a terminal, lines anywhere else."""

    def __init__(self, console: Console, first: int, steps: int):
        self._console, self._steps = console, steps
        self._bar = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("compiling", total=steps, completed=first)

    def __enter__(self) -> "_Display":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, made: int, loss: float, rate: float | None) -> None:
        text = f"loss {loss:.4f}" + (f"  {rate:,.0f} a second" if rate else "")
        if self._bar is not None:
            self._bar.update(self._task, completed=made, description=text)
        else:
            self._console.print(f"step {made}/{self._steps}  {text}")


def _finite(loss: Any, made: int) -> float:
    loss = float(loss)
    if not math.isfinite(loss):
        raise ModelError(
            f"the loss of step {made} is {loss}",
            hint="lower the learning rate, clip gradients, or look at the data",
        )
    return loss


def _keep_up(loss: jax.Array) -> None:
    """Waits for the step on simulated devices.

    They share the host's threads, and collectives of several steps at once can
    starve each other; real devices queue steps.
    """
    if jax.default_backend() == "cpu":
        loss.block_until_ready()


def _summarise(done: Training, console: Console) -> None:
    if done.rate_per_s is not None:
        console.print(f"{done.rate_per_s:,.0f} {done.unit} a second")
    console.print(f"loss {done.first_loss:.4f} at step {done.first_step + 1}")
    console.print(f"loss {done.last_loss:.4f} at step {done.steps}")
