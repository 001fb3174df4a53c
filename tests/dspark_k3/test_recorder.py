# SPDX-License-Identifier: Apache-2.0
"""Rounds of a running engine: what was said of which drafts, and what became of
them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dspark_k3.draft.recorder import Rounds, RoundsRecorder
from experiments import calibrate
from experiments.engine import Job, run_engine
from experiments.prompts import held_out_prompts
from experiments.rounds import of_engine


def logit(p: float) -> float:
    return math.log(p / (1 - p))


def test_a_round_is_a_block_and_what_became_of_it() -> None:
    """Requests come and go, in any order; blocks that were cut are left out."""
    rounds = Rounds(2)
    # The step of the prompts: nothing was drafted before.
    rounds.verified(["a", "b"], [1, 1], [0, 0])
    rounds.drafted(["a", "b"], [[0.5, 0.25], [0.75, 0.5]])
    rounds.verified(["b", "c", "a"], [1, 1, 3], [2, 0, 0])
    rounds.drafted(["b", "c", "a"], [[0.5, 0.5], [0.25, 0.5], [0.9, 0.8]])
    assert rounds.take() == [
        ("b", [logit(0.75), 0.0], 0),
        ("a", [0.0, logit(0.25)], 2),
    ]
    rounds.verified(["a", "c"], [2, 2], [0, 1])
    assert rounds.take() == [("c", [logit(0.25), 0.0], 1)]
    # What was said of a cut block is not said of the next.
    rounds.verified(["a", "b"], [1, 3], [2, 0])
    assert rounds.take() == [("b", [0.0, 0.0], 2)]


def test_certain_heads_have_finite_logits() -> None:
    rounds = Rounds(2)
    rounds.drafted(["a"], [[0.0, 1.0]])
    rounds.verified(["a"], [3], [0])
    ((_, logits, _),) = rounds.take()
    assert logits[0] == pytest.approx(-16.1, abs=0.1)
    assert logits[1] == pytest.approx(16.1, abs=0.1)


def worker(**changes: Any) -> RoundsRecorder:
    """With a runner as vLLM's is, as far as it is read."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.confidence_head = nn.Linear(2, 1)
    found: Any = RoundsRecorder()
    config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True))
    found.model_runner = SimpleNamespace(
        speculator=SimpleNamespace(model=model, num_speculative_steps=2),
        vllm_config=config,
    )
    if changes.get("headless"):
        model.model.confidence_head = None
    if changes.get("calibrated"):
        model.register_buffer("draft_temperatures", torch.ones(2), persistent=False)
    if changes.get("graphs"):
        config.model_config.enforce_eager = False
    recorder: RoundsRecorder = found
    return recorder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("headless", "has no confidence head"),
        ("calibrated", 'record with "calibration": false'),
        ("graphs", "start the engine with enforce_eager"),
    ],
)
def test_what_cannot_be_recorded_is_refused(change: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        worker(**{change: True}).record_rounds()


def test_no_rounds_are_no_file() -> None:
    with pytest.raises(ValueError, match="no round was recorded"):
        of_engine([])


def test_an_engines_rounds_are_those_of_the_engine_free_loop(
    tiny_target: Path, tiny_draft: Path
) -> None:
    """Through vLLM on the CPU, two requests at a time: the same drafts accepted after
    the same confidences, for as long as the engine verifies whole blocks."""
    pytest.importorskip("vllm")
    prompts = held_out_prompts("stdlib", 3)
    target, drafter = calibrate.load_pair(tiny_target, tiny_draft)
    drafts = drafter.config.block_size
    (run,) = run_engine(
        tiny_target,
        tiny_draft,
        drafts,
        [Job(0.0, prompts, 40)],
        batch_size=2,
        record_rounds=True,
        additional_config={"dspark_k3": {"calibration": False}},
    )
    assert len(run.rounds) <= run.verify_steps
    found = calibrate.by_prompt(of_engine(run.rounds))
    wanted = calibrate.record(
        target, drafter, prompts, temperature=0.0, max_new_tokens=40
    )
    assert len(found) == len(wanted) == 3
    for ours, theirs in zip(found, wanted, strict=True):
        count = len(ours.accepted)
        assert len(theirs.accepted) - 1 <= count <= len(theirs.accepted)
        assert torch.equal(ours.accepted, theirs.accepted[:count])
        torch.testing.assert_close(
            ours.logits, theirs.logits[:count], rtol=1e-3, atol=1e-3
        )
