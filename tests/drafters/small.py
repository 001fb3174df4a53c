# SPDX-License-Identifier: Apache-2.0
"""Random models small enough to enumerate."""

from __future__ import annotations

from typing import Any

import torch

from drafters.backbone import DSparkDrafter
from drafters.config import DSparkConfig, read_config
from drafters.target import Qwen3Config, Qwen3Target

VOCAB = 6


def drafter_json(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "vocab_size": VOCAB,
        "block_size": 7,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": [0, 1],
        "num_target_layers": 3,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
    }
    raw.update(changes)
    return {k: v for k, v in raw.items() if v is not ...}


def k3_json(**changes: Any) -> dict[str, Any]:
    return drafter_json(
        architectures=["K3DSparkModel"],
        num_key_value_heads=...,
        head_dim=...,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        target_hidden_size=16,
        num_target_layers=2,
        **changes,
    )


def randomise(module: torch.nn.Module, seed: int, std: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std, generator=generator)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)


def small_target(seed: int = 0) -> Qwen3Target:
    target = Qwen3Target(Qwen3Config(VOCAB, 16, 3, 2, 1, 8, 24, 128))
    randomise(target, seed, 0.5)
    return target.eval()


def small_drafter(config: DSparkConfig | None = None, seed: int = 1) -> DSparkDrafter:
    drafter = DSparkDrafter(config or read_config(drafter_json()))
    randomise(drafter, seed, 0.5)
    return drafter.eval()
