# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding, whole: `speculate` is the truth the faster paths are held to.

One request, no engine. Every round drafts a block after the anchor, decides how much of
it is worth verifying, runs the target once over the anchor and those drafts, and keeps
the accepted ones plus one token of the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.backbone import DSparkDrafter, extend_context
from drafters.rules import verify
from drafters.sampling import probs_from_logits, sample
from drafters.target import Target

#: Confidence probabilities [B, k] to verified lengths [B]. To stay lossless it may look
#: at confidences as `drafters.schedule` does, never at what came of a draft.
LengthPolicy = Callable[[Tensor], Tensor]


@dataclass
class Trace:
    """What a run produced; ``proposed``, ``verified``, ``accepted`` per round."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    proposed: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    confidence_logits: list[list[float]] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a verify step commits, bonus included; 1.0 before any step.

        The prefill token is not counted, as in DeepSpec and vLLM.
        """
        rounds = len(self.accepted)
        return 1.0 + sum(self.accepted) / rounds if rounds else 1.0


@torch.no_grad()
def speculate(
    target: Target,
    drafter: DSparkDrafter,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    draft_length: int,
    temperature: float = 0.0,
    rule: str = "standard",
    policy: LengthPolicy | None = None,
    generator: torch.Generator | None = None,
    stop_ids: Collection[int] = (),
) -> Trace:
    """Generate up to ``max_new_tokens`` after ``prompt`` with ``draft_length`` drafts.

    ``rule`` is one of `drafters.rules.RULES` except "synthetic"; the rule "greedy"
    drafts by argmax, the others at the request's temperature. ``policy`` picks how many
    drafts are verified (default: all). Raises ValueError on an empty prompt and
    CheckpointError when draft_length is outside 1..block_size.
    """
    if not prompt:
        raise ValueError("prompt is empty: the target needs at least one token")
    taps = drafter.config.target_layer_ids

    def target_probs(logits: Tensor) -> Tensor:
        return probs_from_logits(logits.double(), temperature)

    def draft_probs(logits: Tensor) -> Tensor:
        return probs_from_logits(
            logits.double(), 0.0 if rule == "greedy" else temperature
        )

    def draw(probs: Tensor) -> Tensor:
        return sample(probs, generator)

    trace = Trace()
    where = target.embedding.device
    logits, features, cache = target(torch.tensor([list(prompt)], device=where), taps)
    positions = torch.arange(len(prompt), device=where)[None]
    context = drafter.context_kv(features, positions)
    anchor = draw(target_probs(logits[:, -1]))
    committed = len(prompt)  # tokens whose keys and features are in both caches
    while not _finish(trace, [int(anchor)], max_new_tokens, stop_ids):
        draft = drafter.propose(
            anchor,
            torch.tensor([committed], device=where),
            context,
            draft_length,
            draft_probs,
            draw,
        )
        lengths = torch.tensor([draft_length], device=where)
        if draft.confidence_logits is not None:
            trace.confidence_logits.append(draft.confidence_logits[0].tolist())
            if policy is not None:
                lengths = policy(torch.sigmoid(draft.confidence_logits))
        width = 1 + int(lengths)
        rows = torch.cat((anchor[:, None], draft.tokens[:, : width - 1]), 1)
        logits, features, grown = target(rows, taps, cache)
        assert features is not None
        verdict = verify(
            rule,
            draft.tokens[:, : width - 1],
            lengths,
            target_probs(logits),
            draft_probs=draft.probs[:, : width - 1],
            generator=generator,
        )
        kept = 1 + int(verdict.accepted)  # the anchor and the accepted drafts
        trace.proposed.append(draft_length)
        trace.verified.append(width - 1)
        trace.accepted.append(kept - 1)
        cache = target.crop(grown, committed + kept)
        positions = torch.arange(committed, committed + kept, device=where)[None]
        context = extend_context(
            context, drafter.context_kv(features[:, :kept], positions)
        )
        committed += kept
        run = verdict.tokens[0, :kept].tolist()
        if _finish(trace, run[:-1], max_new_tokens, stop_ids):
            break
        anchor = torch.tensor(run[-1:], device=where)
    return trace


def traces(
    target: Target,
    drafter: DSparkDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    draft_length: int | None = None,
) -> Iterator[Trace]:
    """`speculate` after each prompt, prompt i drawn with seed i; with the drafter's
    whole block if no ``draft_length`` is given."""
    for seed, prompt in enumerate(prompts):
        yield speculate(
            target,
            drafter,
            prompt,
            max_new_tokens=max_new_tokens,
            draft_length=draft_length or drafter.config.block_size,
            temperature=temperature,
            generator=torch.Generator().manual_seed(seed),
        )


def _finish(
    trace: Trace, run: Sequence[int], budget: int, stop_ids: Collection[int]
) -> bool:
    """Append ``run`` token by token; the earliest stop within the budget wins."""
    for token in run:
        if len(trace.tokens) >= budget:
            return True
        trace.tokens.append(token)
        if token in stop_ids:
            trace.finish_reason = "stop"
            return True
    return len(trace.tokens) >= budget


@torch.no_grad()
def decode_plainly(
    target: Target,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    stop_ids: Collection[int] = (),
) -> Trace:
    """The same without a drafter, one token a step: what `speculate` must equal."""
    if not prompt:
        raise ValueError("prompt is empty: the target needs at least one token")
    trace = Trace()
    where = target.embedding.device
    logits, _, cache = target(torch.tensor([list(prompt)], device=where))
    while True:
        probs = probs_from_logits(logits[:, -1].double(), temperature)
        token = sample(probs, generator)
        if _finish(trace, [int(token)], max_new_tokens, stop_ids):
            return trace
        logits, _, cache = target(token[:, None], (), cache)
