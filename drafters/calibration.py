# SPDX-License-Identifier: Apache-2.0
"""Make the confidence head's survival probabilities mean what they say.

Sequential Temperature Scaling (DSpark, arXiv 2607.05147): one temperature per draft
position, fitted in order, because the scheduler uses the running product of the
confidences and an error at position 1 is inherited by all later ones. A temperature
moves confidences away from one half or towards it and cannot mend a head that is too
low on both sides; a shift beside it can (Platt, 1999, on each position).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Beside a drafter's config.json: the temperatures fitted for it.
FILE_NAME = "calibration.json"

DEFAULT_GRID: tuple[float, ...] = tuple(2.0 ** (step / 16) for step in range(-48, 49))
"""Temperatures 1/8 to 8, sixteen per octave; contains 1 exactly."""


def survival_from_confidence(confidence: Tensor) -> Tensor:
    """Running product along the last dimension: A_i = c_1 * ... * c_i, same shape.

    Raises:
        ValueError: for an entry outside [0, 1] or NaN.
    """
    if not bool(((confidence >= 0) & (confidence <= 1)).all()):
        raise ValueError(
            "confidence has an entry outside [0, 1] or NaN; pass probabilities "
            "(the sigmoid of the head's logits)"
        )
    return confidence.cumprod(dim=-1)


def expected_calibration_error(
    predicted: Tensor, observed: Tensor, bins: int = 20
) -> float:
    """Mean distance between predicted and observed frequency over equal-width bins.

    sum over bins of (n_bin / N) * |mean predicted - mean observed|.

    Args:
        predicted: [N] probabilities.
        observed: [N] outcomes, bool or 0/1.
        bins: number of equal-width bins on [0, 1]; 20 as in DeepSpec's evaluator.

    Raises:
        ValueError: for empty or mismatched inputs, a probability outside [0, 1], an
            outcome other than 0 or 1, or bins < 1.
    """
    if predicted.ndim != 1 or predicted.shape != observed.shape or len(predicted) == 0:
        raise ValueError(
            f"predicted has shape {tuple(predicted.shape)} and observed "
            f"{tuple(observed.shape)}; both must be [N] with the same N >= 1"
        )
    if bins < 1:
        raise ValueError(f"bins is {bins}; it must be at least 1")
    guess = predicted.double()
    seen = observed.double()
    if not bool(((guess >= 0) & (guess <= 1)).all()):
        raise ValueError("predicted has an entry outside [0, 1] or NaN")
    if not bool(((seen == 0) | (seen == 1)).all()):
        raise ValueError("observed has an entry other than 0 and 1")
    index = (guess * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64, device=guess.device)
    gap.index_add_(0, index, guess - seen)
    return float(gap.abs().sum()) / len(guess)


def roc_auc(predicted: Tensor, observed: Tensor) -> float:
    """Probability that a random 1 of ``observed`` was predicted above a random 0, ties
    counting half: 0.5 says nothing, 1 tells them apart. NaN without both.

    Args:
        predicted: [N] scores.
        observed: [N] outcomes, bool or 0/1.

    Raises:
        ValueError: for empty or mismatched inputs, NaN, or another outcome.
    """
    if predicted.ndim != 1 or predicted.shape != observed.shape or len(predicted) == 0:
        raise ValueError(
            f"predicted has shape {tuple(predicted.shape)} and observed "
            f"{tuple(observed.shape)}; both must be [N] with the same N >= 1"
        )
    if bool(torch.isnan(predicted).any()):
        raise ValueError("predicted contains NaN")
    seen = observed.double()
    if not bool(((seen == 0) | (seen == 1)).all()):
        raise ValueError("observed has an entry other than 0 and 1")
    _, place, counts = predicted.unique(return_inverse=True, return_counts=True)
    # Mean rank, from 1 on, of each distinct score.
    rank = counts.cumsum(0).double() - (counts - 1).double() / 2
    ones, zeros = float(seen.sum()), float((1 - seen).sum())
    if not ones or not zeros:
        return math.nan
    above = float((rank[place] * seen).sum()) - ones * (ones + 1) / 2
    return above / (ones * zeros)


@dataclass(frozen=True)
class SequentialTemperatureScaling:
    """One temperature, and perhaps a shift, per draft position; confidence_i =
    sigmoid(logit_i / T_i + s_i).

    T > 1 tones down an overconfident head. Scaling keeps the order of the logits at
    each position. `fit` or `fit_shifted` on held-out text, `apply` in the drafter.

    Attributes:
        temperatures: one a position.
        shifts: as many, or none: then they are 0.
    """

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.shifts and len(self.shifts) != len(self.temperatures):
            raise ValueError(
                f"{len(self.shifts)} shifts for {len(self.temperatures)} temperatures; "
                "give one a temperature, or none"
            )
        for i, value in enumerate(self.shifts):
            if not math.isfinite(value):
                raise ValueError(f"shifts[{i}] is {value}; it must be finite")
        for i, value in enumerate(self.temperatures):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"temperatures[{i}] is {value}; it must be positive and finite"
                )

    @classmethod
    def fit(
        cls,
        logits: Tensor,
        accepted: Tensor,
        lengths: Tensor | None = None,
        *,
        grid: Sequence[float] = DEFAULT_GRID,
        bins: int = 20,
    ) -> SequentialTemperatureScaling:
        """Fit position by position, earlier temperatures fixed.

        T_i minimises the expected calibration error of the product of the first i
        confidences against the event "at least i drafts accepted"; among equally good
        temperatures the one nearest 1 wins.

        Args:
            logits: [N, k], the confidence head's logits on held-out rounds.
            accepted: int [N], drafts accepted, 0..k.
            lengths: int [N], drafts verified; a position past it was not observed and
                is left out. None means all k.
            grid: candidate temperatures.
            bins: bins of the calibration error.

        Raises:
            ValueError: for mismatched shapes, NaN, counts out of range, an empty grid,
                or a position that no round observed.
        """
        if not grid or not all(math.isfinite(t) and t > 0 for t in grid):
            raise ValueError(
                f"grid is {list(grid)}; give positive temperatures, at least one"
            )
        verified = _verified(logits, accepted, lengths)
        rounds, k = logits.shape
        candidates = sorted(grid, key=lambda value: abs(math.log(value)))
        scores = logits.double()
        survival = torch.ones(rounds, dtype=torch.float64, device=logits.device)
        chosen: list[float] = []
        for i in range(k):
            seen = verified > i
            outcome = accepted[seen] > i
            errors = [
                expected_calibration_error(
                    survival[seen] * torch.sigmoid(scores[seen, i] / value),
                    outcome,
                    bins,
                )
                for value in candidates
            ]
            chosen.append(candidates[errors.index(min(errors))])
            survival = survival * torch.sigmoid(scores[:, i] / chosen[-1])
        return cls(tuple(chosen))

    @classmethod
    def fit_shifted(
        cls, logits: Tensor, accepted: Tensor, lengths: Tensor | None = None
    ) -> SequentialTemperatureScaling:
        """Fit a temperature and a shift a position.

        They maximise the likelihood of what happened to draft i in the rounds in which
        the drafts before it were accepted: the product is calibrated where each
        conditional is. With Platt's prior, so that a position that always ended alike
        stays finite.

        Args:
            logits, accepted, lengths: as of `fit`.

        Raises:
            ValueError: for mismatched shapes, NaN, counts out of range, or a position
                that no round reached.
        """
        verified = _verified(logits, accepted, lengths)
        fitted = []
        for i in range(logits.shape[1]):
            reached = (verified > i) & (accepted >= i)
            if not bool(reached.any()):
                raise ValueError(
                    f"no round reached draft position {i + 1}; collect more rounds, or "
                    "pass fewer columns of logits"
                )
            fitted.append(_platt(logits[reached, i].double(), accepted[reached] > i))
        slopes, shifts = zip(*fitted, strict=True)
        return cls(tuple(1 / slope for slope in slopes), tuple(shifts))

    def apply(self, logits: Tensor) -> Tensor:
        """Calibrated confidences for logits [..., k]; same shape, dtype kept.

        Raises:
            ValueError: if there are more positions than temperatures.
        """
        k = logits.shape[-1]
        if k > len(self.temperatures):
            raise ValueError(
                f"logits has {k} draft positions but temperatures has "
                f"{len(self.temperatures)}; fit the calibration at the longer draft"
            )
        scale, shift = (
            torch.tensor(values[:k], dtype=logits.dtype, device=logits.device)
            for values in (self.temperatures, self.shifts or (0.0,) * k)
        )
        return torch.sigmoid(logits / scale + shift)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_dict` reads it back."""
        return {
            "kind": "sequential_temperature_scaling",
            "temperatures": list(self.temperatures),
            **({"shifts": list(self.shifts)} if self.shifts else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SequentialTemperatureScaling:
        """Read `to_dict`'s form.

        Raises:
            ValueError: for another kind, or temperatures that are not numbers.
        """
        kind = data.get("kind")
        if kind != "sequential_temperature_scaling":
            raise ValueError(
                f"kind is {kind!r}; expected 'sequential_temperature_scaling'"
            )
        read = []
        for name, default in (("temperatures", None), ("shifts", [])):
            values = data.get(name, default)
            if not isinstance(values, list) or not all(
                isinstance(value, int | float) and not isinstance(value, bool)
                for value in values
            ):
                raise ValueError(f"{name} is {values!r}; it must be a list of numbers")
            read.append(tuple(float(value) for value in values))
        return cls(*read)


def _verified(logits: Tensor, accepted: Tensor, lengths: Tensor | None) -> Tensor:
    """int [N], drafts verified; ValueError for rounds that cannot be fitted to."""
    if logits.ndim != 2 or accepted.shape != logits.shape[:1]:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)} and accepted "
            f"{tuple(accepted.shape)}; they must be [N, k] and [N]"
        )
    if bool(torch.isnan(logits).any()):
        raise ValueError("logits contains NaN; look for the fault in the drafter")
    k = logits.shape[1]
    verified = torch.full_like(accepted, k) if lengths is None else lengths
    if verified.shape != accepted.shape or bool(
        ((accepted < 0) | (accepted > verified) | (verified > k)).any()
    ):
        raise ValueError(
            "accepted and lengths must be [N] with 0 <= accepted <= lengths <= "
            f"{k} in every round"
        )
    for i in range(k):
        if not bool((verified > i).any()):
            raise ValueError(
                f"no round verified draft position {i + 1}; collect rounds with "
                "full-length verification, or pass fewer columns of logits"
            )
    return verified


#: Slopes that a fit may have: temperatures of 32 and 1/32.
_SLOPES = 1 / 32, 32.0
_NEWTON_STEPS = 50


def _platt(scores: Tensor, outcome: Tensor) -> tuple[float, float]:
    """Slope and shift of the logistic regression of an outcome on fp64 scores."""
    ones = float(outcome.sum())
    zeros = len(outcome) - ones
    wanted = torch.where(outcome, (ones + 1) / (ones + 2), 1 / (zeros + 2)).double()
    design = torch.stack((scores, torch.ones_like(scores)), 1)
    start = torch.tensor([1.0, 0.0], dtype=torch.float64, device=scores.device)
    found = _logistic(design, wanted, start)
    low, high = _SLOPES
    if not low <= float(found[0]) <= high:
        slope = min(max(float(found[0]), low), high)
        fixed = slope * scores
        only = _logistic(design[:, 1:], wanted, start[1:], fixed)
        return slope, float(only[0])
    return float(found[0]), float(found[1])


def _logistic(
    design: Tensor, wanted: Tensor, found: Tensor, fixed: Tensor | float = 0.0
) -> Tensor:
    """Coefficients of ``design`` beside ``fixed``, by Newton's steps, halved where they
    go too far."""

    def loss(at: Tensor) -> float:
        logits = design @ at + fixed
        return float(
            torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted)
        )

    for _ in range(_NEWTON_STEPS):
        chance = torch.sigmoid(design @ found + fixed)
        gradient = design.T @ (chance - wanted)
        weight = (chance * (1 - chance))[:, None]
        # A little of the identity: scores that are all alike tell no slope.
        hessian = design.T @ (weight * design)
        hessian = hessian + 1e-6 * torch.eye(len(found)).to(design)
        step = torch.linalg.solve(hessian, gradient)
        share = 1.0
        while loss(found - share * step) > loss(found) and share > 1e-6:
            share /= 2
        found = found - share * step
        if float(step.abs().max()) < 1e-10:
            break
    return found


def read_calibration(where: str | Path) -> SequentialTemperatureScaling | None:
    """The temperatures of a file, or beside a drafter's config.json; None if there are
    none.

    Args:
        where: the file, or the drafter's directory.

    Raises:
        ValueError: the file is there and cannot be used.
    """
    path = Path(where)
    if path.is_dir():
        path /= FILE_NAME
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("it must hold one JSON object")
        return SequentialTemperatureScaling.from_dict(found)
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; write it anew with `dspark-k3 calibrate`, or take it "
            "away"
        ) from error
