# SPDX-License-Identifier: Apache-2.0
"""Drafts of our sampler are those of vLLM's loop, in running engines on a GPU: tiny-k3
and the tiny Qwen3 pair, greedy and sampled, 10,000 drafts each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dspark_k3 import settings
from experiments.corpora import held_out_prompts
from experiments.gpu_engine import fleet, tiny_k3
from tests.dspark_k3 import shadow
from tests.dspark_k3.suite import cases

pytestmark = [pytest.mark.engine, pytest.mark.gpu, pytest.mark.timeout(900)]

PAIRS = {
    "k3": (tiny_k3.TARGET, tiny_k3.DRAFTER),
    "qwen3": (tiny_k3.TINY / "target", tiny_k3.TINY / "dspark-vanilla"),
}
MANNERS = {"greedy": 0.0, "sampled": 1.0}
DRAFTS = 10_000
NAMES = [f"{pair}-{manner}" for pair in PAIRS for manner in MANNERS]


def spec(name: str) -> fleet.EngineSpec:
    """The engine of a pair and a manner of drafting. K3's sampled one is adaptive, for
    its confidences; that needs our target on Hopper. Qwen3's have no graphs."""
    pair, manner = name.split("-")
    target, drafter = PAIRS[pair]
    greedy = manner == "greedy"
    speculation = tiny_k3.speculation(7, not greedy and pair == "k3", drafter)
    engine = tiny_k3.engine(target) | {
        "worker_extension_cls": shadow.WORKER,
        "enforce_eager": pair == "qwen3",
        "additional_config": {
            settings.KEY: {"target": pair == "k3", "draft_sampler": "ours"}
        },
        "speculative_config": speculation
        | {"draft_sample_method": "greedy" if greedy else "probabilistic"},
    }
    lengths = [5, 17, 40, 64, 100, 130, 33, 8]
    prompts = held_out_prompts("stdlib", 8, max(lengths))
    options = {
        "drafts": DRAFTS,
        "temperature": MANNERS[manner],
        "prompts": [list(p)[:n] for p, n in zip(prompts, lengths, strict=True)],
        "max_tokens": 400,
    }
    return fleet.EngineSpec(name, engine, shadow.JOB, options, dict(cases.ENVIRONMENT))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fleet.Outcome]:
    folder = Path(os.environ.get("DRAFTS_OUT", tmp_path_factory.mktemp("drafts")))
    found = fleet.run(
        [spec(name) for name in NAMES], folder, parallel=len(NAMES), exclusive=False
    )
    said = {name: one.result or one.error for name, one in found.items()}
    (folder / "drafts.json").write_text(json.dumps(said, indent=1) + "\n")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_vllms_loop(
    outcomes: dict[str, fleet.Outcome], name: str
) -> None:
    """Both add 32 products in fp32, in other orders, before they round: one draft of a
    thousand may be another where two logits are as good as equal."""
    outcome = outcomes[name]
    assert outcome.ok, outcome.error
    found: dict[str, Any] = outcome.result
    counts = found["counts"]
    assert found["live"] >= DRAFTS and counts[shadow.DRAWN] >= found["live"]
    assert counts[shadow.DIFFERENT] * 1000 <= counts[shadow.DRAWN], counts
