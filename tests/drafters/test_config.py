# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint leaves open is refused with the name of the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafters.config import CheckpointError, load_config, read_config
from tests.drafters.small import drafter_json, k3_json


def test_reads_deepspec_qwen3() -> None:
    config = read_config(drafter_json())
    assert (config.layout, config.block_size, config.mask_token_id) == ("qwen3", 7, 5)
    assert config.target_layer_ids == (0, 1)
    assert config.anchor_first and config.block_inputs(7) == 7


def test_reads_k3_with_yarn() -> None:
    config = read_config(
        k3_json(
            rope_theta=...,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 32,
                "original_max_position_embeddings": 32768,
                "mscale": 1,
                "mscale_all_dim": 1,
            },
        )
    )
    assert config.layout == "k3" and config.rope.interleaved
    assert config.rope.theta == 50000.0 and config.rope.yarn is not None
    assert config.rope.yarn["factor"] == 32


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures"),
        ({"mask_token_id": ...}, "mask_token_id"),
        ({"mask_token_id": 99}, "mask_token_id"),
        ({"block_size": ...}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"target_layer_ids": ...}, "target_layer_ids"),
        ({"target_layer_ids": [1, 0]}, "target_layer_ids"),
        ({"dspark_target_layer_ids": [0, 2]}, "dspark_target_layer_ids"),
        ({"markov_head_type": "lstm"}, "markov_head_type"),
        ({"rope_theta": ...}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type"),
        ({"rms_norm_eps": ...}, "rms_norm_eps"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
        ({"speculators_model_type": "dspark"}, "sample_from_anchor"),
        ({"draft_vocab_size": 7}, "draft_vocab_size"),
    ],
)
def test_refuses_and_names_the_key(changes: dict[str, Any], key: str) -> None:
    """Field case F12: layout, block, mask, rope and epsilon come from the config;
    missing or ambiguous ones are errors."""
    with pytest.raises(CheckpointError, match=key):
        read_config(drafter_json(**changes))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"mla_use_nope": True}, "mla_use_nope"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"num_target_layers": 5}, "num_target_layers"),
        ({"draft_vocab_size": 5}, "draft_vocab_size"),
    ],
)
def test_k3_refusals(changes: dict[str, Any], key: str) -> None:
    raw = k3_json() | changes
    with pytest.raises(CheckpointError, match=key):
        read_config(raw)


def test_speculators_layout_is_read_when_it_is_told() -> None:
    """Field case F12: both block layouts are served when the checkpoint says which."""
    raw = drafter_json(speculators_model_type="dspark", sample_from_anchor=False)
    config = read_config(raw)
    assert not config.anchor_first and config.block_inputs(3) == 4


@pytest.mark.parametrize(
    ("fit", "key"),
    [
        ({"target_vocab_size": 7}, "vocab_size"),
        ({"target_hidden_size": 32}, "hidden_size"),
        ({"num_target_layers": 4}, "num_target_layers"),
        ({"draft_length": 8}, "num_speculative_tokens=8"),
        ({"draft_length": 0}, "num_speculative_tokens=0"),
    ],
)
def test_drafter_of_another_target_is_refused(fit: dict[str, int], key: str) -> None:
    """Field case F34: vocabularies and sizes are compared at load. Field case F12: more
    drafts than the trained block are an error, fewer are fine."""
    good = {"target_vocab_size": 6, "target_hidden_size": 16, "num_target_layers": 3}
    config = read_config(drafter_json())
    config.check_against(**good, draft_length=3)
    with pytest.raises(CheckpointError, match=key):
        config.check_against(**(good | fit))


def test_larger_input_vocabulary_needs_named_outputs() -> None:
    """Field case F34: a mask row beyond the target's vocabulary is deliberate only
    when the drafter says which outputs it has."""
    fit = {"target_vocab_size": 5, "target_hidden_size": 16, "num_target_layers": 3}
    read_config(drafter_json(draft_vocab_size=5)).check_against(**fit)
    with pytest.raises(CheckpointError, match="draft_vocab_size"):
        read_config(drafter_json()).check_against(**fit)


def test_final_layer_as_tap_is_refused() -> None:
    """Field case F35: one stated convention for tap layers; the last is not usable."""
    config = read_config(drafter_json(target_layer_ids=[0, 2]))
    with pytest.raises(CheckpointError, match="target_layer_ids"):
        config.check_against(
            target_vocab_size=6, target_hidden_size=16, num_target_layers=3
        )


def test_missing_directory_and_broken_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json not found"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(drafter_json()))
    assert load_config(tmp_path).hidden_size == 16
