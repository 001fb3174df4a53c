# SPDX-License-Identifier: Apache-2.0
"""Acceptance arithmetic: curves, lengths and counts.

Terms (DSpark, arXiv 2607.05147, and vLLM's metrics use them the same way):

* conditional acceptance rate ``a_k`` = P(draft k accepted | drafts before it
  accepted);
* survival rate ``A_k`` = P(first k drafts accepted) = ``a_1 * ... * a_k``, never
  increasing in k. vLLM's "per-position acceptance rate" is a survival rate;
* acceptance length ``AL(k) = 1 + A_1 + ... + A_k``: tokens committed by one verify
  step, the corrected or bonus token included, so it lies in [1, k + 1];
* P(exactly m accepted of k) = ``A_m - A_{m+1}`` for m < k, and ``A_k`` for m = k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Label = Literal["measured", "recorded", "modelled"]
LABELS: tuple[str, ...] = get_args(Label)


def _check_rates(name: str, rates: Sequence[float]) -> tuple[float, ...]:
    values = tuple(float(rate) for rate in rates)
    if not values:
        raise ValueError(f"{name} is empty; give one rate per draft position")
    for position, value in enumerate(values, start=1):
        if not 0.0 <= value <= 1.0:
            raise ValueError(
                f"{name} at position {position} is {value:g}; a rate must lie in [0, 1]"
            )
    return values


@dataclass(frozen=True)
class AcceptanceCurve:
    """Survival rates by draft position, with where they come from.

    Attributes:
        name: short name for tables and plots.
        survival: ``A_1 .. A_n``, unconditional, non-increasing, in [0, 1].
        label: "measured" (this run), "recorded" (somebody's run) or "modelled".
        provenance: one sentence about the source.
        own_lengths: acceptance lengths of runs that drafted k tokens each, by k. They
            take precedence over the sum of survival rates: a run with a smaller k
            starts its drafts at other anchors than the run the rates come from.

    Raises:
        ValueError: a rate outside [0, 1], a rate that rises (the position is
            named), an own length outside [1, k + 1], or an unknown label.
    """

    name: str
    survival: tuple[float, ...]
    label: Label
    provenance: str = ""
    own_lengths: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = _check_rates("survival rate", self.survival)
        for position in range(1, len(values)):
            if values[position] > values[position - 1] + 1e-12:
                raise ValueError(
                    f"survival rate rises at position {position + 1} "
                    f"({values[position - 1]:g} -> {values[position]:g}); P(first k "
                    "drafts accepted) cannot grow with k. Conditional rates may: "
                    "give those as conditional:..."
                )
        if self.label not in LABELS:
            raise ValueError(f"label is {self.label!r}; use one of {LABELS}")
        for k, length in self.own_lengths.items():
            if not 1.0 <= length <= k + 1:
                raise ValueError(
                    f"acceptance length measured at k = {k} is {length:g}; it must "
                    f"lie in [1, {k + 1}]"
                )
        object.__setattr__(self, "survival", values)

    @classmethod
    def from_conditional(
        cls, name: str, rates: Sequence[float], label: Label, provenance: str = ""
    ) -> AcceptanceCurve:
        """Curve from conditional rates ``a_1 .. a_n``, each in [0, 1]."""
        survival: list[float] = []
        running = 1.0
        for rate in _check_rates("conditional rate", rates):
            running *= rate
            survival.append(running)
        return cls(name, tuple(survival), label, provenance)

    @classmethod
    def from_survival(
        cls, name: str, rates: Sequence[float], label: Label, provenance: str = ""
    ) -> AcceptanceCurve:
        """Curve from survival rates; vLLM's ``synthetic_acceptance_rates``."""
        return cls(name, tuple(rates), label, provenance)

    @classmethod
    def geometric(cls, length: float, drafts: int) -> AcceptanceCurve:
        """Constant conditional rate ``a`` with ``AL(drafts) = length``.

        Solves ``1 + a + a^2 + ... + a^drafts = length`` by bisection.
        """
        _check_length(length, drafts)
        low, high = 0.0, 1.0
        for _ in range(200):
            mid = (low + high) / 2
            if 1 + sum(mid**j for j in range(1, drafts + 1)) < length:
                low = mid
            else:
                high = mid
        rate = (low + high) / 2
        return cls(
            f"geometric AL {length:g}",
            tuple(rate**j for j in range(1, drafts + 1)),
            "modelled",
            f"constant conditional rate {rate:.4f}, AL({drafts}) = {length:g}",
        )

    @classmethod
    def minimum_variance(cls, length: float, drafts: int) -> AcceptanceCurve:
        """vLLM's schedule for ``synthetic_acceptance_length``.

        With ``d = length - 1``: floor(d) positions survive always, the next with
        the fractional part of d, the rest never. The accepted count is then nearly
        deterministic, so verifying more than ceil(d) drafts is pure waste and gains
        from trimming measured under it are artefacts.
        """
        _check_length(length, drafts)
        accepted = length - 1
        survival = tuple(
            min(1.0, max(0.0, accepted - position)) for position in range(drafts)
        )
        return cls(
            f"minimum-variance AL {length:g}",
            survival,
            "modelled",
            f"vLLM's synthetic schedule, AL({drafts}) = {length:g}",
        )

    @property
    def max_draft_length(self) -> int:
        """Number of draft positions the curve knows."""
        return len(self.survival)

    @property
    def conditional(self) -> tuple[float, ...]:
        """``a_k = A_k / A_{k-1}``; 0 where no step ever reaches the position."""
        previous = (1.0, *self.survival[:-1])
        return tuple(
            now / before if before > 0 else 0.0
            for now, before in zip(self.survival, previous, strict=True)
        )

    def _check_k(self, k: int) -> None:
        if not 0 <= k <= self.max_draft_length:
            raise ValueError(
                f"draft length k is {k}; curve {self.name!r} has rates for "
                f"0..{self.max_draft_length}"
            )

    def length(self, k: int) -> float:
        """Acceptance length AL(k), in tokens a verify step, bonus included."""
        self._check_k(k)
        own = self.own_lengths.get(k)
        return 1.0 + math.fsum(self.survival[:k]) if own is None else own

    def accepted_distribution(self, k: int) -> tuple[float, ...]:
        """P(exactly m drafts accepted) for m = 0..k; sums to 1."""
        self._check_k(k)
        edges = (1.0, *self.survival[:k], 0.0)
        return tuple(edges[m] - edges[m + 1] for m in range(k + 1))

    def power(self, beta: float) -> AcceptanceCurve:
        """Curve with every conditional rate raised to ``beta`` > 0."""
        if not beta > 0:
            raise ValueError(f"beta is {beta:g}; the exponent must be positive")
        return AcceptanceCurve(
            f"{self.name}^{beta:g}",
            tuple(value**beta for value in self.survival),
            "modelled",
            f"{self.provenance}; conditional rates to the power {beta:g}",
        )


def _check_length(length: float, drafts: int) -> None:
    if drafts < 1:
        raise ValueError(f"drafts is {drafts}; a schedule needs at least 1")
    if not 1.0 <= length <= drafts + 1:
        raise ValueError(
            f"acceptance length is {length:g}; with {drafts} drafts it must lie in "
            f"[1, {drafts + 1}] (the bonus token is counted)"
        )


@dataclass(frozen=True)
class AcceptanceCounts:
    """What a run really proposed, verified and accepted.

    ``proposed`` may exceed ``verified`` when drafts are trimmed before the verify
    step. ``verify_steps`` counts steps with at least one verified draft: the
    prefill token and plain steps are outside. ``reached[j]`` counts verify steps
    whose verified drafts include position j + 1, ``accepted_at[j]`` those whose
    draft there was accepted.
    """

    proposed: int
    verified: int
    accepted: int
    verify_steps: int
    reached: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @classmethod
    def from_steps(
        cls,
        verified: Iterable[int],
        accepted: Iterable[int | None],
        proposed: Iterable[int] | None = None,
    ) -> AcceptanceCounts:
        """Count steps; an accepted entry may be None only where nothing was verified.

        Raises:
            ValueError: lengths disagree, a count is negative, or more was accepted
                than verified or verified than proposed (the step is named).
        """
        widths = list(verified)
        taken = [0 if count is None else count for count in accepted]
        offered = widths if proposed is None else list(proposed)
        if not len(widths) == len(taken) == len(offered):
            raise ValueError(
                f"step lists differ in size: proposed {len(offered)}, verified "
                f"{len(widths)}, accepted {len(taken)}"
            )
        for step, (p, v, a) in enumerate(zip(offered, widths, taken, strict=True)):
            if not 0 <= a <= v <= p:
                raise ValueError(
                    f"step {step}: proposed {p}, verified {v}, accepted {a}; need "
                    "0 <= accepted <= verified <= proposed"
                )
        positions = range(1, max(widths, default=0) + 1)
        return cls(
            proposed=sum(offered),
            verified=sum(widths),
            accepted=sum(taken),
            verify_steps=sum(v > 0 for v in widths),
            reached=tuple(sum(v >= j for v in widths) for j in positions),
            accepted_at=tuple(sum(a >= j for a in taken) for j in positions),
        )

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / verify steps; nan when no step verified a draft."""
        if self.verify_steps == 0:
            return math.nan
        return 1.0 + self.accepted / self.verify_steps

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / verified; nan when nothing was verified."""
        return self.accepted / self.verified if self.verified else math.nan

    @property
    def survival_rates(self) -> tuple[float, ...]:
        """Accepted at position j over the steps that verified position j."""
        return tuple(
            a / r if r else math.nan
            for a, r in zip(self.accepted_at, self.reached, strict=True)
        )
