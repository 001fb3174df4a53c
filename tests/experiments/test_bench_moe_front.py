# SPDX-License-Identifier: Apache-2.0
"""The grouped launch's bench: three results gated and timed as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments import results
from experiments.bench import moe_front, ours, peers, report, shapes, timing
from experiments.bench.candidate import MODES, Candidate, Inputs, Mode, Offer
from tests.experiments.fake_bench import (
    ROWS,
    ScriptedTimer,
    offering,
    row_by_row,
    settings,
    sheet_at,
)
from verify_kernels.skinny_gemm.choice import outputs_of

torch.set_num_threads(1)

PARTS = (
    shapes.Projection("router", 8, 24, 64, fp32_out=True),
    shapes.Projection("latent_down", 8, 16, 64),
    shapes.Projection("shared_gate_up", 8, 40, 64),
)


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_COPIES", 3)


def all_parts(inputs: Inputs, outs: Sequence[Tensor]) -> Sequence[Tensor]:
    x, *weights = inputs
    for w, out in zip(weights, outs, strict=True):
        row_by_row((x, w), out)
    return outs


def exchanged(inputs: Inputs, outs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The last matrix's rows begin where the middle one's do."""
    all_parts(inputs, outs)
    outs[2][:, :16] = outs[1]
    return outs


def rounded_router(inputs: Inputs, outs: Sequence[Tensor]) -> Sequence[Tensor]:
    all_parts(inputs, outs)
    outs[0].copy_(outs[0].bfloat16())
    return outs


def one_missing(inputs: Inputs, outs: Sequence[Tensor]) -> Sequence[Tensor]:
    all_parts((inputs[0], inputs[1]), outs[:1])
    all_parts((inputs[0], inputs[3]), outs[2:])
    return outs


def front(run: Callable[..., object], timer: timing.Timer) -> moe_front.MoeFrontBench:
    links = [Candidate("single", "plain", row_by_row)] * 3
    peer = Offer([moe_front.chained("cublas", "plain", links)])
    return moe_front.MoeFrontBench(
        8, settings(timer), PARTS, offering("ours", run), lambda *_: peer
    )


def test_k3_parts_are_those_of_the_compiled_group() -> None:
    for tp, sizes in ((8, (112, 448, 1536)), (16, (56, 224, 768))):
        parts = shapes.moe_front(tp)
        assert tuple(part.n for part in parts) == sizes
        outputs = tuple("fp32" if part.fp32_out else "bf16" for part in parts)
        assert outputs in outputs_of(parts[0].k)
        assert len({part.k for part in parts}) == 1


def test_a_right_group_is_green_and_timed_beside_chains(tmp_path: Path) -> None:
    path, timer = tmp_path / "out.jsonl", ScriptedTimer()
    sheet, bench = sheet_at(path), front(all_parts, timer)
    points = list(bench.measure())
    for point in points:
        assert not point.red() and not point.missing
        assert set(point.timings) == {
            ("ours", "plain"),
            ("ours", "pdl"),
            ("cublas", "plain"),
        }
        assert point.bytes == 2 * 64 * (24 + 16 + 40)
        sheet.add(point)
    line = results.read(path)[-1]
    assert (line["op"], line["shape"]["m"], line["shape"]["n"]) == ("moe_front", 8, 80)
    assert line["peers"] == {"cublas:plain": 10.0}
    assert "80x64" in report.table(points)


@pytest.mark.parametrize("run", [exchanged, rounded_router, one_missing])
def test_each_part_of_a_group_is_gated(run: Callable[..., object]) -> None:
    """Field case F25: no time for a launch of which one matrix is wrong."""
    timer = ScriptedTimer()
    for point in front(run, timer).measure():
        assert "accurate" in point.red()["ours", "pdl"]
    assert {name for name, _ in timer.timed} == {"cublas"}


def test_a_wrong_chain_is_no_peer() -> None:
    def broken(inputs: Inputs, out: Tensor) -> Tensor:
        return row_by_row(inputs, out) * 1.02

    links = [Candidate("single", "plain", run) for run in (row_by_row, broken)]
    peer = Offer([moe_front.chained("cublas", "plain", [*links, links[0]])])
    bench = moe_front.MoeFrontBench(
        8, settings(ScriptedTimer()), PARTS, lambda *_: Offer(), lambda *_: peer
    )
    assert next(bench.measure()).missing["cublas:plain"] == (
        "its result is wrong; not timed"
    )


def test_vllm_is_chained_from_its_best_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {
        "router": (peers.CUBLAS, peers.LL_BF16),
        "latent_down": (peers.CUBLAS, peers.SKINNY, peers.VLLM),
        "shared_gate_up": (peers.CUBLAS,),
    }

    def gemm(shape: shapes.Projection, rows: int, modes: tuple[Mode, ...]) -> Offer:
        (mode,) = modes
        names = have[shape.name]
        missing = {} if len(names) > 1 else {"vllm": f"cuBLAS at M={rows}"}
        return Offer([Candidate(n, mode, row_by_row) for n in names], missing)

    monkeypatch.setattr(peers, "gemm", gemm)
    (found,) = moe_front.vllm(PARTS, 2, "pdl").candidates
    assert found.key == ("vllm", "pdl")
    assert found.note == "vllm_ll_bf16, vllm, cublas"
    have.update(dict.fromkeys(have, (peers.CUBLAS,)))
    assert moe_front.vllm(PARTS, 2, "pdl").missing == {"vllm": "vllm: cuBLAS at M=2"}


def test_three_launches_of_ours_are_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def single(shape: shapes.Projection, modes: tuple[Mode, ...]) -> Offer:
        return Offer([Candidate("ours", mode, row_by_row) for mode in modes])

    monkeypatch.setattr(ours, "skinny_gemm", single)
    monkeypatch.setattr(peers, "load", lambda name: "no vllm here")
    offer = moe_front.others(PARTS, 8, MODES)
    assert [c.key for c in offer.candidates] == [
        ("cublas", "plain"),
        ("ours_separate", "plain"),
        ("ours_separate", "pdl"),
    ]
    assert "no vllm here" in offer.missing["vllm"]
    monkeypatch.setattr(
        ours, "skinny_gemm", lambda *_: Offer(missing={"ours": "no compiler"})
    )
    missing = moe_front.separate(PARTS, "pdl").missing
    assert missing == {"ours_separate": "no compiler"}
    own = {("ours", "pdl"): 9.0, ("ours_separate", "pdl"): 8.0}
    timer = ScriptedTimer({k: timing.Timing(us, 0.1) for k, us in own.items()})
    bench = moe_front.MoeFrontBench(
        8,
        settings(timer),
        PARTS,
        offering("ours", all_parts),
        lambda *_: Offer([Candidate("ours_separate", "pdl", all_parts)]),
    )
    assert [report.verdicts(p)["peer_pdl"] for p in bench.measure()] == [False] * len(
        ROWS
    )
