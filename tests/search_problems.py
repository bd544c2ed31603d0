"""Random search problems with the structure of sharded transformers."""

import itertools
import math

import numpy as np

from jaxpar.search import Edge, SearchProblem

LATENCY_S = 1e-6
BYTES_PER_S = 1e11
FLOPS_PER_S = 2e14


def random_problem(
    rng: np.random.Generator,
    variables: int,
    choices: int,
    edges: int,
    forbidden: float = 0.0,
) -> SearchProblem:
    """A random graph with random costs; some of them forbidden, some equal."""
    sizes = rng.integers(1, choices + 1, variables)

    def costs(*shape):
        scale = 10.0 ** rng.integers(-6, 1)
        values = rng.integers(0, 8, shape) * scale / 8 + rng.random(shape) * (
            scale * rng.integers(0, 2)
        )
        return np.where(rng.random(shape) < forbidden, math.inf, values)

    pairs = [tuple(rng.integers(0, variables, 2)) for _ in range(edges)]
    return SearchProblem(
        names=tuple(f"v{i}" for i in range(variables)),
        cost_s=tuple(costs(k) for k in sizes),
        edges=tuple(Edge(int(i), int(j), costs(sizes[i], sizes[j])) for i, j in pairs),
        memory_bytes=tuple(
            rng.integers(0, 2 ** rng.integers(1, 20), k).astype(float) for k in sizes
        ),
        constant_s=float(rng.random()),
    )


class _Builder:
    """Operators with factors (letters), each mesh axis splitting one or none."""

    def __init__(self, rng, sizes, axes, free, jitter):
        self.rng, self.sizes, self.axes, self.free = rng, sizes, axes, free
        self.jitter = jitter
        self.names, self.cost, self.memory, self.edges = [], [], [], []
        self.strategies, self.outputs = [], []

    def operator(self, name, output, inputs, flops=0.0, param=None):
        """Adds one operator; inputs: (producer, letters as this operator reads it)."""
        letters = sorted(set(output).union(*(letters for _, letters in inputs)))
        if param:
            letters = sorted(set(letters) | set(param))
        if not self.free:
            letters = letters[:3]
        strategies = [
            s
            for s in itertools.product([*letters, None], repeat=len(self.axes))
            if all(
                self.sizes[c]
                % math.prod(a for a, d in zip(self.axes, s, strict=True) if d == c)
                == 0
                for c in letters
            )
        ]
        number = len(self.names)
        self.names.append(name)
        out_bytes = 2.0 * math.prod(self.sizes[c] for c in output)
        cost, memory = [], []
        for s in strategies:
            split = math.prod(a for a, d in zip(self.axes, s, strict=True) if d)
            seconds = 3 * flops / FLOPS_PER_S / split
            for a, d in zip(self.axes, s, strict=True):
                if d and d not in output:
                    shard = out_bytes / _split(self.axes, s, output)
                    seconds += LATENCY_S + 2 * shard * (a - 1) / a / BYTES_PER_S
                if param and d and d not in param:
                    shard = self._param_bytes(param) / _split(self.axes, s, param)
                    seconds += LATENCY_S + 2 * shard * (a - 1) / a / BYTES_PER_S
            cost.append(seconds + out_bytes / _split(self.axes, s, output) / 1e12)
            memory.append(out_bytes / _split(self.axes, s, output))
        jitter = 1 + self.jitter * self.rng.random(len(cost))
        self.cost.append(np.array(cost) * jitter)
        self.memory.append(np.array(memory))
        self.strategies.append(strategies)
        self.outputs.append(output)
        for producer, read in inputs:
            self._reshard(producer, number, self.outputs[producer], read)
        if param:
            self._storage(number, name, param)
        return number

    def _param_bytes(self, param):
        return 2.0 * math.prod(self.sizes[c] for c in param)

    def _storage(self, reader, name, param):
        """A parameter's storage sharding, and the gather at its reader."""
        number = len(self.names)
        strategies = list(itertools.product([*param, None], repeat=len(self.axes)))
        state = 6 * self._param_bytes(param)
        split = np.array([_split(self.axes, s, param) for s in strategies])
        self.names.append(f"{name}.param")
        self.cost.append(state / split / 1e12)
        self.memory.append(state / split)
        self.strategies.append(strategies)
        self.outputs.append(param)
        self._reshard(number, reader, param, param)

    def _reshard(self, producer, reader, written, read):
        """0 where both ends agree; all-gather or all-to-all of what differs."""
        size = 2.0 * math.prod(self.sizes[c] for c in written)
        have = _places(self.strategies[producer], written)[:, None, :]
        want = _places(self.strategies[reader], read)[None, :, :]
        split = np.array(
            [_split(self.axes, s, written) for s in self.strategies[producer]]
        )
        axes = np.array(self.axes)
        moved = size / split[:, None, None] * (axes - 1) / np.where(want < 0, 1, axes)
        seconds = 2 * (LATENCY_S + moved / BYTES_PER_S)
        table = np.where((have != want) & (have >= 0), seconds, 0.0).sum(axis=2)
        self.edges.append(Edge(producer, reader, table))


def _places(strategies, letters):
    """Per strategy and axis, the dim that the axis splits, or -1."""
    place = {c: k for k, c in enumerate(letters)}
    return np.array([[place.get(d, -1) for d in s] for s in strategies])


def _split(axes, strategy, letters):
    pairs = zip(axes, strategy, strict=True)
    return math.prod(a for a, d in pairs if d and d in letters)


def transformer(
    layers: int,
    axes: tuple[int, ...] = (2, 2, 2),
    *,
    free: bool = True,
    tangled: bool = False,
    jitter: float = 0.05,
) -> SearchProblem:
    """Decoder blocks, every operator with its own strategy over all mesh axes.

    Args:
        layers: Number of blocks.
        axes: Sizes of the mesh axes.
        free: Whether an axis may split any factor, or the first three only.
        tangled: Whether all layers share one mask and one rotary table (hubs).
        jitter: Random share by which costs differ from layer to layer.
    """
    rng = np.random.default_rng(0)
    sizes = dict(b=16, s=2048, d=2048, h=16, e=128, f=8192, t=2048, v=32768)
    build = _Builder(rng, sizes, axes, free, jitter)
    tokens = 16 * 2048
    x = build.operator("embed", "bsd", [], 0.0, "vd")
    rotary, mask = [], []
    if tangled:
        rotary = [(build.operator("rotary", "se", []), "se")]
        mask = [(build.operator("mask", "bst", []), "bst")]
    for n in range(layers):
        norm = build.operator(f"{n}.norm1", "bsd", [(x, "bsd")])
        flops = 2.0 * tokens * 2048 * 2048
        q, k, v = (
            build.operator(
                f"{n}.{c}", o, [(norm, o[0] + o[2] + "d"), *rotary], flops, "dhe"
            )
            for c, o in (("q", "bhse"), ("k", "bhte"), ("v", "bhte"))
        )
        attention = 2.0 * tokens * 2048 * 2048
        scores = build.operator(
            f"{n}.scores", "bhst", [(q, "bhse"), (k, "bhte")], attention
        )
        soft = build.operator(f"{n}.softmax", "bhst", [(scores, "bhst"), *mask])
        mixed = build.operator(
            f"{n}.mix", "bhse", [(soft, "bhst"), (v, "bhte")], attention
        )
        out = build.operator(f"{n}.out", "bsd", [(mixed, "bhse")], flops, "hed")
        x = build.operator(f"{n}.add1", "bsd", [(x, "bsd"), (out, "bsd")])
        norm = build.operator(f"{n}.norm2", "bsd", [(x, "bsd")])
        up = build.operator(f"{n}.up", "bsf", [(norm, "bsd")], 4 * flops, "df")
        gate = build.operator(f"{n}.gate", "bsf", [(norm, "bsd")], 4 * flops, "df")
        act = build.operator(f"{n}.act", "bsf", [(up, "bsf"), (gate, "bsf")])
        down = build.operator(f"{n}.down", "bsd", [(act, "bsf")], 4 * flops, "fd")
        x = build.operator(f"{n}.add2", "bsd", [(x, "bsd"), (down, "bsd")])
    build.operator("head", "bsv", [(x, "bsd")], 2.0 * tokens * 2048 * 32768, "dv")
    return SearchProblem(
        names=tuple(build.names),
        cost_s=tuple(build.cost),
        edges=tuple(build.edges),
        memory_bytes=tuple(build.memory),
    )
