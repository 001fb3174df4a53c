# SPDX-License-Identifier: Apache-2.0
"""The experts' bench without a GPU: its data, what its gates see, where times go."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments import results
from experiments.bench import __main__ as command
from experiments.bench import (
    experts,
    experts_data,
    experts_targets,
    report,
    timing,
)
from experiments.bench.candidate import Key, Mode, Point, Timing
from experiments.bench.experts_data import (
    CORRELATED,
    INDEPENDENT,
    ROUTINGS,
    ExpertsShape,
    Step,
    Truth,
    Weights,
    chosen,
)
from experiments.bench.experts_ways import EXPERTS, PARTS, ROUTED, ours
from experiments.bench.ways import Run, Way, Ways
from tests.experiments.fake_bench import ScriptedTimer, settings, sheet_at
from verify_kernels.moe import ExpertBank, reference

torch.set_num_threads(1)

CPU = torch.device("cpu")
SHAPE = ExpertsShape(16, 128, 64, 16, 4)
PLAIN: Key = ("ours", "plain")
PDL: Key = ("ours", "pdl")
#: (result, step, mode) -> nothing.
Edit = Callable[[Tensor, Step, Mode], object]


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_COPIES", 2)
    monkeypatch.setattr(experts, "_MIN_COPIES", 2)


def sums(latent: Tensor, ids: Tensor, shares: Tensor, weights: Weights) -> Tensor:
    """Row by row in fp32, rounded once."""
    three = weights.gate, weights.up, weights.down
    bank = reference.dense_experts(*three, ids.unique().tolist(), compute=torch.float32)
    out = reference.experts(latent, ids.long(), shares, bank, compute=torch.float32)
    return out.bfloat16()


def nothing(out: Tensor, step: Step, mode: Mode) -> None:
    pass


def torch_ways(
    name: str, weights: Weights, modes: Sequence[Mode], edit: Edit = nothing
) -> list[Way[Step]]:
    """Both parts in torch, with something wrong after each run."""

    def maker(part: str, mode: Mode) -> Callable[[Step], Run]:
        def make(step: Step) -> Run:
            def run(copy: int) -> Tensor:
                ids, shares = step.ids[copy], step.shares[copy]
                if part == ROUTED:
                    ids, shares = reference.route(
                        step.logits[copy], step.bias, step.shape.top_k
                    )
                out = sums(step.latent, ids, shares.float(), weights)
                edit(out, step, mode)
                return out

            return run

        return make

    return [
        Way(name, mode, maker(part, mode), f"{name}'s note", part)
        for part in PARTS
        for mode in modes
    ]


def bench_of(
    timer: timing.Timer, own: Edit = nothing, other: Edit = nothing, rows: int = 3
) -> experts.ExpertsBench:
    return experts.ExpertsBench(
        SHAPE,
        settings(timer, repeats=4, rows=(rows,)),
        lambda weights, modes: Ways(torch_ways("ours", weights, modes, own)),
        lambda shape, weights, warm: Ways(
            torch_ways("humming", weights, ("plain",), other),
            {"marlin": "it cannot be built"},
        ),
    )


def test_a_right_kernel_is_timed_in_both_parts(tmp_path: Path) -> None:
    timer = ScriptedTimer({PDL: Timing(4.0, 0.1)})
    work = bench_of(timer)
    points = list(work.measure())
    assert [p.label for p in points] == [
        "experts@16 independent",
        "experts@16 correlated",
        "route+experts@16 independent",
        "route+experts@16 correlated",
    ]
    assert [p.timings[PDL].us for p in points] == [4.0] * 4
    for point in points:
        assert not point.red() and set(point.gates) == {PLAIN, PDL}
        same = {"accurate", "row_invariant", "repeatable_4"}
        assert set(point.gates[PLAIN]) == same
        assert set(point.gates[PDL]) == same | {"pdl_equals_plain"}
        assert point.peers() == {("humming", "plain"): Timing(10.0, 1.0)}
        assert point.missing == {"marlin": "it cannot be built"}
        assert point.notes["humming:plain"] == "humming's note" and not point.moved
        step = Step.draw(SHAPE, point.shape["routing"], 3, 1, CPU)
        assert point.shape["distinct"] == len(step.ids[0].unique())
        assert point.bytes == SHAPE.live_bytes(point.shape["distinct"])
    work.trace(points)
    assert points[0].kernels[PDL] == ["kernel_of_ours_pdl"]
    assert ("humming", "plain") in points[1].kernels
    path = tmp_path / "out.jsonl"
    sheet = sheet_at(path)
    for point in points:
        sheet.add(point)
    lines = results.read(path)
    assert [line["shape"]["part"] for line in lines] == [EXPERTS] * 4 + [ROUTED] * 4
    assert lines[0]["shape"]["distinct"] == points[0].shape["distinct"]
    assert "humming's note" in lines[0]["note"]
    text = report.table(points)
    assert "64x128" in text and "route+experts@16 correlated" in text
    assert "marlin not available: it cannot be built" in report.remarks(points)


def test_one_row_is_measured_once() -> None:
    points = list(bench_of(ScriptedTimer(), rows=1).measure())
    assert [p.shape["routing"] for p in points] == [INDEPENDENT] * 2


class _Sometimes:
    """A late run gives another bit."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, out: Tensor, step: Step, mode: Mode) -> None:
        self.runs += 1
        if self.runs > 12:
            _flip(out)


def _flip(out: Tensor) -> None:
    out.view(torch.int16)[0, 3] ^= 1


def _in_company(out: Tensor, step: Step, mode: Mode) -> None:
    if step.rows > 1:
        _flip(out)


def _chained(out: Tensor, step: Step, mode: Mode) -> None:
    if mode == "pdl":
        _flip(out)


@pytest.mark.parametrize(
    ("edit", "red"),
    [
        (lambda out, step, mode: out.mul_(1.02), "accurate"),
        (lambda out, step, mode: out[0, 5].fill_(torch.nan), "accurate"),
        (lambda out, step, mode: out[-1].zero_(), "accurate"),
        (_in_company, "row_invariant"),
        (_chained, "pdl_equals_plain"),
        (_Sometimes(), "repeatable_4"),
    ],
)
def test_a_wrong_kernel_is_not_timed(edit: Edit, red: str) -> None:
    timer = ScriptedTimer()
    point = next(bench_of(timer, own=edit).measure())
    assert red in point.red()[PDL] and PDL not in point.timings
    assert PDL not in timer.timed and ("humming", "plain") in timer.timed


def test_ours_that_does_not_run_is_said() -> None:
    def raising(out: Tensor, step: Step, mode: Mode) -> None:
        raise RuntimeError("no device")

    point = next(bench_of(ScriptedTimer(), own=raising).measure())
    assert point.missing["ours:pdl"] == "RuntimeError: no device"
    assert not point.gates and point.peers()


def test_a_peer_with_wrong_arguments_is_no_peer() -> None:
    """Bits that move are said; one that is off or raises is not timed."""

    def raising(out: Tensor, step: Step, mode: Mode) -> None:
        raise ValueError("no kernel")

    moved = next(bench_of(ScriptedTimer(), other=_in_company).measure())
    assert moved.moved == ["humming:plain"] and moved.peers()
    off = next(bench_of(ScriptedTimer(), other=lambda o, s, m: o.neg_()).measure())
    assert "is off by 2; not timed" in off.missing["humming:plain"]
    nan = bench_of(ScriptedTimer(), other=lambda o, s, m: o.fill_(torch.nan))
    assert "is off by nan" in next(nan.measure()).missing["humming:plain"]
    point = next(bench_of(ScriptedTimer(), other=raising).measure())
    assert point.missing["humming:plain"] == "ValueError: no kernel"


def test_what_rows_choose() -> None:
    """The same whatever M is, K different ones, half of the row before's."""
    shape = ExpertsShape.of(16)
    for routing in ROUTINGS:
        ids = chosen(shape, routing, 64)
        assert torch.equal(chosen(shape, routing, 8), ids[:8])
        assert all(len(row.unique()) == 16 for row in ids)
        sets = [set(row.tolist()) for row in ids]
        kept = [len(a & b) for a, b in itertools.pairwise(sets)]
        if routing == CORRELATED:
            assert set(kept) == {8}
        else:
            assert max(kept) < 4
    with pytest.raises(ValueError, match="routing='all'"):
        chosen(shape, "all", 2)


def test_every_copy_takes_other_experts() -> None:
    shape = ExpertsShape.of(16)
    step = Step.draw(shape, CORRELATED, 4, 5, CPU)
    sets = [set(ids.flatten().tolist()) for ids in step.ids]
    assert {len(one) for one in sets} == {step.distinct()}
    assert len(set().union(*sets)) == 5 * step.distinct()
    assert torch.allclose(step.shares.sum(-1), torch.ones(5, 4))
    for copy in range(5):
        ids, _ = reference.route(
            step.logits[copy], step.bias, 16, compute=torch.float32
        )
        assert torch.equal(ids.sort(1).values, step.ids[copy].long().sort(1).values)
    first = Step.draw(shape, CORRELATED, 4, 1, CPU)
    assert torch.equal(first.ids[0], step.ids[0])
    assert torch.equal(first.latent, step.latent)


def test_a_part_of_a_step() -> None:
    step = Step.draw(SHAPE, INDEPENDENT, 5, 2, CPU)
    part = step.part(2, 4)
    assert part.rows == 2 and part.copies == 1
    assert torch.equal(part.ids[0], step.ids[0, 2:4])
    assert torch.equal(part.logits[0], step.logits[0, 2:4])
    plan = step.plan(1)
    distinct, pairs = plan.counts.tolist()
    assert (distinct, pairs) == (step.distinct(1), 20)
    assert plan.experts[:distinct].tolist() == step.ids[1].unique().tolist()


def test_a_bank_packed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights.draw(SHAPE, CPU)
    assert 117 <= int(weights.down.scales.min()) <= int(weights.down.scales.max()) < 123
    whole = ExpertBank.of(weights.gate, weights.up, weights.down)
    for words in (1, 3 * 2 * SHAPE.inner * SHAPE.latent, 2**40):
        monkeypatch.setattr(experts_data, "_PACK_WORDS", words)
        bank = experts_data.packed(weights.gate, weights.up, weights.down)
        for found, right in ((bank.up, whole.up), (bank.down, whole.down)):
            assert torch.equal(found.words, right.words)
            assert torch.equal(found.scales, right.scales)
        assert (bank.latent, bank.inner, bank.experts) == (128, 64, 16)


def test_truth() -> None:
    weights = Weights.draw(SHAPE, CPU)
    step = Step.draw(SHAPE, INDEPENDENT, 4, 2, CPU)
    truth = Truth.of(step, weights)
    bank = reference.dense_experts(
        weights.gate, weights.up, weights.down, step.ids[0].unique().tolist()
    )
    exact = reference.experts(step.latent, step.ids[0].long(), step.shares[0], bank)
    assert torch.allclose(truth.exact, exact, rtol=1e-12)
    assert truth.plain.dtype == torch.bfloat16
    error = (truth.plain.double() - exact).norm() / exact.norm()
    assert 0 < error < 2.0**-7
    assert experts.no_worse(truth.plain, truth)


def test_bytes_by_hand() -> None:
    """16 experts of 3 x 3584 x 192 at TP 16, 4.25 bits a weight."""
    assert ExpertsShape.of(16).live_bytes(16) == 33030144 * 17 // 32 == 17547264
    assert ExpertsShape.of(1).live_bytes(1) == 17547264


def test_shares_of_a_run() -> None:
    parse = command._parser().parse_args
    plain = settings(ScriptedTimer())
    work = command.benches(parse(["experts", "--tp", "1,8,16"]), plain)
    assert [bench.label for bench in work] == ["experts@8", "experts@16", "experts@1"]
    with pytest.raises(ValueError, match="tp=32: use 1, 2, 4, 8, 16"):
        command.benches(parse(["experts", "--tp", "32"]), plain)


def point_of(tp: int, rows: int, us: dict[Key, float], part: str = EXPERTS) -> Point:
    shape = ExpertsShape.of(tp)
    described = {**shape.described(), "m": rows, "part": part, "distinct": 16}
    label = f"{part}@{tp} independent"
    point = Point(experts.OP, label, described, rows, shape.live_bytes(16))
    point.timings = {key: Timing(value, 0.1) for key, value in us.items()}
    return point


@pytest.mark.parametrize(
    ("tp", "rows", "name", "least"),
    [
        (1, 1, "humming_1.15x", 1.15),
        (1, 8, "humming_1.15x", 1.15),
        (8, 1, "humming_1.5x", 1.5),
        (16, 64, "humming_1.5x", 1.5),
    ],
)
def test_targets_against_humming(tp: int, rows: int, name: str, least: float) -> None:
    for factor, verdict in ((1.001, True), (0.999, False)):
        # Below the bytes' floor of TP 1, so that only the peer decides.
        us: dict[Key, float] = {PDL: 10, PLAIN: 1, ("humming", "plain"): 10 * least}
        us["humming", "plain"] *= factor
        us["marlin", "plain"] = 1.0
        point = point_of(tp, rows, us)
        assert report.verdicts(point)[name] is verdict
        said = "\n".join(experts_targets.lines([point]))
        assert f"target >= {least:.2f}x" in said
        chain = point_of(tp, rows, us, ROUTED)
        assert set(report.verdicts(chain).values()) == {None}
        assert not list(experts_targets.lines([chain]))
    assert report.verdicts(point_of(tp, rows, {PDL: 10.0}))[name] is None


def test_target_of_the_bytes() -> None:
    """16 experts of TP 1 are 280.76 MB, 65.14 us at 4.31 TB/s: 81.43 us for 80 %."""
    for us, verdict in ((81.3, True), (81.6, False)):
        point = point_of(1, 1, {PDL: us})
        assert report.verdicts(point)["bandwidth"] is verdict
        (line,) = experts_targets.lines([point])
        assert "280.8 MB at 4.31 TB/s 65.14 us" in line and "target >= 80%" in line
    assert report.verdicts(point_of(1, 16, {PDL: 81.3}))["bandwidth"] is None
    assert report.verdicts(point_of(8, 1, {PDL: 81.3}))["bandwidth"] is None
    said = report.remarks([point])
    assert "MISS bandwidth [experts@1 independent/1]" in said
    assert "experts@1 independent/1, 16 experts: ours:pdl 81.60 us" in said


def test_ours_asks_for_the_launch_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the kernels the copy's choice, the plan of the part and a result of
    NaN."""
    import verify_kernels.moe as package

    calls: list[tuple[str, bool, Tensor]] = []

    def route(logits, bias, top_k, plan, weights, ids, *, pdl):  # type: ignore[no-untyped-def]
        assert top_k == 4 and weights.isnan().all()
        calls.append(("route", pdl, logits))
        plan.counts.fill_(77)

    def sum_up(latent, shares, plan, bank, space, out, *, pdl):  # type: ignore[no-untyped-def]
        assert space.inner.shape == (256, 64) and space.inner.isnan().all()
        assert space.sums.shape == (1, 256, 128) and space.sums.isnan().all()
        assert out.isnan().all()
        calls.append(("experts", pdl, plan.counts))
        return out

    monkeypatch.setattr(package, "moe_route", route)
    monkeypatch.setattr(package, "moe_experts", sum_up)
    step = Step.draw(SHAPE, INDEPENDENT, 3, 2, CPU)
    for way in ours(Weights.draw(SHAPE, CPU), ("plain", "pdl")).ways:
        way.make(step)(1)
    assert [call[:2] for call in calls] == [
        ("experts", False),
        ("experts", True),
        ("route", False),
        ("experts", False),
        ("route", True),
        ("experts", True),
    ]
    assert calls[0][2].tolist() == [step.distinct(1), 12]
    assert torch.equal(calls[2][2], step.logits[1]) and calls[3][2].tolist() == [77, 77]
