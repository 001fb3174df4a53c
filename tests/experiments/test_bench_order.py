# SPDX-License-Identifier: Apache-2.0
"""What the bench does first, and where it stops when its time is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from experiments import results
from experiments.bench import __main__ as command
from experiments.bench import shapes
from experiments.bench.budget import Budget, watched
from experiments.bench.candidate import Point, Timing
from tests.experiments.fake_bench import ScriptedTimer, settings, sheet_at

torch.set_num_threads(1)


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """Three points, 10 s each; a trace of 5 s."""

    def __init__(self, label: str, clock: Clock) -> None:
        self.label = label
        self.clock = clock

    def measure(self) -> Iterator[Point]:
        for rows in (1, 2, 8):
            self.clock.now += 10.0
            point = Point("skinny_gemm", self.label, {"n": 8, "k": 8}, rows, 10**7)
            point.gates["ours", "plain"] = {"accurate": True}
            point.timings["ours", "plain"] = Timing(5.0, 0.1)
            yield point

    def trace(self, points: Sequence[Point]) -> None:
        self.clock.now += 5.0
        for point in points:
            point.kernels["ours", "plain"] = ["kernel"]


def test_shapes_of_the_whole_model_come_last() -> None:
    parse = command._parser().parse_args
    plain = settings(ScriptedTimer())
    ops = ["prefetch", "moe_front", "skinny_gemm", "attn_res"]
    for order in ("1,16,8", "8,1,16"):
        labels = [b.label for b in command.benches(parse([*ops, "--tp", order]), plain)]
        whole = [label.endswith("@1") for label in labels]
        assert whole == sorted(whole) and sum(whole) >= 12
        assert {"N=4", "moe_front@8", "moe_front@16"} <= set(labels[: -sum(whole)])
    with pytest.raises(ValueError, match="nothing to measure"):
        command.benches(parse(["moe_front", "--tp", "1"]), plain)
    assert [s.tp for s in shapes.select((1, 8), ["q_b"])] == [8, 1]


def test_the_budget_ends_between_points_with_all_lines_written(tmp_path: Path) -> None:
    """Of 100 s 80 are for times: eight of nine points, and four traces."""
    path, clock, said = tmp_path / "out.jsonl", Clock(), list[str]()
    work = [Slow(label, clock) for label in ("a@8", "b@8", "c@8", "d@8")]
    points = command.run(work, sheet_at(path), said.append, Budget(100.0, clock))
    assert [f"{p.label}/{p.rows}" for p in points] == [
        *(f"{name}@8/{m}" for name in "ab" for m in (1, 2, 8)),
        "c@8/1",
        "c@8/2",
    ]
    assert "out of time in c@8 after c@8/2" in said
    assert "out of time; not begun: d@8" in said
    lines = results.read(path)
    assert len(lines) == 8 and all(line["kernels"] == ["kernel"] for line in lines)


def test_traces_are_left_out_when_all_time_is_spent(tmp_path: Path) -> None:
    path, clock, said = tmp_path / "out.jsonl", Clock(), list[str]()
    work = [Slow(label, clock) for label in ("a@8", "b@8", "c@8")]
    command.run(work, sheet_at(path), said.append, Budget(64.0, clock))
    assert "out of time; no kernel names from b@8 on" in said
    named = [bool(line["kernels"]) for line in results.read(path)]
    assert named == [True] * 3 + [False] * 3


def test_without_a_budget_there_is_no_end() -> None:
    clock = Clock()
    budget = Budget(None, clock)
    clock.now += 1e9
    assert not budget.spent() and budget.left(0.5) == float("inf")
    assert budget.elapsed == 1e9
    with pytest.raises(ValueError, match="seconds=0"):
        Budget(0.0)


def test_shares_of_a_budget() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    clock.now += 8.5
    assert budget.spent(0.8) and not budget.spent(0.9)
    assert budget.left() == 1.5 and budget.left(0.9) == 0.5
    clock.now += 1.5
    assert budget.spent() and budget.left() == 0.0


def test_work_that_never_ends_is_named() -> None:
    """A kernel that hangs must not hold the machine in silence."""
    ended, calls = threading.Event(), list[tuple[str, float]]()

    def stop(name: str, seconds: float, log: object) -> None:
        calls.append((name, seconds))
        ended.set()

    with watched("quick", 30.0, print, stop):
        pass
    with watched("k768_m8", 0.01, print, stop):
        assert ended.wait(30)
    assert calls == [("k768_m8", 0.01)]
