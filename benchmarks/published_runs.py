"""Published training runs as configurations, and their predicted step times."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpar.configurations import Shape, evaluate, layouts
from jaxpar.hardware import Topology
from jaxpar.topology import get_topology

FAMILIES = {
    "A100-40": "dgx-a100-40g",
    "A100-80": "dgx-a100-80g",
    "H100-80": "dgx-h100",
    "B200": "dgx-b200",
    "TPUv3": "tpu-v3",
    "TPUv4": "tpu-v4",
    "TPUv5e": "tpu-v5e",
    "TPUv5p": "tpu-v5p",
    "TPUv6e": "tpu-v6e",
    "TPUv7x": "tpu7x",
}
"""Chip of a record to family of topologies."""

SLICES = {
    "2-D": {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
    | {128: "8x16", 256: "16x16", 1024: "32x32"},
    "3-D": {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
    | {128: "4x4x8", 256: "4x8x8", 512: "8x8x8", 1024: "8x8x16", 2048: "8x16x16"}
    | {3072: "12x16x16", 4096: "16x16x16"},
}
"""Shape of a slice by its chips, where the source does not say."""

_EAGER = {"tensor_overlap": 0, "data_overlap": False, "flash": False, "dropout": True}
_XLA = {"tensor_overlap": 2, "data_overlap": True, "flash": True, "dropout": False}
_EAGER |= {"tied": True}
_XLA |= {"whole_batch": True}
_FSDP = {"tensor_overlap": 0, "data_overlap": True, "flash": True, "dropout": False}
SOFTWARE: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    # Asynchronous all-reduce in the backward pass came to Megatron-LM after 2104.04473.
    ("2104.04473", "2104.04473", _EAGER),
    ("2205.05198", "2205.05198", _EAGER | {"tensor_overlap": 1}),
    ("2402.15627", "MegaScale's Megatron-LM", _EAGER | {"tensor_overlap": 1}),
    ("bigscience", "BLOOM grid", _EAGER),
    ("vTrain", "vTrain", _EAGER),
    ("alpa", "alpa", _EAGER | {"data_overlap": True}),
    # PaLM reduces gradients between pods after the backward pass (2204.02311, sec. 4).
    ("2204.02311", "PaLM", _XLA | {"flash": False, "data_overlap": False}),
    ("2112.11446", "Gopher", _XLA | {"flash": False}),
    ("2407.21783", "Llama 3", _FSDP | {"tensor_overlap": 1}),
    ("llm-foundry", "llm-foundry", _FSDP),
    ("torchtitan", "torchtitan", _FSDP),
    ("maxtext", "MaxText", _XLA),
    ("tpu-recipes", "tpu-recipes", _XLA),
    ("NeMo docs", "NeMo", _FSDP | {"tensor_overlap": 2}),
    ("Megatron-Bridge", "Megatron-Bridge", _FSDP | {"tensor_overlap": 2}),
    ("Megatron-LM", "Megatron-LM README", _FSDP | {"tensor_overlap": 2}),
    ("levanter", "levanter", _XLA),
)
"""What stands in a source, its name, and what software it ran: first match counts.
Of other sources, TPUs are taken to run as MaxText does and GPUs as Megatron-LM did."""

DTYPES = {"fp16": "bfloat16", "bf16": "bfloat16", "fp8": "float8", "int8": "int8"}
DEGREES = {"174.6B": 2, "529.6B": 3}
"""Interleaving of 2104.04473 Table 2, which does not state it: assumed."""


class RefusedError(Exception):
    """Why a record is not predicted."""


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        name: Its id.
        group: Its source and chip.
        shape: The model.
        columns: Of the configuration, as `layouts` takes them.
        topology: The machine.
        dtype: Of the products with weights.
        seconds: Published time of one step.
        record: As it was read.
        assumed: What the source does not say.
    """

    name: str
    group: str
    shape: Shape
    columns: Mapping[str, Any]
    topology: Topology
    dtype: str
    seconds: float
    record: Mapping[str, Any]
    assumed: tuple[str, ...]


def read_run(record: Mapping[str, Any]) -> Run:
    """A record as a configuration.

    Raises:
        RefusedError: if the record cannot be expressed; says why.
    """
    model, hardware, parallel = (record[k] for k in ("model", "hardware", "parallel"))
    _check(record)
    group, software = _software(record)
    assumed: list[str] = []
    shape = _shape(model, software, assumed)
    topology = _topology(hardware)
    columns = _columns(record, software, topology, assumed)
    batch = parallel["global_batch"]
    if hardware["chip"].startswith("TPU"):
        group = f"{group} {hardware['chip']}"
    elif "llm-foundry" in group or "Bridge" in group:
        group = f"{group} {hardware['chip']}"
    return Run(
        name=record["id"],
        group=group,
        shape=shape,
        columns=columns,
        topology=topology,
        dtype=DTYPES[record["precision"]],
        seconds=_seconds(record, shape, batch),
        record=record,
        assumed=tuple(assumed),
    )


def distinct(runs: list[Run]) -> list[Run]:
    """Runs that several files hold are kept once: same machine, layout and time."""
    kept = {
        (run.group, run.shape, tuple(run.columns.values()), f"{run.seconds:.4g}"): run
        for run in reversed(runs)
    }
    return list(reversed(kept.values()))


def predict(runs: list[Run]) -> np.ndarray:
    """Predicted seconds of one step of every run."""
    return np.array(
        [
            evaluate(
                run.shape, layouts(**run.columns), run.topology, dtype=run.dtype
            ).seconds.step[0]
            for run in runs
        ]
    )


def _check(record: Mapping[str, Any]) -> None:
    """Refuses what cannot be expressed."""
    model, hardware, parallel = (record[k] for k in ("model", "hardware", "parallel"))
    special = str(model.get("note") or "") + str(model.get("attention") or "")
    special = ", ".join(w for w in ("sliding", "local", "MLA") if w in special)
    missing = ", ".join(k for k in _NEEDED if not model.get(k))
    experts = (model.get("experts"), parallel.get("expert"))
    reasons = {
        "memory only, no step time": record["tier"] == "M",
        "mixture of experts": any((n or 1) > 1 for n in experts),
        f"attention is not plain ({special})": special,
        f"the source does not give {missing}": missing,
        f"products in {record['precision']}": record["precision"] not in DTYPES,
        f"no constants for chip {hardware['chip']}": hardware["chip"] not in FAMILIES,
        "the source does not give the number of chips": not isinstance(
            hardware.get("count"), int
        ),
        "the source does not give the batch": not parallel.get("global_batch"),
        "the source gives no time or rate": not any(
            record["measured"].get(k) for k in _TIMES
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise RefusedError(reason)


_NEEDED = ("layers", "d_model", "heads", "d_ff", "vocab", "seq_len")
_TIMES = ("iteration_s", "tokens_per_s", "tflops_per_chip", "mfu")


def _software(record: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    source = record["source"]
    for word, name, software in SOFTWARE:
        if word.lower() in source.lower():
            return name + _part(word, source, record["parallel"]), software
    tpu = record["hardware"]["chip"].startswith("TPU")
    return f"other: {source[:24]}", _XLA if tpu else _EAGER


def _part(word: str, source: str, parallel: Mapping[str, Any]) -> str:
    """Which table of a source a record is from."""
    if word == "vTrain":
        return " single-node" if "single" in source else " multi-node"
    if word not in ("2104.04473", "2205.05198"):
        return ""
    table = re.search(r"Table \d", source)
    third = " ZeRO-3" if parallel.get("zero") == 3 else ""
    return (f" {table[0]}" if table else " text") + third


def _shape(model: Mapping[str, Any], software: Mapping, assumed: list[str]) -> Shape:
    heads = model["heads"]
    kind = str(model.get("mlp") or "")
    kind = "" if " or " in kind else kind
    gated = "swiglu" in kind if kind else _gated(model)
    if not kind:
        assumed.append("gated" if gated else "not gated")
    return Shape(
        layers=model["layers"],
        width=model["d_model"],
        heads=heads,
        kv_heads=model.get("kv_heads") or heads,
        head_dim=model.get("head_dim") or model["d_model"] // heads,
        ffn=model["d_ff"],
        vocab=model["vocab"],
        sequence=model["seq_len"],
        gated=gated,
        tied=model.get("tied") or software.get("tied", False),
        flash=software["flash"],
        dropout=software["dropout"],
    )


def _gated(model: Mapping[str, Any]) -> bool:
    """Whether the number of parameters is nearer to that with a gate."""
    heads, width = model["heads"], model["d_model"]
    dim = model.get("head_dim") or width // heads
    kv = model.get("kv_heads") or heads
    both = [
        Shape(model["layers"], width, heads, kv, dim, model["d_ff"], model["vocab"], 1)
        for _ in range(2)
    ]
    sizes = [replace(both[i], gated=bool(i), tied=False).params for i in range(2)]
    params = model.get("params") or sizes[0]
    return abs(sizes[1] - params) < abs(sizes[0] - params)


def _topology(hardware: Mapping[str, Any]) -> Topology:
    """The machine, with the network that the source gives."""
    family, count = FAMILIES[hardware["chip"]], hardware["count"]
    if family.startswith("dgx"):
        topology = get_topology(f"{family}-{count}")
        return _with_network(topology, str(hardware.get("nic") or ""))
    slices = hardware.get("slices") or hardware.get("pods") or 1
    flat = family in ("tpu-v3", "tpu-v5e", "tpu-v6e")
    shape = SLICES["2-D" if flat else "3-D"].get(count // slices)
    if shape is None:
        raise RefusedError(f"no shape is known for a slice of {count // slices} chips")
    prefix = f"{slices}x" if slices > 1 else ""
    return get_topology(f"{family}-{prefix}{shape}")


def _with_network(topology: Topology, nic: str) -> Topology:
    """The same machine with the bandwidth of a network card string, per device."""
    each = re.search(r"(\d+)x(\d+)\s*Gb", nic)
    node = re.search(r"(\d+)\s*Gb/s.*per node", nic)
    one = re.search(r"(\d+)\s*Gb/GPU", nic)
    if each:
        gigabits = int(each[1]) * int(each[2]) / 8
    elif node:
        gigabits = int(node[1]) / 8
    elif one:
        gigabits = int(one[1])
    else:
        return topology
    speed = gigabits * 1.25e8
    links = tuple(
        replace(link, bytes_per_s=speed) if link.kind == "network" else link
        for link in topology.links
    )
    return replace(topology, links=links)


def _columns(
    record: Mapping[str, Any],
    software: Mapping[str, Any],
    topology: Topology,
    assumed: list[str],
) -> dict[str, Any]:
    """The configuration of a record."""
    parallel = record["parallel"]
    tensor, pipeline, sequence = (
        parallel.get(k) or 1 for k in ("tensor", "pipeline", "sequence")
    )
    replicas = topology.devices / (tensor * pipeline * sequence)
    if replicas != int(replicas):
        raise RefusedError("the axes do not multiply out to the chips")
    zero = int(re.match(r"\d?", str(parallel.get("zero") or 0))[0] or 0)
    fsdp = parallel.get("fsdp") or 0
    fsdp = min(fsdp, int(replicas)) or (int(replicas) if zero else 1)
    # The axis that spans slices must hold them.
    fsdp = min(fsdp, int(replicas) // topology.slices)
    data = int(replicas) // fsdp
    batch = parallel["global_batch"]
    microbatch = parallel.get("microbatch")
    if software.get("whole_batch"):
        # Sources count examples per chip, and accumulate no gradients.
        microbatch = batch / (data * fsdp * pipeline)
    if not microbatch:
        microbatch = 1 if pipeline > 1 else min(1, batch / (data * fsdp))
        assumed.append(f"microbatch {microbatch}")
    if sequence > 1:
        microbatch = max(microbatch, 1)
    many = max(batch / (data * fsdp * microbatch), 1)
    many = math.ceil(round(many, 6))
    remat = _remat(parallel, assumed)
    interleave = parallel.get("interleave")
    if not interleave:
        interleave = next((v for k, v in DEGREES.items() if k in record["id"]), 1)
        assumed.append(f"interleave {interleave}")
    wide = record["precision"] == "bf16" and not record["hardware"]["chip"].startswith(
        "TPU"
    )
    return {
        "data": data,
        "fsdp": fsdp,
        "zero": zero,
        "tensor": tensor,
        "sequence": sequence,
        "sequence_parallel": bool(parallel.get("megatron_sp")),
        "pipeline": pipeline,
        "interleave": interleave,
        "microbatch": microbatch,
        "microbatches": many,
        "remat": remat,
        "tensor_overlap": software["tensor_overlap"],
        "data_overlap": software["data_overlap"],
        "balanced_ends": "embedding" in str(parallel.get("layer_balance") or ""),
        "grad_bytes": 4 if wide else 2,
    }


def _remat(parallel: Mapping[str, Any], assumed: list[str]) -> int:
    """Index of the recomputation that a record names."""
    named = str(parallel.get("recompute") or "")
    if named.startswith("none") or named == "minimal":
        return 0
    if named.startswith("selective"):
        return 1
    if not named:
        assumed.append("recompute selective")
        return 1
    if "qkv" in named:
        return 3
    if not named.startswith("full"):
        assumed.append(f"recompute full for {named!r}")
    return 2


def _seconds(record: Mapping[str, Any], shape: Shape, batch: float) -> float:
    """Published seconds of a step: given, or from tokens or model FLOPs per second."""
    measured, hardware = record["measured"], record["hardware"]
    if measured.get("iteration_s"):
        return measured["iteration_s"]
    if measured.get("tokens_per_s"):
        return batch * shape.sequence / measured["tokens_per_s"]
    flops = float(shape.model_flops(batch)) / hardware["count"]
    if measured.get("tflops_per_chip"):
        return flops / (measured["tflops_per_chip"] * 1e12)
    family = get_topology(f"{FAMILIES[hardware['chip']]}-{hardware['count']}")
    return flops / (measured["mfu"] * family.chip.flops_per_s("bfloat16"))
