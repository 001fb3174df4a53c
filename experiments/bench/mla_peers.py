# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33's MLA kernels as peers, launched as its layers launch them.

``fa3`` is FlashAttention-3 with latents beside the queries, stock on Hopper;
``flashmla`` the dense FlashMLA; ``triton_mla`` the drafter's, each row a request of its
own. What vLLM makes once a step for all layers (schedules) is not timed.
``triton_mla_layer`` has besides what vLLM's layer does around that kernel every time:
two fills, and the table and lengths repeated. ``vllm`` is the sublayer as the K3 layer
runs it, the gate's projection on a second stream; ``vllm_one_stream`` has one packed
projection and no other stream. They are programmatic where vLLM launches so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.bench import peers as vllm_peers
from experiments.bench.mla_data import (
    DRAFT,
    EPS,
    PAGE,
    SCALE,
    SUBLAYER,
    MlaData,
    MlaShape,
    SublayerWeights,
)
from experiments.bench.mla_ways import new
from experiments.bench.ways import Run, Way, Ways
from experiments.byte_model import Q_LORA
from verify_kernels.mla.parts import LATENT, LINE, NOPE, ROPE, VALUE

FA3, FLASHMLA, TRITON = "fa3", "flashmla", "triton_mla"
TRITON_LAYER = "triton_mla_layer"
STOCK, ONE_STREAM = "vllm", "vllm_one_stream"
#: vLLM's ``flash_attn_max_num_splits_for_cuda_graph``.
FA3_SPLITS = 32
_FA = "vllm.v1.attention.backends.fa_utils"
_FLASHMLA = "vllm.v1.attention.ops.flashmla"
_TRITON = "vllm.v1.attention.backends.mla.triton_mla"
_NORM = "vllm.models.common.ops.fused_qk_rmsnorm"
_INSERT = "vllm.models.kimi_k3.nvidia.ops.fused_mla_key_concat_kv_cache"
_GEMM = "vllm.models.kimi_k3.nvidia.low_latency_gemm"
_LAYER = "vllm.models.kimi_k3.nvidia.mla"
_STREAMS = "vllm.utils.multi_stream_utils"
_CHAIN = (_FA, _NORM, _INSERT, _GEMM, _LAYER, _STREAMS)
#: Graphs that torch may make of one function: vLLM's gate is compiled by it, here for
#: more shapes than a server has.
_GRAPHS = 64

Attend = Callable[[Tensor, Tensor], Tensor]


def preload() -> None:
    """Import the modules; before a ``CudaTimer`` is made."""
    for name in (*_CHAIN, _FLASHMLA, _TRITON):
        vllm_peers.load(name)


def _fa3_attend(fa: Any, data: MlaData) -> Attend:
    """(queries [M, H, 576], cache) -> latents, as FlashAttnMLAImpl in CUDA graphs."""
    shape, batch, lengths = data.shape, data.batch, data.lengths
    schedule = fa.get_scheduler_metadata(
        batch_size=shape.requests,
        max_seqlen_q=shape.width,
        max_seqlen_k=shape.context,
        num_heads_q=shape.heads,
        num_heads_kv=1,
        headdim=ROPE,
        cache_seqlens=lengths,
        qkv_dtype=torch.bfloat16,
        headdim_v=LATENT,
        page_size=PAGE,
        cu_seqlens_q=batch.row_start,
        causal=True,
        num_splits=FA3_SPLITS,
    )

    def attend(query: Tensor, cache: Tensor) -> Tensor:
        found: Tensor = fa.flash_attn_varlen_func(
            q=query[..., LATENT:],
            k=cache[..., LATENT:].unsqueeze(-2),
            v=cache[..., :LATENT].unsqueeze(-2),
            q_v=query[..., :LATENT],
            max_seqlen_q=shape.width,
            cu_seqlens_q=batch.row_start,
            max_seqlen_k=shape.context,
            seqused_k=lengths,
            block_table=data.table,
            softmax_scale=SCALE,
            causal=True,
            fa_version=3,
            scheduler_metadata=schedule,
            num_splits=FA3_SPLITS,
        )
        return found

    return attend


def _fa3(fa: Any) -> Callable[[MlaData], Run]:
    def make(data: MlaData) -> Run:
        attend = _fa3_attend(fa, data)
        return lambda copy: attend(data.rows, data.caches[copy])

    return make


def _flashmla(module: Any) -> Callable[[MlaData], Run]:
    """Its schedule is made by the first call, which no graph holds."""

    def make(data: MlaData) -> Run:
        shape, lengths = data.shape, data.lengths
        query = data.rows.unflatten(0, (shape.requests, shape.width))
        schedule, _ = module.get_mla_metadata(
            lengths, shape.width * shape.heads, 1, is_fp8_kvcache=False
        )

        def run(copy: int) -> Tensor:
            found, _ = module.flash_mla_with_kvcache(
                q=query,
                k_cache=data.caches[copy].unsqueeze(-2),
                block_table=data.table,
                cache_seqlens=lengths,
                head_dim_v=LATENT,
                tile_scheduler_metadata=schedule,
                softmax_scale=SCALE,
                causal=True,
                is_fp8_kvcache=False,
            )
            latents: Tensor = found
            return latents.flatten(0, 1)

        return run

    return make


def _triton(module: Any, layer: bool) -> Callable[[MlaData], Run]:
    """TritonMLAImpl's ``forward_mqa``, or the kernels alone."""

    def make(data: MlaData) -> Run:
        shape, width = data.shape, data.shape.width
        splits = module._compute_num_kv_splits(
            shape.context, module.current_platform.num_compute_units()
        )
        lengths = data.lengths
        one = torch.ones((), device=data.rows.device)
        logits = one.new_empty(shape.rows, shape.heads, splits, LATENT + 1)

        def repeated() -> tuple[Tensor, Tensor]:
            if width == 1:
                return data.table, lengths
            table = data.table.repeat_interleave(width, dim=0)
            if not shape.causal:
                return table, lengths.repeat_interleave(width)
            back = torch.arange(
                1 - width, 1, device=lengths.device, dtype=lengths.dtype
            )
            return table, (lengths.unsqueeze(1) + back).flatten().clamp(min=0)

        def outputs() -> tuple[Tensor, Tensor]:
            out = data.rows.new_zeros(shape.rows, shape.heads, LATENT)
            return out, data.rows.new_zeros(shape.rows, shape.heads)

        kept = *outputs(), *repeated()

        def run(copy: int) -> Tensor:
            out, lse, table, rows = (*outputs(), *repeated()) if layer else kept
            cache = data.caches[copy].unsqueeze(2)
            module.decode_attention_fwd(
                data.rows,
                cache,
                cache[..., :LATENT],
                out,
                lse,
                table,
                rows,
                logits,
                splits,
                SCALE,
                PAGE,
                k_scale=one,
                v_scale=one,
                is_mla=True,
            )
            return out

        return run

    return make


class _Chain:
    """vLLM's ``MultiHeadLatentAttention`` for a step of decodes, without its module."""

    def __init__(self, modules: dict[str, Any], data: MlaData) -> None:
        self._modules = modules
        self._data = data
        self._attend = _fa3_attend(modules[_FA], data)
        self._slots = data.slots

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """vLLM's choice for the shape, else cuBLAS."""
        found = self._modules[_GEMM].try_low_latency_gemm(x, weight)
        return F.linear(x, weight) if found is None else found

    def attention(self, packed: Tensor, w: SublayerWeights, cache: Tensor) -> Tensor:
        """[M, H 128], from rows that begin with q_a and kv_a; lines are inserted."""
        heads = self._data.shape.heads
        q_a, latent, k_pe = packed.split([Q_LORA, LATENT, ROPE], dim=-1)
        q_a, latent = self._modules[_NORM].fused_q_kv_rmsnorm(
            q_a, latent, w.q_norm, w.kv_norm, EPS
        )
        q = self.project(q_a, w.q_b).view(-1, heads, NOPE + ROPE)
        out = new(self._data, heads * VALUE)
        nope, q_pe = q.split([NOPE, ROPE], dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), w.w_uk).transpose(0, 1)
        query = self._modules[_INSERT].fused_mla_decode_q_concat_kv_cache_insert(
            absorbed, q_pe, latent, k_pe.unsqueeze(1), cache, self._slots
        )
        found = self._attend(query, cache).view(-1, heads, LATENT).transpose(0, 1)
        values = out.view(-1, heads, VALUE).transpose(0, 1)
        torch.bmm(found, w.w_uv.transpose(1, 2), out=values)
        return out

    def finish(self, found: Tensor, gate: Tensor, w: SublayerWeights) -> Tensor:
        """o_proj of the gated values."""
        gated = self._modules[_LAYER]._gate_sigmoid_mul(found, gate)
        return self.project(gated, w.o_proj)


def _stock(modules: dict[str, Any]) -> Callable[[MlaData], Run]:
    def make(data: MlaData) -> Run:
        chain, rows = _Chain(modules, data), data.rows
        stream = torch.cuda.Stream()
        events = torch.cuda.Event(), torch.cuda.Event()

        def run(copy: int) -> Tensor:
            w, cache = data.weights[copy], data.caches[copy]
            front, last = w.qkv_a_g.split([Q_LORA + LINE, data.shape.heads * VALUE])
            found, gate = modules[_STREAMS].maybe_execute_in_parallel(
                lambda: chain.attention(chain.project(rows, front), w, cache),
                lambda: chain.project(rows, last),
                *events,
                stream,
            )
            return chain.finish(found, gate, w)

        return run

    return make


def _one_stream(modules: dict[str, Any]) -> Callable[[MlaData], Run]:
    def make(data: MlaData) -> Run:
        chain = _Chain(modules, data)

        def run(copy: int) -> Tensor:
            w = data.weights[copy]
            packed = chain.project(data.rows, w.qkv_a_g)
            front, gate = packed.split([Q_LORA + LINE, data.shape.heads * VALUE], 1)
            found = chain.attention(front, w, data.caches[copy])
            return chain.finish(found, gate, w)

        return run

    return make


def peers(shape: MlaShape) -> Ways[MlaData]:
    """Every peer of one step, and why one cannot run it."""
    if shape.part == SUBLAYER:
        return _chains()
    fa, flashmla, triton = (vllm_peers.load(n) for n in (_FA, _FLASHMLA, _TRITON))
    missing: dict[str, str] = {}
    ways: list[Way[MlaData]] = []

    def offer(name: str, module: Any, make: Callable[..., Any], *more: Any) -> None:
        if isinstance(module, str):
            missing[name] = module
        else:
            ways.append(Way(name, "plain", make(module, *more)))

    offer(TRITON, triton, _triton, False)
    if shape.part == DRAFT:
        offer(TRITON_LAYER, triton, _triton, True)
    else:
        offer(FA3, fa, _fa3)
        offer(FLASHMLA, flashmla, _flashmla)
    return Ways(ways, missing)


def _chains() -> Ways[MlaData]:
    modules: dict[str, Any] = {name: vllm_peers.load(name) for name in _CHAIN}
    for module in modules.values():
        if isinstance(module, str):
            return Ways(missing=dict.fromkeys((STOCK, ONE_STREAM), module))
    import torch._dynamo

    torch._dynamo.config.recompile_limit = _GRAPHS
    note = "programmatic where vLLM is; gate on a second stream"
    return Ways(
        [
            Way(STOCK, "plain", _stock(modules), note),
            Way(ONE_STREAM, "plain", _one_stream(modules), "one packed projection"),
        ]
    )
