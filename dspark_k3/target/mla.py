# SPDX-License-Identifier: Apache-2.0
"""An MLA sublayer with our kernels between its projections: norms and cache insert,
absorbed queries, attention over vLLM's paged cache, values and gate.

They leave the lines in the cache that vLLM's kernels leave, `[latent | rope part]` in
bf16, so a step of either kind can follow one of the other: prompts, and steps that have
a prompt among their rows, are vLLM's.

A launch reads what a step is from device tensors that vLLM keeps (`step_of`), the same
memory at a graph's capture and at every replay: the runner's offsets, lengths and block
tables. Nothing of a step is taken from the host.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context

from dspark_k3.target.scope import MLA_SHAPE, MOST_HEADS, STOCK_MLA
from dspark_k3.target.sublayers import Gemm, over_ranks
from verify_kernels.batch import MAX_WIDTH, VerifyBatch
from verify_kernels.mla import MlaSpace, mla_absorb, mla_attend, mla_front, mla_value
from verify_kernels.mla.host import PAGE_STEP, Q_LORAS
from verify_kernels.mla.parts import LINE

#: Bytes that a page of the cache begins at a multiple of.
ALIGNED = 16
#: Names of vLLM's for a cache of the model's own type; `scope` wants a bf16 model.
BF16_CACHES = ("auto", "bfloat16")


class MlaVerify:
    """Our projections around our MLA kernels.

    Args:
        module: vLLM's ``MultiHeadLatentAttention`` of K3 with its weights loaded.
        pdl: launch as programmatic dependents.

    Raises:
        ValueError: the module is not the layer that the kernels compute, or one of its
            projections is none that ours run.
    """

    def __init__(self, module: nn.Module, *, pdl: bool) -> None:
        if found := differences(module):
            raise ValueError(
                f"{module.layer_name}: our MLA kernels do not compute this layer, "
                f"which has {', '.join(found)}; {STOCK_MLA}"
            )
        self._module = module
        self._pdl = pdl
        self._qkv_a_g = Gemm(module.fused_qkv_a_g_proj, pdl=pdl)
        self._q_b = Gemm(module.q_b_proj, pdl=pdl)
        self._o_proj = Gemm(module.o_proj, pdl=pdl)
        self._w_uk = _rows_in_one_piece(module.W_UK_T.data)
        self._w_uv = _rows_in_one_piece(module.W_UV.data.transpose(1, 2))
        self._space = _space(module.num_local_heads, self._w_uk.device)

    def prepare_kv(self) -> None:
        """Check the KV cache that vLLM has bound to the module.

        vLLM frees the first cache, with which it profiles, before it allocates its own,
        so the cache is not held here.

        Raises:
            ValueError: the kernels cannot run in that cache.
        """
        if found := misfits(self._module.kv_cache):
            raise ValueError(
                f"{self._module.layer_name}: our MLA kernels do not serve vLLM's cache "
                f"here, which has {', '.join(found)}; {STOCK_MLA}"
            )

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        module, pdl = self._module, self._pdl
        metadata = get_forward_context().attn_metadata[module.layer_name]
        step = step_of(metadata)
        rows, heads = hidden.shape[0], module.num_local_heads
        packed = self._qkv_a_g(hidden)
        normed = packed.new_empty(rows, module.q_lora_rank)
        mla_front(
            packed,
            module.q_a_layernorm.weight.data,
            module.kv_a_layernorm.weight.data,
            step,
            module.kv_cache,
            normed,
            eps=module.rms_norm_eps,
            counted=True,
            pdl=pdl,
        )
        query = packed.new_empty(rows, heads, module.head_size)
        mla_absorb(self._q_b(normed), self._w_uk, query, pdl=pdl)
        latent = packed.new_empty(rows, heads, module.kv_lora_rank)
        mla_attend(
            query,
            module.kv_cache,
            step,
            self._space,
            latent,
            scale=module.scale,
            counted=True,
            pdl=pdl,
        )
        out = packed.new_empty(rows, heads * module.v_head_dim)
        begin = module.q_lora_rank + module.head_size
        gate = packed[:, begin : begin + out.shape[1]]
        mla_value(latent, self._w_uv, gate, out, pdl=pdl)
        return over_ranks(self._o_proj(out))


def step_of(metadata: Any) -> VerifyBatch:
    """A step as the kernels take it, by vLLM's device tensors alone: under adaptive
    verification the host does not know the widths.

    Args:
        metadata: vLLM's ``FlashAttnMLAMetadata`` of a step without prompts.

    Returns:
        ``history`` counts the step's own rows too, as vLLM's lengths do. Requests that
        pad a graph have length 0, and no rows: the length is also the slot, which says
        whether there is a request. MLA reads no accepted counts; lengths stand there.
    """
    decode = metadata.decode
    return VerifyBatch(
        row_start=decode.query_start_loc,
        history=decode.seq_lens,
        state_slots=decode.seq_lens,
        accepted=decode.seq_lens,
        block_table=decode.block_table,
    )


def narrow(metadata: Any) -> bool:
    """Whether every request of a step without long prompts is one for `MlaVerify`.

    vLLM's MLA takes a prompt's chunk of up to 512 rows for a decode. K3's KDA layers do
    not, and the step is vLLM's by them; but the steps that a runner makes up for
    captures in pieces are wide and no prompt. The bound is the plan's, which no device
    width exceeds (`dspark_k3.target.attention`).
    """
    decode = metadata.decode
    return decode is not None and decode.max_query_len <= MAX_WIDTH


def differences(module: Any) -> list[str]:
    """What a layer of vLLM's has that our kernels do not compute; empty if nothing.

    What is read comes from the configuration: every rank finds the same.
    """
    checks: tuple[tuple[str, tuple[Any, ...]], ...] = (
        *((name, (want,)) for name, want in MLA_SHAPE.items()),
        ("q_lora_rank", Q_LORAS),
        ("kv_cache_dtype", BF16_CACHES),
        ("dcp_world_size", (1,)),
    )
    found = [
        f"{name} {getattr(module, name)}, not {' or '.join(map(str, right))}"
        for name, right in checks
        if getattr(module, name) not in right
    ]
    if module.num_local_heads > MOST_HEADS:
        found.append(f"{module.num_local_heads} heads a rank, not 1 to {MOST_HEADS}")
    if module.rotary_emb is not None:
        found.append("a rotary embedding")
    if not module.use_output_gate:
        found.append("no output gate")
    weights = {"W_UK_T": module.W_UK_T, "W_UV": module.W_UV}
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        # Without a query latent there is one norm.
        if (norm := getattr(module, name, None)) is not None:
            weights[name] = norm.weight
    found += [
        f"{name} in {weight.dtype}, not torch.bfloat16"
        for name, weight in weights.items()
        if weight.dtype != torch.bfloat16
    ]
    return found


def misfits(cache: Tensor) -> list[str]:
    """What keeps the kernels from a cache of vLLM's; empty if nothing."""
    if cache.dim() != 3 or cache.shape[2] != LINE:
        return [f"shape {tuple(cache.shape)}, not (pages, tokens, {LINE})"]
    page = cache.shape[1]
    strides = cache.stride()
    apart = strides[0] * cache.element_size()
    checks = (
        (cache.dtype == torch.bfloat16, f"{cache.dtype}, not torch.bfloat16"),
        (
            page % PAGE_STEP == 0,
            f"pages of {page} tokens, not a multiple of {PAGE_STEP}",
        ),
        (strides[1:] == (LINE, 1), f"strides {strides}, not (..., {LINE}, 1)"),
        (apart % ALIGNED == 0, f"pages {apart} bytes apart, no multiple of {ALIGNED}"),
        (
            cache.data_ptr() % ALIGNED == 0,
            f"its start at {cache.data_ptr():#x}, no multiple of {ALIGNED}",
        ),
    )
    return [words for right, words in checks if not right]


def _rows_in_one_piece(weight: Tensor) -> Tensor:
    """A weight [heads, n, latent] whose heads are contiguous [n, latent] each.

    vLLM's W_UK_T and W_UV are views of kv_b_proj [heads (nope + v), latent], which have
    that; only one that was quantised and is dequantised in another order is copied, and
    then once, here.
    """
    pieces = weight.stride()[1:] == (weight.shape[2], 1)
    return weight if pieces else weight.contiguous()


@functools.cache
def _space(heads: int, device: torch.device) -> MlaSpace:
    """Of all layers: they run one after the other."""
    return MlaSpace.allocate(heads, device)
