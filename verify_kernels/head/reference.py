# SPDX-License-Identifier: Apache-2.0
"""LM head, argmax, and DSpark's sequential Markov sampler in plain torch.

The sampler drafts k tokens after an anchor x_0 from k rows of base logits U_i that the
drafter's backbone gave in one pass:

    logits_i = U_i + W2 W1[x_{i-1}],     x_i drawn from logits_i,     i = 1 .. k
    confidence_i = sigmoid(w [h_i ; W1[x_{i-1}]] + b)

(DSpark, arXiv 2607.05147, section 3; vLLM 0.33's ``K3DSparkForCausalLM``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.dense.reference import matvec, project


@dataclass(frozen=True)
class MarkovDraft:
    """tokens int64 [B, k] and the logits [B, k, V] they were drawn from.

    The logits carry the Markov bias and no temperature.
    """

    tokens: Tensor
    logits: Tensor


def lm_head(
    hidden: Tensor, weight: Tensor, *, compute: torch.dtype = torch.float64
) -> Tensor:
    """hidden [M, H] (normed) and weight [V, H] to logits [M, V] in ``compute``."""
    return project(hidden, weight, compute=compute)


def argmax(logits: Tensor) -> Tensor:
    """int64 [..] of logits [.., V]: the lowest token id among equal largest logits.

    Raises:
        ValueError: if a logit is NaN; every comparison with it would be false.
    """
    if bool(torch.isnan(logits).any()):
        raise ValueError("logits has a NaN; look for the fault in the model's forward")
    size = logits.shape[-1]
    ids = torch.arange(size, device=logits.device)
    best = logits == logits.amax(-1, keepdim=True)
    return torch.where(best, ids, size).amin(-1)


def inverse_cdf(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw int64 [] from logits [V] with one uniform number in [0, 1).

    The first token whose running sum of probabilities exceeds uniform times the whole
    sum; a token of probability 0 is never drawn.
    """
    mass = torch.exp(logits - logits.max())
    running = mass.cumsum(0)
    reached = (running > uniform * running[-1]) & (mass > 0)
    # A uniform just below 1 may have been rounded to 1: the last possible token.
    pick = reached if bool(reached.any()) else running == running[-1]
    return pick.to(torch.uint8).argmax()


def markov_sample(
    base: Tensor,
    anchor: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    uniforms: Tensor | None = None,
    gumbel: Tensor | None = None,
    temperature: float = 1.0,
    compute: torch.dtype = torch.float64,
) -> MarkovDraft:
    """Draft k tokens a request, each from a bias that depends on the one before.

    Greedy (argmax, lowest id among equals) unless noise is given: ``uniforms`` in
    [0, 1) draws by inverse CDF, ``gumbel`` takes argmax(logits / temperature + gumbel).
    The noise is explicit so that a run can be repeated by any implementation.

    Args:
        base: [B, k, V] base logits. anchor: integers [B], the last committed tokens.
        w1, w2: [V, r] each.
        uniforms: [B, k]. gumbel: [B, k, V]. temperature: > 0, used with noise only.

    Raises:
        ValueError: for shapes that do not fit, both kinds of noise, or a temperature
            that is not positive.
    """
    requests, count, vocab = base.shape
    if (
        anchor.shape != (requests,)
        or w1.shape != w2.shape
        or w1.shape[0] != vocab
        or (uniforms is not None and uniforms.shape != (requests, count))
        or (gumbel is not None and gumbel.shape != base.shape)
    ):
        noise = {"uniforms": uniforms, "gumbel": gumbel}
        given = {n: tuple(x.shape) for n, x in noise.items() if x is not None}
        raise ValueError(
            f"base is {tuple(base.shape)}, anchor {tuple(anchor.shape)}, w1 "
            f"{tuple(w1.shape)}, w2 {tuple(w2.shape)}, noise {given}; they must be "
            "[B, k, V], [B], [V, r], [V, r], uniforms [B, k] or gumbel [B, k, V]"
        )
    if uniforms is not None and gumbel is not None:
        raise ValueError("uniforms and gumbel are both given; give one, or none")
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}; it must be > 0 (greedy: give no noise)"
        )
    embedding, table = w1.to(compute), w2.to(compute)
    tokens = torch.empty(requests, count, dtype=torch.int64, device=base.device)
    logits = torch.empty(base.shape, dtype=compute, device=base.device)
    for b in range(requests):
        previous = anchor[b].long()
        for i in range(count):
            row = base[b, i].to(compute) + matvec(table, embedding[previous])
            if uniforms is not None:
                previous = inverse_cdf(row / temperature, uniforms[b, i].to(compute))
            elif gumbel is not None:
                previous = argmax(row / temperature + gumbel[b, i].to(compute))
            else:
                previous = argmax(row)
            logits[b, i], tokens[b, i] = row, previous
    return MarkovDraft(tokens, logits)


def confidence(
    hidden: Tensor,
    previous: Tensor,
    w1: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    compute: torch.dtype = torch.float64,
) -> Tensor:
    """Probability [B, k] in ``compute`` that a draft survives if those before it did.

    Args:
        hidden: [B, k, H], the backbone's rows. previous: integers [B, k], the token
            before each draft: the anchor, then the drafts but the last.
        w1: [V, r]. weight: [H + r]. bias: [] or [1].

    Raises:
        ValueError: if the shapes do not fit.
    """
    requests, count, width = hidden.shape
    rank = w1.shape[1]
    if previous.shape != (requests, count) or weight.shape != (width + rank,):
        raise ValueError(
            f"hidden is {tuple(hidden.shape)}, previous {tuple(previous.shape)}, w1 "
            f"{tuple(w1.shape)}, weight {tuple(weight.shape)}; they must be [B, k, H], "
            "[B, k], [V, r] and [H + r]"
        )
    out = torch.empty(requests, count, dtype=compute, device=hidden.device)
    states, embedding = hidden.to(compute), w1.to(compute)
    scale, shift = weight.to(compute), bias.to(compute).reshape(())
    for b in range(requests):
        for i in range(count):
            seen = torch.cat((states[b, i], embedding[previous[b, i].long()]))
            out[b, i] = torch.sigmoid((seen * scale).sum() + shift)
    return out
