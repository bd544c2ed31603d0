"""Runs the compiler in a process of its own, as far as is asked; keeps its dumps."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxpar.aot.program import Program
from jaxpar.aot.targets import compiler_arguments
from jaxpar.errors import PlanError
from jaxpar.hardware import Topology
from jaxpar.mesh import device_order, logical_mesh

TIERS: Mapping[str, str] = {
    "partitioned": "*.after_tpu-spmd-partitioning.*.txt",
    "optimised": "*.after_optimizations-memory-usage-report.txt",
    "full": "*.after_codegen.txt",
}
"""How far to compile, and the file that shows that it came so far: collectives stand
in the first (about 1% of the time), memory in the second, cycles in the third."""

_BEHIND: Mapping[str, str] = {
    "partitioned": "*.before_optimizations.txt",
    "optimised": "*.after_optimizations_after_buffer_assignment.txt",
}
_POLL_S = 0.05
_SETTLE_S = 0.5
"""A dump appears before its last line is written."""
TEXTS: Mapping[str, str] = {
    "partitioned": TIERS["partitioned"],
    "optimised": "*.after_optimizations.txt",
    "buffers": "*.after_optimizations-buffer-assignment.txt",
    "full": TIERS["full"],
}


@dataclass(frozen=True)
class Compilation:
    """What the compiler left behind.

    Attributes:
        tier: How far it went.
        texts: Programs and reports, by the keys of `TEXTS`, as far as they exist.
        memory: Its own account of the finished program, by class in bytes; None
            unless the tier is "full".
        seconds: It took.
        error: What it refused the program for, or None.
    """

    tier: str
    texts: Mapping[str, str]
    memory: Mapping[str, int] | None
    seconds: float
    error: str | None = None


def compile_program(
    program: Program,
    topology: Topology,
    mesh: Mapping[str, int],
    *,
    tier: str = "full",
    timeout_s: float = 3600.0,
    cache: Path | None = None,
) -> Compilation:
    """Compiles a program for a topology that need not be there.

    Args:
        program: From `program_of`.
        topology: TPUs.
        mesh: Axis sizes; devices are placed along the links as in a real run.
        tier: One of `TIERS`; the compiler is stopped when it has come so far.
        timeout_s: Longest wait.
        cache: Folder of earlier compilations, by content; None keeps none.

    Raises:
        PlanError: if the TPU compiler is not installed, fails, or takes too long.
        MeshError: if it does not know the chip.
    """
    if tier not in TIERS:
        raise PlanError(f"tier is {tier!r}", hint=f"use one of {', '.join(TIERS)}")
    order = device_order(logical_mesh(topology, mesh)).flatten()
    job = {
        "topology": compiler_arguments(topology),
        "mesh": dict(mesh),
        "order": [int(position) for position in order],
        "donated": program.donated,
    }
    kept = cache and cache / _digest(program, job)
    if kept and (found := _read(kept, tier)):
        return found
    with tempfile.TemporaryDirectory(prefix="jaxpar-aot-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        (folder / "program.bin").write_bytes(program.code)
        started = time.perf_counter()
        _run(folder, tier, timeout_s)
        seconds = time.perf_counter() - started
        made = _collected(folder, tier, seconds)
    if kept:
        _write(kept, made)
    return made


def _run(folder: Path, tier: str, timeout_s: float) -> None:
    """Starts the worker, and stops it when the tier is reached."""
    log = folder / "log.txt"
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "jaxpar.aot.worker", str(folder)],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        ends = time.monotonic() + timeout_s
        while worker.poll() is None and not _reached(folder, tier):
            if time.monotonic() > ends:
                raise PlanError(
                    f"the TPU compiler was not done after {timeout_s:.0f} s",
                    hint="ask for an earlier tier, or allow more time",
                )
            time.sleep(_POLL_S)
    finally:
        _kill(worker)
    if not (folder / "done.json").exists() and not _reached(folder, tier):
        raise PlanError(
            f"the TPU compiler stopped with status {worker.returncode}: "
            + log.read_text("utf-8", "replace").strip()[-400:],
            hint="jaxpar[tpu] installs it; it needs a few GiB of memory",
        )


def _kill(worker: subprocess.Popen) -> None:
    """By SIGKILL: on SIGTERM the library prints its stack for tens of seconds."""
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _reached(folder: Path, tier: str) -> bool:
    if (folder / "done.json").exists():
        return True
    dump = folder / "dump"
    if tier == "full" or not any(dump.glob(TIERS[tier])):
        return False
    # Whole once the next one has begun; nothing follows at once, so wait a little.
    time.sleep(_SETTLE_S)
    return tier == "partitioned" or any(dump.glob(_BEHIND[tier]))


def _collected(folder: Path, tier: str, seconds: float) -> Compilation:
    texts = {}
    for key, pattern in TEXTS.items():
        found = sorted((folder / "dump").glob(pattern))
        if found:
            texts[key] = found[-1].read_text(encoding="utf-8")
    done = folder / "done.json"
    answer: dict[str, Any] = {}
    if done.exists():
        answer = json.loads(done.read_text("utf-8"))
    error = answer.pop("error", None)
    return Compilation(tier, texts, answer or None, seconds, error)


# ---- cache


def default_cache() -> Path:
    """Where compilations are kept: `JAXPAR_CACHE_DIR`, else the user's own."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("JAXPAR_CACHE_DIR") or Path(base) / "jaxpar") / "aot"


def _digest(program: Program, job: Mapping[str, Any]) -> str:
    """Of all that decides what comes out, the compiler's version too."""
    try:
        version = metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        raise PlanError(
            "compiling for TPUs needs libtpu, which is not installed",
            hint="pip install 'jaxpar[tpu]'",
        ) from None
    what = hashlib.sha256(program.text.encode())
    what.update(json.dumps([job, version], sort_keys=True).encode())
    return what.hexdigest()[:32]


def _read(folder: Path, tier: str) -> Compilation | None:
    """The cheapest compilation kept that went at least so far."""
    order = list(TIERS)
    for reached in order[order.index(tier) :]:
        place = folder / reached
        if (place / "summary.json").exists():
            summary = json.loads((place / "summary.json").read_text("utf-8"))
            texts = {p.stem: p.read_text("utf-8") for p in place.glob("*.txt")}
            return Compilation(texts=texts, **summary)
    return None


def _write(folder: Path, made: Compilation) -> None:
    place, unfinished = folder / made.tier, folder / f"{made.tier}.{os.getpid()}"
    unfinished.mkdir(parents=True, exist_ok=True)
    for key, text in made.texts.items():
        (unfinished / f"{key}.txt").write_text(text, encoding="utf-8")
    summary = {
        key: value
        for key, value in vars(made).items()
        if key in ("tier", "memory", "seconds", "error")
    }
    (unfinished / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    shutil.rmtree(place, ignore_errors=True)
    unfinished.rename(place)
