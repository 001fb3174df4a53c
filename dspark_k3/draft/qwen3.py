# SPDX-License-Identifier: Apache-2.0
"""vLLM's Qwen3 DSpark drafter with its checkpoint checked before anything is built.

Registered under the in-tree name ``Qwen3DSparkModel``; apart from the check and one
log line it is the in-tree class.
"""

from __future__ import annotations

import logging

from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

from dspark_k3 import settings
from dspark_k3.draft.checks import check_qwen3_draft

logger = logging.getLogger("vllm.dspark_k3")


class CheckedQwen3DSpark(Qwen3DSparkForCausalLM):
    """The in-tree drafter; raises CheckpointError for a checkpoint that cannot work."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        speculative = vllm_config.speculative_config
        if settings.read(vllm_config.additional_config).check_draft:
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
