# SPDX-License-Identifier: Apache-2.0
"""Kimi K3 at its real widths, cut in depth, as model directories for one GPU.

``target_config(layers, tp)`` with ``tp=1`` is the published model with fewer layers.
With a larger ``tp`` it is the share of ONE tensor-parallel rank as a model of its own:
heads, intermediates and vocabulary divided by ``tp``, router and latent projections
whole, as stock vLLM keeps them on Hopper. That is right for timing a rank without its
collectives and meaningless as a model. The directories hold a config and no weights;
``experiments.gpu_engine.spread`` says with what they are filled.

A model cut in depth mixes fewer saved blocks than the whole one: up to
``ceil(layers / block_size)`` where K3 has 1 to 8, so AttnRes is cheaper in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["dense", "kda", "mla"]
KINDS: tuple[Kind, ...] = ("dense", "kda", "mla")

K3_LAYERS = 93
HIDDEN, HEADS, HEAD_DIM, VOCAB = 7168, 96, 128, 163840
EXPERTS, TOP_K, LATENT = 896, 16, 3584
EXPERT_WIDTH, DENSE_WIDTH, SHARED_EXPERTS = 3072, 33792, 2
BLOCK_SIZE = 12
DRAFT_HEADS, DRAFT_WIDTH, DRAFT_LAYERS, MARKOV_RANK = 64, 14336, 5, 256
MAX_DRAFTS = 7
SHARES = (1, 2, 4, 8, 16, 32)

BF16, MXFP4 = 2.0, 0.5 + 1 / 32
#: Stock vLLM pads a rank's expert width to this.
_MIN_EXPERT_WIDTH = 256


@dataclass(frozen=True)
class LayerCounts:
    """Layers of a model by kind: KDA with the dense MLP, KDA with MoE, MLA with MoE."""

    dense: int
    kda: int
    mla: int


def layer_kind(index: int, layers: int) -> Kind:
    """Kind of the 0-based layer ``index`` of a model with ``layers`` layers.

    Every fourth layer is MLA, and so is the last of the whole model.
    """
    if index % 4 == 3 or (layers == K3_LAYERS and index == K3_LAYERS - 1):
        return "mla"
    return "dense" if index == 0 else "kda"


def layer_counts(layers: int) -> LayerCounts:
    """How many layers of each kind a model with ``layers`` layers has."""
    kinds = [layer_kind(index, layers) for index in range(layers)]
    return LayerCounts(*(kinds.count(kind) for kind in KINDS))


def check(layers: int, tp: int) -> None:
    """Raises ValueError for a depth or a share that no config exists for."""
    if not 4 <= layers <= K3_LAYERS:
        raise ValueError(
            f"layers={layers}: must be 4 (the first MLA layer is the fourth) to "
            f"{K3_LAYERS}"
        )
    if tp not in SHARES:
        raise ValueError(f"tp={tp}: must be one of {', '.join(map(str, SHARES))}")


def target_config(
    layers: int, tp: int = 1, block_size: int = BLOCK_SIZE
) -> dict[str, Any]:
    """config.json of a K3 text model with ``layers`` layers.

    Raises ValueError as :func:`check` does, and for a block size below 1.
    """
    check(layers, tp)
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be 1 or more")
    mla = [i + 1 for i in range(layers) if layer_kind(i, layers) == "mla"]
    heads = HEADS // tp
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE_WIDTH // tp,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB // tp,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 74,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "moe_intermediate_size": EXPERT_WIDTH // tp,
        "num_experts": EXPERTS,
        "num_experts_per_token": TOP_K,
        "num_shared_experts": SHARED_EXPERTS,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": block_size,
        "latent_moe_use_norm": True,
        "routed_expert_hidden_size": LATENT,
        "max_position_embeddings": 1048576,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "linear_attn_config": {
            "kda_layers": [i for i in range(1, layers + 1) if i not in mla],
            "full_attn_layers": mla,
            "num_heads": heads,
            "head_dim": HEAD_DIM,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "quantization_config": {"quant_method": "mxfp4"},
    }


def drafter_config(target_layers: int, tp: int = 1) -> dict[str, Any]:
    """config.json of a K3DSpark drafter for such a target: five layers, block of 7.

    Its taps are five layers of the target, three where the target has fewer than
    eight layers. Raises ValueError as :func:`check` does.
    """
    check(target_layers, tp)
    taps = [0, 1, 2] if target_layers < 8 else [1, 2, 3, 5, 6]
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": DRAFT_WIDTH // tp,
        "num_hidden_layers": DRAFT_LAYERS,
        "vocab_size": VOCAB // tp,
        "num_attention_heads": DRAFT_HEADS // tp,
        "num_key_value_heads": DRAFT_HEADS // tp,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 50000.0,
        "max_position_embeddings": 1048576,
        "target_layer_ids": taps,
        "num_target_layers": len(taps),
        "target_hidden_size": HIDDEN,
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "mask_token_id": 4,
        "dspark_noise_token_id": 4,
        "block_size": MAX_DRAFTS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }


def write(config: dict[str, Any], folder: Path) -> Path:
    """Write ``folder/config.json`` and return ``folder``, made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def weight_bytes(layers: int, tp: int, drafter: bool) -> float:
    """Bytes of the weights on one GPU, with the drafter's if ``drafter``."""
    check(layers, tp)
    counts = layer_counts(layers)
    heads = HEADS * HEAD_DIM / tp
    kda = HIDDEN * (5 * heads + HEAD_DIM) + heads * HEAD_DIM
    mla = HIDDEN * (1536 + 576 + 2 * heads) + 1536 * heads * 1.5 + 512 * heads * 2
    shared = 3 * HIDDEN * EXPERT_WIDTH * SHARED_EXPERTS / tp
    moe = HIDDEN * (EXPERTS + 2 * LATENT) + shared
    expert = 3 * LATENT * max(EXPERT_WIDTH / tp, _MIN_EXPERT_WIDTH)
    dense = 3 * HIDDEN * DENSE_WIDTH / tp
    sparse = counts.kda + counts.mla
    plain = (counts.dense + counts.kda) * kda + counts.mla * mla + sparse * moe
    plain += counts.dense * dense + 2 * HIDDEN * VOCAB / tp
    if drafter:
        wide = DRAFT_HEADS * HEAD_DIM / tp
        layer = HIDDEN * (2112 + wide) + 1536 * wide * 1.5 + 1024 * wide
        plain += DRAFT_LAYERS * (layer + 3 * HIDDEN * DRAFT_WIDTH / tp)
        plain += 5 * HIDDEN * HIDDEN + 2 * MARKOV_RANK * VOCAB / tp
    return BF16 * plain + MXFP4 * sparse * EXPERTS * expert


def cache_bytes(layers: int, tp: int) -> int:
    """Bytes of KV cache that hold eight requests of 4,096 tokens with seven drafts.

    A page is a KDA state, 7 MB at the whole width; a request takes eight in a KDA layer
    (one a row of a verify step) and at most two in an MLA layer, also the drafter's.
    """
    counts = layer_counts(layers)
    pages = 8 * (counts.dense + counts.kda) + 2 * (counts.mla + DRAFT_LAYERS)
    return int(1.5e9 + 1.25 * 8 * 7.1e6 * pages / tp)
