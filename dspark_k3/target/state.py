# SPDX-License-Identifier: Apache-2.0
"""vLLM's K3 model state, with its steps counted.

A FULL graph replays without passing through Python's forward, so a step is counted
where its metadata is built, by the rule by which it is run (`Executor.judge`).
"""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.models.kimi_k3.nvidia.model_state import KimiK3ModelState

from dspark_k3.target import graphs


class CountedK3State(KimiK3ModelState):
    """Builds the executor as vLLM's state builds its own, and counts."""

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        *arguments: Any,
        for_capture: bool = False,
        **keywords: Any,
    ) -> dict[str, Any]:
        metadata = super().prepare_attn(
            input_batch,
            cudagraph_mode,
            *arguments,
            for_capture=for_capture,
            **keywords,
        )
        executor = self.language_model.specialized_decode
        if executor is not None and not for_capture and not graphs.capture_under_way():
            padded = cudagraph_mode == CUDAGraphMode.FULL
            rows = (
                input_batch.num_tokens_after_padding
                if padded
                else input_batch.num_tokens
            )
            executor.counters.count(executor.judge(rows, metadata, cudagraph_mode))
        return metadata
