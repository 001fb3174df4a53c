# SPDX-License-Identifier: Apache-2.0
"""Whether vLLM will run a Qwen3 DSpark checkpoint as it was trained.

Free of vLLM, so it can be tested (and used by tools) without an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafters.config import CheckpointError, DSparkConfig, read_config


def check_qwen3_draft(
    draft: Mapping[str, Any],
    *,
    target_vocab_size: int,
    target_hidden_size: int,
    num_target_layers: int,
    draft_length: int,
) -> DSparkConfig:
    """Read ``draft`` (its config.json) and refuse what vLLM would run wrongly.

    vLLM's Qwen3DSparkModel accepts all of these without a word and then drafts tokens
    that are almost never accepted. Returns the configuration that was read.

    Raises drafters.config.CheckpointError naming the key and what to do.
    """
    config = read_config(draft)
    config.check_against(
        target_vocab_size=target_vocab_size,
        target_hidden_size=target_hidden_size,
        num_target_layers=num_target_layers,
        draft_length=draft_length,
    )
    if config.markov_head_type != "vanilla":
        raise CheckpointError(
            f"markov_head_type={config.markov_head_type!r}: vLLM runs the vanilla head "
            "only and would drop this head's weights; use a checkpoint with "
            "markov_head_type=vanilla, or the engine-free loop drafters.loop"
        )
    return config
