# SPDX-License-Identifier: Apache-2.0
"""The bf16 projections of a K3-shaped model, from its configuration alone.

Free of vLLM, so that a deployment can be checked before anything is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verify_kernels.skinny_gemm import serves

ROUTER = ("fp32",)
BF16 = ("bf16",)


@dataclass(frozen=True)
class Projection:
    """One product Y = X W^T of a rank.

    Attributes:
        op: the sublayer that has it, a key of `dspark_k3.settings.OPS`.
        name: the field's name for it.
        k: columns of W on this rank.
        outputs: output dtype, as `verify_kernels.skinny_gemm` spells it.
    """

    op: str
    name: str
    k: int
    outputs: tuple[str, ...] = BF16


def projections(text: Any, tp: int) -> list[Projection]:
    """Every projection of one rank of ``tp``.

    Args:
        text: the model's text configuration (vLLM's ``KimiLinearConfig``).
        tp: tensor-parallel size; divides the heads.
    """
    linear = text.linear_attn_config
    hidden = text.hidden_size
    kda_width = linear["num_heads"] * linear["head_dim"] // tp
    mla_width = text.num_attention_heads * text.v_head_dim // tp
    found = [
        Projection("kda", "in_proj", hidden),
        Projection("kda", "f_b", linear["head_dim"]),
        Projection("kda", "o_proj", kda_width),
        Projection("mla", "qkv_a_g", hidden),
        Projection("mla", "q_b", text.q_lora_rank),
        Projection("mla", "o_proj", mla_width),
        Projection("dense", "gate_up", hidden),
        Projection("dense", "down", text.intermediate_size // tp),
        Projection("lm_head", "lm_head", hidden),
    ]
    if text.num_experts is not None:
        shared = text.moe_intermediate_size * text.num_shared_experts
        found += [
            Projection("moe", "router", hidden, ROUTER),
            Projection("moe", "latent_down", hidden),
            Projection("moe", "latent_up", text.routed_expert_hidden_size),
            Projection("moe", "shared_gate_up", hidden),
            Projection("moe", "shared_down", shared // tp),
        ]
    return found


def without_kernel(text: Any, tp: int, ops: tuple[str, ...]) -> list[Projection]:
    """The projections of the named sublayers that no compiled kernel serves."""
    return [
        each
        for each in projections(text, tp)
        if each.op in ops and not serves(each.k, each.outputs)
    ]
