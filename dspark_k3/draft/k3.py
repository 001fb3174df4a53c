# SPDX-License-Identifier: Apache-2.0
"""vLLM's K3 DSpark drafter with what the settings add to it.

Registered under the in-tree name ``K3DSparkModel`` where vLLM has that class. W1 and W2
of its head are whole on every tensor-parallel rank and so are the logits, so what draws
on one rank draws on all. Its layers attend by our kernel if that is asked for
(`attention`), and the projection of the target's rows, 514 MB of K3's drafter on every
rank, is cut over the ranks if that is.
"""

from __future__ import annotations

from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.models.kimi_k3.nvidia.dspark_mla import K3DSparkForCausalLM

from dspark_k3 import settings
from dspark_k3.draft.additions import Additions


def shard_context(model: nn.Module) -> None:
    """Cut ``context_proj`` of vLLM's K3DSparkModel by its outputs, which are gathered;
    before its weights are loaded, where its modules are made. A rank reads its share
    only: a sixteenth at TP 16, for a gather of 14 KB a row.

    Raises:
        ValueError: the ranks do not divide its outputs.
    """
    ranks = get_tensor_model_parallel_world_size()
    whole = model.context_proj
    if ranks == 1:
        return
    if whole.output_size % ranks:
        raise ValueError(
            f"draft_context is 'sharded' and {ranks} ranks do not divide the "
            f"{whole.output_size} outputs of the drafter's context_proj: take "
            "draft_context out"
        )
    model.context_proj = ColumnParallelLinear(
        whole.input_size,
        whole.output_size,
        bias=False,
        gather_output=True,
        return_bias=False,
        quant_config=model.quant_config,
        prefix=whole.prefix,
    )


class K3DSpark(Additions, K3DSparkForCausalLM):
    """The in-tree drafter; raises ValueError for settings that it cannot follow."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        asked = settings.read(vllm_config.additional_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.add(vllm_config, asked)
        if asked.draft_context == "sharded":
            shard_context(self.model)
        if asked.draft_attention == "ours":
            from dspark_k3.draft.attention import BlockAttention

            device = vllm_config.device_config.device
            for layer in self.model.layers:
                attention = layer.self_attn
                attention.impl.forward_mqa = BlockAttention(attention, device)
