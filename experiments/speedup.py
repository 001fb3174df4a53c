# SPDX-License-Identifier: Apache-2.0
"""What a draft length buys: acceptance curve x step-time profile.

With T_plain(B) a plain decode step of B requests, T_draft(k, B) one draft step and
T_verify(rows) one verify step:

    S(k) = AL(k) * T_plain(B) / (T_draft(k, B) + T_verify(B * (k + 1)))

S(0) = 1 by definition: no drafts is the plain step. The acceptance length that
breaks even is (T_draft + T_verify) / T_plain. The scheduled figures follow DSpark
(arXiv 2607.05147, section 5) on a population of rounds of different difficulty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from experiments.acceptance import AcceptanceCurve
from experiments.difficulty import DifficultyMixture, survival_of
from experiments.step_time import StepTimeProfile

MAX_DRAFTS = 7


def _check(k: int, batch: int) -> None:
    if k < 0:
        raise ValueError(f"draft length k is {k}; it cannot be negative")
    if batch < 1:
        raise ValueError(f"batch is {batch}; at least 1 request decodes")


def step_ms(profile: StepTimeProfile, k: int, batch: int = 1) -> float:
    """One round in ms: draft plus verify, or the plain step for k = 0."""
    _check(k, batch)
    if k == 0:
        return profile.plain_ms(batch)
    rows = batch * (k + 1)
    return profile.draft_ms(k, batch) + profile.verify_ms(rows, batch)


def break_even_length(profile: StepTimeProfile, k: int, batch: int = 1) -> float:
    """Acceptance length at which k drafts are as fast as none."""
    return step_ms(profile, k, batch) / profile.plain_ms(batch)


def speedup_at(
    length: float, profile: StepTimeProfile, k: int, batch: int = 1
) -> float:
    """Speed-up of one user's text for acceptance length ``length`` at k drafts."""
    if not 1.0 <= length <= k + 1:
        raise ValueError(
            f"acceptance length is {length:g}; with k = {k} it lies in [1, {k + 1}]"
        )
    return length / break_even_length(profile, k, batch)


def speedup(
    curve: AcceptanceCurve, profile: StepTimeProfile, k: int, batch: int = 1
) -> float:
    """S(k) for a curve; the same for one user and for the whole batch."""
    return speedup_at(curve.length(k), profile, k, batch)


def tokens_per_second_per_user(
    curve: AcceptanceCurve, profile: StepTimeProfile, k: int, batch: int = 1
) -> float:
    """Tokens a second that each of ``batch`` users sees."""
    return curve.length(k) / step_ms(profile, k, batch) * 1e3


@dataclass(frozen=True)
class Choice:
    """The best fixed draft length.

    Attributes:
        k: draft length, 0 when no drafting is fastest.
        speedup: over no speculation.
        tokens_per_second: per user.
    """

    k: int
    speedup: float
    tokens_per_second: float


def best_draft_length(
    curve: AcceptanceCurve,
    profile: StepTimeProfile,
    batch: int = 1,
    max_k: int = MAX_DRAFTS,
) -> Choice:
    """Best k among 0..min(max_k, the curve's positions); the smaller k on a tie."""
    top = min(max_k, curve.max_draft_length)
    gains = [speedup(curve, profile, k, batch) for k in range(top + 1)]
    k = int(np.argmax(gains))
    return Choice(k, gains[k], tokens_per_second_per_user(curve, profile, k, batch))


def single_request_length(
    survival: np.ndarray, draft_ms: float, verify_ms: np.ndarray
) -> np.ndarray:
    """Early-stop rule for one request, one length per round.

    Extend from k to k + 1 drafts while ``A_{k+1} / AL(k) >
    (T_v(k+2) - T_v(k+1)) / (T_draft + T_v(k+1))`` and stop at the first refusal:
    that keeps the decision free of later confidences, hence lossless.

    Args:
        survival: [rounds, n] survival of each round.
        draft_ms: cost of drafting, paid whatever is verified.
        verify_ms: [n + 1] cost of verifying 1 .. n + 1 rows.

    Returns:
        lengths [rounds], int64, each 0..n.
    """
    rounds, positions = survival.shape
    lengths = np.zeros(rounds, dtype=np.int64)
    committed = np.ones(rounds)
    going = np.ones(rounds, dtype=bool)
    for k in range(positions):
        extra = (verify_ms[k + 1] - verify_ms[k]) / (draft_ms + verify_ms[k])
        going &= survival[:, k] / committed > extra
        lengths += going
        committed += np.where(going, survival[:, k], 0.0)
    return lengths


def verify_table(profile: StepTimeProfile, batch: int, drafts: int) -> np.ndarray:
    """[batch * drafts + 1] ms to verify ``batch`` rows and up to so many more."""
    return np.array(
        [profile.verify_ms(batch + extra, batch) for extra in range(batch * drafts + 1)]
    )


def stale_budgets(
    survival: np.ndarray, batch: int, draft_ms: float, verify_ms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Drafts that each step verifies, chosen on the step before's confidences.

    Args:
        survival: [steps, slots], of all requests of a step.
        batch: requests.
        draft_ms: cost of drafting.
        verify_ms: as of `verify_table`.

    Returns:
        budgets int64 [steps], the first step's by the last's, and expected tokens
        [steps, slots + 1] of every budget.
    """
    ranked = -np.sort(-survival, axis=1)
    gains = batch + np.cumsum(np.pad(ranked, ((0, 0), (1, 0))), axis=1)
    wanted = np.argmax(gains / (draft_ms + verify_ms), axis=1)
    return np.roll(wanted, 1), gains


@dataclass(frozen=True)
class Scheduled:
    """Confidence-scheduled verification, averaged over sampled rounds.

    Attributes:
        speedup: over no speculation, from total tokens and total time.
        tokens_per_second: per user.
        acceptance_length: tokens committed per request and step.
        mean_drafts: drafts verified per request and step.
    """

    speedup: float
    tokens_per_second: float
    acceptance_length: float
    mean_drafts: float


def scheduled(
    mixture: DifficultyMixture,
    profile: StepTimeProfile,
    batch: int = 1,
    drafts: int = MAX_DRAFTS,
    steps: int | None = None,
    seed: int = 0,
) -> Scheduled:
    """Speed-up of confidence scheduling with a block of ``drafts``.

    One request follows :func:`single_request_length`. A batch takes the budget D
    that maximises ``(B + sum of the top D survivals) / (T_draft + T_verify(B + D))``
    on the *previous* step's confidences, then gives the D slots to the highest
    survivals of this step. The full block is drafted and paid every step.

    Args:
        mixture: population of rounds.
        profile: step times.
        batch: requests.
        drafts: block size, at most the mixture's positions.
        steps: sampled steps; default 20000 for one request, else about 6000
            request-steps and at least 200 steps.
        seed: of the sampled rounds.
    """
    _check(drafts, batch)
    if not 1 <= drafts <= len(mixture.mu):
        raise ValueError(
            f"drafts is {drafts}; the curve {mixture.curve.name!r} has rates for "
            f"1..{len(mixture.mu)}"
        )
    rng = np.random.default_rng(seed)
    count = steps or (20_000 if batch == 1 else max(200, 6_000 // batch))
    draft_ms = profile.draft_ms(drafts, batch)
    verify_ms = verify_table(profile, batch, drafts)
    alpha = mixture.sample(count * batch, rng)[:, :drafts]
    survival = survival_of(alpha)
    if batch == 1:
        lengths = single_request_length(survival, draft_ms, verify_ms)
        gained = np.take(
            np.cumsum(np.pad(survival, ((0, 0), (1, 0)), constant_values=1.0), 1),
            lengths + np.arange(count) * (drafts + 1),
        )
        budgets = lengths
        tokens = float(gained.sum())
    else:
        flat = survival.reshape(count, batch * drafts)
        budgets, gains = stale_budgets(flat, batch, draft_ms, verify_ms)
        tokens = float(gains[np.arange(count), budgets].sum())
    time_ms = float(count * draft_ms + verify_ms[budgets].sum())
    per_user = tokens / batch / time_ms
    return Scheduled(
        speedup=per_user * profile.plain_ms(batch),
        tokens_per_second=per_user * 1e3,
        acceptance_length=tokens / (count * batch),
        mean_drafts=float(budgets.mean()) / batch,
    )
