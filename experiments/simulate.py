# SPDX-License-Identifier: Apache-2.0
"""Brute-force simulation, one draft at a time, to check the closed forms.

Nothing here is shared with :mod:`experiments.speedup` but the profile's step times:
the simulator draws each draft's fate and adds each step's milliseconds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from experiments.acceptance import AcceptanceCounts, AcceptanceCurve
from experiments.difficulty import DifficultyMixture
from experiments.step_time import StepTimeProfile


@dataclass(frozen=True)
class Estimate:
    """Sample mean and its standard error."""

    mean: float
    standard_error: float

    def z(self, expected: float) -> float:
        """Distance from ``expected`` in standard errors (0 if both agree exactly)."""
        if self.standard_error == 0:
            return 0.0 if math.isclose(self.mean, expected) else math.inf
        return (self.mean - expected) / self.standard_error


def _estimate(values: list[float]) -> Estimate:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return Estimate(mean, math.sqrt(variance / len(values)))


def _accepted(rates: tuple[float, ...], k: int, rng: random.Random) -> int:
    for position in range(k):
        if rng.random() >= rates[position]:
            return position
    return k


def simulate_speedup(
    curve: AcceptanceCurve,
    profile: StepTimeProfile,
    k: int,
    batch: int = 1,
    steps: int = 4000,
    seed: int = 0,
) -> Estimate:
    """Speed-up from ``steps`` simulated steps of ``batch`` requests.

    Raises:
        ValueError: fewer than 2 steps, which leave no standard error.
    """
    if steps < 2:
        raise ValueError(f"steps is {steps}; a standard error needs at least 2")
    rng = random.Random(seed)
    rates = curve.conditional
    gains: list[float] = []
    for _ in range(steps):
        committed = sum(1 + _accepted(rates, k, rng) for _ in range(batch))
        if k == 0:
            spent = profile.plain_ms(batch)
        else:
            spent = profile.draft_ms(k, batch)
            spent += profile.verify_ms(batch + batch * k, batch)
        plain = committed / batch * profile.plain_ms(batch)
        gains.append(plain / spent)
    return _estimate(gains)


def simulate_threshold(
    mixture: DifficultyMixture, theta: float, rounds: int, seed: int = 0
) -> tuple[Estimate, Estimate]:
    """Rows and acceptance length of a static confidence threshold, by sampling."""
    rng = random.Random(seed)
    rows: list[float] = []
    lengths: list[float] = []
    scale = math.exp(mixture.skew**2 / 2)
    spread = scale * math.sqrt(math.expm1(mixture.skew**2))
    for _ in range(rounds):
        z = rng.gauss(0, 1)
        if mixture.skew:
            z = (math.exp(mixture.skew * z) - scale) / spread
        verified, accepted, alive = 0, 0, True
        for location in mixture.mu:
            logit = location + mixture.s1 * z + mixture.s2 * rng.gauss(0, 1)
            alpha = 1 / (1 + math.exp(-logit))
            if alpha < theta:
                break
            verified += 1
            alive = alive and rng.random() < alpha
            accepted += alive
        rows.append(1.0 + verified)
        lengths.append(1.0 + accepted)
    return _estimate(rows), _estimate(lengths)


def simulate_request(
    curve: AcceptanceCurve,
    k: int,
    prompt: int,
    target_limit: int,
    drafter_limit: int | None = None,
    seed: int = 0,
) -> tuple[AcceptanceCounts, int]:
    """Generate one request up to the context limit, clipping drafts on the way.

    A step at ``position`` tokens drafts at most what fits below both limits: the
    anchor's own successor needs one place, and the drafter none past its window.

    Args:
        curve: acceptance.
        k: configured draft length.
        prompt: tokens in the context at the start (the first sampled one included).
        target_limit: context limit of the target.
        drafter_limit: context limit of the drafter; None means the target's.

    Returns:
        (counts, tokens generated).
    """
    rng = random.Random(seed)
    window = target_limit if drafter_limit is None else drafter_limit
    position = prompt
    widths: list[int] = []
    accepted: list[int] = []
    while position < target_limit:
        width = max(0, min(k, target_limit - position - 1, window - position))
        taken = _accepted(curve.conditional, width, rng)
        widths.append(width)
        accepted.append(taken)
        position += taken + 1
    return AcceptanceCounts.from_steps(widths, accepted), position - prompt
