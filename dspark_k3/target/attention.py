# SPDX-License-Identifier: Apache-2.0
"""Ragged verification on Hopper: FlashAttention MLA that tells the truth about widths.

FlashAttention 3 takes any mix of query lengths from the device, but vLLM's builder
plans from the longest length it sees on the host. Two things make that wrong:

* Adaptive verification trims drafts on the device; the host spreads the budget evenly
  over the requests and so understates the longest one.
* A graph for ragged steps is captured with one token a request and replayed with up to
  eight. FlashAttention chooses the kernel, its tiles and the layout of the scheduler
  metadata from the longest length (1 takes the non-causal kernel), so it must be told
  the same one at capture and at replay.

The builder here always plans for the widest request a verify step may hold. Everything
else is vLLM's; `docs/notes/vllm_033.md` has what was checked on the way.

`use_ragged_mla` gives the backend to the MLA layers of one model. Nothing is registered
and nothing process-wide changes: the drafter's layers keep their own choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLADecodeMetadata,
    FlashAttnMLAMetadataBuilder,
)

from verify_kernels.batch import MAX_WIDTH


class RaggedFlashAttnMLABuilder(FlashAttnMLAMetadataBuilder):
    """vLLM's builder, planning decodes for the widest verify request.

    Raises RuntimeError at construction when the scheduler metadata of a full batch does
    not fit vLLM's buffer, which CUDA graphs read.
    """

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.verify_width = verify_width(vllm_config)
        if self.use_full_cuda_graph and self.fa_aot_schedule:
            requests = vllm_config.scheduler_config.max_num_seqs
            given, needed = len(self.scheduler_metadata), metadata_words(requests)
            if given < needed:
                raise RuntimeError(
                    f"FlashAttention scheduler metadata holds {given} words and "
                    f"max_num_seqs={requests} needs up to {needed}; this vLLM sizes "
                    "the buffer differently from 0.33, use vllm==0.33.*"
                )

    @classmethod
    def get_varlen_cudagraph_max_query_len(
        cls, vllm_config: VllmConfig, kv_cache_spec: Any
    ) -> int:
        """Rows of the widest request that ragged graphs serve: 1 + drafts, to 8."""
        return min(verify_width(vllm_config), MAX_WIDTH)

    def _build_decode(
        self, *, query_start_loc_cpu: Tensor, **arguments: Any
    ) -> FlashAttnMLADecodeMetadata:
        # vLLM reads nothing but the longest length from the host's offsets. Rows with
        # drafts are at most verify_width wide, whatever the host was told; rows without
        # (prompt chunks on the decode path) are exact there.
        longest = max(int(query_start_loc_cpu.diff().max()), self.verify_width)
        metadata = super()._build_decode(
            query_start_loc_cpu=query_start_loc_cpu.new_tensor([0, longest]),
            **arguments,
        )
        assert metadata.max_query_len == longest
        return metadata


class RaggedFlashAttnMLABackend(FlashAttnMLABackend):
    """FLASH_ATTN_MLA whose CUDA graphs replay requests of 1 to 8 rows each."""

    @staticmethod
    def get_builder_cls() -> type[RaggedFlashAttnMLABuilder]:
        return RaggedFlashAttnMLABuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """True: the plan is made from the device's offsets and a fixed bound."""
        return True


def use_ragged_mla(model: nn.Module) -> list[str]:
    """Give every MLA layer in ``model`` the ragged backend; their names, in order.

    Call it after construction and before the engine asks layers for their backends (it
    does so once the weights are loaded). The layers keep the implementation that vLLM
    built: both backends have the same. Raises ValueError, with nothing changed, when a
    layer chose another backend than FLASH_ATTN_MLA.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, AttentionLayerBase) and module.get_attn_backend().is_mla()
    }
    for name, layer in layers.items():
        backend = layer.get_attn_backend()
        if backend not in (FlashAttnMLABackend, RaggedFlashAttnMLABackend):
            raise ValueError(
                f"layer {name} uses {backend.get_name()}; ragged verification needs "
                "FLASH_ATTN_MLA, which vLLM chooses by itself on Hopper with a bf16 KV "
                "cache: leave --attention-backend out"
            )
    for layer in layers.values():
        layer.attn_backend = RaggedFlashAttnMLABackend
    return list(layers)


def verify_width(vllm_config: VllmConfig) -> int:
    """Rows of the widest verify request, 1 + drafts; 1 without speculation."""
    return 1 + int(vllm_config.num_speculative_tokens)


def metadata_words(requests: int) -> int:
    """Most int32 words of FlashAttention 3 scheduler metadata for ``requests``.

    Four vectors of ``requests`` rounded up to 4, and the tile counter (flash-attention,
    hopper/flash_api.cpp, mha_fwd_get_scheduler_metadata).
    """
    return 1 + 4 * (-(-requests // 4) * 4)
