# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the engine: same interface, seeded tokens, chosen faults."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class FakeJob:
    temperature: float
    prompts: list[list[int]]
    max_tokens: int
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FakeRun:
    draft_length: int
    temperature: float
    token_ids: list[list[int]]
    verify_steps: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]
    vllm_version: str = "0.0-fake"

    @property
    def acceptance_length(self) -> float:
        if not self.verify_steps:
            return 1.0
        return 1 + self.accepted_tokens / self.verify_steps

    @property
    def survival_rates(self) -> list[float]:
        if not self.verify_steps:
            return []
        return [count / self.verify_steps for count in self.accepted_per_position]


class FakeEngine:
    """Tokens depend on prompt, and on the seed above temperature 0.

    fault "state" changes greedy tokens for k >= 2, "law" biases sampled tokens,
    "silent" never proposes a draft.
    """

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.lengths: list[int] = []

    def run_engine(
        self,
        target: Path,
        draft: Path | None,
        draft_length: int,
        jobs: Sequence[FakeJob],
        **_: Any,
    ) -> list[FakeRun]:
        self.lengths.append(draft_length)
        return [self.run(draft_length, job) for job in jobs]

    def run(self, k: int, job: FakeJob) -> FakeRun:
        tokens = []
        for index, prompt in enumerate(job.prompts):
            sampled = job.temperature > 0
            rng = random.Random(f"{prompt}{job.seed if sampled else ''}{index}")
            weights = [4.0, 2, 1, 1]
            if self.fault == "law" and k > 0:
                weights = [1.0, 1, 2, 4]
            row = rng.choices(range(4), weights if sampled else None, k=job.max_tokens)
            if self.fault == "state" and k >= 2 and not sampled:
                row[-1] += 1
            tokens.append(row)
        steps = 0 if self.fault == "silent" else 100 * (k > 0)
        taken = [steps * (8 - j) // 10 for j in range(k)]
        return FakeRun(k, job.temperature, tokens, steps, steps * k, sum(taken), taken)
