# SPDX-License-Identifier: Apache-2.0
"""A drafter's `sample_sequential` against vLLM's loop, the kernels' reference in the
kernels' place."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark_k3 import settings
from dspark_k3.draft import sequential
from verify_kernels.markov import MarkovSpace, Noise, reference

VOCAB, RANK, HIDDEN, DRAFTS = 96, 32, 16, 3


class Drafter:
    """What vLLM's classes have that a step asks for; W2 is padded as vLLM pads it."""

    draft_id_to_target_id = None

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=g).bfloat16()

        self.head = normal(VOCAB, HIDDEN)
        self.confident = normal(HIDDEN + RANK)
        self.logits_processor = SimpleNamespace(
            scale=1.0, soft_cap=None, head_dtype=torch.bfloat16
        )
        weights = normal(VOCAB, RANK), normal(VOCAB + 32, RANK)
        w1, w2 = (SimpleNamespace(weight=w) for w in weights)
        self.model = SimpleNamespace(
            markov_head=SimpleNamespace(markov_w1=w1, markov_w2=w2)
        )

    def compute_draft_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T

    def markov_embed(self, tokens: Tensor) -> Tensor:
        return self.model.markov_head.markov_w1.weight[tokens]

    def compute_confidence(self, hidden: Tensor, embed: Tensor) -> Tensor:
        return torch.sigmoid(torch.cat((hidden, embed), -1) @ self.confident).float()


def speculator(requests: int, sampled: bool) -> Any:
    """Buffers for two requests more than a step has."""
    states, rows = requests + 2, (requests + 2) * DRAFTS
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    where = torch.arange(states).flip(0)[:, None].expand(-1, DRAFTS)
    return SimpleNamespace(
        num_speculative_steps=DRAFTS,
        sample_indices=order,
        sample_idx_mapping=where.flatten().contiguous(),
        sample_pos=50 + torch.arange(rows),
        input_buffers=SimpleNamespace(
            input_ids=(7 * torch.arange(rows, dtype=torch.int32)) % VOCAB
        ),
        _anchor_idx=DRAFTS * torch.arange(states),
        draft_tokens=torch.full((states, DRAFTS), -1),
        draft_logits=torch.zeros(states, DRAFTS, VOCAB).bfloat16() if sampled else None,
        temperature=torch.full((states,), 0.7),
        seeds=torch.arange(100, 100 + states),
        use_confidence_head=True,
        draft_token_confidence_probs=torch.zeros(states, DRAFTS),
        use_fp64_gumbel=False,
        draft_watermarker=None,
        acceptance_estimator=None,
    )


def stock(model: Drafter, spec: Any, requests: int, head_hidden: Tensor) -> None:
    """vLLM 0.33's ``_sample_sequential``, with the noise of its sampler."""
    count = requests * DRAFTS
    hidden = head_hidden[spec.sample_indices[:count]]
    base = model.compute_draft_logits(hidden).view(requests, DRAFTS, VOCAB)
    states = spec.sample_idx_mapping[:count].view(requests, DRAFTS)
    positions = spec.sample_pos[:count].view(requests, DRAFTS)
    previous = spec.input_buffers.input_ids[spec._anchor_idx[:requests]].long()
    embeds = []
    for i in range(DRAFTS):
        embeds.append(model.markov_embed(previous))
        w2 = model.model.markov_head.markov_w2.weight[:VOCAB]
        logits = base[:, i] + (embeds[-1].float() @ w2.float().T).bfloat16()
        values = logits.double()
        if spec.draft_logits is not None:
            at = states[:, i]
            spec.draft_logits[at, i] = logits
            seeds = spec.seeds[at] ^ (i << 32)
            noise = reference.gumbel(seeds, positions[:, i] - 1, VOCAB)
            values = values / spec.temperature[at][:, None] + noise
        previous = values.argmax(-1)
        spec.draft_tokens[:requests, i] = previous
    confidence = model.compute_confidence(hidden, torch.stack(embeds, 1).flatten(0, 1))
    spec.draft_token_confidence_probs[:requests] = confidence.view(requests, DRAFTS)


def drawn(
    base: Tensor,
    w1: Tensor,
    w2: Tensor,
    anchor: Tensor,
    tokens: Tensor,
    space: MarkovSpace,
    *,
    noise: Noise | None,
) -> Tensor:
    """What the kernels do."""
    assert anchor.dtype == torch.int32 and w2.shape[0] == base.shape[2]
    return tokens.copy_(reference.markov_sample(base, w1, w2, anchor, noise))


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> sequential.SequentialHead:
    monkeypatch.setattr(sequential, "markov_sample", drawn)
    monkeypatch.setattr(MarkovSpace, "allocate", lambda device: None)
    return sequential.SequentialHead(Drafter(), torch.device("cuda", 0))


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_are_those_of_vllms_loop(
    head: sequential.SequentialHead, sampled: bool
) -> None:
    """And confidences, and kept logits; rows of no request stay as they were."""
    hidden = torch.randn(15, HIDDEN, generator=torch.Generator().manual_seed(2))
    ours, theirs = speculator(3, sampled), speculator(3, sampled)
    assert head(ours, 3, hidden.bfloat16())
    stock(Drafter(), theirs, 3, hidden.bfloat16())
    assert torch.equal(ours.draft_tokens, theirs.draft_tokens)
    assert (ours.draft_tokens[3:] == -1).all()
    found = ours.draft_token_confidence_probs
    assert torch.equal(found, theirs.draft_token_confidence_probs)
    assert (found[:3] > 0).all() and (found[3:] == 0).all()
    if sampled:
        assert torch.equal(ours.draft_logits, theirs.draft_logits)


def change(model: Drafter, spec: Any, name: str) -> None:
    if name == "a reduced draft vocabulary":
        model.draft_id_to_target_id = torch.zeros(1)  # type: ignore[assignment]
    elif name == "logits are transformed":
        model.apply_output_logit_transform = lambda x: x  # type: ignore[attr-defined]
    elif name == "a logit scale of 0.5":
        model.logits_processor.scale = 0.5
    elif name == "a soft cap of 30.0":
        model.logits_processor.soft_cap = 30.0
    elif name == "heads of torch.float32":
        model.logits_processor.head_dtype = torch.float32
    elif name == "the Markov head is not bf16":
        del model.model.markov_head.markov_w2.weight
    elif name == "a Markov head of rank 48":
        model.model.markov_head.markov_w1.weight = torch.zeros(VOCAB, 48).bfloat16()
    elif name == "an odd vocabulary of 95":
        model.model.markov_head.markov_w1.weight = torch.zeros(95, RANK).bfloat16()
    elif name == "drafts are watermarked":
        spec.draft_watermarker = object()
    elif name == "acceptance is estimated from each step's logits":
        spec.acceptance_estimator = object()
    elif name == "noise of 64 bits":
        spec.use_fp64_gumbel = True
    elif name == "logits are kept in torch.float32":
        spec.draft_logits = spec.draft_logits.float()
    elif name == "more than 15 drafts":
        spec.num_speculative_steps = 16
    else:
        raise AssertionError(name)


@pytest.mark.parametrize(
    "why",
    [
        "a reduced draft vocabulary",
        "logits are transformed",
        "a logit scale of 0.5",
        "a soft cap of 30.0",
        "heads of torch.float32",
        "the Markov head is not bf16",
        "a Markov head of rank 48",
        "an odd vocabulary of 95",
        "drafts are watermarked",
        "acceptance is estimated from each step's logits",
        "noise of 64 bits",
        "logits are kept in torch.float32",
        "more than 15 drafts",
        "more than 64 requests",
    ],
)
def test_what_the_kernels_lack_is_left_to_vllm(
    head: sequential.SequentialHead, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, with nothing done."""
    spec = speculator(3, sampled=True)
    requests = 65 if why == "more than 64 requests" else 3
    if requests == 3:
        change(head._model, spec, why)
    with caplog.at_level(logging.INFO, logger="vllm.dspark_k3"):
        for _ in range(2):
            assert not head(spec, requests, torch.zeros(15, HIDDEN).bfloat16())
    assert [record.message for record in caplog.records] == [
        f"dspark-k3: drafts are drawn by vLLM: {why}"
    ]
    assert (spec.draft_tokens == -1).all()


def test_it_is_asked_for_and_needs_a_gpu() -> None:
    assert settings.read({}).draft_sampler == "stock"
    given = {"dspark_k3": {"draft_sampler": "ours"}}
    assert settings.read(given).draft_sampler == "ours"
    with pytest.raises(ValueError, match="must be 'ours' or 'stock'"):
        settings.read({"dspark_k3": {"draft_sampler": True}})
    with pytest.raises(ValueError, match="'ours' on cpu; its kernels need a CUDA"):
        sequential.SequentialHead(Drafter(), torch.device("cpu"))
