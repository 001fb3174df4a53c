# SPDX-License-Identifier: Apache-2.0
"""The attention of a K3 DSpark drafter's block by `verify_kernels.mla`.

vLLM's Triton kernel takes every row of a block for a request and reads the cache once
for each; ours reads it once for all. What stands before it (absorbed queries, rotary
embedding, cache insert) and behind it (the values) is vLLM's. It is there only with
``"draft_attention": "ours"``.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from dspark_k3.target.mla import BF16_CACHES, misfits
from dspark_k3.target.scope import MLA_SHAPE, MOST_HEADS
from verify_kernels.batch import MAX_ROWS, MAX_WIDTH, VerifyBatch
from verify_kernels.mla import MlaSpace, mla_attend

logger = logging.getLogger("vllm.dspark_k3")


class BlockAttention:
    """Stands for ``forward_mqa`` of a drafter layer's attention backend.

    Args:
        attention: vLLM's ``MultiHeadLatentAttention`` of a K3 DSpark layer; its
            backend's own ``forward_mqa`` is kept for what the kernels do not serve.
        device: where it runs.

    Raises:
        ValueError: for a device that the kernels do not run on, or a layer that they do
            not compute.
    """

    def __init__(self, attention: Any, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"draft_attention is 'ours' on {device}; its kernels need a CUDA "
                "device: take draft_attention out"
            )
        if found := differences(attention):
            raise ValueError(
                f"{attention.layer_name}: our MLA kernels do not compute this layer, "
                f"which has {', '.join(found)}: take draft_attention out"
            )
        self._stock = attention.impl.forward_mqa
        self._scale = attention.scale
        self._space, self._starts = _shared(attention.num_local_heads, device)
        self._said: set[str] = set()

    def __call__(
        self, query: Tensor, cache: Tensor, metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Latents [rows, heads, 512] of absorbed queries [rows, heads, 576].

        Args:
            query: of requests that have as many rows each.
            cache: vLLM's pages, the block's own lines among them.
            metadata: vLLM's, of a step of decodes; lengths count the block's rows, and
                are 0 for requests that pad a graph, whose latents are zeros.
            layer: passed to vLLM where the step is left to it.
        """
        decode = metadata.decode
        requests = decode.seq_lens.shape[0]
        width = query.shape[0] // max(requests, 1)
        why = _why_not(query, cache, width)
        if why:
            if why not in self._said:
                self._said.add(why)
                logger.info("dspark-k3: blocks attend by vLLM's kernel: %s", why)
            found: tuple[Tensor, Tensor | None] = self._stock(
                query, cache, metadata, layer
            )
            return found
        step = VerifyBatch(
            row_start=self._starts[width][: requests + 1],
            history=decode.seq_lens,
            state_slots=decode.seq_lens,
            accepted=decode.seq_lens,
            block_table=decode.block_table,
        )
        latent = query.new_empty(*query.shape[:2], MLA_SHAPE["kv_lora_rank"])
        # The kernel before it is no programmatic one: there is nothing to overtake.
        mla_attend(
            query,
            cache,
            step,
            self._space,
            latent,
            scale=self._scale,
            causal=bool(metadata.causal),
            counted=True,
            pdl=False,
        )
        return latent, None


def differences(attention: Any) -> list[str]:
    """What a drafter's layer has that the kernels do not compute; empty if nothing.

    What is read comes from the configuration: every rank finds the same.
    """
    checks = (
        ("kv_lora_rank", (MLA_SHAPE["kv_lora_rank"],)),
        ("qk_rope_head_dim", (MLA_SHAPE["qk_rope_head_dim"],)),
        ("kv_cache_dtype", BF16_CACHES),
        ("dcp_world_size", (1,)),
    )
    found = [
        f"{name} {value}, not {' or '.join(map(str, right))}"
        for name, right in checks
        if (value := getattr(attention, name)) not in right
    ]
    if attention.num_local_heads > MOST_HEADS:
        found.append(f"{attention.num_local_heads} heads a rank, not 1 to {MOST_HEADS}")
    return found


def _why_not(query: Tensor, cache: Tensor, width: int) -> str:
    """Why a step is not for the kernels, "" if it is."""
    if query.shape[0] > MAX_ROWS:
        return f"more than {MAX_ROWS} rows"
    if width > MAX_WIDTH:
        return f"more than {MAX_WIDTH} rows a request"
    if query.dtype != torch.bfloat16:
        return f"queries of {query.dtype}"
    return ", ".join(misfits(cache))


@functools.cache
def _shared(heads: int, device: torch.device) -> tuple[MlaSpace, Tensor]:
    """Of all layers, which run one after the other: the workspace, and by width where
    the rows of each request begin, int32 [MAX_WIDTH + 1, MAX_ROWS + 1]."""
    counts = torch.arange(MAX_ROWS + 1, dtype=torch.int32, device=device)
    widths = torch.arange(MAX_WIDTH + 1, dtype=torch.int32, device=device)
    return MlaSpace.allocate(heads, device), widths[:, None] * counts
