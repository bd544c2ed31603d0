"""Factorisations and Fourier transforms: batches split, matrices do not."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxpar.rules.builder import RuleBuilder, elements
from jaxpar.rules.rule import ArrayType, FactorRule, factor_rule

FACTORISATIONS = {
    "cholesky": 1 / 3,
    "eig": 25.0,
    "eigh": 9.0,
    "geqp3": 2.0,
    "geqrf": 2.0,
    "hessenberg": 10 / 3,
    "householder_product": 2.0,
    "lu": 2 / 3,
    "ormqr": 2.0,
    "qr": 2.0,
    "schur": 25.0,
    "svd": 20.0,
    "symmetric_product": 1.0,
    "triangular_solve": 1.0,
    "tridiagonal": 4 / 3,
}
"""Name -> leading term of the operations on an m x n matrix over m n min(m, n);
orders of magnitude for the iterative ones (Golub and Van Loan, Matrix
Computations)."""

VECTORS = ("lu_pivots_to_permutation", "tridiagonal_solve")
"""Their first operand is a vector per batch element."""


def _batched(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    batch_rank: int,
    flops: float,
) -> FactorRule:
    """All arrays share their leading dims, and nothing else."""
    build = RuleBuilder()
    batch = build.each(operands[0].shape[:batch_rank])
    operand_dims, result_dims = (
        [(*batch, *build.unsplit(array.shape[batch_rank:])) for array in arrays]
        for arrays in (operands, results)
    )
    return build.rule(operand_dims, result_dims, flops)


def _factorisation(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
    *,
    weight: float,
) -> FactorRule:
    *batch, rows, columns = operands[0].shape
    flops = weight * elements(operands[0]) * min(rows, columns)
    return _batched(operands, results, len(batch), flops)


for _name, _weight in FACTORISATIONS.items():
    factor_rule(_name)(partial(_factorisation, weight=_weight))


@factor_rule(*VECTORS)
def of_vectors(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    _params: Mapping[str, Any],
) -> FactorRule:
    """A sweep along a vector."""
    batch_rank = len(operands[0].shape) - 1
    return _batched(operands, results, batch_rank, elements(results[0]))


@factor_rule("fft")
def fft(
    operands: tuple[ArrayType, ...],
    results: tuple[ArrayType, ...],
    params: Mapping[str, Any],
) -> FactorRule:
    """Operations of a radix-2 transform: 5 n log2 n."""
    lengths = params["fft_lengths"]
    batch_rank = len(operands[0].shape) - len(lengths)
    size = max(elements(operands[0]), elements(results[0]))
    flops = 5.0 * size * math.log2(max(2, math.prod(lengths)))
    return _batched(operands, results, batch_rank, flops)
