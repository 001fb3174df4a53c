# SPDX-License-Identifier: Apache-2.0
"""Real vLLM on the CPU: speculation changes the speed, not the text.

An engine takes 8 s to start and 0.2 s a sampled text, alone on a machine, so each one
does all the jobs of its draft length, and what plain decoding's law is held against is
drawn without an engine.
"""

import inspect
import shlex
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters.checkpoint import load_drafter, load_target
from drafters.loop import speculate
from drafters.sampling import probs_from_logits
from experiments.engine import EngineRun, Job, run_engine
from tests.dspark_k3.two_sample import two_sample_p

pytestmark = pytest.mark.engine

TEXT = (inspect.getsource(textwrap) + inspect.getsource(shlex)).encode()
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 47, 63, 64, 65, 100)
PROMPTS = [list(TEXT[1500 + 500 * i :][:n]) for i, n in enumerate(LENGTHS)]
LONG = list(TEXT[:1010])
SHAPED = {"frequency_penalty": 1.0, "presence_penalty": 0.5, "min_tokens": 6}
BATCHES = [
    Job(0.0, PROMPTS[:4], 16),
    Job(0.0, PROMPTS[4:], 16),
    Job(0.0, [LONG, PROMPTS[9]], 14),
    Job(0.0, PROMPTS[6:12], 16, extra=SHAPED),
]
"""All prompts at batch 4, one that ends at max_model_len = 1024 beside a short one, and
with logits shaped by what was generated."""
COUNTED = 1
"""Of the batches, the one whose accepted drafts are counted by the loop too."""
ALONE = [Job(0.0, [prompt], 10) for prompt in PROMPTS]
"""At batch 1. A draft length runs every third, so that two or three run each."""

PROMPT = list(TEXT[3000:3040])
SAMPLES = 160
"""A third of these tell a law that is always the drafter's (p below 1e-3)."""
DRAWN = 7200
SAMPLING = Job(1.0, [PROMPT] * SAMPLES, 3, seed=1000)
LEVEL = 0.01 / 3


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> list[EngineRun]:
    """The same jobs in the same runner without speculation."""
    return run_engine(tiny_target, None, 0, BATCHES + ALONE)


def test_plain_decoding_speculates_nothing(plain: list[EngineRun]) -> None:
    """Field case F23: a run without drafts has acceptance length 1 and no rates."""
    assert all(run.draft_tokens == run.verify_steps == 0 for run in plain)
    assert plain[0].acceptance_length == 1.0
    assert plain[0].survival_rates == []
    texts = plain[0].token_ids + plain[1].token_ids
    assert [len(ids) for ids in texts] == [16] * len(PROMPTS)


def counted_by_the_loop(
    target_directory: Path, draft_directory: Path, length: int
) -> tuple[int, list[int]]:
    """Verify steps of the counted batch, and those that accepted each draft."""
    target = load_target(target_directory)
    drafter = load_drafter(draft_directory, target)
    job = BATCHES[COUNTED]
    steps, by_position = 0, [0] * length
    for prompt in job.prompts:
        trace = speculate(
            target,
            drafter,
            prompt,
            max_new_tokens=job.max_tokens,
            draft_length=length,
        )
        steps += len(trace.accepted)
        for accepted in trace.accepted:
            for position in range(accepted):
                by_position[position] += 1
    return steps, by_position


@pytest.mark.parametrize("length", range(1, 8))
def test_greedy_text_is_unchanged(
    plain: list[EngineRun], tiny_target: Path, tiny_draft: Path, length: int
) -> None:
    """Field cases F13, F25: every depth gives the plain text, and really speculates.

    Field case F22: also up to the context limit. Field case F29: also with penalties
    and min_tokens, which every row of a verify step must see. Field case F25: unchanged
    text does not vouch for the counts, so they are held to `drafters.loop`: same
    prompts, same drafter, same accepted runs by position.
    """
    some = slice(length % 3, None, 3)
    runs = run_engine(tiny_target, tiny_draft, length, BATCHES + ALONE[some])
    slow_runs = plain[: len(BATCHES)] + plain[len(BATCHES) :][some]
    for fast, slow in zip(runs, slow_runs, strict=True):
        assert fast.token_ids == slow.token_ids
    assert runs[COUNTED].acceptance_length > 1.3
    for run in runs:
        generated = sum(len(ids) - 1 for ids in run.token_ids)
        # The last accepted run may reach beyond max_tokens; its tail is not returned.
        surplus = run.accepted_tokens + run.verify_steps - generated
        assert -len(run.token_ids) <= surplus <= length * len(run.token_ids)
        assert run.draft_tokens <= length * run.verify_steps
        assert len(run.accepted_per_position) == length
        assert sum(run.accepted_per_position) == run.accepted_tokens
        rates = run.survival_rates
        assert rates == sorted(rates, reverse=True)
    run = runs[COUNTED]
    found = run.verify_steps, run.accepted_per_position
    assert found == counted_by_the_loop(tiny_target, tiny_draft, length)


@pytest.fixture(scope="module")
def drawn(tiny_target: Path) -> np.ndarray:
    """Three tokens of the target's law, so often that their noise is none."""
    target = load_target(tiny_target)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.tensor([PROMPT] * DRAWN)
    for _ in range(3):
        seen, which = tokens.unique(dim=0, return_inverse=True)
        with torch.no_grad():
            logits = target(seen)[0][:, -1].double()
        probs = probs_from_logits(logits, 1.0)[which]
        following = torch.multinomial(probs, 1, generator=generator)
        tokens = torch.cat((tokens, following), dim=1)
    return tokens[:, len(PROMPT) :].numpy()


def p_values(samples: np.ndarray, reference: np.ndarray) -> list[float]:
    """First token a verify step decides, then bigrams ending at and inside the run."""
    second = two_sample_p(samples[:, 1].tolist(), reference[:, 1].tolist())
    bigrams = [
        two_sample_p(
            [tuple(row) for row in samples[:, i : i + 2].tolist()],
            [tuple(row) for row in reference[:, i : i + 2].tolist()],
        )
        for i in (0, 1)
    ]
    return [second, *bigrams]


def test_sampled_law_is_unchanged(
    drawn: np.ndarray, tiny_target: Path, tiny_draft: Path
) -> None:
    """Field case F25: at temperature 1 token and bigram laws are those of the target.

    Three G tests at 1 % over all three.
    """
    run = run_engine(tiny_target, tiny_draft, 2, [SAMPLING], batch_size=64)[0]
    assert run.accepted_tokens > 0
    assert run.accepted_tokens < run.draft_tokens
    assert min(p_values(np.array(run.token_ids), drawn)) > LEVEL


def test_the_law_test_sees_a_biased_engine(
    drawn: np.ndarray, tiny_target: Path, tiny_draft: Path
) -> None:
    """Drafts that are always accepted have the drafter's law: it must be rejected."""
    always = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0, 1.0],
    }
    run = run_engine(
        tiny_target,
        tiny_draft,
        2,
        [SAMPLING],
        batch_size=64,
        speculative=always,
    )[0]
    assert run.accepted_tokens == run.draft_tokens
    assert min(p_values(np.array(run.token_ids), drawn)) < LEVEL
