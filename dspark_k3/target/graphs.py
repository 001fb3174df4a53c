# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs for ragged decode steps when verification is not adaptive.

vLLM 0.33 captures decode graphs for uniform steps, every request 1 + drafts rows wide,
or, with adaptive verification only, graphs that serve any mix of widths. Without it a
step in which one request has fewer drafts (near max_model_len, at the end of the token
budget, after a grammar cut its drafts, the first step of a resumed request) matches no
graph and runs eagerly.

`capture_ragged_decode` adds the second kind to the first, for steps of up to 64 rows of
a target that asked for us. Uniform steps keep the graphs they have; adaptive
verification keeps vLLM's own.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils, input_batch

from dspark_k3 import settings
from dspark_k3.seams import UnsupportedEngine
from verify_kernels.batch import MAX_ROWS

logger = logging.getLogger("vllm.dspark_k3")

_ARGUMENTS = (
    "self",
    "vllm_config",
    "device",
    "cudagraph_mode",
    "decode_query_len",
    "lora_capture_cases",
    "varlen_decode",
    "ubatch_runner",
)
_FIELDS = (
    "cg_mode",
    "num_tokens",
    "num_reqs",
    "uniform_token_count",
    "max_query_len",
    "num_active_loras",
    "num_ubatches",
)


_under_way = False


def capture_under_way() -> bool:
    """Whether the target's graphs are being captured: every step is a dummy then."""
    return _under_way


class RaggedGraphManager(cudagraph_utils.ModelCudaGraphManager):
    """vLLM's graph manager; for our target it captures ragged decode graphs as well."""

    def capture(self, *arguments: Any, **keywords: Any) -> Any:
        """vLLM's capture; `capture_under_way` while it lasts. The steps that price
        adaptive verification follow, for which the caches are cleared."""
        global _under_way
        _under_way = True
        try:
            captured = super().capture(*arguments, **keywords)
        finally:
            _under_way = False
        if self.varlen_decode and self._asked():
            clear_caches(self.compilation_config.static_forward_context.values())
        return captured

    def _asked(self) -> bool:
        return settings.read(self.vllm_config.additional_config).target

    def _init_candidates(self) -> None:
        super()._init_candidates()
        asked = (
            self._asked()
            and self.decode_query_len > 1
            and self.cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        )
        if not asked:
            return
        if not self.varlen_decode and self.cudagraph_mode.separate_routine():
            self._add_ragged()
        bare = uncovered_rows(
            self.compilation_config.cudagraph_capture_sizes,
            self.max_num_reqs,
            self.decode_query_len,
            adaptive=self.varlen_decode,
        )
        if bare:
            logger.warning(
                "dspark-k3: decode steps of %d to %d rows whose requests differ in "
                "drafts have no CUDA graph and run eagerly; add %d to "
                "cudagraph_capture_sizes",
                bare[0],
                bare[-1],
                bare[-1],
            )

    def _add_ragged(self) -> None:
        most = self.max_num_reqs * self.decode_query_len
        ragged = [
            cudagraph_utils.BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL,
                num_tokens=rows,
                num_reqs=min(rows, self.max_num_reqs),
                max_query_len=self.decode_query_len,
            )
            for rows in _sizes(self.compilation_config.cudagraph_capture_sizes, most)
        ]
        # Captured largest first, as vLLM does: later graphs reuse the pool's memory.
        full = self._capture_descs.setdefault(CUDAGraphMode.FULL, [])
        full.extend(ragged)
        full.sort(key=lambda graph: graph.num_tokens, reverse=True)
        smallest = 0
        for graph in ragged:
            for rows in range(smallest, graph.num_tokens + 1):
                self._offer(graph, rows)
            smallest = graph.num_tokens + 1

    def _offer(self, graph: Any, rows: int) -> None:
        """Between the uniform graphs of this row count and the piecewise ones."""
        candidates = self._candidates.setdefault((rows, 0), [])
        uniform = [x for x in candidates if x.cg_mode == CUDAGraphMode.FULL]
        candidates.insert(len(uniform), graph)


_DUMMY_ARGUMENTS = (
    "input_batch",
    "block_tables",
    "context_len",
    "num_kv_blocks",
    "max_model_len",
    "input_block_tables",
)
_stock_dummy_context = input_batch.set_dummy_context


def separate_dummy_context(
    batch: Any,
    block_tables: Any,
    context_len: int,
    num_kv_blocks: int,
    max_model_len: int,
    input_block_tables: Sequence[Tensor] | None = None,
) -> None:
    """vLLM's `set_dummy_context` with blocks of its own for every cache group.

    vLLM gives every group the same blocks, though groups share the bytes of a block, so
    the steps that price adaptive verification read KDA's float32 states as MLA's bf16
    lines, which may be NaN. With tiny-k3 a drafted token id was past the vocabulary
    there (H200, 2026-11-30: an index assertion in the second Markov step). Here group g
    has the blocks 1 + g n .. (g + 1) n, n the G-th part of all but the null block.

    The context is cut to what these blocks hold without two requests sharing one, and
    so that a request's drafts after this step still fit ``max_model_len``. In a cache
    too small for that the step has no context and requests share their group's blocks:
    left at the null block, as by vLLM, the groups would meet there.
    """
    tables = input_block_tables or block_tables.input_block_tables
    share = (num_kv_blocks - 1) // max(len(tables), 1)
    if not context_len or not share:
        return
    requests = batch.num_reqs
    width = batch.max_query_len or int(batch.num_scheduled_tokens.max())
    sizes = block_tables.block_sizes
    each = share // requests
    room = min(max_model_len - width, *(each * size for size in sizes)) - width
    context = min(context_len, max(room, 0))
    _stock_dummy_context(
        batch, block_tables, context, share, max_model_len, input_block_tables
    )
    for group, (table, size) in enumerate(zip(tables, sizes, strict=True)):
        used = min(-(-(context + width) // size), table.shape[1])
        blocks = torch.arange(requests * used, dtype=table.dtype, device=table.device)
        blocks = 1 + group * share + blocks % share
        table[:requests, :used] = blocks.view(requests, used)


def clear_caches(layers: Iterable[Any]) -> None:
    """Zero the memory of the layers' caches; nothing may be in them yet.

    vLLM's kernel warm-ups leave KDA states in blocks that the pricing steps then read
    as attention lines (seen: NaN in the first blocks, tiny-k3, H200, 2026-11-30).

    Args:
        layers: with ``kv_cache``, a tensor, or several, or nothing.
    """
    cleared = set()
    for layer in layers:
        held = getattr(layer, "kv_cache", ())
        for cache in (held,) if isinstance(held, Tensor) else held or ():
            storage = cache.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in cleared:
                cleared.add(storage.data_ptr())
                storage.fill_(0)


def capture_ragged_decode() -> None:
    """Let this process's model runner build `RaggedGraphManager`.

    Call it in a worker before the KV cache is initialised; calling it again does
    nothing. A model that did not ask for our target gets vLLM's graphs from it and no
    others. Raises seams.UnsupportedEngine, with nothing changed, when the runner or its
    manager is not the one this was written for.
    """
    from vllm.v1.worker.gpu import model_runner

    found = getattr(model_runner, "ModelCudaGraphManager", None)
    if found is RaggedGraphManager:
        return
    check_manager(found)
    check_dummy_context(getattr(model_runner, "set_dummy_context", None))
    model_runner.ModelCudaGraphManager = RaggedGraphManager
    model_runner.set_dummy_context = separate_dummy_context


def check_manager(manager: Any) -> None:
    """Raise seams.UnsupportedEngine unless ``manager`` is vLLM 0.33's graph manager."""
    wrong = None
    if manager is not cudagraph_utils.ModelCudaGraphManager:
        wrong = f"the model runner uses {manager!r}"
    elif (got := tuple(inspect.signature(manager.__init__).parameters)) != _ARGUMENTS:
        wrong = f"ModelCudaGraphManager takes {', '.join(got)}"
    elif not callable(getattr(manager, "_init_candidates", None)):
        wrong = "ModelCudaGraphManager has no _init_candidates"
    else:
        descriptor = cudagraph_utils.BatchExecutionDescriptor
        if (got := tuple(field.name for field in fields(descriptor))) != _FIELDS:
            wrong = f"BatchExecutionDescriptor has the fields {', '.join(got)}"
    if wrong is not None:
        raise UnsupportedEngine(
            f"cannot capture CUDA graphs for ragged decode steps: {wrong}, which is "
            "not vLLM 0.33. Install vllm==0.33.*, or take a plug-in that replaces the "
            "graph manager out"
        )


def check_dummy_context(found: Any) -> None:
    """Raise seams.UnsupportedEngine unless ``found`` is 0.33's `set_dummy_context`."""
    wrong = None
    if found is not _stock_dummy_context:
        wrong = f"the model runner uses {found!r}"
    elif (got := tuple(inspect.signature(found).parameters)) != _DUMMY_ARGUMENTS:
        wrong = f"set_dummy_context takes {', '.join(got)}"
    if wrong is not None:
        raise UnsupportedEngine(
            f"cannot give profiling steps blocks of their own: {wrong}, which is not "
            "vLLM 0.33. Install vllm==0.33.*"
        )


def uncovered_rows(
    capture_sizes: Iterable[int], max_num_seqs: int, width: int, *, adaptive: bool
) -> range:
    """Row counts of ragged decode steps, at most 64, that no graph is large enough for.

    Args:
        capture_sizes: ``compilation_config.cudagraph_capture_sizes``.
        max_num_seqs: ``scheduler_config.max_num_seqs``.
        width: rows of the widest request, 1 + drafts.
        adaptive: whether vLLM captures these graphs itself, for adaptive verification;
            it takes no size above the ``max_num_seqs * width`` rows of a full batch.

    Returns:
        The row counts that would run eagerly, an empty range when there are none; every
        smaller count is padded to the next captured size.
    """
    sizes, most = list(capture_sizes), max_num_seqs * width
    taken = [x for x in sizes if x <= most] if adaptive else _sizes(sizes, most)
    return range(max(taken, default=0) + 1, min(MAX_ROWS, most) + 1)


def _sizes(capture_sizes: Iterable[int], most: int) -> list[int]:
    """Captured sizes up to 64 and ``most`` rows, and that limit itself if a larger size
    is captured, so that rows between the last size and the limit have a graph."""
    sizes, limit = set(capture_sizes), min(MAX_ROWS, most)
    taken = {rows for rows in sizes if rows <= limit}
    if taken != sizes:
        taken.add(limit)
    return sorted(taken)
