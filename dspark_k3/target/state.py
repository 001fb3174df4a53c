# SPDX-License-Identifier: Apache-2.0
"""vLLM's K3 model state, with its steps counted and one of its slots kept clean.

A FULL graph replays without passing through Python's forward, so a step is counted
where its metadata is built, by the rule by which it is run (`Executor.judge`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.models.kimi_k3.nvidia.model_state import KimiK3ModelState

from dspark_k3.target import fresh, graphs


class CountedK3State(KimiK3ModelState):
    """Builds the executor as vLLM's state builds its own, counts, and keeps padded
    one-token prompts from KDA's prefill (`fresh`)."""

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[Tensor, ...],
        slot_mappings: Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        **keywords: Any,
    ) -> dict[str, Any]:
        dummy = for_capture or graphs.capture_under_way()
        if not dummy and (rows := fresh.one_token_prompts(input_batch)):
            fresh.run_as_decodes(input_batch, rows)
            fresh.clear_states(
                rows,
                block_tables,
                kv_cache_config.kv_cache_groups,
                fresh.kda_caches(self.language_model.model.layers),
            )
        metadata = super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture=for_capture,
            **keywords,
        )
        executor = self.language_model.specialized_decode
        if executor is not None and not dummy:
            padded = cudagraph_mode == CUDAGraphMode.FULL
            rows_run = (
                input_batch.num_tokens_after_padding
                if padded
                else input_batch.num_tokens
            )
            executor.counters.count(executor.judge(rows_run, metadata, cudagraph_mode))
        return metadata
