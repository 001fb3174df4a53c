# SPDX-License-Identifier: Apache-2.0
"""Sizes of tiny-k3 and its drafter, and the target as `drafters` wants one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.corpora import EOS, MASK, VOCAB_SIZE
from verify_kernels.model.checkpoint import load
from verify_kernels.model.parallel import Past, crop, dense_banks, forward
from verify_kernels.model.weights import K3Config, K3Weights

MAX_POSITIONS = 2048
TARGET = K3Config(
    vocab_size=VOCAB_SIZE,
    hidden=512,
    layers=4,
    residual_block=2,
    mla_layers=(3,),
    heads=2,
    kda_k=128,
    kda_v=128,
    decay_rank=128,
    q_lora=256,
    kv_lora=512,
    nope=128,
    rope=64,
    v_head=128,
    dense_layers=1,
    dense_inner=256,
    experts=16,
    top_k=4,
    latent=128,
    expert_inner=128,
    shared_inner=128,
)
#: What config.json says beside the sizes.
TOKENS = {
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
BLOCK_SIZE = 7
#: The prefix restarts at layers 0 and 2, so after layer 1 it is everything layers 0 and
#: 1 added, and after layer 2 what layer 2 added.
TAPS = (1, 2)


def drafter_config() -> dict[str, Any]:
    """config.json of the drafter, as vLLM 0.33's ``K3DSparkConfig`` reads it."""
    c = TARGET
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "torch_dtype": "bfloat16",
        "hidden_size": c.hidden,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "vocab_size": c.vocab_size,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "q_lora_rank": 128,
        "kv_lora_rank": c.kv_lora,
        "qk_nope_head_dim": c.nope,
        "qk_rope_head_dim": c.rope,
        "v_head_dim": c.v_head,
        "rope_theta": 10000.0,
        "target_layer_ids": list(TAPS),
        "num_target_layers": len(TAPS),
        "target_hidden_size": c.hidden,
        "markov_rank": 64,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "mask_token_id": MASK,
        "block_size": BLOCK_SIZE,
        "sample_from_anchor": True,
        "tie_word_embeddings": False,
    } | TOKENS


class K3Target:
    """A `drafters.target.Target` over the whole-sequence form of the model."""

    def __init__(self, config: K3Config, weights: K3Weights) -> None:
        self.config, self.weights = config, weights
        self.experts = dense_banks(weights, weights.embedding.dtype)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden
        self.num_layers = config.layers
        self.embedding = weights.embedding
        self.head = weights.head

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, taps: Sequence[int] = (), cache: Past | None = None
    ) -> tuple[Tensor, Tensor | None, Past]:
        """tokens [B, Q] after ``cache`` -> logits [B, Q, V], features, new cache."""
        return forward(
            self.config,
            self.weights,
            tokens,
            experts=self.experts,
            taps=taps,
            past=cache,
        )

    def crop(self, cache: Past, length: int) -> Past:
        """``cache`` cut back to its first ``length`` tokens."""
        return crop(cache, length)


def load_target(directory: str | Path, device: str = "cpu") -> K3Target:
    """The checkpoint in ``directory``, in fp32. Raises ValueError."""
    return K3Target(*load(directory, torch.float32, device))
