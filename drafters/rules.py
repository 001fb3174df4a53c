# SPDX-License-Identifier: Apache-2.0
"""Verification rules: how many drafts stay, and which token follows them.

A rule is a pure function to an `OutcomeLaw`: for each request the law of the number of
accepted drafts and, for each number, the law of the token that follows. `verify` draws
from exactly that law with two uniform numbers per request. What the tests enumerate is
therefore the implementation itself.

Exactness (the emitted tokens have the target's own law) needs, whatever the rule:

1. target_probs is the target's final sampling distribution: after temperature, top-k,
   top-p, penalties and grammar mask, and row t sees the drafts before t only.
2. For "standard" and "block", draft_probs is the distribution each draft was really
   drawn from, after every truncation. A truncated q is fine, a different q is not, and
   q need not cover the target's support. Argmax drafts are a point mass: pass
   draft_probs=None, never their softmax.
3. For "standard" and "block", whether slot i is verified was decided before x_i was
   drawn (`drafters.schedule` keeps to that). "greedy" and "target_only" hold for each
   draft sequence on its own, so their lengths may depend on anything drawn so far.

"synthetic" is not exact: it forces acceptance rates for timing, and its text means
nothing.

Sources: Leviathan et al., arXiv 2211.17192 (standard); Sun et al., arXiv 2403.10444
(block); DSpark, arXiv 2607.05147 (lengths that do not look ahead).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.sampling import Generators, pick, probs_from_logits, uniforms

__all__ = [
    "RULES",
    "OutcomeLaw",
    "Verdict",
    "block_law",
    "outcome_law",
    "point_mass_law",
    "probs_from_logits",
    "rates_from_length",
    "standard_law",
    "synthetic_law",
    "verify",
]

RULES = ("standard", "block", "greedy", "target_only", "synthetic")

_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class OutcomeLaw:
    """What a rule does with given drafts.

    accepted: float64 [B, k+1], P(exactly j drafts accepted); 0 for j > lengths[b].
    next_token: float64 [B, k+1, V], law of the token after j accepted drafts: the
        residual for j < lengths[b], the target's own law for j = lengths[b].
    """

    accepted: Tensor
    next_token: Tensor


@dataclass(frozen=True, eq=False)
class Verdict:
    """The outcome of one verify step.

    accepted: int64 [B], drafts accepted, 0..lengths[b].
    tokens: int64 [B, k+1], the accepted drafts, then the corrected or bonus token at
        column accepted[b], then -1.
    """

    accepted: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class _Step:
    """Checked inputs in float64, with harmless values in the slots that do not exist.

    tokens int64 [B, k], live bool [B, k], target [B, k+1, V], draft [B, k, V].
    """

    tokens: Tensor
    lengths: Tensor
    live: Tensor
    target: Tensor
    draft: Tensor


def verify(
    rule: str,
    draft_tokens: Tensor,
    lengths: Tensor,
    target_probs: Tensor,
    *,
    draft_probs: Tensor | None = None,
    survival_rates: Sequence[float] | None = None,
    generator: Generators = None,
) -> Verdict:
    """Verify the drafts of a ragged batch and draw the token that follows them.

    Args:
        rule: one of `RULES`.
        draft_tokens: int [B, k]; entries at or past lengths[b] are not read.
        lengths: int [B], drafts to verify per request, 0..k.
        target_probs: [B, k+1, V]; row t is the target's distribution after t drafts;
            rows past lengths[b] are not read and may hold NaN.
        draft_probs: [B, k, V], the distribution each draft was drawn from. None means
            the drafts are a point mass (argmax). Only "standard" and "block" read it.
        survival_rates: "synthetic" only: P(the first i drafts are accepted), i = 1..k,
            non-increasing.
        generator: one for the batch, or one per request. Two uniform numbers are drawn
            per request and call; with one generator per request its batch mates
            cannot change its tokens.

    Raises:
        ValueError: names the argument, the value and the rule it breaks.
    """
    law = outcome_law(
        rule,
        draft_tokens,
        lengths,
        target_probs,
        draft_probs=draft_probs,
        survival_rates=survival_rates,
    )
    batch, columns = law.accepted.shape
    device = law.accepted.device
    count_draw, token_draw = uniforms(batch, 2, device, generator)
    accepted = pick(law.accepted, count_draw)
    row = torch.arange(batch, device=device)
    final = pick(law.next_token[row, accepted], token_draw)
    column = torch.arange(columns, device=device)
    stay = column < accepted.unsqueeze(-1)
    padded = torch.nn.functional.pad(draft_tokens.long(), (0, 1), value=-1)
    tokens = torch.where(stay, padded, torch.full_like(padded, -1))
    tokens = tokens.scatter(1, accepted.unsqueeze(-1), final.unsqueeze(-1))
    return Verdict(accepted=accepted, tokens=tokens)


def outcome_law(
    rule: str,
    draft_tokens: Tensor,
    lengths: Tensor,
    target_probs: Tensor,
    *,
    draft_probs: Tensor | None = None,
    survival_rates: Sequence[float] | None = None,
) -> OutcomeLaw:
    """The law `verify` draws from; arguments and errors as there."""
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; it must be one of {', '.join(RULES)}")
    if (rule == "synthetic") != (survival_rates is not None):
        raise ValueError(
            f"survival_rates is {survival_rates} with rule {rule!r}; "
            "give it with 'synthetic' and with no other rule"
        )
    if survival_rates is not None:
        return synthetic_law(draft_tokens, lengths, target_probs, survival_rates)
    if rule in ("greedy", "target_only"):
        return point_mass_law(draft_tokens, lengths, target_probs)
    ratio_rule: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | None], OutcomeLaw]]
    ratio_rule = {"standard": standard_law, "block": block_law}
    return ratio_rule[rule](draft_tokens, lengths, target_probs, draft_probs)


def standard_law(
    draft_tokens: Tensor,
    lengths: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
) -> OutcomeLaw:
    """Chain rejection sampling (Leviathan et al., arXiv 2211.17192).

    Draft x_i is accepted with probability min(1, p_i(x_i) / q_i(x_i)); the first
    rejection ends the run and draws from the normalised max(p_i - q_i, 0).
    """
    step = _checked(draft_tokens, lengths, target_probs, draft_probs)
    accept = _ratio(step).clamp(max=1.0)
    k = step.tokens.shape[1]
    residual = (step.target[:, :k] - step.draft).clamp(min=0.0)
    return OutcomeLaw(_first_rejection(accept, step.live), _next_token(step, residual))


def block_law(
    draft_tokens: Tensor,
    lengths: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
) -> OutcomeLaw:
    """Block verification (Sun et al., arXiv 2403.10444): never fewer than "standard".

    With P_0 = 1 and P_i = min(1, P_(i-1) p_i(x_i) / q_i(x_i)), the residual after i
    drafts is R_i(v) = max(P_i p_(i+1)(v) - q_(i+1)(v), 0) with mass m_i. Draft i passes
    with h_i = m_i / (m_i + 1 - P_i), the last verified one with h = P. The number
    accepted is the LAST i that passes, each tested on its own, and the next token comes
    from R_i. The residual belongs to this rule: it carries P_i, which the standard
    residual does not.
    """
    step = _checked(draft_tokens, lengths, target_probs, draft_probs)
    k = step.tokens.shape[1]
    ratio = _ratio(step)
    joint = [torch.ones_like(step.target[:, 0, 0])]
    for i in range(k):
        joint.append((joint[-1] * ratio[:, i]).clamp(max=1.0))
    prefix = torch.stack(joint, dim=1)
    scaled = prefix[:, :k].unsqueeze(-1) * step.target[:, :k]
    residual = (scaled - step.draft).clamp(min=0.0)
    mass = residual.sum(dim=-1)
    room = mass + 1.0 - prefix[:, :k]
    # No room means P_i = 1 and p = q at the next slot: then every later prefix up to
    # that slot has ratio 1 as well, and stopping here has probability 0 either way.
    passes = torch.where(room > 0, mass / room.clamp(min=1e-300), torch.ones_like(room))
    passes = torch.cat([passes, prefix[:, k:]], dim=1)
    final = step.lengths.unsqueeze(-1)
    passes = passes.scatter(1, final, prefix.gather(1, final))
    slot = torch.arange(k + 1, device=passes.device)
    passes = torch.where(slot > final, torch.zeros_like(passes), passes)
    passes[:, 0] = 1.0
    fails_after = (1.0 - passes[:, 1:]).flip(1).cumprod(dim=1).flip(1)
    fails_after = torch.nn.functional.pad(fails_after, (0, 1), value=1.0)
    return OutcomeLaw(passes * fails_after, _next_token(step, residual))


def point_mass_law(
    draft_tokens: Tensor, lengths: Tensor, target_probs: Tensor
) -> OutcomeLaw:
    """Accept x_i with probability p_i(x_i); else draw from p_i with x_i removed.

    This is "greedy" (the standard rule with q a point mass at the argmax) and equally
    "target_only" (draw from the target, accept if it equals the draft): for given
    drafts the two have one law. They differ in how the drafts were made, hence in the
    mean acceptance: p(argmax q) against sum q p.
    """
    step = _checked(draft_tokens, lengths, target_probs, None)
    k = step.tokens.shape[1]
    accept = step.target[:, :k].gather(-1, step.tokens.unsqueeze(-1)).squeeze(-1)
    residual = step.target[:, :k].scatter(-1, step.tokens.unsqueeze(-1), 0.0)
    return OutcomeLaw(_first_rejection(accept, step.live), _next_token(step, residual))


def synthetic_law(
    draft_tokens: Tensor,
    lengths: Tensor,
    target_probs: Tensor,
    survival_rates: Sequence[float],
) -> OutcomeLaw:
    """Force P(first i drafts accepted) = survival_rates[i-1]; the text is meaningless.

    The rates are unconditional (marginal), as in vLLM's `synthetic_acceptance_rates`,
    so the mean acceptance length at full length is 1 + sum(rates), bonus included. The
    next token is drawn from the target row it follows.

    Raises:
        ValueError: unless there are k rates in [0, 1] that never increase.
    """
    step = _checked(draft_tokens, lengths, target_probs, None)
    k = step.tokens.shape[1]
    rates = [float(rate) for rate in survival_rates]
    if len(rates) != k:
        raise ValueError(
            f"survival_rates has {len(rates)} entries for draft length {k}; "
            "give one per draft position"
        )
    _check_rates(rates)
    survival = torch.tensor([1.0, *rates], dtype=torch.float64)
    survival = survival.to(step.target.device).broadcast_to(step.target.shape[:2])
    survival = survival * torch.nn.functional.pad(step.live, (1, 0), value=True)
    after = torch.nn.functional.pad(survival[:, 1:], (0, 1), value=0.0)
    return OutcomeLaw(survival - after, step.target)


def rates_from_length(length: float, k: int) -> list[float]:
    """vLLM's minimum-variance schedule for a synthetic acceptance length.

    Args:
        length: mean acceptance length wanted, bonus included, in [1, k+1].
        k: draft length, at least 1.

    Returns:
        k survival rates: floor(length - 1) ones, then the fraction, then zeros. They
        sum to length - 1, so the mean is `length` for every k that can reach it. The
        accepted count is all but deterministic; use explicit rates to study spread.

    Raises:
        ValueError: for k < 1 or a length outside [1, k+1].
    """
    if k < 1:
        raise ValueError(f"k is {k}; the draft length must be at least 1")
    if not 1.0 <= length <= k + 1.0:
        raise ValueError(
            f"length is {length}; with {k} drafts the acceptance length, bonus "
            f"included, must lie in [1, {k + 1}]"
        )
    drafts = length - 1.0
    full = math.floor(drafts)
    return ([1.0] * full + [drafts - full] + [0.0] * k)[:k]


def _check_rates(rates: Sequence[float]) -> None:
    for i, rate in enumerate(rates):
        if not 0.0 <= rate <= 1.0:
            raise ValueError(
                f"survival_rates[{i}] is {rate}; every rate must lie in [0, 1]"
            )
        if i and rate > rates[i - 1]:
            raise ValueError(
                f"survival_rates[{i}] = {rate} exceeds survival_rates[{i - 1}] = "
                f"{rates[i - 1]}; a longer run cannot be likelier than a shorter one "
                "(give unconditional rates, not conditional ones)"
            )


def _ratio(step: _Step) -> Tensor:
    """p_i(x_i) / q_i(x_i), float64 [B, k]; 0 in slots that do not exist."""
    k = step.tokens.shape[1]
    index = step.tokens.unsqueeze(-1)
    p = step.target[:, :k].gather(-1, index).squeeze(-1)
    q = step.draft.gather(-1, index).squeeze(-1)
    impossible = step.live & (q <= 0)
    if bool(impossible.any()):
        b, i = (int(n) for n in impossible.nonzero()[0])
        raise ValueError(
            f"draft_tokens[{b}, {i}] = {int(step.tokens[b, i])} has probability 0 in "
            "draft_probs, so it was not drawn from it; pass the distribution the draft "
            "was drawn from (None for argmax drafts)"
        )
    return torch.where(step.live, p / torch.where(step.live, q, 1.0), 0.0)


def _first_rejection(accept: Tensor, live: Tensor) -> Tensor:
    """P(exactly j accepted) [B, k+1] from conditional acceptance rates [B, k]."""
    rate = torch.where(live, accept, torch.zeros_like(accept))
    survival = torch.nn.functional.pad(rate.cumprod(dim=1), (1, 0), value=1.0)
    return survival * torch.nn.functional.pad(1.0 - rate, (0, 1), value=1.0)


def _next_token(step: _Step, residual: Tensor) -> Tensor:
    """Residual laws for j < length, the target's law from j = length on."""
    mass = residual.sum(dim=-1, keepdim=True)
    # Without mass the rejection has probability 0 (up to rounding); the target's law
    # keeps the row a distribution.
    usable = (mass > 0) & step.live.unsqueeze(-1)
    k = residual.shape[1]
    corrected = torch.where(
        usable, residual / torch.where(usable, mass, 1.0), step.target[:, :k]
    )
    return torch.cat([corrected, step.target[:, k:]], dim=1)


def _checked(
    draft_tokens: Tensor,
    lengths: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
) -> _Step:
    if draft_tokens.ndim != 2:
        raise ValueError(
            f"draft_tokens has shape {tuple(draft_tokens.shape)}; it must be [B, k]"
        )
    batch, k = draft_tokens.shape
    if target_probs.ndim != 3 or target_probs.shape[:2] != (batch, k + 1):
        raise ValueError(
            f"target_probs has shape {tuple(target_probs.shape)}; with draft_tokens "
            f"[{batch}, {k}] it must be [{batch}, {k + 1}, V]"
        )
    vocab = target_probs.shape[2]
    if draft_probs is not None and draft_probs.shape != (batch, k, vocab):
        raise ValueError(
            f"draft_probs has shape {tuple(draft_probs.shape)}; "
            f"it must be [{batch}, {k}, {vocab}]"
        )
    if lengths.shape != (batch,) or lengths.is_floating_point():
        raise ValueError(
            f"lengths has shape {tuple(lengths.shape)} and dtype {lengths.dtype}; "
            f"it must be [{batch}] integers"
        )
    count = lengths.long()
    if bool(((count < 0) | (count > k)).any()):
        raise ValueError(f"lengths is {count.tolist()}; every entry must be in 0..{k}")
    slot = torch.arange(k + 1, device=count.device)
    read = slot <= count.unsqueeze(-1)
    live = read[:, 1:]
    tokens = torch.where(live, draft_tokens.long(), 0)
    if bool(((tokens < 0) | (tokens >= vocab)).any()):
        b, i = (int(n) for n in ((tokens < 0) | (tokens >= vocab)).nonzero()[0])
        raise ValueError(
            f"draft_tokens[{b}, {i}] is {int(tokens[b, i])}; the vocabulary of "
            f"target_probs has ids 0..{vocab - 1}"
        )
    target = _rows("target_probs", target_probs, read)
    if draft_probs is None:
        draft = torch.nn.functional.one_hot(tokens, vocab).double()
    else:
        draft = _rows("draft_probs", draft_probs, live)
    return _Step(tokens, count, live, target, draft)


def _rows(name: str, probs: Tensor, read: Tensor) -> Tensor:
    """float64 rows that sum to 1; rows that are not read become uniform."""
    uniform = 1.0 / probs.shape[-1]
    rows = torch.where(read.unsqueeze(-1), probs.double(), uniform)
    total = rows.sum(dim=-1)
    # Written so that NaN fails the comparison.
    good = (rows >= 0).all(dim=-1) & ((total - 1.0).abs() <= _SUM_TOLERANCE)
    if not bool(good.all()):
        b, i = (int(n) for n in (~good).nonzero()[0])
        raise ValueError(
            f"{name}[{b}, {i}] is not a distribution (sum {float(total[b, i]):.6g}, "
            f"smallest entry {float(rows[b, i].min()):.6g}); pass probabilities, "
            "non-negative and summing to 1, not logits"
        )
    return rows / total.unsqueeze(-1)
