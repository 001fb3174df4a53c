# SPDX-License-Identifier: Apache-2.0
"""The prefetch bench: what runs in which order, and what a time is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments import results
from experiments.bench import report, shapes, timing
from experiments.bench import weight_prefetch as bench
from experiments.bench.candidate import Inputs, Key, Offer, Timing
from tests.experiments.fake_bench import (
    ScriptedTimer,
    offering,
    row_by_row,
    settings,
    sheet_at,
)

torch.set_num_threads(1)

SHAPE = shapes.Projection("o_proj", 8, 40, 64)


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_COPIES", 3)


class Track:
    """Lanes, a prefetch and a product that note what they were asked for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.weights: dict[int, str] = {}

    def pause(self, us: float) -> None:
        self.events.append(f"pause {us:g}")

    def fork(self, work: Callable[[], object]) -> None:
        self.events.append("fork")
        work()

    def join(self) -> None:
        self.events.append("join")

    def prefetch(self, weight: Tensor) -> Callable[[], None]:
        name = self.weights.setdefault(weight.data_ptr(), f"w{len(self.weights)}")
        return lambda: self.events.append(f"prefetch {name}")

    def product(self, inputs: Inputs, out: Tensor) -> Tensor:
        self.events.append(f"product {self.weights[inputs[1].data_ptr()]}")
        return row_by_row(inputs, out)


def of(track: Track, timer: timing.Timer, **changes: object) -> bench.PrefetchBench:
    given = {
        "our_offer": offering("ours", track.product, ("plain",)),
        "make_lanes": lambda: track,
        "make_prefetch": track.prefetch,
        **changes,
    }
    return bench.PrefetchBench(SHAPE, settings(timer), **given)  # type: ignore[arg-type]


def script(cold: float, warm: float, after: Mapping[float, float]) -> ScriptedTimer:
    """Net times; every pause takes 0.5 us more than it was asked for."""
    us: dict[Key, float] = {
        ("cold", "plain"): 5.5 + cold,
        ("warm", "plain"): 5.5 + warm,
    }
    for lead, net in after.items():
        us[f"pause_{lead:g}", "plain"] = lead + 0.5
        us[f"prefetched_{lead:g}", "plain"] = lead + 0.5 + net
    return ScriptedTimer({key: Timing(value, 0.25) for key, value in us.items()})


def test_only_weights_worth_prefetching_are_taken() -> None:
    found = [shape.label for shape in bench.worthwhile(shapes.select())]
    assert found == ["o_proj@8", "shared_gate_up@8"]


def test_the_prefetch_runs_beside_the_pause_and_ends_before_the_product() -> None:
    """Field case F26: the weight prefetched is the weight multiplied, cold before."""
    track = Track()

    class Watching(ScriptedTimer):
        seen: dict[Key, list[str]]

        def measure(
            self, launches: Mapping[Key, timing.Launch], copies: int, floor_us: float
        ) -> dict[Key, Timing | str]:
            self.seen = {}
            for key, launch in launches.items():
                track.events.clear()
                for copy in range(copies):
                    launch(copy)
                self.seen[key] = list(track.events)
            return dict.fromkeys(launches, Timing(9.0, 0.1))

    timer = Watching()
    next(of(track, timer).measure())
    three = range(3)
    cold = [e for i in three for e in ("pause 5", f"product w{i}")]
    assert timer.seen["cold", "plain"] == cold
    assert timer.seen["warm", "plain"] == ["pause 5", "product w0"] * 3
    assert timer.seen["pause_20", "plain"] == ["pause 20"] * 3
    assert timer.seen["prefetched_20", "plain"] == [
        event
        for i in three
        for event in ("fork", f"prefetch w{i}", "pause 20", "join", f"product w{i}")
    ]


def test_times_are_without_the_pause(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    timer = script(6.5, 3.0, {5.0: 6.0, 10.0: 5.0, 20.0: 3.5, 40.0: 3.25})
    sheet, work = sheet_at(path), of(Track(), timer)
    points = list(work.measure())
    assert len(points) == 3 * 6
    work.trace(points)
    for point in points[:6]:
        sheet.add(point)
    lines = results.read(path)
    found = {
        (line["shape"]["weights"], line["shape"].get("lead_us")): line["us"]
        for line in lines
    }
    assert found == {
        ("cold", None): 6.5,
        ("warm", None): 3.0,
        ("prefetched", 5.0): 6.0,
        ("prefetched", 10.0): 5.0,
        ("prefetched", 20.0): 3.5,
        ("prefetched", 40.0): 3.25,
    }
    for line in lines:
        assert (line["op"], line["spread"], line["peers"]) == ("prefetch", 0.5, {})
        assert set(line["gates"]) == {
            "accurate",
            "same_bits_prefetched",
            "weights_unchanged",
        }
    assert all(report.verdicts(point) == {} for point in points)
    table = report.table(points[:6]).splitlines()
    assert "o_proj@8 prefetched 20 us" in table[5] and " 3.50 " in table[5]


def test_no_time_where_the_pause_hides_the_product() -> None:
    timer = script(6.5, 3.0, {5.0: -0.5, 10.0: 5.0, 20.0: 3.5, 40.0: 3.25})
    points = list(of(Track(), timer).measure())
    assert points[2].missing == {
        "prefetched": "5.00 us with its pause, 5.50 us the pause alone"
    }
    assert not points[2].timings and points[3].timings


def test_a_prefetch_that_changes_memory_is_red() -> None:
    """Field case F25: a result that depends on the prefetch has no time."""
    track, timer = Track(), ScriptedTimer()

    def spoil(weight: Tensor) -> Callable[[], None]:
        track.prefetch(weight)
        return lambda: weight[0].add_(1)  # type: ignore[return-value]

    for point in of(track, timer, make_prefetch=spoil).measure():
        assert set(point.red()["ours", "plain"]) == {
            "same_bits_prefetched",
            "weights_unchanged",
        }
        assert not point.timings
    assert not timer.timed


def test_wide_steps_are_left_out_and_a_missing_kernel_is_said() -> None:
    timer = ScriptedTimer()
    given = settings(timer, rows=(8, 16, 64))
    track = Track()
    work = bench.PrefetchBench(
        SHAPE,
        given,
        offering("ours", track.product, ("plain",)),
        lambda: track,
        track.prefetch,
    )
    assert {point.rows for point in work.measure()} == {8}
    none = of(track, timer, our_offer=lambda *_: Offer(missing={"ours": "no compiler"}))
    with pytest.raises(ValueError, match="no compiler"):
        next(none.measure())
