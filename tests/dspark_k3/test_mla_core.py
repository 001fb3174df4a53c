# SPDX-License-Identifier: Apache-2.0
"""MLA between its projections: what it is bound to, what it takes a step for, its
numbers. vLLM's builder plans the steps; our launches are torch."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm.models.kimi_k3")

from vllm.config import CUDAGraphMode

from dspark_k3 import settings
from dspark_k3.target import executor, mla, scope
from tests.dspark_k3 import mla_layers, ragged_mla
from tests.dspark_k3.mla_layers import HIDDEN, LATENT, LINE, NOPE, Launches, layer, step
from tests.dspark_k3.test_target_executor import backbone
from verify_kernels import VerifyBatch
from verify_kernels import mla as kernels
from verify_kernels.mla.reference import verify

PAGE = 16


@pytest.fixture(autouse=True)
def replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Launches, dict[str, Any]]]:
    torch.manual_seed(0)
    yield mla_layers.stand_in(monkeypatch.setattr)
    mla._space.cache_clear()


@pytest.fixture
def launches(replaced: tuple[Launches, dict[str, Any]]) -> Launches:
    return replaced[0]


@pytest.fixture
def plans(replaced: tuple[Launches, dict[str, Any]]) -> dict[str, Any]:
    """Metadata of the step by layer."""
    return replaced[1]


def bound(pages: int = 9, *, heads: int = 2, pdl: bool = True) -> mla.MlaVerify:
    module = layer(heads)
    mla_layers.bind_pages(module, pages, PAGE)
    ours = mla.MlaVerify(module, pdl=pdl)
    ours.prepare_kv()
    return ours


def rows_of(count: int) -> Tensor:
    return torch.randn(count, HIDDEN).bfloat16()


def test_the_weights_are_where_vllms_are() -> None:
    module = layer(heads=3)
    ours = mla.MlaVerify(module, pdl=True)
    loaded = module.kv_b_proj.weight.view(3, -1, LATENT)
    for weight, theirs in (
        (ours._w_uk, loaded[:, :NOPE]),
        (ours._w_uv, loaded[:, NOPE:]),
    ):
        assert weight.data_ptr() == theirs.data_ptr()
        assert weight.stride() == theirs.stride()
        assert torch.equal(weight, theirs)


def test_weights_in_another_order_are_copied_once() -> None:
    """As after a dequantisation that gives [latent, ...]."""
    module = layer()
    wanted = module.W_UK_T.clone(), module.W_UV.transpose(1, 2).clone()
    module.W_UK_T.data = module.W_UK_T.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    module.W_UV.data = module.W_UV.contiguous()
    ours = mla.MlaVerify(module, pdl=True)
    for weight, values in zip((ours._w_uk, ours._w_uv), wanted, strict=True):
        assert weight.is_contiguous() and torch.equal(weight, values)


CHANGES: list[tuple[str, Any, str]] = [
    ("kv_lora_rank", 256, "kv_lora_rank 256, not 512"),
    ("qk_nope_head_dim", 64, "qk_nope_head_dim 64, not 128"),
    ("qk_rope_head_dim", 0, "qk_rope_head_dim 0, not 64"),
    ("v_head_dim", 64, "v_head_dim 64, not 128"),
    ("q_lora_rank", 512, "q_lora_rank 512, not "),
    ("kv_cache_dtype", "fp8", "kv_cache_dtype fp8, not auto or bfloat16"),
    ("dcp_world_size", 2, "dcp_world_size 2, not 1"),
    ("num_local_heads", 97, "97 heads a rank, not 1 to 96"),
    ("rotary_emb", object(), "a rotary embedding"),
    ("use_output_gate", False, "no output gate"),
    ("kv_a_layernorm", SimpleNamespace(weight=torch.ones(512)), "kv_a_layernorm in"),
]


@pytest.mark.parametrize(("name", "value", "words"), CHANGES)
def test_another_layer_is_refused(name: str, value: Any, words: str) -> None:
    module = layer()
    vars(module)[name] = value
    (found,) = mla.differences(module)
    assert found.startswith(words)


def test_a_refusal_names_all_that_differs() -> None:
    module = layer()
    vars(module).update({name: value for name, value, _ in CHANGES})
    module.W_UV.data = module.W_UV.half()
    with pytest.raises(ValueError, match=r"W_UV in torch\.float16") as error:
        mla.MlaVerify(module, pdl=True)
    assert all(words in str(error.value) for *_, words in CHANGES)
    assert str(error.value).startswith("mla: our MLA kernels do not compute this layer")
    assert str(error.value).endswith(scope.STOCK_MLA)
    assert mla.differences(layer()) == []


def test_full_rank_queries_are_refused() -> None:
    """Kimi Linear's: no latent to normalise, and no norm for it."""
    module = layer()
    vars(module).update(q_lora_rank=None)
    del vars(module)["q_a_layernorm"]
    (found,) = mla.differences(module)
    assert found.startswith("q_lora_rank None")


def test_a_quantised_projection_is_refused() -> None:
    module = layer()
    module.q_b_proj.weight = module.q_b_proj.weight.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"a torch\.float8_e4m3fn weight"):
        mla.MlaVerify(module, pdl=True)


@pytest.mark.parametrize("page", [16, 64, 128, 144])
@pytest.mark.parametrize("between", [0, 8])
def test_vllms_pages_fit(page: int, between: int) -> None:
    """Pages that are lengthened to hold a KDA state, and such with bytes behind."""
    module = layer()
    mla_layers.bind_pages(module, 3, page, between)
    mla.MlaVerify(module, pdl=True).prepare_kv()


def other_type(module: Any) -> None:
    vars(module)["kv_cache"] = module.kv_cache.to(torch.float8_e4m3fn)


def other_page(module: Any) -> None:
    mla_layers.bind_pages(module, 3, 24)


def other_line(module: Any) -> None:
    vars(module)["kv_cache"] = torch.zeros(3, PAGE, 656, dtype=torch.uint8)


def other_order(module: Any) -> None:
    turned = module.kv_cache.transpose(1, 2).contiguous().transpose(1, 2)
    vars(module)["kv_cache"] = turned


def odd_bytes(module: Any) -> None:
    mla_layers.bind_pages(module, 3, PAGE, 4)


def odd_start(module: Any) -> None:
    raw = torch.zeros(3 * PAGE * LINE + 1).bfloat16()
    vars(module)["kv_cache"] = raw[1:].view(3, PAGE, LINE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_type, "torch.float8_e4m3fn, not torch.bfloat16"),
        (other_page, "pages of 24 tokens, not a multiple of 16"),
        (other_line, r"shape \(3, 16, 656\), not \(pages, tokens, 576\)"),
        (other_order, r"strides \(9216, 1, 16\), not \(\.\.\., 576, 1\)"),
        (odd_bytes, "pages 18440 bytes apart, no multiple of 16"),
        (odd_start, "its start at 0x[0-9a-f]+, no multiple of 16"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_at_start(change: Any, words: str) -> None:
    module = layer()
    mla_layers.bind_pages(module, 3, PAGE)
    change(module)
    ours = mla.MlaVerify(module, pdl=True)
    with pytest.raises(ValueError, match=words) as error:
        ours.prepare_kv()
    assert str(error.value).startswith("mla: our MLA kernels do not serve vLLM's cache")
    assert str(error.value).endswith(scope.STOCK_MLA)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with ragged_mla.attention_module() as module:
        import vllm.v1.attention.backends.mla.flashattn_mla as flash

        monkeypatch.setattr(flash, "get_flash_attn_version", lambda: 2)
        yield module


class Runner:
    """The buffers that vLLM's runner keeps, and metadata over them by its builder.

    After `InputBuffers`, `_prepare_pos_seq_lens_kernel`, `_gather_block_tables_kernel`
    and `AdaptiveVerificationManager.reallocate_drafts`: requests that pad have length 0
    and a zero row of blocks, the offsets behind the last request are the total.
    """

    def __init__(self, attention: ModuleType, most: int = 8, **config: Any) -> None:
        self._most = most
        self._row_start = torch.zeros(most + 1, dtype=torch.int32)
        self._lengths = torch.zeros(most, dtype=torch.int32)
        self._blocks = torch.zeros(most, 4, dtype=torch.int32)
        self._builder = ragged_mla.build(
            attention.RaggedFlashAttnMLABuilder, ragged_mla.config(**config), "cpu"
        )

    def plan(
        self,
        widths: list[int],
        computed: list[int],
        *,
        told: list[int] | None = None,
        rows: int | None = None,
        requests: int | None = None,
    ) -> Any:
        """Metadata of a step; the host is ``told`` other widths under adaptive
        verification, and a graph has ``rows`` and ``requests``."""
        live, total = len(widths), sum(widths)
        padded = requests or live
        self._row_start[1:] = total
        self._row_start[1 : live + 1] = torch.tensor(widths).cumsum(0)
        self._lengths.zero_()
        self._lengths[:live] = torch.tensor(computed) + torch.tensor(widths)
        self._blocks[:padded] = 0
        for request in range(live):
            self._blocks[request] = 1 + 4 * request + torch.arange(4)
        host = [*(told or widths), *[0] * (padded - live)]
        return self._builder.build(
            0,
            ragged_mla.common(
                self._row_start[: padded + 1],
                host,
                self._lengths[:padded],
                self._blocks[:padded],
                rows=rows or total,
                longest=max(host),
                seq_lens_bound=[64] * padded,
            ),
        )


@pytest.mark.parametrize("widths", [[8, 8, 8], [1, 1, 1], [3, 1, 8], [5, 2]])
def test_a_step_is_vllms_tensors(attention: ModuleType, widths: list[int]) -> None:
    """Uniform, without drafts, and ragged."""
    computed = [17, 0, 33][: len(widths)]
    metadata = Runner(attention).plan(widths, computed)
    assert mla.narrow(metadata)
    found = mla.step_of(metadata)
    found.check()
    assert found.row_start.diff().tolist() == widths
    lengths = [c + w for c, w in zip(computed, widths, strict=True)]
    assert found.history.tolist() == found.state_slots.tolist() == lengths
    assert found.block_table is not None
    assert found.block_table[:, 0].tolist() == [1, 5, 9][: len(widths)]
    assert found.block_table.dtype == torch.int32


def test_host_row_counts_are_not_read(attention: ModuleType) -> None:
    """Adaptive verification: the host knows the total, the device the widths."""
    metadata = Runner(attention).plan([8, 2], [9, 9], told=[5, 5])
    found = mla.step_of(metadata)
    assert found.row_start.tolist() == [0, 8, 10]
    assert found.history.tolist() == [17, 11]


@pytest.mark.parametrize("drafts", [0, 7])
def test_a_graphs_step_is_where_its_capture_was(
    attention: ModuleType, drafts: int
) -> None:
    """A captured launch reads the same memory at every replay; the step is there."""
    runner = Runner(attention, drafts=drafts)
    rows, requests = (4, 4) if drafts == 0 else (24, 8)
    dummy = [1] * 4 if drafts == 0 else [3] * 8
    captured = mla.step_of(runner.plan(dummy, [0] * requests))
    widths = [1, 1] if drafts == 0 else [8, 1, 3]
    computed = [7] * len(widths)
    metadata = runner.plan(widths, computed, rows=rows, requests=requests)
    assert mla.narrow(metadata)
    for name in ("row_start", "history", "state_slots", "accepted", "block_table"):
        before, after = getattr(captured, name), getattr(mla.step_of(metadata), name)
        assert before.data_ptr() == after.data_ptr(), name
        assert before.shape == after.shape and before.stride() == after.stride()
    live = len(widths)
    assert captured.row_start.diff().tolist() == [*widths, *[0] * (requests - live)]
    assert captured.state_slots.tolist() == [
        *(7 + w for w in widths),
        *[0] * (requests - live),
    ]


def test_a_prompts_chunk_is_no_step_of_ours(attention: ModuleType) -> None:
    """vLLM's MLA takes it for a decode; KDA's metadata says that it is a prompt."""
    metadata = Runner(attention).plan([8, 9], [9, 0])
    assert metadata.num_prefills == 0 and not mla.narrow(metadata)
    assert mla.narrow(Runner(attention).plan([8, 8], [9, 0]))
    assert not mla.narrow(SimpleNamespace(decode=None))


def in_fp32(ours: mla.MlaVerify, hidden: Tensor, given: Any) -> tuple[Tensor, Tensor]:
    """By the reference: the layer's output and the cache."""
    module, decode = ours._module, given.decode
    cache = module.kv_cache.float()
    history = (decode.seq_lens - decode.query_start_loc.diff()).clamp(min=0)
    batch = VerifyBatch(
        decode.query_start_loc,
        history,
        decode.seq_lens,
        torch.ones_like(history),
        decode.block_table,
    )
    rows = mla_layers.rows_of(module, hidden)
    out = verify(batch, rows, mla_layers.reference(module), cache)
    return out @ module.o_proj.weight.float().T, cache


def test_a_step_is_the_references(plans: dict[str, Any]) -> None:
    """Two requests of several pages each and one whose first row this is; two that pad
    a graph, and rows of nobody. No line but the rows' own is written."""
    ours = bound()
    before = ours._module.kv_cache.clone()
    tables = [[3, 1, 0], [2, 4, 6], [8, 0, 0], [0, 0, 0], [0, 0, 0]]
    plans["mla"] = step([3, 8, 1, 0, 0], [14, 30, 0, -1, -1], tables)
    hidden = rows_of(16)
    wanted, lines = in_fp32(ours, hidden, plans["mla"])
    found = ours(hidden, torch.arange(16))
    # Of values around 1, each rounded to bf16 six times on the way.
    torch.testing.assert_close(found.float(), wanted, atol=0.03, rtol=0.03)
    assert wanted[:12].abs().amax() > 0.5
    assert not found[12:].any() and found[:12].any(-1).all()
    cache = ours._module.kv_cache
    torch.testing.assert_close(cache.float(), lines, atol=2**-6, rtol=2**-6)
    written = {
        (page, token)
        for page, token in itertools.product(range(9), range(PAGE))
        if not torch.equal(cache[page, token], before[page, token])
    }
    assert written == {
        (3, 14),
        (3, 15),
        (1, 0),
        *((4, 14 + i) for i in range(2)),
        *((6, i) for i in range(6)),
        (8, 0),
    }


def test_a_step_of_nobody_writes_nothing(plans: dict[str, Any]) -> None:
    ours = bound()
    before = ours._module.kv_cache.clone()
    plans["mla"] = step([0, 0], [-1, -1], [[0], [0]], longest=1)
    assert not ours(rows_of(4), torch.arange(4)).any()
    assert torch.equal(ours._module.kv_cache, before)


@pytest.mark.parametrize("seed", range(2))
def test_accepted_rows_are_plain_decoding(seed: int, plans: dict[str, Any]) -> None:
    """Field cases F02, F13: random drafts, acceptance and batches against one row a
    step, bit for bit; rejected rows leave nothing that is read."""
    rng = random.Random(seed)
    ours = bound(pages=13)
    alone = mla.MlaVerify(ours._module, pdl=True)
    theirs = ours._module.kv_cache.clone()
    own = ours._module.kv_cache
    tables = [[3, 1, 12, 5], [2, 4, 10, 11], [8, 6, 7, 9]]
    computed = [5, 14, 0]
    for _ in range(6):
        picked = rng.sample(range(3), rng.randint(1, 3))
        widths = [rng.randint(1, 8) for _ in picked]
        hidden = rows_of(sum(widths))
        own_tables = [tables[i] for i in picked]
        plans["mla"] = step(widths, [computed[i] for i in picked], own_tables)
        vars(ours._module)["kv_cache"] = own
        found = ours(hidden, torch.arange(len(hidden)))
        begin = 0
        vars(ours._module)["kv_cache"] = theirs
        for i, width in zip(picked, widths, strict=True):
            for row in range(begin, begin + rng.randint(1, width)):
                plans["mla"] = step([1], [computed[i]], [tables[i]])
                wanted = alone(hidden[row : row + 1], torch.arange(1))
                assert torch.equal(found[row : row + 1], wanted), (i, row)
                computed[i] += 1
            begin += width


def test_the_launches_get_what_the_layer_says(
    launches: Launches, plans: dict[str, Any]
) -> None:
    for pdl in (True, False):
        ours = bound(pdl=pdl)
        vars(ours._module)["scale"] = 0.125
        plans["mla"] = step([2], [3], [[1]])
        launches.calls.clear()
        ours(rows_of(2), torch.arange(2))
        assert launches.calls == [
            ("front", {"eps": 3e-5, "counted": True, "pdl": pdl}),
            ("absorb", {"pdl": pdl}),
            ("attend", {"scale": 0.125, "counted": True, "pdl": pdl}),
            ("value", {"pdl": pdl}),
        ]


@pytest.mark.parametrize(("q_lora", "heads"), [(1536, 6), (1536, 12), (256, 2)])
def test_the_kernels_take_these_arguments(
    monkeypatch: pytest.MonkeyPatch, plans: dict[str, Any], q_lora: int, heads: int
) -> None:
    """All is checked, and then a GPU is missing; shares of K3, and tiny-k3."""
    checked: list[str] = []

    def after_checks(name: str) -> Any:
        launch, stand_in = getattr(kernels, name), getattr(mla, name)

        def run(*tensors: Any, **keywords: Any) -> None:
            with pytest.raises(ValueError, match="the rows are on cpu"):
                launch(*tensors, **keywords)
            checked.append(name)
            stood = [
                f"space of {heads}" if isinstance(x, kernels.MlaSpace) else x
                for x in tensors
            ]
            stand_in(*stood, **keywords)

        return run

    names = ["mla_front", "mla_absorb", "mla_attend", "mla_value"]
    for name in names:
        monkeypatch.setattr(mla, name, after_checks(name))
    monkeypatch.setattr(mla, "MlaSpace", kernels.MlaSpace)
    module = layer(heads, q_lora)
    mla_layers.bind_pages(module, 5, PAGE, 8)
    ours = mla.MlaVerify(module, pdl=True)
    ours.prepare_kv()
    plans["mla"] = step([2, 8, 0], [3, 9, -1], [[1, 0], [2, 3], [0, 0]])
    assert ours(rows_of(16), torch.arange(16))[:10].any(-1).all()
    assert checked == names


def test_layers_share_a_space(launches: Launches) -> None:
    """One after the other; of as many heads, on one device."""
    for heads in (2, 2, 3):
        bound(heads=heads)
    cpu = torch.device("cpu")
    assert launches.allocated == [(2, cpu), (3, cpu)]


def test_the_ranks_sum_the_projected_rows(
    monkeypatch: pytest.MonkeyPatch, plans: dict[str, Any]
) -> None:
    plans["mla"] = step([2], [3], [[1]])
    ours, hidden = bound(), rows_of(2)
    once = ours(hidden, torch.arange(2))
    monkeypatch.setattr(mla, "over_ranks", lambda rows: rows + rows)
    assert torch.equal(ours(hidden, torch.arange(2)), once + once)


def test_a_cache_is_not_kept_alive(plans: dict[str, Any]) -> None:
    """vLLM frees the one that it profiles with, and binds another."""
    ours = bound()
    plans["mla"] = step([2], [3], [[1]])
    ours(rows_of(2), torch.arange(2))
    held = weakref.ref(ours._module.kv_cache)
    mla_layers.bind_pages(ours._module, 3, PAGE)
    assert held() is None
    before = ours._module.kv_cache.clone()
    ours.prepare_kv()
    ours(rows_of(2), torch.arange(2))
    assert not torch.equal(ours._module.kv_cache, before)


@pytest.mark.parametrize("core", ["ours", "stock"])
def test_the_setting_chooses_the_core(
    monkeypatch: pytest.MonkeyPatch, core: str
) -> None:
    made: list[str] = []

    def maker(name: str) -> Any:
        def make(module: Any, *, pdl: bool) -> None:
            made.append(name)

        return make

    for name in ("Mla", "MlaVerify"):
        monkeypatch.setattr(executor, name, maker(name))
    ops = dict.fromkeys(settings.OPS, "stock") | {"mla": "ours", "mla_core": core}
    asked = settings.read({"dspark_k3": {"target": True, "ops": ops}})
    for each in backbone().layers:
        executor.Layer(each, asked)
    assert made == [{"ours": "MlaVerify", "stock": "Mla"}[core]] * 3


def test_wide_requests_are_vllms_and_a_new_cache_is_looked_at() -> None:
    run: Any = object.__new__(executor.Executor)
    ours = bound()
    run._layers = [SimpleNamespace(name="mla", attention=ours)]
    given = {"mla": step([9], [3], [[1]])}
    assert run.judge(9, given, CUDAGraphMode.NONE) == "stock_other"
    given = {"mla": step([8, 1], [3, 3], [[1], [2]])}
    assert run.judge(9, given, CUDAGraphMode.NONE) == "ours"
    run.prepare_kv()
    mla_layers.bind_pages(ours._module, 3, 24)
    with pytest.raises(ValueError, match="pages of 24 tokens"):
        run.prepare_kv()
