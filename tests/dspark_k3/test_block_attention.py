# SPDX-License-Identifier: Apache-2.0
"""A drafter's block attention against what vLLM's Triton kernel is asked for, the
kernels' equations in the kernels' place; on a GPU beside that kernel."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.models.kimi_k3")

from dspark_k3 import settings
from dspark_k3.draft import attention
from verify_kernels import VerifyBatch
from verify_kernels.mla import MlaSpace

HEADS, LATENT, LINE, PAGE, PAGES = 2, 512, 576, 16, 12
SCALE = 0.07


def layer(**changes: Any) -> Any:
    """What is read of vLLM's layer."""
    found = SimpleNamespace(
        layer_name="layers.93.self_attn",
        impl=SimpleNamespace(forward_mqa=stock),
        scale=SCALE,
        num_local_heads=HEADS,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=64,
        kv_cache_dtype="auto",
        dcp_world_size=1,
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def stock(
    query: Tensor, cache: Tensor, metadata: Any, layer: Any
) -> tuple[Tensor, Tensor | None]:
    """vLLM's: each row a request of its own over its table's lines."""
    decode = metadata.decode
    requests = len(decode.seq_lens)
    width = len(query) // requests
    found = query.new_zeros(*query.shape[:2], LATENT)
    for row in range(len(query)):
        request, t = divmod(row, width)
        keys = int(decode.seq_lens[request])
        keys -= (width - 1 - t) * bool(metadata.causal)
        if keys <= 0:
            continue
        at = torch.arange(keys, device=query.device)
        lines = cache[decode.block_table[request, at // PAGE].long(), at % PAGE]
        scores = query[row].float() @ lines.float().T * layer.scale
        found[row] = (scores.softmax(-1) @ lines[:, :LATENT].float()).to(query.dtype)
    return found, None


def by_requests(
    query: Tensor,
    cache: Tensor,
    batch: VerifyBatch,
    space: Any,
    latent: Tensor,
    *,
    scale: float,
    causal: bool,
    counted: bool,
    pdl: bool,
) -> Tensor:
    """What the kernels do: a request's rows by where they begin."""
    assert counted and not pdl and scale == SCALE
    latent.zero_()
    for b in range(len(batch.history)):
        first, last = (int(x) for x in batch.row_start[b : b + 2])
        if int(batch.state_slots[b]) <= 0:
            continue
        part = SimpleNamespace(
            decode=SimpleNamespace(
                seq_lens=batch.history[b : b + 1],
                block_table=batch.block_table[b : b + 1],
            ),
            causal=causal,
        )
        own = SimpleNamespace(scale=scale)
        latent[first:last] = stock(query[first:last], cache, part, own)[0]
    return latent


def step(
    lengths: list[int], width: int, *, causal: bool = False, device: str = "cpu"
) -> tuple[Tensor, Tensor, Any]:
    """Queries, a cache whose pages lie apart, and vLLM's metadata."""
    g = torch.Generator().manual_seed(sum(lengths))
    query = torch.randn(len(lengths) * width, HEADS, LINE, generator=g).bfloat16()
    cache = torch.randn(PAGES, PAGE + 2, LINE, generator=g).bfloat16()[:, :PAGE]
    table = torch.randperm(PAGES, generator=g)[None].expand(len(lengths), -1)
    decode = SimpleNamespace(
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.int().contiguous().to(device),
    )
    metadata = SimpleNamespace(decode=decode, causal=causal)
    # A copy would close the gaps between pages.
    held = torch.empty(PAGES, PAGE + 2, LINE, dtype=cache.dtype, device=device)
    return query.to(device), held[:, :PAGE].copy_(cache), metadata


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> attention.BlockAttention:
    monkeypatch.setattr(attention, "mla_attend", by_requests)
    monkeypatch.setattr(MlaSpace, "allocate", lambda heads, device: None)
    monkeypatch.setattr(attention, "_shared", lambda heads, device: shared(heads))
    return attention.BlockAttention(layer(), torch.device("cuda", 0))


shared_on = attention._shared.__wrapped__


def shared(heads: int) -> Any:
    return shared_on(heads, torch.device("cpu"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [1, 7])
def test_a_block_sees_what_vllms_kernel_sees(
    made: attention.BlockAttention, width: int, causal: bool
) -> None:
    """Requests that pad a graph give zeros."""
    query, cache, metadata = step([40, 7, 129, 0], width, causal=causal)
    wanted, _ = stock(query, cache, metadata, layer())
    found, lse = made(query, cache, metadata, None)
    assert torch.equal(found, wanted) and lse is None
    assert not found[3 * width :].any() and found[: 3 * width].any()


@pytest.mark.parametrize(
    ("lengths", "width", "why"),
    [
        ([20] * 10, 7, "more than 64 rows"),
        ([20], 9, "more than 8 rows a request"),
        ([20], 7, "queries of torch.float32"),
        ([20], 7, "pages of 9 tokens, not a multiple of 16"),
    ],
)
def test_what_the_kernels_do_not_serve_is_vllms(
    made: attention.BlockAttention,
    lengths: list[int],
    width: int,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Said once."""
    query, cache, metadata = step(lengths, width)
    if "float32" in why:
        query = query.float()
    if "pages" in why:
        cache = cache[:, :9]
    asked: list[Any] = []
    made._stock = lambda *given: (asked.append(given), None)  # type: ignore[assignment]
    with caplog.at_level(logging.INFO, logger="vllm.dspark_k3"):
        for _ in range(2):
            made(query, cache, metadata, "the layer")
    assert len(asked) == 2 and asked[0][3] == "the layer"
    assert [record.getMessage() for record in caplog.records] == [
        f"dspark-k3: blocks attend by vLLM's kernel: {why}"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8, not auto or bfloat16"),
        ({"kv_lora_rank": 256}, "kv_lora_rank 256, not 512"),
        ({"dcp_world_size": 2}, "dcp_world_size 2, not 1"),
        ({"num_local_heads": 128}, "128 heads a rank, not 1 to 96"),
    ],
)
def test_another_layer_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        attention.BlockAttention(layer(**changes), torch.device("cuda", 0))


def test_a_cpu_is_refused_and_the_setting_is_off() -> None:
    with pytest.raises(ValueError, match="draft_attention is 'ours' on cpu"):
        attention.BlockAttention(layer(), torch.device("cpu"))
    assert settings.read({}).draft_attention == "stock"
    given = {"dspark_k3": {"draft_attention": "ours"}}
    assert settings.read(given).draft_attention == "ours"


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[40], [150, 7, 0], [191, 33, 64, 8, 0, 0, 0, 0]])
def test_on_a_gpu_beside_vllms_kernel(lengths: list[int]) -> None:
    """Both against fp32: ours is not further off than twice what vLLM's is."""
    pytest.importorskip("vllm.v1.attention.ops.triton_decode_attention")
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    query, cache, metadata = step(lengths, 7, device="cuda")
    found, _ = attention.BlockAttention(layer(), torch.device("cuda", 0))(
        query, cache, metadata, None
    )
    exact, _ = stock(query.float(), cache.float(), metadata, layer())
    decode = metadata.decode
    theirs = torch.zeros_like(found)
    splits = 4
    decode_attention_fwd(
        query,
        cache.unsqueeze(2),
        cache.unsqueeze(2)[..., :LATENT],
        theirs,
        torch.zeros(len(query), HEADS, device="cuda", dtype=query.dtype),
        decode.block_table.repeat_interleave(7, 0),
        decode.seq_lens.repeat_interleave(7),
        torch.empty(len(query), HEADS, splits, LATENT + 1, device="cuda"),
        splits,
        SCALE,
        PAGE,
    )
    # Of a request without keys vLLM's rows are NaN.
    live = 7 * sum(n > 0 for n in lengths)
    error, other = ((x - exact)[:live].abs().max() for x in (found, theirs))
    assert error <= 2 * other
    assert not found[live:].any()
