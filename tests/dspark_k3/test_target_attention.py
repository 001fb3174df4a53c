# SPDX-License-Identifier: Apache-2.0
"""The ragged MLA backend's plan, on the CPU: what FlashAttention is told."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.dspark_k3 import ragged_mla as fakes


@pytest.fixture(scope="module")
def attention() -> Iterator[ModuleType]:
    with fakes.attention_module() as module:
        yield module


class Scheduler:
    """FlashAttention 3's `get_scheduler_metadata`, recording what it was told.

    Gives as many words as hopper/flash_api.cpp does: a length of 1 is not causal, and
    only the causal kernel has the fourth vector.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **told: Any) -> torch.Tensor:
        self.calls.append(told)
        causal = told["causal"] and told["max_seqlen_q"] > 1
        rounded = -(-told["batch_size"] // 4) * 4
        return torch.ones(1 + (3 + causal) * rounded, dtype=torch.int32)


@pytest.fixture
def scheduler(attention: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    import vllm.v1.attention.backends.mla.flashattn_mla as flash

    made = Scheduler()
    monkeypatch.setattr(flash, "get_scheduler_metadata", made)
    monkeypatch.setattr(flash, "get_flash_attn_version", lambda: 3)
    return made


def build_step(
    builder: Any,
    widths: Sequence[int],
    host: Sequence[int],
    *,
    longest: int,
    rows: int | None = None,
    capture: bool = False,
) -> Any:
    row_start = fakes.offsets(widths)
    batch = fakes.common(
        row_start,
        host,
        row_start.diff() + 100,
        torch.zeros(len(widths), 4, dtype=torch.int32),
        rows=sum(widths) if rows is None else rows,
        longest=longest,
    )
    if capture:
        return builder.build_for_cudagraph_capture(batch)
    return builder.build(0, batch)


def adaptive(
    rng: random.Random, requests: int, k: int
) -> tuple[list[int], list[int], int]:
    """Device widths, host widths and rows scheduled for the widest request of a step
    that was trimmed to a random budget."""
    drafts = sorted((rng.randint(0, k) for _ in range(requests)), reverse=True)
    admitted = [rng.choice([0, rng.randint(0, d), d]) for d in drafts]
    scheduled = [1 + d for d in drafts]
    host = fakes.even_split(scheduled, drafts, sum(admitted))
    return [1 + a for a in admitted], host, max(scheduled)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_plan_covers_the_device_whatever_the_host_was_told(
    attention: ModuleType, scheduler: Scheduler, k: int
) -> None:
    rng = random.Random(k)
    builder = fakes.build(
        attention.RaggedFlashAttnMLABuilder, fakes.config(drafts=k), "cpu"
    )
    understated = 0
    for _ in range(200):
        widths, host, longest = adaptive(rng, rng.randint(1, 8), k)
        assert sum(widths) == sum(host)
        decode = build_step(builder, widths, host, longest=longest).decode
        assert decode.max_query_len == k + 1 >= max(widths)
        assert scheduler.calls[-1]["max_seqlen_q"] == k + 1
        assert decode.query_start_loc.diff().tolist() == widths
        assert scheduler.calls[-1]["cu_seqlens_q"].diff().tolist() == widths
        assert (scheduler.calls[-1]["cache_seqlens"] == decode.seq_lens).all()
        understated += max(host) < max(widths)
    # With one draft an even split is never narrower than the device's.
    assert understated == 0 if k == 1 else understated > 20


@pytest.mark.parametrize(("rows", "requests"), [(1, 1), (8, 8), (24, 8), (64, 8)])
def test_capture_and_every_replay_have_one_plan(
    attention: ModuleType, scheduler: Scheduler, rows: int, requests: int
) -> None:
    rng = random.Random(rows)
    builder = fakes.build(attention.RaggedFlashAttnMLABuilder, fakes.config(), "cpu")
    dummy = [rows // requests] * requests
    captured = build_step(builder, dummy, dummy, longest=8, capture=True).decode
    for _ in range(50):
        live = rng.randint(1, requests)
        widths, host, longest = adaptive(rng, live, 7)
        if sum(widths) > rows:
            continue
        padding = [0] * (requests - live)
        decode = build_step(
            builder, widths + padding, host + padding, longest=longest, rows=rows
        ).decode
        for name in ("max_query_len", "max_num_splits"):
            assert getattr(decode, name) == getattr(captured, name)
        words = captured.scheduler_metadata
        assert decode.scheduler_metadata.data_ptr() == words.data_ptr()
        assert decode.scheduler_metadata.shape == words.shape
        assert builder.scheduler_metadata[len(words) :].eq(0).all()


def test_vllms_own_plan_changes_between_capture_and_replay(
    attention: ModuleType, scheduler: Scheduler
) -> None:
    # What the subclass is there for; if vLLM mends it, the subclass can go.
    builder = fakes.build(attention.FlashAttnMLAMetadataBuilder, fakes.config(), "cpu")
    captured = build_step(builder, [1] * 8, [1] * 8, longest=8, capture=True).decode
    replayed = build_step(builder, [5, 1, 1, 1], [2] * 4, longest=8).decode
    assert (captured.max_query_len, replayed.max_query_len) == (1, 2)


@pytest.mark.parametrize("chunk", [9, 100, 512])
def test_short_prompt_chunks_on_the_decode_path(
    attention: ModuleType, scheduler: Scheduler, chunk: int
) -> None:
    builder = fakes.build(attention.RaggedFlashAttnMLABuilder, fakes.config(), "cpu")
    host = fakes.even_split([8, 8, chunk], [7, 7, 0], 8)
    assert host == [5, 5, chunk]
    metadata = build_step(builder, [8, 2, chunk], host, longest=chunk)
    assert metadata.num_prefills == 0
    assert metadata.decode.max_query_len == chunk


def test_long_prompts_leave_the_decodes_their_width(
    attention: ModuleType, scheduler: Scheduler
) -> None:
    builder = fakes.build(attention.RaggedFlashAttnMLABuilder, fakes.config(), "cpu")
    host = fakes.even_split([8, 8, 600], [7, 7, 0], 6)
    metadata = build_step(builder, [7, 1, 600], host, longest=600)
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert metadata.num_decode_tokens == 8
    assert metadata.decode.max_query_len == 8
    assert metadata.prefill.query_start_loc.tolist() == [0, 600]


def test_without_speculation_nothing_changes(
    attention: ModuleType, scheduler: Scheduler
) -> None:
    ours, stock = (
        fakes.build(cls, fakes.config(drafts=0), "cpu")
        for cls in (
            attention.RaggedFlashAttnMLABuilder,
            attention.FlashAttnMLAMetadataBuilder,
        )
    )
    for widths in ([1], [1] * 8, [1, 1, 1, 0]):
        plans = [
            build_step(builder, widths, widths, longest=1).decode.max_query_len
            for builder in (ours, stock)
        ]
        assert plans == [1, 1]


def test_a_metadata_buffer_that_is_too_small_is_refused(
    attention: ModuleType, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.v1.attention.backends.mla.flashattn_mla as flash

    monkeypatch.setattr(flash, "round_up", lambda count, multiple: 4)
    with pytest.raises(RuntimeError, match=r"holds 17 words.*=8 needs up to 33"):
        fakes.build(attention.RaggedFlashAttnMLABuilder, fakes.config(), "cpu")


@pytest.mark.parametrize("requests", [1, 3, 4, 5, 64, 257])
def test_metadata_words_are_flash_attentions(
    attention: ModuleType, requests: int
) -> None:
    words = Scheduler()(batch_size=requests, causal=True, max_seqlen_q=8)
    assert attention.metadata_words(requests) == len(words)


def test_vllms_start_up_checks_refuse_stock_and_pass_ours(
    attention: ModuleType, scheduler: Scheduler
) -> None:
    from vllm.v1.worker.gpu import attn_utils

    vllm_config = fakes.config()

    def group(backend: Any) -> Any:
        made = fakes.build(backend.get_builder_cls(), vllm_config, "cpu")
        return SimpleNamespace(
            backend=backend,
            layer_names=[fakes.LAYER],
            kv_cache_spec=made.kv_cache_spec,
            get_metadata_builder=lambda ubatch: made,
        )

    def refused(backend: Any, width: int) -> Any:
        return attn_utils.get_varlen_cudagraph_unsupported_backend(
            [[group(backend)]], vllm_config, width
        )

    assert refused(attention.FlashAttnMLABackend, 8) == ("FlashAttnMLABackend", None)
    assert refused(attention.RaggedFlashAttnMLABackend, 8) is None
    assert refused(attention.RaggedFlashAttnMLABackend, 9) == (
        "RaggedFlashAttnMLABackend",
        8,
    )
    ours = [[group(attention.RaggedFlashAttnMLABackend)]]
    assert attn_utils.get_query_lens_mismatch_unsupported_backend(ours) is None


@pytest.mark.parametrize(("k", "bound"), [(0, 1), (1, 2), (7, 8), (12, 8)])
def test_bound_is_the_widest_request_up_to_eight(
    attention: ModuleType, k: int, bound: int
) -> None:
    cls = attention.RaggedFlashAttnMLABuilder
    made = cls.get_varlen_cudagraph_max_query_len(fakes.config(drafts=k), None)
    assert made == bound


def layer(backend: Any) -> torch.nn.Module:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Layer(torch.nn.Module, AttentionLayerBase):
        def __init__(self) -> None:
            super().__init__()
            self.attn_backend = backend

        def get_attn_backend(self) -> Any:
            return self.attn_backend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return None

    return Layer()


def test_only_the_models_own_mla_layers_change(attention: ModuleType) -> None:
    from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAAttentionBackend

    stock = attention.FlashAttnMLABackend
    model, other = (
        torch.nn.ModuleDict(
            {
                "kda": layer(KimiK3KDAAttentionBackend),
                "mla": layer(stock),
                "mlp": torch.nn.Linear(2, 2),
            }
        )
        for _ in range(2)
    )
    for _ in range(2):
        assert attention.use_ragged_mla(model) == ["mla"]
        ragged = attention.RaggedFlashAttnMLABackend
        assert model["mla"].get_attn_backend() is ragged
        assert model["kda"].get_attn_backend() is KimiK3KDAAttentionBackend
        assert other["mla"].get_attn_backend() is stock
    assert ragged.get_impl_cls() is stock.get_impl_cls()
    assert ragged.get_name() == "FLASH_ATTN_MLA"


def test_another_backend_is_refused_and_nothing_changed(attention: ModuleType) -> None:
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

    stock = attention.FlashAttnMLABackend
    model = torch.nn.ModuleDict({"a": layer(stock), "b": layer(TritonMLABackend)})
    with pytest.raises(ValueError, match=r"layer b uses TRITON_MLA.*leave --attention"):
        attention.use_ragged_mla(model)
    assert model["a"].get_attn_backend() is stock
