"""Numbers and shardings in words for people; all else keeps to SI units."""

from collections.abc import Mapping

from jaxpar.sharding import Spec

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_RATES = ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"))
_SPEEDS = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"))
_MINUTE_S = 60.0
_FULL = 100


def _scaled(value: float, steps: tuple[tuple[float, str], ...], last: str) -> str:
    for size, unit in steps:
        if value >= size:
            share = value / size
            digits = 0 if share >= _FULL else 1 if share >= _FULL / 10 else 2
            return f"{share:,.{digits}f} {unit}"
    return last


def bytes_text(size_bytes: float) -> str:
    """Bytes as "1.50 GiB"."""
    return _scaled(size_bytes, _BYTES, f"{size_bytes:.0f} B")


def seconds_text(time_s: float) -> str:
    """Seconds as "12.3 ms"."""
    if time_s >= _MINUTE_S:
        return f"{int(time_s // _MINUTE_S)} min {time_s % _MINUTE_S:.0f} s"
    return _scaled(time_s, _SECONDS, f"{time_s * 1e9:.0f} ns" if time_s else "0 s")


def count_text(count: float) -> str:
    """A large count as "8.03 B"."""
    return _scaled(count, _COUNTS, f"{count:.0f}")


def flops_text(rate_flops_per_s: float) -> str:
    """A rate of computation as "197 TFLOP/s"."""
    return _scaled(rate_flops_per_s, _RATES, f"{rate_flops_per_s:.0f} FLOP/s")


def speed_text(rate_bytes_per_s: float) -> str:
    """A bandwidth as "45.0 GB/s"; decimal, as data sheets have it."""
    return _scaled(rate_bytes_per_s, _SPEEDS, f"{rate_bytes_per_s:.0f} B/s")


def percent_text(share: float) -> str:
    """A share as "41.2%"."""
    return f"{100 * share:.1f}%"


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as "4096x14336"."""
    return "x".join(map(str, shape)) or "scalar"


def spec_text(spec: Spec) -> str:
    """A sharding as "fsdp, ·, data+tensor"; a dot is a whole dim."""
    if not any(spec):
        return "whole"
    return ", ".join("+".join(dim) or "·" for dim in spec)


def mesh_text(mesh: Mapping[str, int]) -> str:
    """A mesh as "data=2 tensor=4"."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one device"
