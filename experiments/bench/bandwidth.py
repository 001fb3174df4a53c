# SPDX-License-Identifier: Apache-2.0
"""What the memory of this device gives: 2 GiB read, and 2 GiB copied."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from experiments.bench.candidate import reason

SIZE = 2**31
_REPEATS = 9


def _seconds(work: Callable[[], object]) -> float:
    """Median over repeats that are queued behind one another."""
    work()
    pairs = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in pairs) / 1e3


def measure() -> tuple[dict[str, float], dict[str, str]]:
    """Bytes a second moved by each method, and the methods that failed with why.

    ``read`` is the faster of a Triton kernel that combines all words and torch's
    largest-element reduction; ``copy`` counts bytes read and bytes written.
    """
    data = torch.randint(
        -(2**31), 2**31 - 1, (SIZE // 4,), dtype=torch.int32, device="cuda"
    )
    rates: dict[str, float] = {}
    failed: dict[str, str] = {}
    try:
        from experiments.bench.read_kernel import read

        rates["read_triton"] = SIZE / _seconds(lambda: read(data))
    except Exception as error:
        failed["read_triton"] = reason(error)
    rates["read_torch"] = SIZE / _seconds(lambda: torch.amax(data))
    target = torch.empty_like(data)
    rates["copy"] = 2 * SIZE / _seconds(lambda: target.copy_(data))
    rates["read"] = max(rate for name, rate in rates.items() if "read" in name)
    return rates, failed
