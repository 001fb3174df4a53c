# SPDX-License-Identifier: Apache-2.0
"""The whole-sequence form: the numbers of `K3Model.step`, and right gradients."""

from __future__ import annotations

import random

import pytest
import torch

from tests.verify_kernels import whole_sequence
from verify_kernels import VerifyBatch
from verify_kernels.kda.reference import _apply
from verify_kernels.model.parallel import (
    CHUNK,
    Past,
    chunk_kda,
    crop,
    dense_banks,
    forward,
)
from verify_kernels.model.reference import K3Model
from verify_kernels.model.weights import K3Config, K3Weights, random_weights

CONFIGS = [
    K3Config(round_prefix=None),
    K3Config(
        layers=5,
        residual_block=3,
        mla_layers=(2, 4),
        dense_layers=2,
        top_k=3,
        round_prefix=None,
    ),
]


def text(config: K3Config, length: int) -> list[int]:
    return random.Random(1).choices(range(config.vocab_size), k=length)


def stepped(
    config: K3Config, weights: K3Weights, tokens: list[int], taps: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features from `K3Model.step`, up to eight rows at a time."""
    model = K3Model(config, weights)
    prefixes: list[torch.Tensor] = []
    residual = model._residual

    def spy(*args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, prefix = residual(*args, **kwargs)  # type: ignore[arg-type]
        prefixes.append(prefix.clone())
        return hidden, prefix

    model._residual = spy  # type: ignore[method-assign]
    state = model.new_state(2, 16, 4)
    logits, features = [], []
    for begin in range(0, len(tokens), 8):
        rows = torch.tensor(tokens[begin : begin + 8])
        prefixes.clear()
        ints = torch.tensor
        batch = VerifyBatch(
            row_start=ints([0, len(rows)], dtype=torch.int32),
            history=ints([begin], dtype=torch.int32),
            state_slots=ints([1], dtype=torch.int32),
            accepted=ints([0], dtype=torch.int32),
            block_table=ints([list(range(16))], dtype=torch.int32),
        )
        logits.append(model.step(batch, rows, state))
        state.commit(1, len(rows))
        # Two mixes a layer: the next layer's first one has the prefix after a layer.
        features.append(torch.cat([prefixes[2 * tap + 2] for tap in taps], -1))
    return torch.cat(logits), torch.cat(features)


@pytest.mark.parametrize("config", CONFIGS)
def test_agrees_with_steps_and_with_the_independent_model(config: K3Config) -> None:
    weights = random_weights(config, 5, torch.float64)
    tokens = text(config, 2 * CHUNK + 5)
    taps = (-1, 1, config.layers - 1)
    out = forward(
        config,
        weights,
        torch.tensor([tokens, tokens[::-1]]),
        experts=dense_banks(weights, torch.float64),
        taps=taps,
    )
    logits, features = stepped(config, weights, tokens, taps)
    # fp64, at most 5 layers; see test_model_reference for the tolerance.
    torch.testing.assert_close(out.logits[0], logits, rtol=0, atol=1e-11)
    torch.testing.assert_close(out.features[0], features, rtol=0, atol=1e-11)
    for row, order in enumerate((tokens, tokens[::-1])):
        expected = whole_sequence.logits(config, weights, order)
        torch.testing.assert_close(out.logits[row], expected, rtol=0, atol=1e-11)


def test_rounded_prefix_in_fp32_agrees_with_steps() -> None:
    """The shipped form: bf16 prefix, fp32 arithmetic."""
    config = K3Config()
    weights = random_weights(config, 5, torch.float32)
    tokens = text(config, 20)
    out = forward(
        config,
        weights,
        torch.tensor([tokens]),
        experts=dense_banks(weights, torch.float32),
    )
    logits, _ = stepped(config, weights, tokens, (0,))
    # A sum near a tie may round to the other bf16 neighbour, 2^-8 relative; a few such
    # flips of a 20-wide prefix move logits of size 3 by some 0.01.
    torch.testing.assert_close(out.logits[0], logits, rtol=0, atol=0.06)
    assert (out.logits[0] - logits).abs().median() < 1e-4


@pytest.mark.parametrize("config", CONFIGS)
def test_continues_from_a_cache_cut_back(config: K3Config) -> None:
    """Widths and accepted counts of a verify loop; rejected rows leave nothing."""
    weights = random_weights(config, 6, torch.float64)
    tokens = text(config, 60)
    experts = dense_banks(weights, torch.float64)
    rng = random.Random(2)
    past: Past | None = None
    got, done = [], 0
    for width, keep in ((19, 19), (8, 8), (5, 3), (8, 1), (1, 1), (20, 17)):
        rows = tokens[done : done + keep]
        rows += rng.choices(range(config.vocab_size), k=width - keep)
        out = forward(config, weights, torch.tensor([rows]), experts=experts, past=past)
        got.append(out.logits[0, :keep])
        done += keep
        past = crop(out.past, done)
    expected = whole_sequence.logits(config, weights, tokens[:done])
    torch.testing.assert_close(torch.cat(got), expected, rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match=f"length is {done - 1}"):
        crop(past, done - 1)


@pytest.mark.parametrize("length", [1, CHUNK, CHUNK + 1, 50])
def test_chunks_are_the_recurrence_and_its_gradient(length: int) -> None:
    """Values and gradients of every input against the rule applied row by row, with
    decays down to the bound of e^-5 a row."""
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, width = 2, 6
    key = torch.nn.functional.normalize(draw(2, length, heads, width), dim=-1)
    inputs = [
        draw(2, length, heads, width),
        key,
        draw(2, length, heads, 4),
        -5 * torch.sigmoid(4 * draw(2, length, heads, width)),
        torch.sigmoid(draw(2, length, heads)),
        draw(2, heads, 4, width),
    ]
    for x in inputs:
        x.requires_grad_()
    q, k, v, g, beta, state = inputs
    outs, us = [], []
    for t in range(length):
        decayed = state * g[:, t].exp()[:, :, None]
        seen = (decayed * k[:, t, :, None]).sum(-1)
        u = beta[:, t, :, None] * (v[:, t] - seen)
        state = torch.stack(
            [_apply(state[b], u[b], k[b, t], g[b, t]) for b in range(2)]
        )
        us.append(u)
        outs.append((state * q[:, t, :, None]).sum(-1))
    expected = (torch.stack(outs, 1), torch.stack(us, 1), state)
    got = chunk_kda(*inputs)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weight = [draw(*x.shape) for x in expected]

    def gradients(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        total = sum((w * x).sum() for w, x in zip(weight, outputs, strict=True))
        return torch.autograd.grad(total, inputs)

    for ours, theirs in zip(gradients(got), gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_chunks_stay_finite_in_fp32_at_the_fastest_decay() -> None:
    one = torch.ones(1, 3 * CHUNK, 1, 8)
    key = one / 8**0.5
    g = torch.full_like(one, -5.0, requires_grad=True)
    out, _, _ = chunk_kda(key, key, one, g, one[..., 0] / 2, torch.zeros(1, 1, 8, 8))
    out.sum().backward()
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(g.grad).all())
    # Beyond one row back everything is below e^-5: o is about beta v <q, k>.
    torch.testing.assert_close(out, torch.full_like(out, 0.5), rtol=0, atol=0.01)


def test_wrong_tap_is_named() -> None:
    config = K3Config()
    weights = random_weights(config, 0, torch.float32)
    with pytest.raises(ValueError, match=r"taps is \[4\]; each must be -1 to 3"):
        forward(config, weights, torch.tensor([[1]]), experts={}, taps=(4,))


def test_routing_is_reported() -> None:
    config = CONFIGS[0]
    weights = random_weights(config, 0, torch.float32)
    seen: dict[int, torch.Tensor] = {}
    forward(
        config,
        weights,
        torch.tensor([[1, 2, 3]]),
        experts=dense_banks(weights, torch.float32),
        on_route=seen.__setitem__,
    )
    assert sorted(seen) == [1, 2, 3]
    assert all(ids.shape == (3, config.top_k) for ids in seen.values())
