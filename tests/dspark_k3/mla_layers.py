# SPDX-License-Identifier: Apache-2.0
"""An MLA layer of vLLM's over pages as vLLM binds them, and our launches in torch.

The launches take the arguments of `verify_kernels.mla` and compute a row at a time, so
that a row's bits do not depend on the others, as the kernels promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.dspark_k3.kda_layers import RowGemm, linear
from verify_kernels import VerifyBatch
from verify_kernels.layer import products
from verify_kernels.mla.reference import MlaRows, MlaWeights

HIDDEN, NAME = 64, "mla"
LATENT, NOPE, ROPE, VALUE = 512, 128, 64, 128
LINE = LATENT + ROPE
EPS = 3e-5


def norm(width: int) -> Any:
    weight = (1 + 0.3 * torch.randn(width)).bfloat16()
    return SimpleNamespace(weight=nn.Parameter(weight, requires_grad=False))


def layer(heads: int = 2, q_lora: int = 256) -> Any:
    """vLLM's class with random weights, absorbed by its own method; nothing is built
    that needs an engine."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales
    from vllm.models.kimi_k3.nvidia import mla

    module = object.__new__(mla.MultiHeadLatentAttention)
    nn.Module.__init__(module)
    packed = q_lora + LINE + heads * VALUE
    vars(module).update(
        layer_name=NAME,
        hidden_size=HIDDEN,
        num_local_heads=heads,
        q_lora_rank=q_lora,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        qk_head_dim=NOPE + ROPE,
        v_head_dim=VALUE,
        head_size=LINE,
        scale=(NOPE + ROPE) ** -0.5,
        rms_norm_eps=EPS,
        kv_cache_dtype="auto",
        dcp_world_size=1,
        rotary_emb=None,
        use_output_gate=True,
        quant_config=None,
        fused_qkv_a_g_proj=linear(packed, HIDDEN, 2.0),
        q_b_proj=linear(heads * (NOPE + ROPE), q_lora, 2.0),
        kv_b_proj=linear(heads * (NOPE + VALUE), LATENT, 2.0),
        o_proj=linear(HIDDEN, heads * VALUE),
        q_a_layernorm=norm(q_lora),
        kv_a_layernorm=norm(LATENT),
    )
    module.kv_b_proj.quant_method = None
    set_default_quant_scales(module, register_buffer=True)
    module.process_weights_after_loading(torch.bfloat16)
    return module


def bind_pages(module: Any, pages: int, page: int = 16, between: int = 0) -> None:
    """Random lines in pages of ``page`` tokens, with ``between`` elements behind each,
    as vLLM's `bind_kv_cache` is given them: [pages, 1, page, line]."""
    apart = page * LINE + between
    raw = torch.randn(pages * apart).bfloat16()
    strides = (apart, apart, LINE, 1)
    module.bind_kv_cache(raw.as_strided((pages, 1, page, LINE), strides))


def step(
    widths: list[int],
    histories: list[int],
    tables: list[list[int]],
    longest: int | None = None,
) -> Any:
    """Of vLLM's metadata what `MlaVerify` reads; a request with history -1 is none."""
    lengths = [h + w if h >= 0 else 0 for h, w in zip(histories, widths, strict=True)]
    return SimpleNamespace(
        num_prefills=0,
        decode=SimpleNamespace(
            query_start_loc=torch.tensor([0, *widths]).cumsum(0).int(),
            seq_lens=torch.tensor(lengths).int(),
            block_table=torch.tensor(tables).int(),
            max_query_len=longest or max(widths),
        ),
    )


def reference(module: Any) -> MlaWeights:
    """The module's weights, float32, from the projections that vLLM loads."""
    heads = module.num_local_heads
    kv_b = module.kv_b_proj.weight.float().view(heads, NOPE + VALUE, LATENT)
    return MlaWeights(
        q_a_norm=module.q_a_layernorm.weight.float(),
        kv_norm=module.kv_a_layernorm.weight.float(),
        w_qb=module.q_b_proj.weight.float(),
        w_uk=kv_b[:, :NOPE].contiguous(),
        w_uv=kv_b[:, NOPE:].contiguous(),
        norm_eps=EPS,
    )


def rows_of(module: Any, hidden: Tensor) -> MlaRows:
    """What its first projection gives, bf16 as float32."""
    packed = (hidden.float() @ module.fused_qkv_a_g_proj.weight.float().T).bfloat16()
    return MlaRows.unpack(packed.float(), reference(module))


class Launches:
    """The four functions and the space; ``calls`` has their keywords in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.allocated: list[tuple[int, torch.device]] = []

    def allocate(self, heads: int, device: torch.device) -> str:
        self.allocated.append((heads, device))
        return f"space of {heads}"

    def front(
        self,
        packed: Tensor,
        q_norm: Tensor,
        kv_norm: Tensor,
        batch: VerifyBatch,
        cache: Tensor,
        out: Tensor,
        **keywords: Any,
    ) -> None:
        self.calls.append(("front", keywords))
        check(packed, q_norm, kv_norm, cache, out)
        q_lora, eps = out.shape[1], keywords["eps"]
        out.zero_()
        table = batch.block_table
        assert table is not None
        for request, row, position in live(batch):
            q_a, latent, rope = packed[row, : q_lora + LINE].split(
                [q_lora, LATENT, ROPE]
            )
            out[row] = normed(q_a, q_norm, eps)
            place = int(table[request, position // cache.shape[1]])
            line = cache[place, position % cache.shape[1]]
            line[:LATENT] = normed(latent, kv_norm, eps)
            line[LATENT:] = rope

    def absorb(self, q: Tensor, w_uk: Tensor, query: Tensor, **keywords: Any) -> None:
        self.calls.append(("absorb", keywords))
        check(q, query)
        assert w_uk.shape[1:] == (NOPE, LATENT)
        assert w_uk.stride()[1:] == (LATENT, 1) and not w_uk.requires_grad
        for row, own in enumerate(q.unflatten(1, (-1, NOPE + ROPE)).float()):
            nope = own[:, None, :NOPE].contiguous()
            query[row, :, :LATENT] = torch.bmm(nope, w_uk.float())[:, 0]
            query[row, :, LATENT:] = own[:, NOPE:]

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        batch: VerifyBatch,
        space: Any,
        latent: Tensor,
        **keywords: Any,
    ) -> None:
        self.calls.append(("attend", keywords))
        check(query, cache, latent)
        assert space == f"space of {query.shape[1]}"
        latent.zero_()
        table = batch.block_table
        assert table is not None
        page = cache.shape[1]
        for request, row, position in live(batch):
            at = torch.arange(position + 1)
            lines = cache[table[request, at // page].long(), at % page].float()
            scores = query[row].float() @ lines.T * keywords["scale"]
            latent[row] = scores.softmax(-1) @ lines[:, :LATENT]

    def value(
        self, latent: Tensor, w_uv: Tensor, gate: Tensor, out: Tensor, **keywords: Any
    ) -> None:
        self.calls.append(("value", keywords))
        check(latent, out)
        assert gate.dtype == torch.bfloat16 and gate.shape == out.shape
        assert w_uv.shape[1:] == (VALUE, LATENT)
        assert w_uv.stride()[1:] == (LATENT, 1) and not w_uv.requires_grad
        for row, own in enumerate(latent.float()):
            values = torch.bmm(w_uv.float(), own[:, :, None])
            out[row] = values.flatten() * torch.sigmoid(gate[row].float())


def check(*tensors: Tensor) -> None:
    """bf16, no gradients."""
    assert {(x.dtype, x.requires_grad) for x in tensors} == {(torch.bfloat16, False)}


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean() + eps) * weight.float()


def live(batch: VerifyBatch) -> Iterator[tuple[int, int, int]]:
    """(request, row, position) of every row, the history counting the step's rows."""
    starts, lengths = batch.row_start.tolist(), batch.history.tolist()
    for request, slot in enumerate(batch.state_slots.tolist()):
        begin, end = starts[request], starts[request + 1]
        for row in range(begin, end) if slot > 0 else ():
            yield request, row, lengths[request] - end + row


def stand_in(patch: Callable[[Any, str, Any], None]) -> tuple[Launches, dict[str, Any]]:
    """Replace what needs a GPU or an engine. Returns the launches, and the metadata by
    layer that a step reads, for the caller to fill."""
    from dspark_k3.target import mla, sublayers

    launches = Launches()
    context = SimpleNamespace(attn_metadata={})
    patch(products, "SkinnyGemm", RowGemm)
    patch(sublayers, "get_tensor_model_parallel_world_size", lambda: 1)
    patch(mla, "get_forward_context", lambda: context)
    for name in ("front", "absorb", "attend", "value"):
        patch(mla, f"mla_{name}", getattr(launches, name))
    patch(mla, "MlaSpace", launches)
    mla._space.cache_clear()
    return launches, context.attn_metadata
