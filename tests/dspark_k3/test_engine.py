# SPDX-License-Identifier: Apache-2.0
"""Real vLLM on the CPU: speculation changes the speed, not the text."""

import inspect
import shlex
import textwrap
from pathlib import Path

import numpy as np
import pytest

from drafters.checkpoint import load_drafter, load_target
from drafters.loop import speculate
from experiments.engine import EngineRun, Job, run_engine
from tests.dspark_k3.two_sample import two_sample_p

pytestmark = pytest.mark.engine

TEXT = (inspect.getsource(textwrap) + inspect.getsource(shlex)).encode()
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 33, 47, 63, 64, 65, 100)
PROMPTS = [list(TEXT[1500 + 500 * i :][:n]) for i, n in enumerate(LENGTHS)]
LONG = list(TEXT[:1010])
SHAPED = {"frequency_penalty": 1.0, "presence_penalty": 0.5, "min_tokens": 6}
GREEDY = [
    Job(0.0, PROMPTS, 16),
    *(Job(0.0, [prompt], 10) for prompt in PROMPTS),
    Job(0.0, [LONG, PROMPTS[9]], 14),
    Job(0.0, PROMPTS[4:12], 16, extra=SHAPED),
]
"""All prompts at batch 4, one by one (batch 1), one that ends at max_model_len = 1024
beside a short one, and with logits shaped by what was generated."""

SAMPLES = 720


def sampling(count: int) -> list[Job]:
    return [Job(1.0, [list(TEXT[3000:3040])] * count, 3, seed=1000)]


LEVEL = 0.01 / 3


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> list[EngineRun]:
    """The same jobs in the same runner without speculation."""
    return run_engine(tiny_target, None, 0, GREEDY)


def test_plain_decoding_speculates_nothing(plain: list[EngineRun]) -> None:
    """Field case F23: a run without drafts has acceptance length 1 and no rates."""
    assert all(run.draft_tokens == run.verify_steps == 0 for run in plain)
    assert plain[0].acceptance_length == 1.0
    assert plain[0].survival_rates == []
    assert [len(ids) for ids in plain[0].token_ids] == [16] * len(PROMPTS)


@pytest.mark.parametrize("length", range(1, 8))
def test_greedy_text_is_unchanged(
    plain: list[EngineRun], tiny_target: Path, tiny_draft: Path, length: int
) -> None:
    """Field cases F13, F25: every depth gives the plain text, and really speculates.

    Field case F22: also up to the context limit. Field case F29: also with penalties
    and min_tokens, which every row of a verify step must see.
    """
    runs = run_engine(tiny_target, tiny_draft, length, GREEDY)
    for fast, slow in zip(runs, plain, strict=True):
        assert fast.token_ids == slow.token_ids
    assert runs[0].acceptance_length > 1.3
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


@pytest.fixture(scope="module")
def plain_samples(tiny_target: Path) -> np.ndarray:
    run = run_engine(tiny_target, None, 0, sampling(SAMPLES), batch_size=64)[0]
    return np.array(run.token_ids)


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
    plain_samples: np.ndarray, tiny_target: Path, tiny_draft: Path
) -> None:
    """Field case F25: at temperature 1 token and bigram laws are those of the target.

    Three G tests at 1 % over all three.
    """
    run = run_engine(tiny_target, tiny_draft, 2, sampling(SAMPLES), batch_size=64)[0]
    assert run.accepted_tokens > 0
    assert run.accepted_tokens < run.draft_tokens
    assert min(p_values(np.array(run.token_ids), plain_samples)) > LEVEL


def test_the_law_test_sees_a_biased_engine(
    plain_samples: np.ndarray, tiny_target: Path, tiny_draft: Path
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
        sampling(SAMPLES),
        batch_size=64,
        speculative=always,
    )[0]
    assert run.accepted_tokens == run.draft_tokens
    assert min(p_values(np.array(run.token_ids), plain_samples)) < LEVEL


@pytest.mark.parametrize("length", [3, 7])
def test_acceptance_counts_equal_the_engine_free_loop(
    tiny_target: Path, tiny_draft: Path, length: int
) -> None:
    """Field case F25: unchanged text does not vouch for the counts, so they are held
    to `drafters.loop`: same prompts, same drafter, same accepted runs by position."""
    target = load_target(tiny_target)
    drafter = load_drafter(tiny_draft, target)
    job = Job(0.0, PROMPTS[4:], 16)
    expected = [0] * length
    steps = 0
    for prompt in job.prompts:
        trace = speculate(
            target, drafter, prompt, max_new_tokens=16, draft_length=length
        )
        steps += len(trace.accepted)
        for accepted in trace.accepted:
            for position in range(accepted):
                expected[position] += 1
    run = run_engine(tiny_target, tiny_draft, length, [job])[0]
    assert run.verify_steps == steps
    assert run.accepted_per_position == expected
