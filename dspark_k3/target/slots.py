# SPDX-License-Identifier: Apache-2.0
"""What a request's KDA states take in vLLM's cache, by layout; free of vLLM.

A *snapshot* request has 1 + drafts slots a layer, with a state each. A *folded* one has
one slot: state, and of the last step's rows what a fold needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dspark_k3.settings import Layout
from verify_kernels.batch import MAX_WIDTH
from verify_kernels.kda.host import DIM, TAPS

Shape = tuple[int, ...]
#: u, key, decay, and the counts.
RECORD_DTYPES = (torch.float32, torch.float32, torch.float32, torch.int32)


def record_shapes(heads: int) -> tuple[Shape, ...]:
    """Of a folded slot's records, in a page behind window and state: u, key and decay
    of eight rows, and counts, of an even number of heads so that what follows starts
    at a multiple of 16 bytes."""
    rows = (heads, MAX_WIDTH, DIM)
    return (rows, rows, rows, (heads + heads % 2, 2))


@dataclass(frozen=True)
class SlotMemory:
    """Of one request in a rank's cache, without what vLLM pads a page with.

    Attributes:
        slots: of a layer.
        page_bytes: of a slot.
        layers: KDA layers.
    """

    slots: int
    page_bytes: int
    layers: int

    @property
    def request_bytes(self) -> int:
        """Of all layers."""
        return self.slots * self.page_bytes * self.layers


def slot_memory(layers: int, heads: int, drafts: int, layout: Layout) -> SlotMemory:
    """What a layout takes for ``layers`` KDA layers with ``heads`` heads a rank."""
    page = (TAPS - 1 + drafts) * 3 * heads * DIM * 2 + heads * DIM * DIM * 4
    if layout == "snapshot" or not drafts:
        return SlotMemory(1 + drafts, page, layers)
    sizes: Sequence[int] = [prod(shape) for shape in record_shapes(heads)]
    kinds = zip(sizes, RECORD_DTYPES, strict=True)
    return SlotMemory(1, page + sum(n * kind.itemsize for n, kind in kinds), layers)


def describe(config: Any, layout: Layout) -> str:
    """A line for the log: what the states of a request take in both layouts.

    Args:
        config: vLLM's ``VllmConfig``.
        layout: the one in use.
    """
    linear = config.model_config.hf_text_config.linear_attn_config
    heads = linear["num_heads"] // config.parallel_config.tensor_parallel_size
    drafts = int(config.num_speculative_tokens)
    parts = []
    for name in ("snapshot", "fold"):
        of = slot_memory(len(linear["kda_layers"]), heads, drafts, name)
        parts.append(
            f"{name}: {of.slots} of {of.page_bytes / 1e6:.2f} MB a layer, "
            f"{of.request_bytes / 1e6:.1f} MB in all"
        )
    return f"KDA state slots of a request, layout {layout}; {'; '.join(parts)}"
