# SPDX-License-Identifier: Apache-2.0
"""vLLM's MLA metadata builders over a small made-up configuration, on any device."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

KV_LORA, ROPE, NOPE, V_HEAD = 512, 64, 128, 128
LINE = KV_LORA + ROPE
LAYER = "model.layers.3.self_attn"
NEEDS_KERNELS = (
    "vllm.v1.attention.backends.mla.flashattn_mla",
    "dspark_k3.target.attention",
)


@contextmanager
def attention_module() -> Iterator[ModuleType]:
    """`dspark_k3.target.attention`; on the CPU over FlashAttention functions that must
    not be called, and forgotten afterwards."""
    name = "dspark_k3.target.attention"
    if torch.cuda.is_available():
        yield importlib.import_module(name)
        return
    from vllm.v1.attention.backends import fa_utils

    with pytest.MonkeyPatch.context() as patch:
        for function in ("flash_attn_varlen_func", "get_scheduler_metadata"):
            patch.setattr(fa_utils, function, None, raising=False)
        _forget()
        yield importlib.import_module(name)
        _forget()


def _forget() -> None:
    for name in NEEDS_KERNELS:
        sys.modules.pop(name, None)
        package, _, leaf = name.rpartition(".")
        if hasattr(sys.modules.get(package), leaf):
            delattr(sys.modules[package], leaf)


class NoPrefill:
    """A prefill backend that takes metadata and runs nothing."""

    def clone(self) -> NoPrefill:
        return self

    def get_name(self) -> str:
        return "NONE"

    def prepare_metadata(self, metadata: Any) -> None:
        pass


def config(
    *,
    drafts: int = 7,
    max_num_seqs: int = 8,
    heads: int = 6,
    page: int = 64,
    graphs: bool = True,
) -> Any:
    """What a builder reads of a ``VllmConfig``: ``drafts`` drafts, FULL decode graphs
    or none, a bf16 cache in pages of ``page`` tokens."""
    from vllm.config import CUDAGraphMode

    layer = SimpleNamespace(
        q_lora_rank=256,
        kv_lora_rank=KV_LORA,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=V_HEAD,
        prefill_backend=NoPrefill(),
    )
    speculative = SimpleNamespace(
        num_speculative_tokens=drafts, parallel_drafting=False, method="dspark"
    )
    return SimpleNamespace(
        num_speculative_tokens=drafts,
        speculative_config=speculative if drafts else None,
        use_v2_model_runner=True,
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            max_model_len=8192,
            get_num_attention_heads=lambda parallel: heads,
            get_head_size=lambda: LINE,
        ),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        cache_config=SimpleNamespace(block_size=page, cache_dtype="auto"),
        attention_config=SimpleNamespace(
            use_prefill_query_quantization=False,
            flash_attn_max_num_splits_for_cuda_graph=32,
            flash_attn_version=None,
        ),
        compilation_config=SimpleNamespace(
            static_forward_context={LAYER: layer},
            cudagraph_mode=CUDAGraphMode["FULL_DECODE_ONLY" if graphs else "NONE"],
            max_cudagraph_capture_size=max_num_seqs * (drafts + 1) if graphs else 0,
        ),
    )


def build(builder_cls: Any, vllm_config: Any, device: str) -> Any:
    """A metadata builder of the class for one MLA layer."""
    spec = SimpleNamespace(
        block_size=vllm_config.cache_config.block_size, dtype=torch.bfloat16
    )
    return builder_cls(spec, [LAYER], vllm_config, torch.device(device))


def even_split(
    scheduled: Sequence[int], drafts: Sequence[int], budget: int
) -> list[int]:
    """Row counts the host is told under adaptive verification, by vLLM's own rule.

    scheduled and drafts: rows and drafts of each request as scheduled, requests with
    drafts first; budget: drafts admitted in all.
    """
    import numpy as np
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
        AdaptiveVerificationManager,
    )

    manager = object.__new__(AdaptiveVerificationManager)
    manager._batch_budget = ({}, {}, budget)
    manager.num_bonus_tokens = 1
    rows, _ = manager.compact_batch(
        np.array(drafts, np.int32),
        np.array(scheduled, np.int32),
        np.zeros(len(scheduled) + 1, np.int32),
    )
    return rows.tolist()


def offsets(widths: Sequence[int], device: str | torch.device = "cpu") -> Tensor:
    """int32 [B + 1], cumulative row counts."""
    total = torch.tensor([0, *widths]).cumsum(0)
    return total.to(torch.int32).to(device)


def common(
    row_start: Tensor,
    host_widths: Sequence[int],
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    rows: int,
    longest: int,
    seq_lens_bound: Sequence[int] | None = None,
) -> Any:
    """What the runner hands a builder.

    row_start int32 [B + 1], seq_lens int32 [B] and block_table int32 [B, blocks] are
    the device's; host_widths is what the host was told; rows the padded row count;
    longest the host's bound on a request's rows; seq_lens_bound the host's on seq_lens.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    host = offsets(host_widths)
    bound = list(seq_lens_bound if seq_lens_bound is not None else seq_lens.tolist())
    return CommonAttentionMetadata(
        query_start_loc=row_start,
        query_start_loc_cpu=host,
        seq_lens=seq_lens,
        num_reqs=len(host_widths),
        num_actual_tokens=rows,
        max_query_len=longest,
        max_seq_len=max(bound),
        block_table_tensor=block_table,
        slot_mapping=torch.full((rows,), -1, device=row_start.device),
        seq_lens_cpu_upper_bound=torch.tensor(bound, dtype=torch.int32),
    )
