# SPDX-License-Identifier: Apache-2.0
"""DSpark's sequential steps as vLLM's loop rounds them, in plain torch.

    bias_i   = bf16(W2 W1[x_{i-1}])                       x_0 the anchor
    logits_i = bf16(base_i + bias_i), fp32 of both where base is fp32
    x_i      = argmax(logits_i), or argmax(logits_i / temperature + noise_i)
    noise    = -log(-log(1 - u)),  u = (h + 1/2) 2^-32

h is MurmurHash3_x86_32 (A. Appleby, public domain) of seed, position + 2^30 and token
id (vLLM 0.33, ``DSparkSpeculator._sample_sequential`` and ``gumbel_sample``). Dot
products and noise are fp64 here, fp32 in kernels: `close` says which tokens may differ.
`verify_kernels.head.reference` has the law without roundings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verify_kernels.markov.host import Noise

#: Added to the positions of drafts.
DRAFT_SALT = 1 << 30
_MASK = 0xFFFFFFFF


def _rotated(value: Tensor, count: int) -> Tensor:
    return ((value << count) | (value >> (32 - count))) & _MASK


def murmur3(words: Sequence[Tensor], seed: int = 0) -> Tensor:
    """MurmurHash3_x86_32 of so many 32-bit words, int64 tensors that broadcast."""
    h = torch.tensor(seed)
    for word in words:
        key = _rotated((word & _MASK) * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK
        h = (_rotated(h ^ key, 13) * 5 + 0xE6546B64) & _MASK
    h = h ^ (4 * len(words))
    h = (h ^ (h >> 16)) * 0x85EBCA6B & _MASK
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & _MASK
    return h ^ (h >> 16)


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Noise fp64 [B, vocab] of drafts; int64 [B] seeds and positions before them."""
    seeds, positions = seeds[:, None], positions[:, None] + DRAFT_SALT
    ids = torch.arange(vocab, device=seeds.device)
    h = murmur3((seeds, seeds >> 32, positions, ids))
    uniform = (h.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


def step_logits(base: Tensor, w1: Tensor, w2: Tensor, previous: Tensor) -> Tensor:
    """Logits [B, V] in ``base``'s dtype, of base [B, V] and int64 [B] tokens."""
    exact = w1[previous].double() @ w2.double().T
    bias = exact.float().bfloat16()
    return (base.float() + bias.float()).to(base.dtype)


def scores(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """What the argmax is taken of, fp64 [B, V]; the rest is [B]."""
    noise = gumbel(seeds, positions, logits.shape[1])
    warm = (temperature != 0)[:, None]
    heat = torch.where(warm, temperature[:, None], 1.0).double()
    return torch.where(warm, logits.double() / heat + noise, logits.double())


def step(
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    previous: Tensor,
    number: int,
    noise: Noise | None = None,
) -> tuple[Tensor, Tensor]:
    """Of draft ``number``, behind int64 [B] tokens: its logits [B, V], and what the
    argmax is taken of, fp64 [B, V]. The rest is as `verify_kernels.markov` takes
    it."""
    logits = step_logits(base[:, number], w1, w2, previous)
    if noise is None:
        return logits, logits.double()
    states = noise.states[:, number]
    there, at = states >= 0, states.clamp(min=0)
    heat = torch.where(there, noise.temperature[at], 0.0)
    seeds = noise.seeds[at]
    if noise.logits is not None:
        seeds = seeds ^ (number << 32)
    return logits, scores(logits, heat, seeds, noise.positions[:, number])


def argmax(values: Tensor) -> Tensor:
    """int64 [B] of [B, V]: the lowest id of the largest; a NaN is above all numbers."""
    values = torch.where(values.isnan(), torch.inf, values.clamp(max=1e300))
    best = values == values.amax(-1, keepdim=True)
    return best.to(torch.uint8).argmax(-1)


def close(values: Tensor, tokens: Tensor, limit: float) -> Tensor:
    """bool [B]: whether the tokens' values are within ``limit`` of the largest."""
    found = values.gather(1, tokens[:, None])[:, 0]
    return found >= values.amax(-1) - limit


def markov_sample(
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    anchor: Tensor,
    noise: Noise | None = None,
) -> Tensor:
    """Tokens int64 [B, N], and the logits that ``noise`` wants kept; arguments as
    `verify_kernels.markov` takes them, on any device."""
    tokens = []
    previous = anchor.long()
    for number in range(base.shape[1]):
        logits, values = step(base, w1, w2, previous, number, noise)
        if noise is not None and noise.logits is not None:
            states = noise.states[:, number]
            there = states >= 0
            noise.logits[states[there], number, : logits.shape[1]] = logits[there]
        previous = argmax(values)
        tokens.append(previous)
    return torch.stack(tokens, 1)
