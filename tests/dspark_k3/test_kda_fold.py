# SPDX-License-Identifier: Apache-2.0
"""KDA with one slot a request: the text of vLLM's slots, from fewer of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.models.kimi_k3")

from tests.dspark_k3 import kda_folds
from tests.dspark_k3.kda_folds import BothEngine
from tests.dspark_k3.test_kda_slots import fresh
from tests.dspark_k3.test_kda_slots import step as run_step


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Metadata of the step by layer."""
    torch.manual_seed(0)
    return kda_folds.stand_in(monkeypatch.setattr)


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_order_of_steps_gives_the_bits_of_decoding_alone(
    seed: int, trim: bool, plans: dict[str, Any]
) -> None:
    """Field cases F02, F13: prompt chunks, chunks of one token, drafts, none, trimming,
    acceptance, preemption, slots of former owners; steps of the executor and of vLLM's
    model, prompts among the rows or not."""
    rng = random.Random(seed)
    engine = BothEngine(5, rng, plans)
    live = [fresh(engine, i, rng.choice([2, 3, 9, 40]), rng) for i in range(5)]
    for _ in range(60):
        run_step(engine, rng.sample(live, rng.randint(1, 5)), rng, trim)
        if rng.random() < 0.15:
            gone = rng.choice(live)
            prompt = rng.choice([len(gone.tokens), 2, 9]) or 2
            live[live.index(gone)] = fresh(engine, gone.index, prompt, rng)
    assert all(engine.seen.values()), engine.seen
