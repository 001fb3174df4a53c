# SPDX-License-Identifier: Apache-2.0
"""vLLM's K3 DSpark drafter with what the settings add to it.

Registered under the in-tree name ``K3DSparkModel`` where vLLM has that class. W1 and W2
of its head are whole on every tensor-parallel rank and so are the logits, so what draws
on one rank draws on all. Its layers attend by our kernel if that is asked for
(`attention`).
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.models.kimi_k3.nvidia.dspark_mla import K3DSparkForCausalLM

from dspark_k3 import settings
from dspark_k3.draft.additions import Additions


class K3DSpark(Additions, K3DSparkForCausalLM):
    """The in-tree drafter; raises ValueError for settings that it cannot follow."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        asked = settings.read(vllm_config.additional_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.add(vllm_config, asked)
        if asked.draft_attention == "ours":
            from dspark_k3.draft.attention import BlockAttention

            device = vllm_config.device_config.device
            for layer in self.model.layers:
                attention = layer.self_attn
                attention.impl.forward_mqa = BlockAttention(attention, device)
