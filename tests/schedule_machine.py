"""Schedules for tests: random ones, and a machine that runs their arrays in numpy."""

import numpy as np
from hypothesis import strategies as st

from jaxpar.schedule import FAMILIES, Kind, Schedule, Task, make_schedule

WIDTH = 3


@st.composite
def made(draw, most: int = 9) -> Schedule:
    """Any schedule that a family makes."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    wave = draw(st.booleans())
    one = family == "zero-bubble" and not wave
    return make_schedule(
        family,
        draw(st.integers(1, 5)),
        draw(st.integers(1, most)),
        1 if one else draw(st.integers(1, 3)),
        wave=wave,
    )


@st.composite
def wild(draw) -> Schedule:
    """Any valid schedule: every device picks what to do, or nothing, at random."""
    devices, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    microbatches, split = draw(st.integers(1, 4)), draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    empty = Schedule("wild", devices, chunks, microbatches, ())
    kinds = list(Kind) if split else [Kind.FORWARD, Kind.BACKWARD]
    left = [
        Task(kind, mb, stage)
        for kind in kinds
        for mb in range(microbatches)
        for stage in range(empty.stages)
    ]
    done: set[Task] = set()
    ticks = []
    while left:
        cells = [[] for _ in range(devices)]
        for kind in kinds:
            for device in range(devices):
                mine = {t for t in cells[device]}
                ready = [
                    t
                    for t in left
                    if (t.kind, t.stage % devices) == (kind, device)
                    and all(
                        need in done or (need in mine and need.stage == t.stage)
                        for need in empty.needs(t)
                    )
                ]
                if ready and rng.random() < 0.7:
                    cells[device].append(ready[rng.integers(len(ready))])
        done.update(t for cell in cells for t in cell)
        left = [t for t in left if t not in done]
        ticks.append(tuple(map(tuple, cells)))
    return Schedule("wild", devices, chunks, microbatches, tuple(ticks))


class Toy:
    """A chain of affine stages and a squared loss; gradients the direct way."""

    def __init__(self, stages: int, microbatches: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.weight = rng.normal(size=(stages, WIDTH, WIDTH)) / 2
        self.bias = rng.normal(size=(stages, WIDTH))
        self.batch, self.target = rng.normal(size=(2, microbatches, WIDTH))

    def stage(self, s, x):
        return self.weight[s] @ x + self.bias[s]

    def direct(self):
        """Loss, and gradients of weights and biases, one microbatch after another."""
        loss, weight, bias = 0.0, np.zeros_like(self.weight), np.zeros_like(self.bias)
        for first, target in zip(self.batch, self.target, strict=True):
            inputs = [first]
            for s in range(len(self.weight)):
                inputs.append(self.stage(s, inputs[-1]))
            loss += 0.5 * np.sum((inputs[-1] - target) ** 2)
            gradient = inputs[-1] - target
            for s in reversed(range(len(self.weight))):
                weight[s] += np.outer(gradient, inputs[s])
                bias[s] += gradient
                gradient = self.weight[s].T @ gradient
        return loss, weight, bias


class Machine:
    """Devices that know the arrays, their own buffers, and nothing of the schedule.

    Buffers and links hold NaN wherever nothing was put; one read too many shows. A
    row more than needed takes, as row -1, what is not to be kept.
    """

    def __init__(self, lowered, toy, devices):
        self.lowered, self.toy, self.devices = lowered, toy, devices
        self.inputs = np.full((devices, lowered.input_rows + 1, WIDTH), np.nan)
        self.gradients = np.full((devices, lowered.gradient_rows + 1, WIDTH), np.nan)
        self.loss = 0.0
        self.weight, self.bias = np.zeros_like(toy.weight), np.zeros_like(toy.bias)

    def run(self):
        for start, stop, kinds in self.lowered.runs:
            for tick in range(start, stop):
                sent = {kind: self._slot(kind, tick) for kind in kinds}
                self._arrive(
                    sent.get(Kind.FORWARD), self.lowered.input_arrival[tick], 1
                )
                self._arrive(
                    sent.get(Kind.BACKWARD), self.lowered.gradient_arrival[tick], -1
                )
        return self.loss, self.weight, self.bias

    def _slot(self, kind, tick):
        table = {
            Kind.FORWARD: self.lowered.forward,
            Kind.BACKWARD: self.lowered.backward,
            Kind.WEIGHT: self.lowered.weight,
        }[kind]
        sent = np.full((self.devices, WIDTH), np.nan)
        for d in range(self.devices):
            mb, row = table.microbatch[tick, d], table.input_row[tick, d]
            if mb < 0:
                continue
            s = table.chunk[tick, d] * self.devices + d
            x = self.inputs[d, row] if s else self.toy.batch[mb]
            assert (row >= 0) == (s > 0)
            if kind is Kind.FORWARD:
                sent[d] = self._forward(s, mb, x)
            else:
                sent[d] = self._backward(kind, s, mb, x, table.gradient_row[tick, d], d)
        return sent

    def _forward(self, s, mb, x):
        y = self.toy.stage(s, x)
        if s == len(self.toy.weight) - 1:
            self.loss += 0.5 * np.sum((y - self.toy.target[mb]) ** 2)
        return y

    def _backward(self, kind, s, mb, x, row, d):
        last = s == len(self.toy.weight) - 1
        assert (row >= 0) == (not last)
        gradient = self.gradients[d, row]
        if last:
            gradient = self.toy.stage(s, x) - self.toy.target[mb]
        split = (self.lowered.weight.microbatch >= 0).any()
        if kind is Kind.WEIGHT or not split:
            self.weight[s] += np.outer(gradient, x)
            self.bias[s] += gradient
        return self.toy.weight[s].T @ gradient

    def _arrive(self, sent, rows, step):
        buffer = self.inputs if step == 1 else self.gradients
        if sent is None:
            assert (rows == -1).all()
            return
        for d, row in enumerate(rows):
            buffer[d, row] = sent[(d - step) % self.devices]
