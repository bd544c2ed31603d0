"""Sliding windows: what slides needs its neighbours, so it is never split."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.rules.builder import RuleBuilder, elements
from jaxpar.rules.rule import ArrayType, FactorRule, factor_rule


def slides(
    window: int,
    stride: int = 1,
    padding: Sequence[int] = (0, 0),
    base_dilation: int = 1,
    window_dilation: int = 1,
) -> bool:
    """Whether a window does anything but look at one element after the other."""
    trivial = (window, stride, base_dilation, window_dilation) == (1, 1, 1, 1)
    return not trivial or tuple(padding) != (0, 0)


def _sliding_dims(params: Mapping[str, Any]) -> list[int]:
    window = params["window_dimensions"]
    once = (1,) * len(window)
    columns = zip(
        window,
        params["window_strides"],
        params["padding"],
        params.get("base_dilation") or once,
        params.get("window_dilation") or once,
        strict=True,
    )
    return [d for d, column in enumerate(columns) if slides(*column)]


@factor_rule(
    *("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
    *("select_and_scatter", "select_and_scatter_add", "select_and_gather_add"),
)
def windowed(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Arrays, then scalars to start from; one operation per element and window."""
    build = RuleBuilder()
    arrays = [a for a in operands if len(a.shape) == len(results[0].shape)]
    aligned = build.aligned((*arrays, *results), _sliding_dims(params))
    starts = ((),) * (len(operands) - len(arrays))
    places = min(elements(a) for a in (*arrays, *results))
    return build.rule(
        (*aligned[: len(arrays)], *starts),
        aligned[len(arrays) :],
        places * math.prod(params["window_dimensions"]),
    )
