# SPDX-License-Identifier: Apache-2.0
"""KDA with one slot a request: the text of vLLM's slots, from fewer of them."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

pytest.importorskip("vllm.models.kimi_k3")

from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention

from dspark_k3 import settings
from dspark_k3.target import executor, fold, scope, slots
from dspark_k3.target import fresh as padded
from tests.dspark_k3 import kda_folds, kda_layers
from tests.dspark_k3.kda_folds import BothEngine
from tests.dspark_k3.test_kda_slots import Engine, K, fresh
from tests.dspark_k3.test_kda_slots import step as run_step
from tests.dspark_k3.test_target_executor import backbone
from verify_kernels import VerifyBatch
from verify_kernels.kda import KdaFoldState, bind_slots
from verify_kernels.kda.host import DIM

STOCK_FORWARD = KimiK3DeltaAttention._forward


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Metadata of the step by layer."""
    torch.manual_seed(0)
    return kda_folds.stand_in(monkeypatch.setattr)


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_order_of_steps_gives_the_bits_of_decoding_alone(
    seed: int, trim: bool, plans: dict[str, Any]
) -> None:
    """Field cases F02, F13: prompt chunks, chunks of one token, drafts, none, trimming,
    acceptance, preemption, slots of former owners; steps of the executor and of vLLM's
    model, prompts among the rows or not."""
    rng = random.Random(seed)
    engine = BothEngine(5, rng, plans)
    live = [fresh(engine, i, rng.choice([2, 3, 9, 40]), rng) for i in range(5)]
    for _ in range(60):
        run_step(engine, rng.sample(live, rng.randint(1, 5)), rng, trim)
        if rng.random() < 0.15:
            gone = rng.choice(live)
            prompt = rng.choice([len(gone.tokens), 2, 9]) or 2
            live[live.index(gone)] = fresh(engine, gone.index, prompt, rng)
    assert all(engine.seen.values()), engine.seen


def plan(engine: Engine, batch: list[Any], widths: list[int], **keywords: Any) -> Any:
    drafted = [width - 1 for width in widths]
    return engine.plan(batch, widths, widths, widths, drafted, **keywords)


def one_column(engine: Engine) -> Engine:
    """As `FoldBuilder` plans."""
    vars(engine.builder).update(spec_state_slots=1)
    return engine


def bound(drafts: int = K) -> fold.KdaFold:
    module = kda_folds.folded(drafts)
    kda_folds.bind_folded(module, 4)
    ours = fold.KdaFold(module, pdl=True)
    ours.prepare_kv()
    return ours


def test_a_request_of_width_one_drafts_and_none_are_one_column() -> None:
    engine = one_column(Engine(3))
    live = kda_layers.requests(3, K)
    metadata = plan(engine, live, [8, 1, 3])
    slots, row_start, _ = bound().step_of(metadata, 12)
    assert slots.tolist() == [[r.slots[0]] for r in live]
    assert row_start.diff().tolist() == [8, 1, 3]


def test_the_builder_stages_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """In graphs at the same addresses at every replay; padding has the null slot."""
    from vllm.models.kimi_k3.nvidia import kda_metadata

    from tests.dspark_k3.test_kda_core import graph_engine

    made: list[tuple[Any, ...]] = []

    def stock(self: Any, *given: Any) -> None:
        made.append(given)
        self.decode_cudagraph_max_bs = 64
        self.spec_state_slots = 1 + K
        self.spec_state_indices_tensor = torch.full((64, 1 + K), 99).int()

    engine = graph_engine(monkeypatch, K)
    monkeypatch.setattr(kda_metadata.KimiK3KDAMetadataBuilder, "__init__", stock)
    spec: Any = object()
    config: Any = object()
    builder = fold.FoldBuilder(spec, ["kda"], config, torch.device("cpu"))
    assert made == [(spec, ["kda"], config, torch.device("cpu"))]
    vars(engine.builder).update(
        spec_state_slots=builder.spec_state_slots,
        spec_state_indices_tensor=builder.spec_state_indices_tensor,
    )
    live, ours = kda_layers.requests(3, K), bound()
    captured = ours.step_of(plan(engine, live[:1], [8], padding=4), 24)
    engine.state.num_accepted_tokens_gpu[:] = torch.tensor([2, 1, 8]).int()
    replayed = ours.step_of(plan(engine, live, [8, 1, 3], padding=2), 24)
    for before, after in zip(captured, replayed, strict=True):
        assert before.data_ptr() == after.data_ptr()
        assert before.shape == after.shape and before.stride() == after.stride()
    slots, row_start, accepted = captured
    assert slots.tolist() == [[1], [9], [17], [0], [0]]
    assert row_start.tolist() == [0, 8, 9, 12, 12, 12]
    assert accepted.tolist() == [2, 1, 8, 1, 1]


def test_its_backend_is_the_layers() -> None:
    module = kda_folds.folded()
    assert module.get_attn_backend() is fold.FoldBackend
    assert fold.FoldBackend.get_builder_cls() is fold.FoldBuilder
    assert fold.FoldBackend.supports_device_cpu_query_lens_mismatch()


@pytest.mark.parametrize("path", ["executor", "model"])
def test_null_slots_read_and_write_nothing(path: str, plans: dict[str, Any]) -> None:
    """A capture's dummy step, and the requests that pad a graph."""
    engine = one_column(Engine(2))
    ours = bound()
    module = ours._module
    before = [cache.clone() for cache in module.kv_cache]
    plans["kda"] = plan(engine, kda_layers.requests(2, K), [3, 2])
    plans["kda"].spec_state_indices_tensor = torch.zeros(2, 1).int()
    hidden = torch.full((8, kda_layers.HIDDEN), torch.nan).bfloat16()
    hidden[:5] = 1.0
    run: Any = ours if path == "executor" else module.forward
    assert not run(hidden, torch.arange(8))[:5].any()
    for cache, kept in zip(module.kv_cache, before, strict=True):
        assert torch.equal(cache.view(torch.int8), kept.view(torch.int8))


def test_no_metadata_is_no_step(plans: dict[str, Any]) -> None:
    """vLLM's memory profile, before there is an executor."""
    module = kda_folds.folded()
    hidden = torch.ones(3, kda_layers.HIDDEN).bfloat16()
    assert not module.forward(hidden, torch.arange(3)).any()


def test_decodes_that_are_no_verify_rows_are_folded_too(plans: dict[str, Any]) -> None:
    """Alone, more than 64, and beside verify rows, which 0.33 does not plan."""
    ours = bound()
    many = SimpleNamespace(
        num_spec_decodes=0,
        non_spec_state_indices_tensor=torch.arange(70, dtype=torch.int32),
    )
    slots, starts, accepted = ours.step_of(many, 70)
    assert slots.shape == (70, 1) and starts.tolist() == list(range(71))
    assert accepted.tolist() == [1] * 70 and starts.dtype == torch.int32
    engine = one_column(Engine(2))
    mixed = plan(engine, kda_layers.requests(2, 0), [1, 1])
    hidden = torch.stack([kda_folds.embedded(i) for i in range(3)])
    module = ours._module
    first = [cache.clone() for cache in module.kv_cache]

    def start(slot: int) -> None:
        for cache, kept in zip(module.kv_cache, first, strict=True):
            cache.copy_(kept)
        for cache in module.kv_cache:
            cache[1:3] = 0
        ours.commit(torch.tensor([slot]).int(), torch.zeros(1).int())

    wanted = []
    for slot, rows in ((1, [0, 2]), (2, [1])):
        start(slot)
        plans["kda"] = replace(
            mixed,
            spec_state_indices_tensor=torch.tensor([[slot]]).int(),
            spec_query_start_loc=torch.tensor([0, len(rows)]).int(),
            num_accepted_tokens=torch.ones(1).int(),
            num_spec_decodes=1,
        )
        wanted.append(ours(hidden[rows], torch.arange(len(rows))))
    start(1)
    plans["kda"] = replace(
        mixed,
        num_spec_decodes=1,
        num_spec_decode_tokens=2,
        num_decodes=1,
        num_decode_tokens=1,
        num_actual_tokens=3,
        spec_state_indices_tensor=torch.tensor([[1]]).int(),
        spec_query_start_loc=torch.tensor([0, 2]).int(),
        num_accepted_tokens=torch.ones(1).int(),
        non_spec_state_indices_tensor=torch.tensor([2]).int(),
        spec_token_indx=torch.tensor([0, 2]),
        non_spec_token_indx=torch.tensor([1]),
        spec_token_start=None,
    )
    found = module.forward(hidden, torch.arange(3))
    assert torch.equal(found[[0, 2]], wanted[0])
    assert torch.equal(found[[1]], wanted[1])


class MachineSlots:
    """The kernels' PTX on the CPU (`tests.verify_kernels.machine`)."""

    def __init__(self, weights: Any, cache: KdaFoldState, rows: int, *, pdl: bool):
        from tests.verify_kernels.test_kda_slots import on_machine

        self._weights, self._form = weights, on_machine(8)

    def __call__(
        self,
        packed: Tensor,
        cache: KdaFoldState,
        slots: Tensor,
        row_start: Tensor,
        accepted: Tensor,
        out: Tensor,
    ) -> None:
        batch = VerifyBatch(
            row_start, torch.zeros_like(accepted), slots[:, 0], accepted
        )
        self._form.step(packed, self._weights, cache, batch, out)

    def commit(self, cache: KdaFoldState, slots: Tensor, accepted: Tensor) -> None:
        self._form.commit(cache, slots, accepted)


@pytest.mark.parametrize("drafts", [K, 2])
def test_the_kernels_run_in_vllms_pages(
    monkeypatch: pytest.MonkeyPatch, plans: dict[str, Any], drafts: int
) -> None:
    """A prompt, two verify steps and a commit in pages longer than their contents: the
    reference's results, and no slot but its own is written."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    found = []
    for launch in (kda_folds.ReferenceSlots, MachineSlots):
        monkeypatch.setattr(fold, "bind_slots", launch)
        torch.manual_seed(1)
        ours = bound(drafts)
        module = ours._module
        slots = torch.tensor([1, 3]).int()
        ours.commit(slots, torch.zeros(2).int())
        generator = torch.Generator().manual_seed(2)
        for cache in module.kv_cache[:2]:
            values = torch.randn(2, *cache.shape[1:], generator=generator)
            cache[[1, 3]] = values.to(cache.dtype)
        outs = []
        for widths, told in (([1 + drafts, 2], [1, 1]), ([2, 1 + drafts], [3, 1])):
            engine = one_column(Engine(2, drafts))
            live = kda_layers.requests(2, drafts)
            for request, slot in zip(live, slots.tolist(), strict=True):
                request.slots[0] = slot
            engine.state.num_accepted_tokens_gpu[:] = torch.tensor(told).int()
            plans["kda"] = plan(engine, live, widths)
            rows = torch.randn(sum(widths), kda_layers.HIDDEN, generator=generator)
            outs.append(ours(rows.bfloat16(), torch.arange(len(rows))))
        ours.commit(slots, torch.tensor([2, 1 + drafts]).int())
        found.append((torch.cat(outs), ours._cache()))
    (out, cache), (own_out, own) = found
    torch.testing.assert_close(own_out, out, atol=2**-6, rtol=2**-6)
    assert torch.equal(own.window[[1, 3]][:, :3], cache.window[[1, 3]][:, :3])
    assert torch.equal(own.counts, cache.counts)
    assert not own.counts[[1, 3]].any()
    torch.testing.assert_close(
        own.state[[1, 3]], cache.state[[1, 3]], atol=1e-5, rtol=1e-5
    )
    for name in ("state", "window", "u", "key", "decay", "counts"):
        raw = getattr(own, name)[[0, 2]].contiguous().view(torch.int8)
        assert (raw == -1).all(), name


@pytest.mark.parametrize("heads", [96, 48, 24, 12, 6, 3, 2])
@pytest.mark.parametrize("drafts", [1, K])
def test_pages_are_what_is_said_and_fit_the_kernels(
    monkeypatch: pytest.MonkeyPatch, heads: int, drafts: int
) -> None:
    """TP 1 to 32: vLLM's spec of the layer, one block a request; all is checked, and
    then a GPU is missing."""
    monkeypatch.setattr(kda_folds, "HEADS", heads)
    module = kda_folds.folded(drafts)
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            mamba_block_size=1024,
            mamba_page_size_padded=None,
            mamba_cache_mode="none",
            use_replayssm=False,
        ),
        num_speculative_tokens=drafts,
    )
    spec = module.get_kv_cache_spec(config)
    memory = slots.slot_memory(1, heads, drafts, "fold")
    assert spec.num_speculative_blocks == 0
    assert (memory.slots, memory.page_bytes) == (1, spec.page_size_bytes)
    assert spec.max_memory_usage_bytes(config) == memory.request_bytes
    assert spec.page_size_bytes % 16 == 0
    vllms: Any = kda_folds.folded(drafts)
    vllms.__class__ = KimiK3DeltaAttention
    stock = vllms.get_kv_cache_spec(config)
    memory = slots.slot_memory(1, heads, drafts, "snapshot")
    assert memory.slots == 1 + stock.num_speculative_blocks
    assert stock.max_memory_usage_bytes(config) == memory.request_bytes

    monkeypatch.setattr(fold, "bind_slots", bind_slots)
    mla = 128 * 576 * 2
    for page in (spec.page_size_bytes, -(-spec.page_size_bytes // mla) * mla):
        kda_folds.bind_folded(module, 3, page)
        with pytest.raises(ValueError, match="state is on cpu") as error:
            fold.KdaFold(module, pdl=True).prepare_kv()
        assert str(error.value).startswith("kda: our KDA kernel does not serve one")
        assert str(error.value).endswith(scope.SNAPSHOT_LAYOUT)


@pytest.mark.parametrize(
    ("heads", "snapshot", "folded"),
    [(96, 3880, 566), (12, 485, 70.8), (6, 242.5, 35.4)],
)
def test_k3s_states_take_a_seventh(heads: int, snapshot: float, folded: float) -> None:
    """TP 1, 8 and 16, k = 7, MB a request on each rank."""
    for layout, wanted in (("snapshot", snapshot), ("fold", folded)):
        found = slots.slot_memory(69, heads, K, layout).request_bytes  # type: ignore[arg-type]
        assert found / 1e6 == pytest.approx(wanted, rel=2e-3)
    plain = slots.slot_memory(69, heads, 0, "fold")
    assert plain == slots.slot_memory(69, heads, 0, "snapshot")


def deployment(layout: str, drafts: int, tp: int = 8) -> Any:
    linear = {
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "kda_layers": list(range(69)),
    }
    text = SimpleNamespace(linear_attn_config=linear)
    return SimpleNamespace(
        additional_config={"dspark_k3": {"target": True, "kda_layout": layout}},
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, hf_config=text, hf_text_config=text
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        cache_config=SimpleNamespace(
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto",
            use_kda_recoverssm=False,
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts)
        if drafts
        else None,
        num_speculative_tokens=drafts,
    )


def test_the_log_says_what_both_layouts_take() -> None:
    assert slots.describe(deployment("fold", K), "fold") == (
        "KDA state slots of a request, layout fold; snapshot: 8 of 0.88 MB a layer, "
        "485.0 MB in all; fold: 1 of 1.03 MB a layer, 70.8 MB in all"
    )


@pytest.mark.parametrize(
    ("layout", "drafts", "more"), [("fold", K, 4), ("fold", 0, 0), ("snapshot", K, 0)]
)
def test_classes_count_the_records_of_those_who_asked(
    layout: str, drafts: int, more: int
) -> None:
    """By them vLLM makes attention blocks as long as a page of states."""
    from vllm.models.kimi_k3 import KimiLinearForCausalLM as Stock

    kda_folds.folded()
    kda_folds.folded()
    config = deployment(layout, drafts)
    shapes = Stock.get_mamba_state_shape_from_config(config)
    dtypes = Stock.get_mamba_state_dtype_from_config(config)
    assert len(shapes) == len(dtypes) == 2 + more
    page = sum(prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
    memory = slots.slot_memory(69, 12, drafts, layout)  # type: ignore[arg-type]
    assert page == memory.page_bytes


def test_the_executor_folds_in_folded_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def maker(name: str) -> Any:
        def make(module: Any, *, pdl: bool) -> None:
            made.append(name)

        return make

    for name in ("KdaFold", "KdaVerify"):
        monkeypatch.setattr(executor, name, maker(name))
    each = backbone().layers[1]
    ops = dict.fromkeys(settings.OPS, "stock") | {"kda": "ours", "kda_core": "ours"}
    asked = settings.read(
        {"dspark_k3": {"target": True, "ops": ops, "kda_layout": "fold"}}
    )
    executor.Layer(each, asked)
    attention = each.self_attn
    each.self_attn = kda_folds.folded()
    vars(each.self_attn)["in_proj_qkvgfab"] = attention.in_proj_qkvgfab
    executor.Layer(each, asked)
    assert made == ["KdaVerify", "KdaFold"]


def test_a_slot_that_is_cleared_counts_no_rows() -> None:
    """A padded prompt of one token begins as a verify row (`fresh`)."""
    ours = bound()
    layers = [SimpleNamespace(self_attn=each) for each in (ours._module, object())]
    caches = padded.kda_caches(layers)
    groups = [SimpleNamespace(layer_names=["kda"])]
    padded.clear_states([1], [torch.tensor([[1], [2]])], groups, caches)
    cache = ours._cache()
    assert not cache.counts[2].any() and not cache.state[2].any()
    assert (cache.counts[[1, 3]] == -1).all()


def test_vllm_gives_a_request_one_block() -> None:
    """By its own manager of states, from the first chunk to the longest sequence."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager
    from vllm.v1.kv_cache_interface import MambaSpec

    shapes = ((10, 768), (2, DIM, DIM), *slots.record_shapes(2))
    kinds = (torch.bfloat16, torch.float32, *slots.RECORD_DTYPES)
    for drafts, wanted in ((0, 1), (K, 1 + K)):
        spec = MambaSpec(
            block_size=1024,
            shapes=shapes,
            dtypes=kinds,
            num_speculative_blocks=drafts,
        )
        pool = BlockPool(20, False, 1024)
        manager = MambaManager(
            spec,
            block_pool=pool,
            enable_caching=False,
            kv_cache_group_id=0,
            scheduler_block_size=1024,
        )
        held = 0
        for tokens in (5, 200, 1024):
            held += len(manager.allocate_new_blocks("request", tokens, tokens))
        assert held == wanted


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    metadata: Any,
) -> Tensor:
    """vLLM's, with windows [slots, channels, entries]."""
    out, starts = torch.empty_like(x), query_start_loc.tolist()
    for j, begin in enumerate(starts[:-1]):
        end, held = starts[j + 1], conv_states[int(cache_indices[j])]
        past = held[:, :3] * has_initial_state[j]
        past = torch.where(has_initial_state[j], past, torch.zeros_like(past))
        line = torch.cat((past, x[:, begin:end]), 1).float()
        taps = torch.stack([line[:, i : i + end - begin] for i in range(4)], -1)
        out[:, begin:end] = silu((taps * weight[:, None]).sum(-1))
        held[:, :3] = line[:, -3:]
    return out


def chunk_kda(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    out: None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """vLLM's, row by row."""
    found, last = torch.empty_like(v), initial_state.clone()
    rate = A_log.exp()[:, None]
    starts = cu_seqlens.tolist()
    for j in range(len(last)):
        for t in range(starts[j], starts[j + 1]):
            query, key, value = (x[0, t].float() for x in (q, k, v))
            query, key = (
                torch.nn.functional.normalize(x, dim=-1) for x in (query, key)
            )
            raw = raw_g[0, t].float() + g_bias.view_as(key)
            last[j] *= (lower_bound * torch.sigmoid(rate * raw)).exp()[:, None]
            error = value - (last[j] * key[:, None]).sum(-1)
            u = torch.sigmoid(raw_beta[0, t].float())[:, None] * error
            last[j] += u[:, :, None] * key[:, None]
            found[0, t] = (last[j] * query[:, None]).sum(-1) * DIM**-0.5
    return found, last


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1]])
def test_prompts_go_through_vllms_forward(
    monkeypatch: pytest.MonkeyPatch, plans: dict[str, Any], order: list[int]
) -> None:
    """Its own code on the plan without the verify rows, which are neighbours, are
    apart, or are none; only its kernels are stood in for."""
    from vllm.models.kimi_k3.nvidia import kda as stock
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda as kernels

    def gather(state: Tensor, slots: Tensor, kept: Tensor) -> Tensor:
        found = torch.where(kept[:, None, None, None], state[slots], 0.0)
        return torch.as_tensor(found)

    engine, found = one_column(Engine(3)), []
    live = kda_layers.requests(3, K)
    # The first decodes, the second goes on after four tokens, the third begins.
    live[1].prompt, live[2].prompt, live[2].computed = 9, 6, 0
    widths = [[3, 5, 6][i] for i in order]
    drafted = [[2, 0, 0][i] for i in order]
    hidden = torch.stack([kda_folds.embedded(i) for i in range(sum(widths))])
    stub = KimiK3DeltaAttention._forward
    for forward in (stub, STOCK_FORWARD):
        monkeypatch.setattr(KimiK3DeltaAttention, "_forward", forward)
        monkeypatch.setattr(stock, "causal_conv1d_fn", causal_conv)
        monkeypatch.setattr(stock, "gather_initial_states", gather)
        monkeypatch.setattr(kernels, "chunk_kda_with_fused_gate", chunk_kda)
        torch.manual_seed(3)
        module = kda_folds.folded()
        kda_folds.bind_folded(module, 1 + 3 * (1 + K))
        ours = fold.KdaFold(module, pdl=True)
        ours.prepare_kv()
        for cache in module.kv_cache[:2]:
            cache[[1, 9]] = torch.randn(2, *cache.shape[1:]).to(cache.dtype)
        module.kv_cache[-1][[1, 9]] = 0
        batch = [live[i] for i in order]
        plans["kda"] = engine.plan(batch, widths, widths, widths, drafted)
        neighbours = plans["kda"].spec_token_start is not None
        assert neighbours == (order == [0, 1, 2])
        out = module.forward(hidden, torch.arange(len(hidden)))
        found.append((out, *(cache[[1, 9, 17]] for cache in module.kv_cache[:2])))
        assert not module.kv_cache[-1][[9, 17], :, 0].any()
    (wanted, window, state), (out, own_window, own_state) = found
    torch.testing.assert_close(out, wanted, atol=2**-5, rtol=2**-5)
    assert torch.equal(own_window[1:, :3], window[1:, :3])
    torch.testing.assert_close(own_state[1:], state[1:], atol=2**-6, rtol=2**-6)
