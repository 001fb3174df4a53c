# SPDX-License-Identifier: Apache-2.0
"""vLLM itself accepts every one of these drafters without a word."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from drafters.config import CheckpointError
from dspark_k3.draft.checks import check_qwen3_draft
from experiments.engine import Job, error_line, run_engine

FITTING = {
    "target_vocab_size": 260,
    "target_hidden_size": 128,
    "num_target_layers": 4,
    "draft_length": 7,
}


@pytest.fixture
def draft(tiny_draft: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((tiny_draft / "config.json").read_text())
    return config


def test_the_shipped_drafter_passes(draft: dict[str, Any]) -> None:
    assert check_qwen3_draft(draft, **FITTING).block_size == 7
    assert check_qwen3_draft(draft, **{**FITTING, "draft_length": 3}).block_size == 7


@pytest.mark.parametrize(
    ("change", "target", "message"),
    [
        ({}, {"draft_length": 8}, "num_speculative_tokens=8.*block_size=7"),
        ({"mask_token_id": None}, {}, "mask_token_id is missing"),
        ({"mask_token_id": 260}, {}, "mask_token_id=260 is outside"),
        ({"markov_head_type": "rnn"}, {}, "markov_head_type='rnn'.*vanilla"),
        ({"markov_head_type": "gated"}, {}, "markov_head_type='gated'.*vanilla"),
        ({"architectures": ["OtherModel"]}, {}, "architectures=.*Qwen3DSparkModel"),
        ({"speculators_model_type": "dspark"}, {}, "sample_from_anchor is missing"),
        ({"target_layer_ids": None}, {}, "target_layer_ids is missing"),
        ({}, {"target_vocab_size": 261}, "vocab_size=260.*261"),
        ({}, {"target_hidden_size": 256}, "hidden_size=128.*256"),
        ({}, {"num_target_layers": 5}, "num_target_layers=4.*5"),
    ],
)
def test_misfits_are_refused_by_name(
    draft: dict[str, Any],
    change: dict[str, Any],
    target: dict[str, int],
    message: str,
) -> None:
    """Field cases F12, F34: block, mask, layout, head, vocabulary, hidden size."""
    with pytest.raises(CheckpointError, match=message):
        check_qwen3_draft({**draft, **change}, **{**FITTING, **target})


def test_the_runner_refuses_a_long_block_before_starting(
    tiny_target: Path, tiny_draft: Path
) -> None:
    """Field case F12."""
    with pytest.raises(ValueError, match=r"num_speculative_tokens=8.*block_size=7"):
        run_engine(tiny_target, tiny_draft, 8, [Job(0.0, [[1]], 1)])


@pytest.mark.engine
def test_the_engine_itself_refuses_an_rnn_head(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    """Field cases F09, F12: the check runs inside vLLM, and its message comes out."""
    copy = tmp_path / "draft"
    shutil.copytree(tiny_draft, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "markov_head_type": "rnn"}))
    with pytest.raises(RuntimeError, match=r"head_type='rnn'.*vanilla") as caught:
        run_engine(tiny_target, copy, 3, [Job(0.0, [[1]], 1)])
    assert "dspark-k3 doctor" in str(caught.value)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            [
                "(EngineCore pid=1) ERROR [core.py:1] ValueError: the cause",
                "RuntimeError: Engine core initialization failed. See above.",
            ],
            "ValueError: the cause",
        ),
        (["[rank0]: a.b.CheckpointError: x=1: no"], "a.b.CheckpointError: x=1: no"),
        (["starting", "Killed", ""], "Killed"),
        ([], "no output"),
    ],
)
def test_error_line_finds_the_cause(log: list[str], expected: str) -> None:
    assert expected in error_line(log)
