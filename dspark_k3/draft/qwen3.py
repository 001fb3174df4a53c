# SPDX-License-Identifier: Apache-2.0
"""vLLM's Qwen3 DSpark drafter with its checkpoint checked before anything is built.

Registered under the in-tree name ``Qwen3DSparkModel``; it is the in-tree class apart
from the check, a log line, what the settings add (`additions`) and, on a CPU,
`normalise_each_layer`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.platforms import current_platform

from dspark_k3 import settings
from dspark_k3.draft.additions import Additions
from dspark_k3.draft.checks import check_qwen3_draft

logger = logging.getLogger("vllm.dspark_k3")


def normalise_each_layer(model: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    """RMSNorm of the context keys [layers, T, kv_heads, head_dim], layer by layer.

    vLLM norms the keys of all layers in one call with weights [layers, head_dim]. The
    CPU build's rms_norm (0.32.0) reads only the first row of them, so that every layer
    but the first sees other context keys than the drafter was trained with: the text
    stays right, the drafts do not. Can go when that op honours grouped weights;
    `test_acceptance_counts_equal_the_engine_free_loop` tells.
    """

    def normalise(keys: Tensor) -> Tensor:
        normed = torch.empty_like(keys)
        for layer, weight in enumerate(model._k_norm_weights):
            _custom_ops.rms_norm(
                normed[layer], keys[layer], weight, model._rms_norm_eps
            )
        return normed

    return normalise


class CheckedQwen3DSpark(Additions, Qwen3DSparkForCausalLM):
    """The in-tree drafter; raises CheckpointError for a checkpoint that cannot work."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        speculative = vllm_config.speculative_config
        asked = settings.read(vllm_config.additional_config)
        if asked.check_draft:
            target = vllm_config.model_config
            config = check_qwen3_draft(
                speculative.draft_model_config.hf_config.to_dict(),
                target_vocab_size=target.get_vocab_size(),
                target_hidden_size=target.get_hidden_size(),
                num_target_layers=target.get_total_num_hidden_layers(),
                draft_length=speculative.num_speculative_tokens,
            )
            logger.info(
                "dspark-k3: drafter %s active in this worker: method=%s, "
                "num_speculative_tokens=%d, block_size=%d, markov_head=%s, drafts=%s",
                type(self).__name__,
                speculative.method,
                speculative.num_speculative_tokens,
                config.block_size,
                config.markov_head_type,
                speculative.draft_sample_method,
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.add(vllm_config, asked)
        if current_platform.is_cpu():
            self.model._normalize_context_k = normalise_each_layer(self.model)
