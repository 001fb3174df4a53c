# SPDX-License-Identifier: Apache-2.0
"""Acceptance that varies from round to round.

Independent Bernoulli slots reproduce a published acceptance length, but not what a
confidence scheduler gains: that needs rounds of different difficulty. Model:

    logit alpha_k = mu_k + s1 * z + s2 * e_k,   e_k ~ N(0, 1),

z once a round and e_k per position, all independent. alpha_k is the chance that
draft k is accepted if the ones before it were; the confidence head is taken to
report it exactly. z is standard normal for skew 0, else a standardised log-normal
exp(skew * g), g ~ N(0, 1): a few rounds are far easier than the rest, which chat
needs. mu_k is solved so that the population's conditional rates equal a curve's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.acceptance import AcceptanceCurve

Array = NDArray[np.float64]

#: (s1, s2, skew) chosen on a coarse grid against the confidence-threshold sweep of
#: DSpark Fig. 5; a fit for scheduler studies, not a claim about the real heads.
PANELS: dict[str, tuple[float, float, float]] = {
    "math": (1.4, 0.5, 0.0),
    "code": (1.4, 0.0, 0.0),
    "chat": (1.6, 0.8, 0.8),
}

_LOGIT_LIMIT = 40.0
_Z_NODES = 97
_E_NODES = 401


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-np.clip(x, -_LOGIT_LIMIT, _LOGIT_LIMIT)))


def _normal_grid(nodes: int) -> tuple[Array, Array]:
    """Equally spaced nodes on [-6, 6] with normalised normal weights.

    Chosen over Gauss-Hermite because a confidence threshold makes the integrand
    jump, where a high-order rule loses its accuracy.
    """
    points = np.linspace(-6.0, 6.0, nodes)
    weights = np.exp(-0.5 * points**2)
    return points, weights / weights.sum()


def _difficulty(normal: Array, skew: float) -> Array:
    """Standardised log-normal of a standard normal; the normal itself at skew 0."""
    if skew == 0:
        return normal
    mean = np.exp(skew**2 / 2)
    deviation = mean * np.sqrt(np.expm1(skew**2))
    return (np.exp(skew * normal) - mean) / deviation


@dataclass(frozen=True)
class DifficultyMixture:
    """Solved mixture; build it with :func:`fit_mixture`.

    Attributes:
        curve: the population curve that the mixture reproduces.
        s1: spread between rounds, in logits.
        s2: spread between positions of one round, in logits.
        skew: 0 for a normal difficulty, larger for a longer easy tail.
        mu: one location per position, in logits.
    """

    curve: AcceptanceCurve
    s1: float
    s2: float
    skew: float
    mu: tuple[float, ...]

    def threshold(self, theta: float) -> tuple[float, float]:
        """Static confidence threshold: verify up to the first alpha_k < theta.

        Returns:
            (rows, length): mean rows of a verify step (anchor included) and mean
            acceptance length (bonus included), both in tokens, by quadrature.
        """
        if not 0.0 <= theta <= 1.0:
            raise ValueError(f"theta is {theta:g}; a threshold lies in [0, 1]")
        normal, z_weight = _normal_grid(_Z_NODES)
        z = _difficulty(normal, self.skew)
        e, e_weight = _normal_grid(_E_NODES)
        verified = np.ones_like(z)
        accepted = np.ones_like(z)
        rows, length = 1.0, 1.0
        for location in self.mu:
            alpha = _sigmoid(location + self.s1 * z[:, None] + self.s2 * e[None, :])
            keep = alpha >= theta
            verified = verified * (keep @ e_weight)
            accepted = accepted * ((alpha * keep) @ e_weight)
            rows += float(verified @ z_weight)
            length += float(accepted @ z_weight)
        return rows, length

    def sample(self, rounds: int, rng: np.random.Generator) -> Array:
        """Conditional rates [rounds, positions] of independently drawn rounds."""
        if rounds < 1:
            raise ValueError(f"rounds is {rounds}; draw at least 1")
        z = _difficulty(rng.standard_normal((rounds, 1)), self.skew)
        e = rng.standard_normal((rounds, len(self.mu)))
        return _sigmoid(np.asarray(self.mu) + self.s1 * z + self.s2 * e)


def fit_mixture(
    curve: AcceptanceCurve, s1: float, s2: float, skew: float = 0.0
) -> DifficultyMixture:
    """Solve mu_k so that the conditional rates of the mixture equal the curve's.

    Raises:
        ValueError: a spread or the skew is negative.
    """
    if min(s1, s2, skew) < 0:
        raise ValueError(
            f"s1 = {s1:g}, s2 = {s2:g}, skew = {skew:g}; none may be negative"
        )
    normal, z_weight = _normal_grid(_Z_NODES)
    z = _difficulty(normal, skew)
    e, e_weight = _normal_grid(_E_NODES)
    noise = s1 * z[:, None] + s2 * e[None, :]
    survivors = z_weight
    mu: list[float] = []
    for rate in curve.conditional:
        low, high = -_LOGIT_LIMIT, _LOGIT_LIMIT
        if 0.0 < rate < 1.0:
            for _ in range(60):
                mid = (low + high) / 2
                got = survivors @ (_sigmoid(mid + noise) @ e_weight) / survivors.sum()
                low, high = (mid, high) if got < rate else (low, mid)
            location = (low + high) / 2
        else:
            location = high if rate >= 1.0 else low
        mu.append(location)
        survivors = survivors * (_sigmoid(location + noise) @ e_weight)
        if survivors.sum() <= 0:
            survivors = z_weight
    return DifficultyMixture(curve, s1, s2, skew, tuple(mu))


def panel_mixture(curve: AcceptanceCurve, panel: str) -> DifficultyMixture:
    """Mixture with the spreads of one panel of DSpark Fig. 5."""
    if panel not in PANELS:
        raise ValueError(f"difficulty is {panel!r}; use one of {sorted(PANELS)}")
    return fit_mixture(curve, *PANELS[panel])


def survival_of(alpha: Array | Sequence[Sequence[float]]) -> Array:
    """Survival [rounds, positions] from conditional rates, by running product."""
    return np.cumprod(np.asarray(alpha, dtype=np.float64), axis=1, dtype=np.float64)
