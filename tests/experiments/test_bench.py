# SPDX-License-Identifier: Apache-2.0
"""The bench's logic without a GPU: scripted times, gates on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import results
from experiments.bench import __main__ as command
from experiments.bench import (
    attention_residual,
    gates,
    gemm,
    peers,
    report,
    shapes,
    timing,
)
from experiments.bench.candidate import (
    Candidate,
    Inputs,
    Key,
    Offer,
    Point,
    Timing,
)
from tests.experiments.fake_bench import (
    ROWS,
    ScriptedTimer,
    offering,
    row_by_row,
    settings,
    sheet_at,
)
from verify_kernels.attn_res.reference import attn_res as attn_res_reference

torch.set_num_threads(1)

TINY = shapes.Projection("in_proj", 8, 40, 64)
ROUTER = shapes.Projection("router", 8, 40, 64, fp32_out=True)
#: N x K and decimal megabytes a rank, from the published configuration.
PUBLISHED = {
    "in_proj": ("49376x7168 707.85", "6288x7168 90.14", "3216x7168 46.10"),
    "f_b": ("12288x128 3.15", "1536x128 0.39", "768x128 0.20"),
    "qkv_a_g": ("14400x7168 206.44", "3648x7168 52.30", "2880x7168 41.29"),
    "q_b": ("18432x1536 56.62", "2304x1536 7.08", "1152x1536 3.54"),
    "o_proj": ("7168x12288 176.16", "7168x1536 22.02", "7168x768 11.01"),
    "router": ("896x7168 12.85", "112x7168 1.61", "56x7168 0.80"),
    "latent_down": ("3584x7168 51.38", "448x7168 6.42", "224x7168 3.21"),
    "latent_up": ("7168x3584 51.38", "896x3584 6.42", "448x3584 3.21"),
    "shared_gate_up": ("12288x7168 176.16", "1536x7168 22.02", "768x7168 11.01"),
    "shared_down": ("7168x6144 88.08", "7168x768 11.01", "7168x384 5.51"),
    "dense_gate_up": ("67584x7168 968.88", "8448x7168 121.11", "4224x7168 60.56"),
    "dense_down": ("7168x33792 484.44", "7168x4224 60.56", "7168x2112 30.28"),
    "lm_head": ("163840x7168 2348.81", "20480x7168 293.60", "10240x7168 146.80"),
}


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> int:
    """A rotation of tiny weights would take thousands of copies; the true limit."""
    limit = timing.MAX_COPIES
    monkeypatch.setattr(timing, "MAX_COPIES", 3)
    return limit


def one_wrong(inputs: Inputs, out: Tensor) -> Tensor:
    row_by_row(inputs, out)[-1, 3] *= 1.5
    return out


def moved_by_width(inputs: Inputs, out: Tensor) -> Tensor:
    """One fp32 bit on one element, at M = 8 only: well inside any error bound."""
    row_by_row(inputs, out)
    if out.shape[0] == 8:
        out.view(torch.int32)[0, 0] ^= 1
    return out


def unwritten(inputs: Inputs, out: Tensor) -> Tensor:
    row_by_row((inputs[0][:-1], inputs[1]), out[:-1])
    return out


class Flickers:
    """Differs in one bit at one launch in eighty."""

    def __init__(self) -> None:
        self.launches = 0

    def __call__(self, inputs: Inputs, out: Tensor) -> Tensor:
        self.launches += 1
        row_by_row(inputs, out)
        if self.launches % 80 == 0:
            out.view(torch.int16)[0, 0] ^= 1
        return out


def raises(inputs: Inputs, out: Tensor) -> Tensor:
    raise ValueError("x has 1 row;\n  no")


def bench_of(
    run: Callable[..., Tensor],
    timer: timing.Timer,
    peer: Callable[..., Offer] | None = None,
    **changes: Any,
) -> gemm.GemmBench:
    peer = peer or (lambda shape, *_: peers.cublas(shape))
    shape = ROUTER if run is moved_by_width else TINY
    return gemm.GemmBench(
        shape, settings(timer, **changes), offering("ours", run), peer
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_and_bytes_are_the_published_ones(name: str) -> None:
    for tp, published in zip((1, 8, 16), PUBLISHED[name], strict=True):
        (shape,) = (s for s in shapes.projections(tp) if s.name == name)
        megabytes = shape.weight_bytes / 1e6
        assert f"{shape.n}x{shape.k} {megabytes:.2f}" == published
        assert shape.fp32_out == (name == "router")
    assert set(PUBLISHED) == set(shapes.NAMES)


def test_equal_shapes_are_measured_once() -> None:
    selected = shapes.select((8, 16))
    keys = [(s.n, s.k, s.fp32_out) for s in selected]
    assert len(set(keys)) == len(keys) == 25
    (down,) = (s for s in selected if (s.n, s.k) == (7168, 768))
    assert (down.label, down.aliases) == ("shared_down@8", ("o_proj@16",))
    with pytest.raises(ValueError, match="shape='gate'"):
        shapes.select(names=["gate"])
    with pytest.raises(ValueError, match="tp=3"):
        shapes.projections(3)


def test_every_size_has_shapes_that_are_a_share_of_the_whole() -> None:
    """Weights times TP are the whole model's: row or column parallel, nothing lost; f_a
    and the latent parts of qkv_a_g are on every rank."""
    whole = {s.name: s for s in shapes.projections(1)}
    for tp in shapes.SIZES:
        for share in shapes.projections(tp):
            if share.name not in ("in_proj", "qkv_a_g"):
                assert tp * share.weight_bytes == whole[share.name].weight_bytes


def test_rotation_and_graph_length(
    few_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "MAX_COPIES", few_copies)
    assert timing.copies_for(90_140_000) == 4
    assert timing.copies_for(2_348_810_000) == 1
    assert timing.copies_for(11_010_048) == 28
    assert timing.launches_for(4, 20.9) == 24
    assert timing.launches_for(28, 2.55) == 157
    assert timing.launches_for(1526, 0.05) == 1526
    assert timing.floor_us(90_144_768) == pytest.approx(20.915, abs=1e-3)


def test_kernel_names_are_told_apart() -> None:
    names = [
        "fill",
        "x::spin_kernel(long)",
        "a",
        "b",
        "spin_kernel",
        "spin_kernel",
        "c",
    ]
    assert timing.split_at_spin(names) == [["a", "b"], [], ["c"]]


def test_a_right_kernel_is_green_and_timed() -> None:
    timer = ScriptedTimer()
    points = list(bench_of(row_by_row, timer).measure())
    assert [p.rows for p in points] == list(ROWS)
    for point in points:
        assert not point.red() and not point.missing
        assert set(point.timings) == {
            ("ours", "plain"),
            ("ours", "pdl"),
            ("cublas", "plain"),
        }
        assert set(point.gates["ours", "pdl"]) == {
            "accurate",
            "accurate_outliers",
            "row_invariant",
            "repeatable_12",
            "pdl_equals_plain",
        }


def test_the_timed_work_is_the_work_named() -> None:
    """Field case F26: M rows of the point, and another weight at every launch."""
    seen: list[tuple[int, int]] = []

    class Watching(ScriptedTimer):
        def measure(
            self, launches: Mapping[Key, timing.Launch], copies: int, floor_us: float
        ) -> dict[Key, Timing | str]:
            seen.clear()
            return super().measure(launches, copies, floor_us)

    def run(inputs: Inputs, out: Tensor) -> Tensor:
        seen.append((inputs[0].shape[0], inputs[1].data_ptr()))
        return row_by_row(inputs, out)

    for point in bench_of(run, Watching(), lambda *_: Offer()).measure():
        assert len(seen) == 2 * 3 and len(set(seen)) == 3
        assert {rows for rows, _ in seen} == {point.rows}


@pytest.mark.parametrize(
    ("run", "red"),
    [
        (one_wrong, {"accurate", "accurate_outliers", "row_invariant"}),
        (
            unwritten,
            {"accurate", "accurate_outliers", "row_invariant", "repeatable_12"},
        ),
        (Flickers(), {"repeatable_400"}),
    ],
)
def test_a_wrong_kernel_is_red_and_untimed(
    run: Callable[..., Tensor], red: set[str]
) -> None:
    """Field case F25: no time, and no speed-up, for a kernel that is wrong."""
    timer = ScriptedTimer()
    repeats = 400 if isinstance(run, Flickers) else 12
    points = list(bench_of(run, timer, repeats=repeats).measure())
    for point in points:
        found = set(point.red()["ours", "plain"])
        assert found >= red if isinstance(run, Flickers) else found == red
    assert {name for name, _ in timer.timed} == {"cublas"}
    text = report.table(points)
    assert text.count("RED") == 2 * len(points)
    assert "RED ours:plain" in report.remarks(points)
    assert all(report.share(point, "plain") is None for point in points)


def test_a_bit_that_moves_with_the_width_is_red() -> None:
    """Field case F40: text differs because a row's bits depend on M."""
    timer = ScriptedTimer()
    for point in bench_of(moved_by_width, timer, lambda *_: Offer()).measure():
        assert point.red()["ours", "pdl"] == ["row_invariant"]
    assert not timer.timed


def test_programmatic_launch_must_give_the_bits_of_plain() -> None:
    def early(inputs: Inputs, out: Tensor) -> Tensor:
        row_by_row(inputs, out)
        out[:, 0] *= 1 + 2.0**-7
        return out

    offer = Offer(
        [Candidate("ours", "plain", row_by_row), Candidate("ours", "pdl", early)]
    )
    timer = ScriptedTimer()
    bench = gemm.GemmBench(TINY, settings(timer), lambda *_: offer, lambda *_: Offer())
    point = next(bench.measure())
    assert "pdl_equals_plain" in point.red()["ours", "pdl"]
    assert timer.timed == [("ours", "plain")]


def test_a_kernel_that_raises_is_missing_with_the_reason() -> None:
    timer = ScriptedTimer()
    point = next(bench_of(raises, timer).measure())
    assert point.missing["ours:pdl"] == "ValueError: x has 1 row; no"
    assert not point.gates and ("ours", "plain") not in timer.timed
    assert "ours:pdl not available: ValueError" in report.remarks([point])


def test_wrong_raising_and_moving_peers_are_said() -> None:
    def offer(shape: shapes.Projection, *_: object) -> Offer:
        return (
            offering("broken", raises, ("pdl",))()
            + offering("wrong", one_wrong, ("plain",))()
            + offering("moves", moved_by_width, ("plain",))()
            + Offer(missing={"vllm": "ModuleNotFoundError: No module named 'vllm'"})
        )

    timer = ScriptedTimer({("moves", "plain"): "graph: no"})
    bench = gemm.GemmBench(ROUTER, settings(timer), offering("ours", row_by_row), offer)
    points = list(bench.measure())
    last = points[-1]
    assert last.missing == {
        "broken:pdl": "ValueError: x has 1 row; no",
        "wrong:plain": "its result is wrong; not timed",
        "vllm": "ModuleNotFoundError: No module named 'vllm'",
        "moves:plain": "graph: no",
    }
    assert last.moved == ["moves:plain"] and not points[0].moved
    text = report.remarks(points)
    assert (
        "moves:plain: rows differ in bits from the same rows at M=1 [router@8/8]"
        in text
    )
    assert "vllm not available: ModuleNotFoundError" in text


def test_fp32_output_is_held_to_fp32_sums() -> None:
    """A router whose logits were rounded to bf16 on the way is not accurate."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 512, generator=generator).bfloat16()
    w = torch.randn(16, 512, generator=generator).bfloat16()
    exact = gates.exact_product(x, w)
    product = x.double() @ w.double().t()
    assert torch.equal(exact.value, product)
    assert gates.accurate(product.float(), exact)
    assert gates.accurate(product.bfloat16(), exact)
    assert not gates.accurate(product.bfloat16().float(), exact)
    assert not gates.accurate(product.float()[:3], exact)
    spoiled = product.bfloat16()
    spoiled[2, 5] = float("nan")
    assert not gates.accurate(spoiled, exact)


def test_one_wrong_element_and_a_spread_loss_are_both_seen() -> None:
    """Each bound of the accuracy gate catches what the other lets through."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 512, generator=generator).bfloat16()
    w = torch.randn(4096, 512, generator=generator).bfloat16()
    exact = gates.exact_product(x, w)
    wrong = exact.value.bfloat16()
    wrong[1, 7] += 1.0
    assert gates.relative_error(wrong, exact.value) < 2 * exact.bf16_error
    assert not gates.accurate(wrong, exact)
    spread = exact.value.float() * (1 + 1e-4)
    slack = 2 * 512 * 2.0**-23 * exact.magnitude
    assert bool(((spread.double() - exact.value).abs() <= slack).all())
    assert not gates.accurate(spread, exact)


def attn_res_run(inputs: Inputs, out: Tensor, scale: float = 1.0) -> Tensor:
    hidden, prefix = attn_res_reference(*inputs, num_blocks=4, compute=torch.float32)
    inputs[0].copy_(prefix)
    return out.copy_(hidden * scale)


def attn_res_bench(
    timer: timing.Timer, run: Callable[..., Tensor]
) -> attention_residual.AttnResBench:
    return attention_residual.AttnResBench(
        4,
        settings(timer),
        width=64,
        our_offer=offering("ours", run),
        peer_offer=offering("vllm", attn_res_run),
    )


def test_attn_res_is_gated_on_hidden_and_prefix() -> None:
    good = list(attn_res_bench(ScriptedTimer(), attn_res_run).measure())
    assert not any(point.red() or point.missing for point in good)
    assert all(len(point.timings) == 4 for point in good)

    def stale_prefix(inputs: Inputs, out: Tensor) -> Tensor:
        return attn_res_run((inputs[0].clone(), *inputs[1:]), out)

    for run in (stale_prefix, functools.partial(attn_res_run, scale=1.02)):
        timer = ScriptedTimer()
        point = next(attn_res_bench(timer, run).measure())
        assert point.red()["ours", "plain"] == ["accurate"]
        assert {name for name, _ in timer.timed} == {"vllm"}


def test_attn_res_bytes() -> None:
    """8 blocks, prefix and delta in, prefix and output out: 12 rows of 14,336 bytes."""
    assert attention_residual.moved_bytes(1, 8) == 14336 * (12 + 3)
    assert attention_residual.moved_bytes(8, 4) == 14336 * (8 * 8 + 3)


def point_of(size: int, rows: int, us: Mapping[Key, float], op: str = gemm.OP) -> Point:
    point = Point(op, "in_proj@8", {"n": 6288, "k": 7168, "width": 7168}, rows, size)
    point.timings.update({key: Timing(value, 0.0) for key, value in us.items()})
    return point


OURS_PDL, OURS_PLAIN = ("ours", "pdl"), ("ours", "plain")


@pytest.mark.parametrize(
    ("megabytes", "needed"),
    [(150, 0.95), (149, 0.92), (80, 0.92), (79, 0.85), (40, 0.85), (10, 0.75)],
)
def test_bandwidth_by_size(megabytes: int, needed: float) -> None:
    limit = megabytes / 4.31 / needed
    for factor, verdict in ((0.999, True), (1.001, False)):
        point = point_of(megabytes * 10**6, 8, {OURS_PDL: limit * factor})
        assert report.verdicts(point)["bandwidth"] is verdict
        point.rows = 16
        assert report.verdicts(point)["bandwidth"] is None


def test_small_weights_have_no_bandwidth_bound() -> None:
    point = point_of(9_900_000, 1, {OURS_PDL: 1000.0})
    assert report.verdicts(point)["bandwidth"] is None


def test_peers_are_met_in_their_own_launch_mode() -> None:
    us: dict[Key, float] = {
        OURS_PLAIN: 20.5,
        OURS_PDL: 18.6,
        ("cublas", "plain"): 20.0,
        ("vllm", "plain"): 21.0,
        ("vllm", "pdl"): 18.0,
    }
    found = report.verdicts(point_of(90_140_000, 4, us))
    assert (found["peer_plain"], found["peer_pdl"]) == (True, False)
    us |= {OURS_PLAIN: 20.7, OURS_PDL: 18.5}
    found = report.verdicts(point_of(90_140_000, 4, us))
    assert (found["peer_plain"], found["peer_pdl"]) == (False, True)
    assert found["cublas"] is None
    del us["vllm", "pdl"], us["vllm", "plain"]
    best = report.best_peer(point_of(90_140_000, 4, us), "pdl")
    assert best == (("cublas", "plain"), 20.0)


def test_wide_steps_must_be_as_fast_as_cublas() -> None:
    us: dict[Key, float] = {OURS_PLAIN: 20.0, OURS_PDL: 19.0, ("cublas", "plain"): 20.0}
    assert report.verdicts(point_of(90_140_000, 16, us))["cublas"] is True
    us[OURS_PLAIN] = 20.01
    assert report.verdicts(point_of(90_140_000, 64, us))["cublas"] is False


def test_attn_res_must_be_twice_as_fast() -> None:
    us: dict[Key, float] = {OURS_PLAIN: 5.0, OURS_PDL: 4.1}
    us |= {("vllm", "plain"): 10.0, ("vllm", "pdl"): 8.0}
    found = report.verdicts(point_of(200_000, 8, us, attention_residual.OP))
    assert found == {"peer_plain": True, "peer_pdl": False}
    found = report.verdicts(point_of(200_000, 16, us, attention_residual.OP))
    assert set(found.values()) == {None}


def test_table_has_one_aligned_line_a_point() -> None:
    us: dict[Key, float] = {OURS_PDL: 22.2, ("cublas", "plain"): 26.6}
    lines = report.table(
        [point_of(90_144_768, 8, us), point_of(1_000_000, 64, {})]
    ).splitlines()
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert " ".join(lines[1].split()) == (
        "in_proj@8 6288x7168 90.1 8 - 22.20 26.60 26.60 cublas 26.60 cublas 20.92 "
        "94.2% ok - ok -"
    )


def test_lines_are_on_disk_at_once_and_again_with_kernel_names(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    earlier = sheet_at(path)
    earlier.rates({"read": 4.31e12})
    sheet = sheet_at(path)
    sheet.rates({"copy": 4.25e12})
    bench = bench_of(row_by_row, ScriptedTimer())
    points = []
    for number, point in enumerate(bench.measure(), start=1):
        points.append(point)
        sheet.add(point)
        lines = results.read(path)
        assert len(lines) == 2 + 2 * number
    assert not lines[-1]["kernels"]
    bench.trace(points)
    sheet.rewrite(points)
    again = results.read(path)
    assert len(again) == 2 + 2 * len(ROWS) and again[:2] == lines[:2]
    line = again[-1]
    assert line["kernels"] == ["kernel_of_ours_pdl"]
    assert line["peer_kernels"] == {"cublas:plain": ["kernel_of_cublas_plain"]}
    assert line["peers"] == {"cublas:plain": 10.0}
    assert (line["op"], line["variant"], line["us"]) == ("skinny_gemm", "pdl", 10.0)
    assert line["floor_us"] == pytest.approx(40 * 64 * 2 / 4.31e6)
    assert line["bandwidth_share"] == pytest.approx(line["floor_us"] / 10.0)
    assert line["shape"]["m"] == 8 and line["commit"] == "0" * 40
    assert all(line["gates"].values()) and "1980 MHz" in line["note"]


def test_a_red_kernel_leaves_its_gates_and_no_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    sheet = sheet_at(path)
    points = list(bench_of(one_wrong, ScriptedTimer()).measure())
    for point in points:
        sheet.add(point)
    lines = results.read(path)
    assert {line["metric"] for line in lines} == {"red_gates"}
    assert lines[0]["gates"]["accurate"] is False and lines[0]["value"] == 3.0


class _Stops:
    """A bench that dies at its second point."""

    label = "dies@8"

    def __init__(self, point: Point) -> None:
        self._point = point

    def measure(self) -> Iterator[Point]:
        yield self._point
        raise RuntimeError("device lost")

    def trace(self, points: object) -> None:
        raise RuntimeError("no profiler")


def test_one_failing_bench_does_not_lose_the_others(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    said: list[str] = []
    (first, *_) = bench_of(row_by_row, ScriptedTimer()).measure()
    work = [_Stops(first), bench_of(row_by_row, ScriptedTimer())]
    points = command.run(work, sheet_at(path), said.append)
    assert len(points) == 1 + len(ROWS)
    assert len(results.read(path)) == 2 * len(points)
    assert any(
        "dies@8 stopped after 1 points: RuntimeError: device lost" in s for s in said
    )
    assert any("no kernel names" in s and "no profiler" in s for s in said)


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    parse = command._parser().parse_args
    plain = settings(ScriptedTimer())
    quick = parse(["skinny_gemm", "attn_res", "--quick"])
    assert len(command.benches(quick, plain)) == 7 + 2
    one = parse(["skinny_gemm", "--shape", "q_b", "--tp", "16", "--rows", "8,1,8"])
    assert len(command.benches(one, plain)) == 1
    assert command.chosen_rows(one) == (1, 8)
    with pytest.raises(ValueError, match="op='prefill'"):
        command.benches(parse(["prefill"]), plain)
    assert command.main(["skinny_gemm", "--rows", "65"]) == 2
    assert capsys.readouterr().err.startswith("error: rows=65")


@pytest.mark.skipif(torch.cuda.is_available(), reason="would start the whole bench")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["attn_res"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
