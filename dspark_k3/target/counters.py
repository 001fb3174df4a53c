# SPDX-License-Identifier: Apache-2.0
"""Who ran each step of a worker: our executor, or vLLM and why."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

Reason = Literal[
    "ours", "stock_prefill", "stock_rows", "stock_piecewise", "stock_other"
]
REASONS: tuple[Reason, ...] = get_args(Reason)


class StepCounters:
    """Steps by what ran them. Dummy and profiling runs are not counted.

    ours: our executor, in a graph or eagerly. stock_prefill: a prompt's tokens were
    among the rows. stock_rows: more than 64 rows. stock_piecewise: vLLM replayed a
    piecewise graph, which is captured by row count alone. stock_other: the step had no
    K3 metadata, or verify rows beside decodes that are none, which is not seen in 0.33.
    """

    def __init__(self) -> None:
        self._steps: Counter[Reason] = Counter()

    def count(self, reason: Reason) -> None:
        """One more step."""
        self._steps[reason] += 1

    def read(self) -> dict[str, int]:
        """Steps so far, every reason named."""
        return {reason: self._steps[reason] for reason in REASONS}
