"""Gather and scatter: lookups and updates at computed places."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jaxpar.rules.builder import RuleBuilder
from jaxpar.rules.rule import ArrayType, Dims, FactorKind, FactorRule, factor_rule


@factor_rule("gather")
def gather(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Windows of a table at many places.

    A dim of which one element is looked up, such as a vocabulary, is summed over:
    each device looks up what it holds, and zeros else.
    """
    table, indices = operands
    numbers = params["dimension_numbers"]
    build = RuleBuilder()
    places = build.each(indices.shape[:-1])
    coordinates = build.whole(indices.shape[-1])
    tied = _tied(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, places
    )
    windows = {
        d: _looked_up(build, n, params["slice_sizes"][d], d in numbers.start_index_map)
        for d, n in enumerate(table.shape)
        if d not in tied
    }
    kept = [f for d, (_, f) in windows.items() if d not in numbers.collapsed_slice_dims]
    table_dims = tied | {d: f for d, (f, _) in windows.items()}
    return build.rule(
        (_in_order(table_dims), (*places, coordinates)),
        (_interleaved(len(results[0].shape), numbers.offset_dims, kept, places),),
    )


def _scatter(
    operands: tuple[ArrayType, ...],
    _results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
    *,
    places_kind: FactorKind,
) -> FactorRule:
    """Windows of an array changed at many places; dims that they lie along stay whole.

    Where the order of the changes does not matter they are summed over: a device
    that has some of them makes its part of the sum.
    """
    array, indices, updates = operands
    numbers = params["dimension_numbers"]
    build = RuleBuilder()
    index_batch = numbers.scatter_indices_batching_dims
    places: Dims = tuple(
        build.add(n, FactorKind.PASS if d in index_batch else places_kind)
        for d, n in enumerate(indices.shape[:-1])
    )
    coordinates = build.whole(indices.shape[-1])
    tied = _tied(numbers.operand_batching_dims, index_batch, places)
    absent = {*tied, *numbers.inserted_window_dims}
    kept = [d for d in range(len(array.shape)) if d not in absent]
    sizes = dict(
        zip(kept, (updates.shape[d] for d in numbers.update_window_dims), strict=True)
    )
    moving = numbers.scatter_dims_to_operand_dims
    windows = {
        d: _changed(build, n, sizes.get(d, 1), d in moving)
        for d, n in enumerate(array.shape)
        if d not in tied
    }
    dims = _in_order(tied | {d: f for d, (f, _) in windows.items()})
    update_dims = _interleaved(
        len(updates.shape),
        numbers.update_window_dims,
        [windows[d][1] for d in kept],
        places,
    )
    return build.rule((dims, (*places, coordinates), update_dims), (dims,))


factor_rule("scatter")(partial(_scatter, places_kind=FactorKind.WHOLE))
factor_rule("scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")(
    partial(_scatter, places_kind=FactorKind.REDUCE)
)


def _looked_up(
    build: RuleBuilder, size: int, window: int, moving: bool
) -> tuple[int | None, int | None]:
    """Factors of a dim of a table and of the windows that are read along it."""
    if window == size and not moving:
        shared = build.add(size)
        return shared, shared
    if window == 1:
        return build.reduced(size), None
    return build.whole(size), build.whole(window)


def _changed(
    build: RuleBuilder, size: int, window: int, moving: bool
) -> tuple[int | None, int | None]:
    """Factors of a dim of an array and of the windows that are changed along it."""
    if window == size and not moving:
        shared = build.add(size)
        return shared, shared
    return build.whole(size), build.whole(window)


def _tied(
    array_dims: Sequence[int], index_dims: Sequence[int], places: Dims
) -> dict[int, int | None]:
    """Per batch dim of the array, the factor that its indices have there."""
    pairs = zip(array_dims, index_dims, strict=True)
    return {d: places[i] for d, i in pairs}


def _in_order(factors: Mapping[int, int | None]) -> Dims:
    return tuple(factors[d] for d in sorted(factors))


def _interleaved(
    rank: int, window_dims: Sequence[int], windows: Sequence[int | None], places: Dims
) -> Dims:
    """Factors of window dims where those are, the factors of places in between."""
    window, place = iter(windows), iter(places)
    return tuple(next(window if d in window_dims else place) for d in range(rank))
