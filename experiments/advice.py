# SPDX-License-Identifier: Apache-2.0
"""Which draft length pays, in plain words."""

from __future__ import annotations

from dataclasses import dataclass

from experiments import speedup
from experiments.acceptance import AcceptanceCurve
from experiments.byte_model import FloorProfile
from experiments.difficulty import panel_mixture
from experiments.step_time import StepTimeProfile

#: Rows of one step up to which the byte floor is a fair model.
_FLOOR_ROWS = 64


@dataclass(frozen=True)
class Advice:
    """Best fixed and confidence-scheduled verification for one batch size."""

    batch: int
    best: speedup.Choice
    longest: int
    longest_speedup: float
    scheduled: speedup.Scheduled
    reason: str


def advise(
    curve: AcceptanceCurve,
    profile: StepTimeProfile,
    batch: int,
    difficulty: str = "code",
    max_k: int = speedup.MAX_DRAFTS,
) -> Advice:
    """Best k for a curve on a machine at one batch size.

    Args:
        curve: acceptance.
        profile: step times.
        batch: requests decoding together.
        difficulty: how unequal rounds are: "math", "code" or "chat"; matters for the
            confidence-scheduled figure only, which is always modelled.
        max_k: longest draft length considered.
    """
    best = speedup.best_draft_length(curve, profile, batch, max_k)
    longest = min(max_k, curve.max_draft_length)
    plan = speedup.scheduled(panel_mixture(curve, difficulty), profile, batch, longest)
    return Advice(
        batch,
        best,
        longest,
        speedup.speedup(curve, profile, longest, batch),
        plan,
        _reason(curve, profile, batch, best.k, longest),
    )


def _reason(
    curve: AcceptanceCurve, profile: StepTimeProfile, batch: int, k: int, longest: int
) -> str:
    def marginal(at: int) -> str:
        now = speedup.step_ms(profile, at, batch)
        before = speedup.step_ms(profile, at - 1, batch)
        tokens = curve.survival[at - 1] / curve.length(at - 1)
        return (
            f"draft {at} adds {tokens:.1%} tokens and {(now - before) / before:.1%} "
            "time a step"
        )

    if k == 0:
        needed = speedup.break_even_length(profile, 1, batch)
        text = (
            f"do not draft: one draft needs an acceptance length of {needed:.2f} to "
            f"break even and reaches {curve.length(1):.2f}"
        )
    elif k < longest:
        text = f"{marginal(k)}; {marginal(k + 1)}"
    else:
        text = f"{marginal(k)}, so the longest block still pays"
    if isinstance(profile, FloorProfile) and batch * (longest + 1) > _FLOOR_ROWS:
        text += (
            f"; {batch * (longest + 1)} rows exceed {_FLOOR_ROWS}, where this byte "
            "floor leaves out arithmetic and flatters long drafts"
        )
    return text


def closing(curve: AcceptanceCurve, profile: StepTimeProfile, batch: int) -> str:
    """One paragraph: which k pays, by how much, and why."""
    best = speedup.best_draft_length(curve, profile, batch)
    longest = min(speedup.MAX_DRAFTS, curve.max_draft_length)
    reason = _reason(curve, profile, batch, best.k, longest)
    origin = f"({curve.label} acceptance, {profile.label} step times)"
    if best.k == 0:
        return (
            f"With {curve.name} on {profile.name} at batch {batch} {origin} "
            f"speculation does not pay: {reason}."
        )
    text = (
        f"With {curve.name} on {profile.name} at batch {batch} {origin} the best fixed "
        f"draft length is k = {best.k}: {best.tokens_per_second:.0f} tokens/s per "
        f"user, {best.speedup:.2f} times the speed without drafts"
    )
    if best.k != longest:
        other = speedup.speedup(curve, profile, longest, batch)
        text += f" and {best.speedup / other - 1:.0%} above k = {longest}"
    return f"{text}. Why: {reason}."
