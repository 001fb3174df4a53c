# SPDX-License-Identifier: Apache-2.0
"""LM head, argmax and the sequential sampler, against `drafters` and exact laws."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drafters.config import read_config
from drafters.heads import ConfidenceHead, VanillaMarkovHead
from drafters.sampling import pick, probs_from_logits
from tests.drafters.small import drafter_json, randomise
from verify_kernels.head.reference import (
    argmax,
    confidence,
    inverse_cdf,
    lm_head,
    markov_sample,
)

VOCAB, RANK, COUNT, HIDDEN = 6, 4, 7, 16


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniform(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def drafter_head() -> VanillaMarkovHead:
    head = VanillaMarkovHead(read_config(drafter_json())).double()
    randomise(head, 3, 1.0)
    return head.requires_grad_(False)


def draft_by_drafters(
    base: Tensor, anchor: Tensor, uniforms: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """The sampler in `drafters`' own parts."""
    head, previous = drafter_head(), anchor
    state = head.initial_state(len(anchor))
    tokens, logits = [], []
    for i in range(base.shape[1]):
        bias, state = head.step(head.embed(previous), base[:, i, :0], state)
        row = base[:, i] + bias
        if uniforms is None:
            previous = probs_from_logits(row, 0.0).argmax(-1)
        else:
            previous = pick(probs_from_logits(row, temperature), uniforms[:, i])
        tokens.append(previous)
        logits.append(row)
    return torch.stack(tokens, 1), torch.stack(logits, 1)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_sampler_is_the_drafters(temperature: float) -> None:
    base, anchor = normal(40, COUNT, VOCAB, seed=1), torch.arange(40) % VOCAB
    noise = uniform(40, COUNT, seed=2) if temperature else None
    tokens, logits = draft_by_drafters(base, anchor, noise, temperature)
    head = drafter_head()
    got = markov_sample(
        base,
        anchor,
        head.markov_w1.weight,
        head.markov_w2.weight,
        uniforms=noise,
        temperature=temperature or 1.0,
    )
    assert torch.equal(got.tokens, tokens)
    # Sums of four products of size 1 to 10 in fp64.
    torch.testing.assert_close(got.logits, logits, rtol=0, atol=1e-13)


def test_each_token_biases_the_next() -> None:
    """A bigram table that leads round a circle, whatever the base logits prefer."""
    w1 = torch.eye(VOCAB, dtype=torch.float64)
    w2 = 100 * w1.roll(1, 0)  # W2 W1[x] is 100 at x + 1
    base = normal(3, COUNT, VOCAB, seed=4)
    got = markov_sample(base, torch.tensor([0, 3, 5]), w1, w2)
    walk = [[(start + i) % VOCAB for i in range(1, COUNT + 1)] for start in (0, 3, 5)]
    assert got.tokens.tolist() == walk


def test_gumbel_draws_what_the_noise_says() -> None:
    """Field case F28: token i depends on its own noise and on what precedes."""
    base, anchor = normal(5, COUNT, VOCAB, seed=5), torch.arange(5)
    w1, w2 = normal(VOCAB, RANK, seed=6), normal(VOCAB, RANK, seed=7)
    noise = -torch.log(-torch.log(uniform(5, COUNT, VOCAB, seed=8)))
    got = markov_sample(base, anchor, w1, w2, gumbel=noise, temperature=0.7)
    for b in range(5):
        previous = int(anchor[b])
        for i in range(COUNT):
            scores = [
                (float(base[b, i, v]) + float(w2[v] @ w1[previous])) / 0.7
                + float(noise[b, i, v])
                for v in range(VOCAB)
            ]
            previous = scores.index(max(scores))
            assert int(got.tokens[b, i]) == previous
        alone = markov_sample(
            base[b, None], anchor[b, None], w1, w2, gumbel=noise[b, None],
            temperature=0.7,
        )  # fmt: skip
        assert torch.equal(alone.tokens[0], got.tokens[b])
        assert torch.equal(alone.logits[0], got.logits[b])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.integers(-4, 4), st.just(-math.inf)), min_size=1))
def test_inverse_cdf_gives_every_token_its_share(values: list[float]) -> None:
    """An even grid of uniforms hits each token as often as its probability says."""
    logits = torch.tensor(values, dtype=torch.float64)
    if torch.isneginf(logits).all():
        return
    grid = 400
    points = [(j + 0.5) / grid for j in range(grid)]
    counts = Counter(
        int(inverse_cdf(logits, torch.tensor(u, dtype=torch.float64))) for u in points
    )
    for token, share in enumerate(torch.softmax(logits, 0).tolist()):
        assert abs(counts[token] - grid * share) <= 1.0 + 1e-9
        assert share > 0 or counts[token] == 0


def test_inverse_cdf_at_the_ends() -> None:
    """u = 0 and the largest u never reach a token of probability 0, not even when a
    uniform below 1 becomes 1 in the sampler's fp32."""
    logits = torch.tensor([-math.inf, 0.0, 0.3, -math.inf], dtype=torch.float64)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    ends[1] = ends[1].nextafter(ends[0])
    assert [int(inverse_cdf(logits, u)) for u in ends] == [1, 2]
    assert ends[1] < 1 and ends[1].float() == 1
    none = torch.zeros(4, 1, dtype=torch.float64)
    draft = markov_sample(
        logits.expand(1, 2, 4),
        torch.zeros(1, dtype=torch.int64),
        none,
        none,
        uniforms=ends[1].expand(1, 2),
        compute=torch.float32,
    )
    assert draft.tokens.tolist() == [[2, 2]]


def test_argmax_takes_the_lowest_id_among_equals() -> None:
    logits = torch.full((3, 1000), -1.0)
    logits[0, [999, 17, 512]] = 4.0
    logits[2, 5] = math.inf
    assert argmax(logits).tolist() == [17, 0, 5]
    assert argmax(torch.full((2, 7), -math.inf)).tolist() == [0, 0]
    with pytest.raises(ValueError, match="logits has a NaN"):
        argmax(torch.tensor([0.0, math.nan]))


def test_lm_head_by_hand_and_row_by_row() -> None:
    hidden, weight = normal(5, 8, seed=9), normal(11, 8, seed=10)
    got = lm_head(hidden, weight)
    for m in range(5):
        hand = [math.fsum((hidden[m] * row).tolist()) for row in weight]
        assert got[m].tolist() == pytest.approx(hand, abs=1e-14)
        assert torch.equal(lm_head(hidden[m : m + 1], weight)[0], got[m])


def test_confidence_is_the_drafters() -> None:
    config = read_config(drafter_json())
    head, markov = ConfidenceHead(config).double(), drafter_head()
    randomise(head, 5, 0.5)
    hidden = normal(3, COUNT, HIDDEN, seed=11)
    previous = torch.arange(3 * COUNT).view(3, COUNT) % VOCAB
    theirs = torch.sigmoid(head(hidden, markov.embed(previous))).detach()
    got = confidence(
        hidden,
        previous,
        markov.markov_w1.weight,
        head.proj.weight[0].detach(),
        head.proj.bias.detach(),
    )
    # A sum of 20 products of size 1 in fp64.
    torch.testing.assert_close(got, theirs, rtol=0, atol=1e-14)


def test_bad_input_is_refused() -> None:
    base, anchor = normal(2, 3, VOCAB, seed=1), torch.zeros(2, dtype=torch.int32)
    w = normal(VOCAB, RANK, seed=2)
    with pytest.raises(ValueError, match="uniforms and gumbel are both given"):
        markov_sample(base, anchor, w, w, uniforms=torch.zeros(2, 3), gumbel=base)
    with pytest.raises(ValueError, match="temperature is 0"):
        markov_sample(base, anchor, w, w, temperature=0)
    with pytest.raises(ValueError, match=r"noise \{'uniforms': \(2, 2\)\}"):
        markov_sample(base, anchor, w, w, uniforms=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"weight \(5,\)"):
        confidence(normal(2, 3, 4, seed=1), base[..., 0], w, w[:, 0][:5], w[0, 0])
