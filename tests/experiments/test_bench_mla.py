# SPDX-License-Identifier: Apache-2.0
"""The MLA bench without a GPU: what its gates see, where its times go, what is asked of
the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import results
from experiments.bench import __main__ as command
from experiments.bench import mla, mla_peers, report, timing
from experiments.bench import peers as vllm_peers
from experiments.bench.candidate import OURS, Key, Mode, Timing
from experiments.bench.mla_data import (
    CORE,
    DRAFT,
    PAGE,
    SCALE,
    SUBLAYER,
    MlaData,
    MlaShape,
)
from experiments.bench.mla_ways import new, ours
from experiments.bench.ways import Run, Way, Ways
from tests.experiments.fake_bench import ScriptedTimer, settings, sheet_at
from tests.verify_kernels.mla_cases import Case, expected
from verify_kernels.batch import VerifyBatch
from verify_kernels.mla.parts import LATENT

torch.set_num_threads(1)

SHAPE = MlaShape.of(CORE, 48, 2, 4, 130)
BLOCK = MlaShape.of(DRAFT, 32, 1, 7, 70)
LAYER = MlaShape.of(SUBLAYER, 96, 2, 2, 66)
PLAIN: Key = (OURS, "plain")
PDL: Key = (OURS, "pdl")
CPU = torch.device("cpu")
Make = Callable[[MlaData], Run]


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_COPIES", 2)


def exactly(data: MlaData) -> Run:
    """Attention whose bits do not depend on the step: row by row, in fp64, rounded."""
    out = new(data, data.shape.heads, LATENT)

    def run(copy: int) -> Tensor:
        case = Case(data.batch, data.rows, data.caches[copy])
        return out.copy_(expected(case, data.shape.causal)[0])

    return run


def then(edit: Callable[[Tensor], object]) -> Make:
    """`exactly`, with something wrong after each run."""

    def make(data: MlaData) -> Run:
        inner = exactly(data)

        def run(copy: int) -> Tensor:
            out = inner(copy)
            edit(out)
            return out

        return run

    return make


def own(plain: Make = exactly, pdl: Make = exactly) -> Callable[..., Ways[MlaData]]:
    made = {"plain": plain, "pdl": pdl}

    def offer(part: str, modes: Sequence[Mode]) -> Ways[MlaData]:
        return Ways([Way(OURS, mode, made[mode]) for mode in modes])

    return offer


def other(make: Make = exactly) -> Callable[[MlaShape], Ways[MlaData]]:
    return lambda shape: Ways(
        [Way("fa3", "plain", make, "a note")], {"flashmla": "not in this build"}
    )


def bench_of(
    timer: timing.Timer, shape: MlaShape = SHAPE, **ways: object
) -> mla.MlaBench:
    given = {"our_ways": own(), "peer_ways": other(), **ways}
    return mla.MlaBench(shape, settings(timer, repeats=4), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [SHAPE, BLOCK], ids=[CORE, DRAFT])
def test_a_right_kernel_is_timed(shape: MlaShape, tmp_path: Path) -> None:
    timer = ScriptedTimer({PDL: Timing(4.0, 0.1), PLAIN: Timing(5.0, 0.1)})
    work = bench_of(timer, shape)
    (point,) = points = list(work.measure())
    assert not point.red() and set(point.gates) == {PLAIN, PDL}
    assert set(point.gates[PDL]) == {
        "accurate",
        "row_invariant",
        "pdl_equals_plain",
        "repeatable_4",
    }
    assert set(point.timings) == {PLAIN, PDL, ("fa3", "plain")}
    assert point.missing == {"flashmla": "not in this build"} and not point.moved
    work.trace(points)
    assert point.kernels["fa3", "plain"] == ["kernel_of_fa3_plain"]
    path = tmp_path / "out.jsonl"
    sheet_at(path).add(point)
    (line, _) = results.read(path)
    assert line["shape"]["part"] == shape.part and line["peers"] == {"fa3:plain": 10.0}
    assert report.verdicts(point) == {"peer_plain": True, "peer_pdl": True}
    assert f"{shape.heads}x{shape.context}" in report.table(points)
    assert "over ours: fa3 2.50x" in report.remarks(points)


class _Sometimes:
    """The fifth run and those after it give another bit."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, out: Tensor) -> None:
        self.runs += 1
        if self.runs > 4:
            out.view(torch.int16)[0, 0, 0] ^= 1


def _in_steps(out: Tensor) -> None:
    """Other bits in a step of several rows, as accurate."""
    if len(out) > 1:
        out.view(torch.int16)[0, 0, 0] ^= 1


@pytest.mark.parametrize(
    ("edit", "red"),
    [
        (lambda out: out.mul_(1.01), "accurate"),
        (lambda out: out[-1].fill_(torch.nan), "accurate"),
        (_in_steps, "row_invariant"),
        (
            lambda out: out.view(torch.int16)[:, 0, 0].bitwise_xor_(1),
            "pdl_equals_plain",
        ),
        (_Sometimes(), "repeatable_4"),
    ],
)
def test_a_wrong_kernel_is_not_timed(
    edit: Callable[[Tensor], object], red: str
) -> None:
    timer = ScriptedTimer()
    (point,) = bench_of(timer, our_ways=own(pdl=then(edit))).measure()
    assert red in point.red()[PDL]
    assert PDL not in timer.timed and ("fa3", "plain") in timer.timed
    if red == "repeatable_4":
        assert PLAIN not in point.timings
        assert "over ours" not in report.remarks([point])


def test_a_wrong_peer_is_no_peer() -> None:
    def raising(data: MlaData) -> Run:
        raise ValueError("no kernel")

    for make, says in (
        (then(lambda out: out.mul_(1.1)), "is off by"),
        (raising, "ValueError: no kernel"),
    ):
        (point,) = bench_of(ScriptedTimer(), peer_ways=other(make)).measure()
        assert says in point.missing["fa3:plain"] and not point.peers()
    (point,) = bench_of(ScriptedTimer(), peer_ways=other(then(_in_steps))).measure()
    assert point.moved == ["fa3:plain"] and point.peers()


@pytest.mark.parametrize("shape", [SHAPE, BLOCK], ids=[CORE, DRAFT])
def test_truth_is_the_tests(shape: MlaShape) -> None:
    """Of the kernels' own tests, which go row by row; and rows alone see the same."""
    data = MlaData.draw(shape, 1, CPU)
    case = Case(data.batch, data.rows, data.caches[0])
    for kind, close in ((torch.float64, 1e-12), (torch.bfloat16, 2.0**-7)):
        found, wanted = data.truth(kind), expected(case, shape.causal, kind)[0]
        assert found.dtype == kind
        torch.testing.assert_close(found, wanted, rtol=close, atol=close)
    exact = data.truth(torch.float64)
    for row in (0, shape.width - 1, shape.rows - 1):
        alone = data.alone(row)
        assert alone.shape.context == int(alone.lengths[0])
        torch.testing.assert_close(alone.truth(torch.float64)[0], exact[row])


def test_a_sublayer() -> None:
    """Its truth is the reference's, lines are inserted where the slots say."""
    from verify_kernels.mla import reference

    data = MlaData.draw(LAYER, 1, CPU)
    w, shape = data.weights[0], data.shape
    exact = data.truth(torch.float64)
    packed = data.rows.double() @ w.qkv_a_g.double().t()
    wide = [x.double() for x in (w.q_norm, w.kv_norm, w.q_b, w.w_uk, w.w_uv)]
    weights = reference.MlaWeights(*wide)
    cache = data.caches[0].double()
    gated = reference.verify(
        data.batch, reference.MlaRows.unpack(packed, weights), weights, cache
    )
    torch.testing.assert_close(exact, gated @ w.o_proj.double().t())
    changed = (cache != data.caches[0].double()).any(-1).flatten().nonzero()[:, 0]
    assert changed.tolist() == sorted(data.slots.tolist())
    plain = data.truth(torch.bfloat16)
    assert mla.no_worse(plain, exact, plain)
    assert float((plain.double() - exact).norm() / exact.norm()) < mla.PEER_ERROR / 2
    assert shape.copy_bytes == 2 * (
        2 * 66 * 576 + (1536 + 576 + 128) * 7168 + 192 * 1536 + 256 * 512 + 128 * 7168
    )


def test_bytes_and_sizes() -> None:
    shape = MlaShape.of(CORE, 16, 8, 8, 131072)
    assert shape.moved_bytes == 8 * 131072 * 1152 + 64 * 6 * 2 * (576 + 512)
    with pytest.raises(ValueError, match="tp=7"):
        mla.shapes((7,), (1,))


def test_steps_of_a_run() -> None:
    parse = command._parser().parse_args
    every = settings(ScriptedTimer(), rows=command.DEFAULT_ROWS)

    def labels(*arguments: str) -> list[str]:
        options = parse(["mla", *arguments])
        return [bench.label for bench in command.benches(options, every)]

    found = labels("--tp", "1,8,16")
    contexts = 1024, 8192, 32768, 131072
    assert found[:8] == [f"core H=6 B=1 q={q} c={c}" for q in (1, 8) for c in contexts]
    assert found[8:16] == [
        f"sublayer H={heads} B=1 q={q} c={c}"
        for heads in (6, 12)
        for q in (1, 8)
        for c in contexts[:2]
    ]
    assert found[16] == "core H=12 B=1 q=1 c=1024"
    assert found[32:34] == [
        "draft_block H=64 B=1 q=7 c=32768",
        "draft_block H=4 B=1 q=7 c=32768",
    ]
    assert found[34] == "core H=6 B=8 q=1 c=1024"
    assert not any("B=8" in label and "c=131072" in label for label in found)
    assert [label for label in found if "q=4" in label] == found[-3 * (4 + 3) :]
    assert len(found) == len(set(found)) == 24 + 8 + 2 + 18 + 21
    assert len(labels("--shape", "sublayer")) == 8
    assert sorted(labels()) == sorted(found)


def test_long_contexts_have_few_repeats() -> None:
    """20 of them, or as many as were asked for."""
    for context, asked, count in ((40_000, 30, 30), (40_001, 30, 20), (40_001, 4, 4)):
        shape = replace(SHAPE, requests=1, context=context)
        work = mla.MlaBench(shape, settings(ScriptedTimer(), repeats=asked))
        assert work._repeats == count


class _Kernels:
    """Stands for every vLLM module of an attention peer; results are exact."""

    current_platform = SimpleNamespace(num_compute_units=lambda: 132)

    def __init__(self, data: MlaData) -> None:
        self.data = data
        self.calls: list[dict[str, Any]] = []

    def _right(self) -> Tensor:
        return self.data.truth(torch.float64).bfloat16()

    def get_scheduler_metadata(self, **given: Any) -> str:
        assert given["max_seqlen_k"] == self.data.shape.context
        return "schedule"

    def flash_attn_varlen_func(self, **given: Any) -> Tensor:
        assert given["scheduler_metadata"] == "schedule" and given["num_splits"] == 32
        assert given["softmax_scale"] == SCALE and given["causal"]
        assert given["q"].shape[2] == given["k"].shape[3] == 64
        assert given["q_v"].shape[2] == given["v"].shape[3] == 512
        assert given["k"].shape[1:3] == (PAGE, 1)
        return self._right()

    def get_mla_metadata(self, *_: Any, **__: Any) -> tuple[str, None]:
        return "schedule", None

    def flash_mla_with_kvcache(self, **given: Any) -> tuple[Tensor, None]:
        shape = self.data.shape
        assert given["q"].shape == (shape.requests, shape.width, shape.heads, 576)
        assert given["k_cache"].shape[1:] == (PAGE, 1, 576)
        return self._right().unflatten(0, (shape.requests, -1)), None

    @staticmethod
    def _compute_num_kv_splits(context: int, units: int) -> int:
        assert units == 132
        return 4

    def decode_attention_fwd(self, *given: Any, **_: Any) -> None:
        _, _, _, out, _, table, lengths, logits, splits, *rest = given
        shape = self.data.shape
        assert len(table) == len(lengths) == shape.rows and rest == [SCALE, PAGE]
        step = range(shape.width) if shape.causal else [shape.width - 1] * shape.width
        before = shape.context - shape.width
        assert lengths.tolist() == [before + t + 1 for t in step] * shape.requests
        assert logits.shape == (shape.rows, shape.heads, splits, LATENT + 1)
        out.copy_(self._right())


@pytest.mark.parametrize("shape", [SHAPE, BLOCK], ids=[CORE, DRAFT])
def test_what_is_asked_of_attention_peers(
    shape: MlaShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = MlaData.draw(shape, 1, CPU)
    monkeypatch.setattr(vllm_peers, "load", lambda name: _Kernels(data))
    offer = mla_peers.peers(shape)
    assert {way.name for way in offer.ways} == (
        {"triton_mla", "fa3", "flashmla"}
        if shape.causal
        else {"triton_mla", "triton_mla_layer"}
    )
    for way in offer.ways:
        assert torch.equal(way.make(data)(0), data.truth(torch.float64).bfloat16())


def _modules() -> dict[str, Any]:
    """Of a sublayer's chain, in plain torch."""

    def rmsnorm(q: Tensor, kv: Tensor, q_w: Tensor, kv_w: Tensor, eps: float) -> Any:
        def one(x: Tensor, w: Tensor) -> Tensor:
            wide = x.float()
            root = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
            return (wide * root * w.float()).bfloat16()

        return one(q, q_w), one(kv, kv_w)

    def insert(
        ql: Tensor, pe: Tensor, kv: Tensor, k_pe: Tensor, cache: Tensor, at: Tensor
    ) -> Tensor:
        cache.flatten(0, 1)[at] = torch.cat((kv, k_pe.flatten(1)), 1)
        return torch.cat((ql, pe), -1)

    def attend(**given: Any) -> Tensor:
        query = torch.cat((given["q_v"], given["q"]), -1)
        cache = torch.cat((given["v"], given["k"]), -1).squeeze(-2)
        starts, lengths = given["cu_seqlens_q"], given["seqused_k"]
        batch = VerifyBatch(
            starts, lengths - starts.diff(), lengths, lengths, given["block_table"]
        )
        return expected(Case(batch, query, cache))[0].bfloat16()

    return {
        mla_peers._FA: SimpleNamespace(
            get_scheduler_metadata=lambda **_: None, flash_attn_varlen_func=attend
        ),
        mla_peers._NORM: SimpleNamespace(fused_q_kv_rmsnorm=rmsnorm),
        mla_peers._INSERT: SimpleNamespace(
            fused_mla_decode_q_concat_kv_cache_insert=insert
        ),
        mla_peers._GEMM: SimpleNamespace(try_low_latency_gemm=lambda x, w: None),
        mla_peers._LAYER: SimpleNamespace(
            _gate_sigmoid_mul=lambda x, gate: x * gate.sigmoid()
        ),
        mla_peers._STREAMS: SimpleNamespace(
            maybe_execute_in_parallel=lambda a, b, *_: (a(), b())
        ),
    }


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    yield


@pytest.mark.usefixtures("no_streams")
def test_the_stock_chain_is_the_sublayer(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = _modules()
    monkeypatch.setattr(vllm_peers, "load", modules.get)
    work = mla.MlaBench(
        LAYER,
        settings(ScriptedTimer(), repeats=2),
        lambda part, modes: Ways(missing={OURS: "not here"}),
    )
    (point,) = work.measure()
    assert set(point.peers()) == {("vllm", "plain"), ("vllm_one_stream", "plain")}
    assert point.missing == {OURS: "not here"}
    modules[mla_peers._INSERT] = "no such module"
    assert mla_peers.peers(LAYER).missing == dict.fromkeys(
        ("vllm", "vllm_one_stream"), "no such module"
    )


def test_ours_in_both_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention alone with the copy's cache; a sublayer's launches in their order."""
    import verify_kernels.mla as package
    import verify_kernels.skinny_gemm as gemms

    calls: list[tuple[str, bool, Tensor]] = []

    def noting(name: str, out: int, own: int) -> Callable[..., Tensor]:
        def launch(*given: Any, pdl: bool, **_: Any) -> Tensor:
            calls.append((name, pdl, given[own]))
            result: Tensor = given[out]
            return result

        return launch

    class Gemm:
        def __init__(self, k: int, *, pdl: bool) -> None:
            self._k, self._pdl = k, pdl

        def __call__(self, x: Tensor, w: Tensor, out: Tensor) -> None:
            assert x.shape[1] == w.shape[1] == self._k and len(w) == out.shape[1]
            calls.append(("gemm", self._pdl, w))

    monkeypatch.setattr(package, "mla_front", noting("front", 5, 4))
    monkeypatch.setattr(package, "mla_absorb", noting("absorb", 2, 1))
    monkeypatch.setattr(package, "mla_attend", noting("attend", 4, 1))
    monkeypatch.setattr(package, "mla_value", noting("value", 3, 1))
    monkeypatch.setattr(gemms, "SkinnyGemm", Gemm)
    data = MlaData.draw(replace(SHAPE, heads=1), 2, CPU)
    for pdl, way in enumerate(ours(CORE, ("plain", "pdl")).ways):
        way.make(data)(1)
        name, launched, cache = calls.pop()
        assert (name, launched) == ("attend", bool(pdl))
        assert cache.data_ptr() == data.caches[1].data_ptr()
    data = MlaData.draw(LAYER, 1, CPU)
    (way,) = ours(SUBLAYER, ("pdl",)).ways
    assert way.make(data)(0).shape == (LAYER.rows, 7168)
    names = ["gemm", "front", "gemm", "absorb", "attend", "value", "gemm"]
    assert [call[0] for call in calls] == names and all(call[1] for call in calls)
