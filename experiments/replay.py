# SPDX-License-Identifier: Apache-2.0
"""Adaptive verification of rounds that were recorded, on a step-time profile.

Every recorded round knows how many drafts of a whole block the target accepts. A
shorter verification accepts the smaller of the two, so what a scheduler would have
committed need not be modelled: only time is, by the profile. The scheduler sees the
confidences alone, as they were recorded or calibrated; a batch is drawn from the rounds
at random.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments import speedup
from experiments.rounds import Array, RecordedRounds
from experiments.step_time import StepTimeProfile

#: Request-steps that are drawn, about, and steps at least.
_DRAWN, _STEPS = 40_000, 400


@dataclass(frozen=True)
class Replayed:
    """One batch size.

    Attributes:
        batch: requests decoding together.
        best: the best fixed draft length on these rounds.
        recorded: by the confidences as they are.
        calibrated: by the calibrated ones, if there is a calibration.
    """

    batch: int
    best: speedup.Choice
    recorded: speedup.Scheduled
    calibrated: speedup.Scheduled | None


def replay(
    rounds: RecordedRounds,
    profile: StepTimeProfile,
    batch: int,
    calibrated: Array | None = None,
) -> Replayed:
    """The best fixed draft length and adaptive verification of the whole block.

    Args:
        rounds: of blocks verified whole.
        profile: step times.
        batch: requests.
        calibrated: [N, k], survival by a calibration, if there is one.

    Raises:
        ValueError: a batch or block that the profile has no times for.
    """
    return Replayed(
        batch,
        fixed(rounds.accepted, rounds.logits.shape[1], profile, batch),
        adaptive(rounds.survival(), rounds.accepted, profile, batch),
        None
        if calibrated is None
        else adaptive(calibrated, rounds.accepted, profile, batch),
    )


def fixed(
    accepted: NDArray[np.int64], drafts: int, profile: StepTimeProfile, batch: int
) -> speedup.Choice:
    """The k of 0 .. ``drafts`` that commits most in a second; the smaller on a tie."""
    rates = [
        float(1 + np.minimum(accepted, k).mean()) / speedup.step_ms(profile, k, batch)
        for k in range(drafts + 1)
    ]
    k = int(np.argmax(rates))
    return speedup.Choice(k, rates[k] / rates[0], rates[k] * 1e3)


def adaptive(
    survival: Array,
    accepted: NDArray[np.int64],
    profile: StepTimeProfile,
    batch: int,
    seed: int = 0,
) -> speedup.Scheduled:
    """What the rules of `speedup.scheduled` commit by these predictions.

    Args:
        survival: [N, k], what the scheduler believes.
        accepted: [N], what the target accepts.
        profile: step times.
        batch: requests.
        seed: of the rounds that meet in a step.
    """
    drafts = survival.shape[1]
    steps = max(_STEPS, _DRAWN // batch)
    drawn = np.random.default_rng(seed).integers(len(accepted), size=(steps, batch))
    draft_ms = profile.draft_ms(drafts, batch)
    verify_ms = speedup.verify_table(profile, batch, drafts)
    believed = survival[drawn]
    if batch == 1:
        lengths = speedup.single_request_length(believed[:, 0], draft_ms, verify_ms)
        lengths = lengths[:, None]
        budgets = lengths[:, 0]
    else:
        flat = believed.reshape(steps, batch * drafts)
        budgets, _ = speedup.stale_budgets(flat, batch, draft_ms, verify_ms)
        # Survival falls along a request, and a stable sort keeps equals in order: the
        # first of all slots are a prefix of every request.
        order = np.argsort(-flat, axis=1, kind="stable")
        place = np.empty_like(order)
        np.put_along_axis(place, order, np.arange(batch * drafts)[None], axis=1)
        taken = place < budgets[:, None]
        lengths = taken.reshape(steps, batch, drafts).sum(axis=2)
    tokens = steps * batch + float(np.minimum(lengths, accepted[drawn]).sum())
    time_ms = float(steps * draft_ms + verify_ms[budgets].sum())
    per_user = tokens / batch / time_ms
    return speedup.Scheduled(
        speedup=per_user * profile.plain_ms(batch),
        tokens_per_second=per_user * 1e3,
        acceptance_length=tokens / (steps * batch),
        mean_drafts=float(lengths.mean()),
    )
