# SPDX-License-Identifier: Apache-2.0
"""From logits to the distribution that is sampled, and drawing from it.

Drafter and target both go through `probs_from_logits`, and what it returns is both
what tokens are drawn from and what the verification rules are told. That identity is
the first condition for exactness: a ratio test against any other q is biased.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Generators: TypeAlias = torch.Generator | Sequence[torch.Generator] | None

GREEDY_BELOW = 1e-5
"""Temperatures below this mean argmax, as in DeepSpec and vLLM."""


def probs_from_logits(
    logits: Tensor,
    temperature: float | Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """The distribution that is really sampled: temperature, then top-k, then top-p.

    Args:
        logits: [..., V], any floating dtype; -inf marks a forbidden token.
        temperature: a number, or a tensor that broadcasts to `logits.shape[:-1]`.
            Below 1e-5 the row becomes one-hot at its largest logit, the lowest token
            id among equals; top_k and top_p have no effect on such a row.
        top_k: keep exactly this many tokens (lowest ids among equals); None keeps all.
        top_p: keep the smallest set, from the most likely token down, whose mass
            reaches top_p; None keeps all.

    Returns:
        [..., V], float64 for float64 logits and float32 for every other dtype. A token
        that was cut has probability exactly 0.

    Raises:
        ValueError: for a NaN or +inf logit, a row without a finite logit, a negative
            temperature, top_k < 1 or top_p outside (0, 1].
    """
    if not logits.is_floating_point() or logits.ndim < 1 or logits.shape[-1] == 0:
        raise ValueError(
            f"logits has dtype {logits.dtype} and shape {tuple(logits.shape)}; "
            "it must be floating point with a vocabulary as its last dimension"
        )
    if bool((torch.isnan(logits) | torch.isposinf(logits)).any()):
        raise ValueError(
            "logits contains NaN or +inf; every logit must be finite or -inf "
            "(a forbidden token), so look for the fault in the model's forward"
        )
    if bool(torch.isneginf(logits).all(dim=-1).any()):
        raise ValueError(
            "logits has a row of -inf only; leave at least one token allowed"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1, or None for all")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p is {top_p}; it must lie in (0, 1], or be None for all")
    work = logits if logits.dtype == torch.float64 else logits.float()
    heat = torch.as_tensor(temperature, dtype=work.dtype, device=work.device)
    if not bool((heat >= 0).all() & torch.isfinite(heat).all()):
        raise ValueError(
            f"temperature is {temperature}; it must be finite and >= 0 (0 is greedy)"
        )
    heat = heat.broadcast_to(work.shape[:-1]).unsqueeze(-1)
    greedy = heat < GREEDY_BELOW
    probs = torch.softmax(work / torch.where(greedy, torch.ones_like(heat), heat), -1)
    if top_k is not None or top_p is not None:
        probs = _truncate(probs, top_k, top_p)
    if bool(greedy.any()):
        best = torch.nn.functional.one_hot(work.argmax(dim=-1), work.shape[-1])
        probs = torch.where(greedy, best.to(probs.dtype), probs)
    return probs


def sample(probs: Tensor, generator: Generators = None) -> Tensor:
    """Draw one token per row of `probs` [B, V]; returns int64 [B].

    One uniform number per row, so a row's token depends on its own probabilities and
    (with one generator per row) on its own generator only. A token of probability 0
    is never drawn.

    Raises:
        ValueError: if `probs` is not [B, V] or the generators do not match its rows.
    """
    if probs.ndim != 2:
        raise ValueError(f"probs has shape {tuple(probs.shape)}; it must be [B, V]")
    return pick(probs.double(), uniforms(probs.shape[0], 1, probs.device, generator)[0])


def uniforms(
    rows: int, draws: int, device: torch.device, generator: Generators
) -> Tensor:
    """float64 [draws, rows] in [0, 1); with a sequence, row b uses generator b alone.

    Raises:
        ValueError: if the sequence does not hold one generator per row.
    """
    if generator is None or isinstance(generator, torch.Generator):
        where = device if generator is None else generator.device
        drawn = torch.rand(
            draws, rows, generator=generator, dtype=torch.float64, device=where
        )
        return drawn.to(device)
    if len(generator) != rows:
        raise ValueError(
            f"generator holds {len(generator)} generators for {rows} requests; "
            "give one per request, or a single one for the batch"
        )
    columns = [
        torch.rand(draws, generator=own, dtype=torch.float64, device=own.device)
        for own in generator
    ]
    if not columns:
        return torch.empty(draws, 0, dtype=torch.float64, device=device)
    return torch.stack([column.to(device) for column in columns], dim=1)


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: weights [B, V] >= 0 with a positive sum, uniform [B] in [0, 1).

    Returns int64 [B]. The search looks at positive weights only: rounding of the
    running sum, sequential or parallel, can then never select a token of weight 0.
    """
    cdf = weights.cumsum(dim=-1)
    positive = weights > 0
    reached = positive & (cdf > (uniform * cdf[:, -1]).unsqueeze(-1))
    first = reached.to(torch.uint8).argmax(dim=-1)
    size = weights.shape[-1]
    last = size - 1 - positive.flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.where(reached.any(dim=-1), first, last)


def _truncate(probs: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked[..., top_k:] = 0.0
    if top_p is not None and top_p < 1.0:
        ranked = ranked / ranked.sum(dim=-1, keepdim=True)
        before = ranked.cumsum(dim=-1) - ranked
        # The most likely token has nothing before it, so one token always stays.
        ranked = torch.where(before < top_p, ranked, torch.zeros_like(ranked))
    kept = torch.zeros_like(probs).scatter(-1, order, ranked)
    return kept / kept.sum(dim=-1, keepdim=True)
