# SPDX-License-Identifier: Apache-2.0
"""The KDA bench without a GPU: what its gates see, where its times go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from experiments import results
from experiments.bench import __main__ as command
from experiments.bench import kda, kda_peers, kda_targets, report, timing
from experiments.bench.candidate import Key, Mode, Point, Timing
from experiments.bench.kda_data import FOLD, LAYOUTS, SNAPSHOT, KdaData, KdaShape
from experiments.bench.kda_ways import new_out, ours
from experiments.bench.ways import Run, Way, Ways
from tests.experiments.fake_bench import ScriptedTimer, settings, sheet_at
from verify_kernels.kda.host import DIM, TAPS
from verify_kernels.kda.reference import KdaRows, KdaWeights, step

torch.set_num_threads(1)

SHAPE = KdaShape(48, 2, 2, 2)
PLAIN: Key = ("ours", "plain")
PDL: Key = ("ours", "pdl")
#: An edit of what a launch read or wrote.
Edit = Callable[[KdaData], object]


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_COPIES", 2)


def _rows(data: KdaData, copy: int) -> tuple[KdaRows, KdaWeights, Tensor]:
    """Rows, weights and q, k, v before the convolution [M, 3, H, 128]."""
    w, heads = data.weights[copy], data.shape.heads
    taps = w.conv.view(3, heads, DIM, TAPS).permute(0, 3, 1, 2)
    weights = KdaWeights(taps[0], taps[1], taps[2], w.a_log, w.dt_bias, w.norm)
    packed = data.packed.float()
    rows = KdaRows.unpack(packed, w.w_fb.float(), heads, DIM, bf16_decay=True)
    return rows, weights, packed[:, : 3 * heads * DIM].unflatten(1, (3, heads, DIM))


def folding(data: KdaData) -> Run:
    """The fold layout in fp32 torch."""
    out, cache = new_out(data.shape, data.packed.device), data.fold
    heads = data.shape.heads

    def run(copy: int) -> Tensor:
        rows, weights, raw = _rows(data, copy)
        batch, width = data.fold_batches[copy], data.shape.width
        for b, slot in enumerate(batch.state_slots.tolist()):
            count = min(int(batch.accepted[b]), int(cache.counts[slot, 0, 0]))
            for t in range(count):
                decayed = cache.state[slot] * cache.decay[slot, :, t, None]
                key = cache.key[slot, :, t, None]
                cache.state[slot] = decayed + cache.u[slot, :, t, :, None] * key
            past = cache.window[slot, count : count + 3].float()
            line = torch.cat((past.unflatten(1, (3, heads, DIM)), raw[b * width :]))
            state = cache.state[slot]
            for t in range(width):
                taps = line[t : t + TAPS].unbind(1)
                found = step(state, taps, rows, b * width + t, weights)  # type: ignore[arg-type]
                out[b * width + t], state = found.out, found.state
                cache.u[slot, :, t], cache.key[slot, :, t] = found.u, found.key
                cache.decay[slot, :, t] = found.g.exp()
            cache.window[slot, : 3 + width] = line[: 3 + width].flatten(1)
            cache.counts[slot, :, 0] = width
        return out

    return run


def snapping(data: KdaData) -> Run:
    """vLLM's slots in fp32 torch."""
    out, heads = new_out(data.shape, data.packed.device), data.shape.heads

    def run(copy: int) -> Tensor:
        rows, weights, raw = _rows(data, copy)
        width = data.shape.width
        for b, slots in enumerate(data.tables[copy].tolist()):
            told = int(data.told[b])
            state = data.state[slots[told - 1]].clone()
            past = data.window[slots[0], told - 1 : told + 2].float()
            line = torch.cat((past.unflatten(1, (3, heads, DIM)), raw[b * width :]))
            for t in range(width):
                taps = line[t : t + TAPS].unbind(1)
                found = step(state, taps, rows, b * width + t, weights)  # type: ignore[arg-type]
                out[b * width + t], state = found.out, found.state
                data.state[slots[t]] = state
            data.window[slots[0], : 2 + width] = line[1 : 3 + width].flatten(1)
        return out

    return run


def then(make: Callable[[KdaData], Run], edit: Callable[[KdaData, Tensor], object]):  # type: ignore[no-untyped-def]
    """A kernel with something wrong after each run."""

    def made(data: KdaData) -> Run:
        inner = make(data)

        def run(copy: int) -> Tensor:
            out = inner(copy)
            edit(data, out)
            return out

        return run

    return made


def own(
    fold: Callable[[KdaData], Run] = folding, snap: Callable[[KdaData], Run] = snapping
) -> Callable[[str, Sequence[Mode]], Ways[KdaData]]:
    made = {FOLD: fold, SNAPSHOT: snap}
    return lambda layout, modes: Ways([Way(layout, m, made[layout]) for m in modes])


def other(
    make: Callable[[KdaData], Run] = snapping,
) -> Callable[[KdaShape, Sequence[Mode]], Ways[KdaData]]:
    return lambda shape, modes: Ways(
        [Way("vllm", mode, make, "a note") for mode in modes],
        {"vllm_native": "it is built for 12 heads"},
    )


def bench_of(timer: timing.Timer, **ways: object) -> kda.KdaBench:
    given = {"our_ways": own(), "peer_ways": other(), **ways}
    return kda.KdaBench(SHAPE, settings(timer, repeats=4), **given)  # type: ignore[arg-type]


def test_a_right_kernel_is_timed_in_both_layouts(tmp_path: Path) -> None:
    us: dict[Key, float] = {(FOLD, "pdl"): 4.0, (SNAPSHOT, "pdl"): 9.0}
    timer = ScriptedTimer({key: Timing(value, 0.1) for key, value in us.items()})
    work = bench_of(timer)
    points = list(work.measure())
    assert [p.label for p in points] == ["H=2 B=2 q=2 fold", "H=2 B=2 q=2 snapshot"]
    assert [p.timings[PDL].us for p in points] == [4.0, 9.0]
    for point in points:
        assert not point.red() and set(point.gates) == {PLAIN, PDL}
        assert set(point.gates[PDL]) == {
            "accurate",
            "accurate_state",
            "modes_equal",
            "repeatable_4",
        }
        assert set(point.peers()) == {("vllm", "plain"), ("vllm", "pdl")}
        assert point.missing == {"vllm_native": "it is built for 12 heads"}
    work.trace(points)
    assert points[1].kernels[PDL] == ["kernel_of_snapshot_pdl"]
    path = tmp_path / "out.jsonl"
    sheet = sheet_at(path)
    for point in points:
        sheet.add(point)
    lines = results.read(path)
    assert [line["shape"]["layout"] for line in lines] == [FOLD] * 2 + [SNAPSHOT] * 2
    assert lines[0]["peers"] == {"vllm:plain": 10.0, "vllm:pdl": 10.0}
    assert lines[0]["shape"]["heads"] == 2 and "a note" in lines[0]["note"]


def _flip(data: KdaData, out: Tensor) -> None:
    out.view(torch.int16)[0, 0, 0] ^= 1


def _one_row(data: KdaData) -> Tensor:
    """A row of the last head of the last request of the first copy, [128]."""
    return data.fold.state[SHAPE.requests, SHAPE.heads - 1, 77]


class _Sometimes:
    """The fifth run and those after it give another bit."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, data: KdaData, out: Tensor) -> None:
        self.runs += 1
        if self.runs > 5:
            _flip(data, out)


@pytest.mark.parametrize(
    ("fold", "red"),
    [
        (then(folding, lambda d, out: out.mul_(1.01)), "accurate"),
        (then(folding, lambda d, _: d.fold.state.mul_(1 + 1e-5)), "accurate_state"),
        (then(folding, lambda d, _: _one_row(d).mul_(1 + 1e-4)), "accurate_state"),
        (then(folding, lambda d, _: _one_row(d)[0].fill_(torch.nan)), "accurate_state"),
        (then(folding, lambda d, _: d.fold.counts.zero_()), "accurate"),
        (then(folding, lambda d, _: d.fold.window.zero_()), "accurate"),
        (then(folding, lambda d, out: out[1].fill_(torch.nan)), "accurate"),
        (then(folding, _Sometimes()), "repeatable_4"),
    ],
)
def test_a_wrong_kernel_is_not_timed(fold: Callable[[KdaData], Run], red: str) -> None:
    timer = ScriptedTimer()
    points = list(bench_of(timer, our_ways=own(fold)).measure())
    assert red in points[0].red()[PDL]
    assert PDL not in points[0].timings and PDL in points[1].timings
    assert (FOLD, "pdl") not in timer.timed and (SNAPSHOT, "pdl") in timer.timed


def test_states_are_compared_a_request_at_a_time() -> None:
    """[2 requests, 96 heads, 32, 32]; fp32 torch happens to be right in one head."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        shape = 2, 96, 32, 32
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    exact = normal()
    plain, found = (exact * (1 + 2.0**-22 * normal()) for _ in range(2))
    plain[0, 1] = exact[0, 1]
    assert kda.no_worse(found, exact, plain, kda.STATE)
    assert not kda.no_worse(found, exact, plain, (-2, -1))
    # A head that is wrong: half a percent of its state.
    found[1, 2] *= 1.005
    assert not kda.no_worse(found, exact, plain, kda.STATE)


def test_a_peer_with_wrong_arguments_is_no_peer() -> None:
    """One that takes the first snapshot, and one that raises; rounding passes."""

    def stale(data: KdaData) -> Run:
        inner = snapping(data)

        def run(copy: int) -> Tensor:
            data.told.fill_(1)
            return inner(copy)

        return run

    def raising(data: KdaData) -> Run:
        raise ValueError("no kernel")

    rounded = then(snapping, lambda d, out: out.mul_(1 + 2.0**-8))
    for make, says in ((stale, "is off by"), (raising, "ValueError: no kernel")):
        point = next(bench_of(ScriptedTimer(), peer_ways=other(make)).measure())
        assert says in point.missing["vllm:pdl"] and not point.peers()
    point = next(bench_of(ScriptedTimer(), peer_ways=other(rounded)).measure())
    assert ("vllm", "pdl") in point.peers()


def test_every_copy_has_a_place_of_its_own() -> None:
    """Whatever a copy's launch changes, the other copy's state and result do not."""
    data = KdaData(SHAPE, 2, torch.device("cpu"))
    for make, layout in ((folding, FOLD), (snapping, SNAPSHOT)):
        run = make(data)
        alone = []
        for copies in ((0,), (1,), (0, 1), (1, 0)):
            data.reset(torch.nan)
            data.packed.fill_(0.5)
            for number in range(2):
                data.tell(number)
                outs = {copy: run(copy).clone() for copy in copies}
            alone.append(outs)
        for copy in (0, 1):
            for outs in alone[2:]:
                assert torch.equal(outs[copy], alone[copy][copy]), layout
        assert not torch.equal(alone[0][0], alone[1][1])
    assert all(table.data_ptr() % 64 == 0 for table in data.tables)


def test_bytes() -> None:
    """96 heads, B = 8, width 8, decimal megabytes by hand."""
    shape = KdaShape.of(1, 8, 8)
    state, w_fb, packed = 96 * 65536 / 1e6, 96 * 32768 / 1e6, 64 * 49376 * 2 / 1e6
    assert kda.moved_bytes(shape, FOLD) / 1e6 == pytest.approx(
        16 * state + w_fb + packed
    )
    assert kda.moved_bytes(shape, SNAPSHOT) / 1e6 == pytest.approx(
        72 * state + w_fb + packed
    )


def test_steps_of_a_run() -> None:
    parse = command._parser().parse_args
    few = parse(["kda", "--tp", "16,8,1"])
    plain = settings(ScriptedTimer(), rows=(1, 8, 64))
    labels = [bench.label for bench in command.benches(few, plain)]
    assert labels[:4] == [
        "H=6 B=1 q=8",
        "H=12 B=1 q=8",
        "H=96 B=1 q=8",
        "H=6 B=8 q=8",
    ]
    assert len(labels) == 3 * 6 and len(set(labels)) == len(labels)
    every = kda.shapes((1,), command.DEFAULT_ROWS)
    assert len(every) == len(kda.STEPS)
    assert max(shape.rows for shape in every) == 64
    with pytest.raises(ValueError, match="tp=7"):
        kda.shapes((7,), (1,))


def point_of(tp: int, requests: int, width: int, us: dict[Key, float]) -> Point:
    shape = KdaShape.of(tp, requests, width)
    described = {**shape.described(), "layout": FOLD}
    size = kda.moved_bytes(shape, FOLD)
    point = Point(kda.OP, f"{shape.label} fold", described, shape.rows, size)
    point.timings = {key: Timing(value, 0.1) for key, value in us.items()}
    return point


@pytest.mark.parametrize(
    ("tp", "requests", "width", "name", "peer", "times"),
    [
        (1, 1, 8, "stock_3x", ("vllm", "pdl"), 3.0),
        (16, 1, 8, "stock_2x", ("vllm", "pdl"), 2.0),
        (8, 1, 8, "stock_2x", ("vllm", "pdl"), 2.0),
        (16, 8, 1, "stock_2x", ("vllm", "pdl"), 2.0),
        (8, 8, 1, "native", ("vllm_native", "plain"), 1.0),
    ],
)
def test_targets_against_peers(
    tp: int, requests: int, width: int, name: str, peer: Key, times: float
) -> None:
    for factor, verdict in ((1.001, True), (0.999, False)):
        us: dict[Key, float] = {PDL: 10.0, PLAIN: 1.0, peer: 10.0 * times * factor}
        point = point_of(tp, requests, width, us)
        assert report.verdicts(point)[name] is verdict
        (line,) = kda_targets.lines([point])
        assert f"target >= {times:.2f}x" in line
    assert report.verdicts(point_of(tp, 4, 2, us))[name] is None


def test_target_of_the_bytes() -> None:
    """16 states of 6.29 MB at 4.31 TB/s are 23.36 us, and 1.4 times that 32.70."""
    for us, verdict in ((32.6, True), (32.8, False)):
        point = point_of(1, 8, 8, {PDL: us})
        assert report.verdicts(point)["two_states"] is verdict
        (line,) = kda_targets.lines([point])
        assert "two states a request 23.36 us" in line
    text = report.table([point])
    assert "8x8" in text and "H=96 B=8 q=8 fold" in text
    said = report.remarks([point])
    assert "MISS two_states [H=96 B=8 q=8 fold/64]" in said
    assert "H=96 B=8 q=8 fold: ours:pdl 32.80 us" in said


def test_every_peer_is_reported_when_its_library_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kda_peers.vllm_peers, "load", lambda name: "nothing here")
    offer = kda_peers.peers(SHAPE, ("pdl",))
    assert not offer.ways
    assert offer.missing == {
        "vllm": "nothing here",
        "vllm_native": "it decodes one row a request and is off where vLLM speculates",
        "vllm_recoverssm": "nothing here",
        "fla": "nothing here",
    }


def test_where_the_native_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(tp: int, width: int) -> str:
        return kda_peers.native_problem(KdaShape.of(tp, 1, width), SimpleNamespace())

    monkeypatch.setattr(torch.ops._C, "fused_kda_decode", print, raising=False)
    assert problem(8, 1) == problem(1, 1) == ""
    assert "built for (12, 24, 48, 96) heads" in problem(16, 1)
    assert "one row" in problem(1, 2)


def test_ours_asks_for_the_launch_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives each layout the tensors of the copy."""
    import verify_kernels.kda as package

    calls: list[tuple[str, bool, Tensor]] = []

    def fold(packed, w, cache, batch, out, *, pdl):  # type: ignore[no-untyped-def]
        calls.append((FOLD, pdl, batch.state_slots))
        return out

    def snapshots(packed, w, state, window, slots, batch, out, *, pdl):  # type: ignore[no-untyped-def]
        calls.append((SNAPSHOT, pdl, slots[:, 0]))
        return out

    monkeypatch.setattr(package, "kda_verify", fold)
    monkeypatch.setattr(package, "kda_verify_snapshots", snapshots)
    data = KdaData(SHAPE, 2, torch.device("cpu"))
    for layout in LAYOUTS:
        for way in ours(layout, ("plain", "pdl")).ways:
            way.make(data)(1)
    assert [call[:2] for call in calls] == [
        (layout, pdl) for layout in LAYOUTS for pdl in (False, True)
    ]
    assert calls[0][2].tolist() == [3, 4] and calls[2][2].tolist() == [5, 7]
