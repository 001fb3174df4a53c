# SPDX-License-Identifier: Apache-2.0
"""What must hold before a time means anything.

An op hands each gate a way to compute some of its rows alone: ``prepare(first, last)``
gives a :class:`Job` with fresh inputs and an output full of NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verify_kernels.batch import MAX_ROWS

#: fp32 unit in the last place, relative: what one truncating addition may lose.
FP32_ULP = 2.0**-23
#: A value rounded to the nearest bf16 (8 bits) is within this of itself, relatively.
BF16_STEP = 2.0**-8
#: Products that one tensor-core instruction adds into the running sum.
MMA_DEPTH = 16
_CHUNK_BYTES = 2**29


@dataclass(frozen=True)
class Job:
    """A launch that is ready, and its result ([rows, ...]) from what it returned."""

    launch: Callable[[], Any]
    result: Callable[[Any], Tensor]

    def __call__(self) -> Tensor:
        return self.result(self.launch())


Prepare = Callable[[int, int], Job]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits; NaN is never equal."""
    return a.dtype == b.dtype and torch.equal(a, b)


def row_invariant(
    prepare: Prepare, rows: Sequence[int] = range(1, MAX_ROWS + 1)
) -> bool:
    """Row t computed alone has the bits of row t inside the first M, for M in rows."""
    alone = torch.cat([prepare(t, t + 1)() for t in range(max(rows))])
    return all(same_bits(prepare(0, m)(), alone[:m]) for m in rows)


def repeatable(
    prepare: Prepare,
    rows: Sequence[int],
    count: int,
    disturb: Callable[[], object] = lambda: None,
) -> bool:
    """``count`` launches with M cycling through ``rows`` give the bits of the first.

    Each cycle is launched back to back, so programmatic launches overlap as in use;
    ``disturb`` is called before each (`bench.neighbours`).
    """
    expected = [prepare(0, m)() for m in rows]
    wrong = torch.zeros((), dtype=torch.int64, device=expected[0].device)
    done = 0
    while done < count:
        jobs = [prepare(0, m) for m in rows[: count - done]]
        disturb()
        returned = [job.launch() for job in jobs]
        for job, value, wanted in zip(jobs, returned, expected, strict=False):
            wrong += (job.result(value) != wanted).sum()
        done += len(jobs)
    return int(wrong) == 0


@dataclass(frozen=True)
class Exact:
    """A matrix product in fp64, and what its error bounds need.

    Attributes:
        value: fp64 [M, N].
        magnitude: fp64 [M, N], the sums of |x_k w_k|.
        k: length of the sums.
        bf16_error: relative error of torch's own bf16 product, which rounds once.
    """

    value: Tensor
    magnitude: Tensor
    k: int
    bf16_error: float


def relative_error(out: Tensor, exact: Tensor) -> float:
    """||out - exact|| / ||exact||, NaN where out has a NaN."""
    return float((out.double() - exact).norm() / exact.norm())


def exact_product(x: Tensor, w: Tensor) -> Exact:
    """X W^T of bf16 [M, K] and [N, K], in chunks of N so that fp64 weights fit."""
    chunk = max(_CHUNK_BYTES // (8 * w.shape[1]), 1)
    xd, xa = x.double(), x.double().abs()
    value, magnitude = [], []
    for part in w.split(chunk):
        wide = part.double()
        value.append(xd @ wide.t())
        magnitude.append(xa @ wide.abs_().t())
    product = torch.cat(value, 1)
    rounded = torch.mm(x, w.t())
    return Exact(
        product, torch.cat(magnitude, 1), x.shape[1], relative_error(rounded, product)
    )


def accurate(out: Tensor, exact: Exact) -> bool:
    """As accurate as bf16 in, fp32 sums and one rounding to out's dtype allow.

    In norm: twice the error of torch's bf16 product; for fp32 out one fp32 ulp of the
    running sum for each of the K / 16 tensor-core additions. Each element: its
    rounding, and two fp32 ulps of the sum of magnitudes for each product, the bound for
    any order of additions that truncate. The second catches one wrong element among
    many, the first a loss that is spread over all.
    """
    if out.shape != exact.value.shape:
        return False
    rounded = out.dtype == torch.bfloat16
    allowed = 2 * exact.bf16_error if rounded else exact.k / MMA_DEPTH * FP32_ULP
    step = BF16_STEP if rounded else 0.0
    slack = step * exact.value.abs() + 2 * exact.k * FP32_ULP * exact.magnitude
    close = (out.double() - exact.value).abs() <= slack
    return bool(close.all()) and relative_error(out, exact.value) <= allowed
