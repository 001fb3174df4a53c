# SPDX-License-Identifier: Apache-2.0
"""Requests whose whole prompt is one token, arriving while others decode with drafts.

vLLM's scheduler gives such a request 1 + drafts rows, the drafts being placeholders, to
keep the step uniform. With nothing computed before them, vLLM 0.33 does not run them as
a decode: KDA takes all for a prompt and keeps the placeholders in the state
(`docs/notes/vllm_033.md`). Here they run as the verify rows that they look like, from a
state that is cleared first; the placeholders are then rejected like any draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: A KDA layer's convolution windows, recurrent states and, folded, records and their
#: counts; slots first.
Caches = Sequence[Tensor]


def one_token_prompts(batch: Any) -> list[int]:
    """Rows of vLLM's ``InputBatch`` that are such requests.

    A request that has computed nothing has drafts only if the scheduler padded it,
    which it does for one new token.
    """
    drafts = batch.num_draft_tokens_per_req
    if drafts is None:
        return []
    untouched = batch.is_prefilling_np & (batch.num_computed_prefill_tokens_np == 0)
    return np.flatnonzero(untouched & (drafts > 0)).tolist()


def run_as_decodes(batch: Any, rows: Sequence[int]) -> None:
    """Have vLLM plan the ``rows`` as verify rows."""
    marked = batch.prefill_runs_as_decode_np
    marked = np.zeros_like(batch.is_prefilling_np) if marked is None else marked.copy()
    marked[list(rows)] = True
    batch.prefill_runs_as_decode_np = marked


def clear_states(
    rows: Sequence[int],
    block_tables: Sequence[Tensor],
    groups: Iterable[Any],
    caches: Mapping[str, Caches],
) -> None:
    """Zero what the first verify step of the ``rows`` starts from: column 0's slot.

    Args:
        rows: requests of the batch.
        block_tables: [requests, columns] of each cache group, on the device.
        groups: vLLM's ``kv_cache_groups``, in that order.
        caches: of every KDA layer, by the layer's name.
    """
    for table, group in zip(block_tables, groups, strict=True):
        held = [caches[name] for name in group.layer_names if name in caches]
        if not held:
            continue
        wanted = torch.tensor(rows, device=table.device)
        slots = table[wanted, 0].long()
        for layer in held:
            for cache in layer:
                cache.index_fill_(0, slots, 0)


def kda_caches(layers: Iterable[Any]) -> dict[str, Caches]:
    """All that the slots of every KDA layer hold, by its name, of K3's layers."""
    return {
        layer.self_attn.prefix: list(layer.self_attn.kv_cache)
        for layer in layers
        if hasattr(layer.self_attn, "in_proj_qkvgfab")
    }
