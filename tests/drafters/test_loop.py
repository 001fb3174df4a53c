# SPDX-License-Identifier: Apache-2.0
"""The speculative loop gives the target's text, and the target's law."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from drafters.checkpoint import load_drafter, load_target
from drafters.config import read_config
from drafters.loop import Trace, _finish, decode_plainly, speculate
from drafters.sampling import probs_from_logits
from drafters.schedule import static_threshold
from experiments.corpora import EOS, held_out_prompts
from tests.drafters.small import VOCAB, drafter_json, small_drafter, small_target


@pytest.mark.parametrize("k", range(1, 8))
def test_greedy_text_equals_plain_decoding(
    k: int, tiny_target: Path, tiny_draft: Path
) -> None:
    """Field case F13: every draft length, not only powers of two. Field case F25:
    drafts were really accepted, so the equality says something."""
    target = load_target(tiny_target)
    drafter = load_drafter(tiny_draft, target)
    accepted = 0
    for kind, length in (("stdlib", 17), ("generated", 64)):
        prompt = held_out_prompts(kind, 1, length)[0]
        plain = decode_plainly(target, prompt, max_new_tokens=40, stop_ids=(EOS,))
        fast = speculate(
            target, drafter, prompt, max_new_tokens=40, draft_length=k, stop_ids=(EOS,)
        )
        assert fast.tokens == plain.tokens
        accepted += sum(fast.accepted)
    assert accepted > 0


@torch.no_grad()
def target_law(prompt: list[int], tokens: int) -> torch.Tensor:
    """Exact joint law of the next ``tokens`` tokens, by enumeration."""
    target = small_target()
    law = torch.ones((), dtype=torch.float64)
    continuations = list(itertools.product(range(VOCAB), repeat=tokens))
    batch = torch.tensor([prompt + list(c) for c in continuations])
    logits, _, _ = target(batch)
    law = torch.ones(len(continuations), dtype=torch.float64)
    for t in range(tokens):
        at = len(prompt) - 1 + t
        probs = probs_from_logits(logits[:, at].double(), 1.0)
        law *= probs.gather(1, batch[:, at + 1, None])[:, 0]
    return law


def drafted_pair_p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square of tokens two and three: the first never comes from a draft."""
    seen = counts.view(VOCAB, -1).sum(0)
    expected = law.view(VOCAB, -1).sum(0) * counts.sum()
    rare = expected < 5  # pooled, so that the chi-square approximation holds
    observed = torch.cat((seen[~rare], seen[rare].sum()[None]))
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
    return float(chisquare(observed.numpy(), wanted.numpy()).pvalue)


CASES = [
    ("standard", None, "vanilla"),
    ("standard", 0.6, "rnn"),
    ("block", None, "gated"),
    ("block", 0.6, "vanilla"),
    ("greedy", 0.6, "vanilla"),
    ("target_only", None, "vanilla"),
]


@pytest.mark.parametrize(("rule", "theta", "head"), CASES)
def test_sampled_text_has_the_targets_law(
    rule: str, theta: float | None, head: str
) -> None:
    """Field case F27: q is what tokens were drawn from, through the whole loop."""
    prompt, draws = [1, 3, 2], 600
    config = read_config(drafter_json(markov_head_type=head))
    target, drafter = small_target(), small_drafter(config)
    policy = partial(static_threshold, theta=theta) if theta is not None else None
    counts = torch.zeros([VOCAB] * 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    for _ in range(draws):
        trace = speculate(
            target,
            drafter,
            prompt,
            max_new_tokens=3,
            draft_length=2,
            temperature=1.0,
            rule=rule,
            policy=policy,
            generator=generator,
        )
        counts[tuple(trace.tokens)] += 1
    # Bonferroni: one error in a thousand over all cases.
    assert drafted_pair_p_value(counts, target_law(prompt, 3)) > 1e-3 / len(CASES)


def test_the_law_test_has_power() -> None:
    """Drawing from the drafter alone must fail the same comparison."""
    prompt, draws = [1, 3, 2], 600
    wrong = target_law([1, 3, 4], 3)
    right = target_law(prompt, 3)
    generator = torch.Generator().manual_seed(0)
    sample = torch.multinomial(wrong, draws, replacement=True, generator=generator)
    seen = torch.bincount(sample, minlength=len(right)).double()
    assert drafted_pair_p_value(seen, right) < 1e-9


@pytest.mark.parametrize(
    ("stop_at", "budget", "kept", "reason"),
    [(2, 5, [10, 11, 99], "stop"), (5, 5, [10, 11, 20, 21, 22], "length")],
)
def test_stop_inside_an_accepted_run(
    stop_at: int, budget: int, kept: list[int], reason: str
) -> None:
    """Field case F31: the earliest stop within the budget wins; nothing leaks after."""
    run = [10, 11, 20, 21, 22, 23]
    run.insert(stop_at, 99)
    trace = Trace()
    assert _finish(trace, run, budget, {99})
    assert (trace.tokens, trace.finish_reason) == (kept, reason)


def test_budget_inside_an_accepted_run(tiny_target: Path, tiny_draft: Path) -> None:
    """Field case F31: never more than max_new_tokens, for every cut of the text."""
    target = load_target(tiny_target)
    drafter = load_drafter(tiny_draft, target)
    prompt = held_out_prompts("generated", 1, 48)[0]
    whole = decode_plainly(target, prompt, max_new_tokens=18).tokens
    for budget in range(1, 18):
        cut = speculate(
            target, drafter, prompt, max_new_tokens=budget, draft_length=7
        ).tokens
        assert cut == whole[:budget]


def test_same_seed_same_text() -> None:
    """Field case F28: a seeded run repeats itself."""
    target, drafter = small_target(), small_drafter()

    def run() -> Trace:
        return speculate(
            target,
            drafter,
            [1, 2],
            max_new_tokens=30,
            draft_length=3,
            temperature=1.0,
            generator=torch.Generator().manual_seed(42),
        )

    first = run()
    assert first == run()
    # Field case F23: proposed, verified and accepted are counted apart.
    assert len(first.proposed) == len(first.verified) == len(first.accepted)
    assert all(
        a <= v <= p
        for a, v, p in zip(first.accepted, first.verified, first.proposed, strict=True)
    )
    assert Trace().acceptance_length == 1.0


def test_nothing_verified_is_plain_decoding() -> None:
    """Field case F03: rounds that verify no draft commit one token each."""
    target, drafter = small_target(), small_drafter()
    trace = speculate(
        target,
        drafter,
        [1, 2, 3],
        max_new_tokens=8,
        draft_length=4,
        policy=lambda c: torch.zeros(c.shape[0], dtype=torch.long),
    )
    assert trace.verified == [0] * 7 and trace.acceptance_length == 1.0
    assert trace.tokens == decode_plainly(target, [1, 2, 3], max_new_tokens=8).tokens
