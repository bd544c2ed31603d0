"""Convolutions: batch, channels in, channels out; space only where nothing slides."""

import math
from collections.abc import Mapping
from typing import Any

from jaxpar.rules.builder import RuleBuilder, elements
from jaxpar.rules.rule import ArrayType, Dims, FactorRule, factor_rule
from jaxpar.rules.window import slides


@factor_rule("conv_general_dilated")
def convolution(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Channels in groups split at group boundaries, and so do batches in groups.

    The compiler gets groups wrong where the channels that a group sums over are
    split as well (jax 0.10 on CPU doubles the result): those stay whole.
    """
    (image, kernel), (result,) = operands, results
    numbers = params["dimension_numbers"]
    image_spec, kernel_spec = numbers.lhs_spec, numbers.rhs_spec
    channels = kernel.shape[kernel_spec[1]]
    build = RuleBuilder()
    leading = _leading(
        build,
        (image.shape[image_spec[0]], channels, kernel.shape[kernel_spec[0]]),
        (params["feature_group_count"], params["batch_group_count"]),
    )
    space = _space(build, operands, results, params)
    specs = (image_spec, kernel_spec, numbers.out_spec)
    image_dims, kernel_dims, result_dims = (
        _placed(spec, (*first, *rest))
        for spec, first, rest in zip(specs, leading, space, strict=True)
    )
    window = math.prod(kernel.shape[d] for d in kernel_spec[2:])
    flops = 2.0 * elements(result) * window * channels
    return build.rule((image_dims, kernel_dims), (result_dims,), flops)


def _placed(spec: tuple[int, ...], factors: Dims) -> Dims:
    """Factors of (batch, feature, *space), or (out, in, *space), as they lie."""
    where = dict(zip(spec, factors, strict=True))
    return tuple(where[d] for d in range(len(spec)))


def _leading(
    build: RuleBuilder, sizes: tuple[int, int, int], groups: tuple[int, int]
) -> tuple[Dims, Dims, Dims]:
    """Factors of image (batch, in), kernel (out, in) and result (batch, out).

    Args:
        build: Where the factors go.
        sizes: Batch of the image, channels in per group, channels out.
        groups: Of channels, of batches.
    """
    batch_size, per_group, out_size = sizes
    feature_groups, batch_groups = groups
    if feature_groups > 1:
        batch, group = build.add(batch_size), build.add(feature_groups)
        return (batch, group), (group, build.whole(per_group)), (batch, group)
    if batch_groups > 1:
        group, inner = build.add(batch_groups), build.whole(per_group)
        kept = build.whole(batch_size // batch_groups)
        return (group, inner), (group, inner), (kept, group)
    batch, out = build.add(batch_size), build.add(out_size)
    summed = build.reduced(per_group)
    return (batch, summed), (out, summed), (batch, out)


def _space(
    build: RuleBuilder,
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> tuple[Dims, Dims, Dims]:
    """Factors of the dims of space of image, kernel and result."""
    (image, kernel), (result,) = operands, results
    numbers = params["dimension_numbers"]
    lies = zip(numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec, strict=True)
    image_dims: list[int | None] = []
    kernel_dims: list[int | None] = []
    result_dims: list[int | None] = []
    for i, (a, b, c) in enumerate(list(lies)[2:]):
        sliding = slides(
            kernel.shape[b],
            params["window_strides"][i],
            params["padding"][i],
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
        )
        add = build.whole if sliding else build.add
        image_dims.append(add(image.shape[a]))
        kernel_dims.append(build.whole(kernel.shape[b]))
        result_dims.append(add(result.shape[c]) if sliding else image_dims[-1])
    return tuple(image_dims), tuple(kernel_dims), tuple(result_dims)
