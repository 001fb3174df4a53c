# SPDX-License-Identifier: Apache-2.0
"""The search for tilings without a GPU: what is tried, refused, timed and said."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import results
from experiments.bench import gates, search, shapes, space, timing, tune, tuning_sheet
from experiments.bench.budget import Budget
from experiments.bench.candidate import Candidate, Inputs, Key, Mode, Timing
from experiments.bench.product import Data
from tests.experiments.fake_bench import (
    ScriptedTimer,
    offering,
    row_by_row,
    settings,
    sheet_at,
)
from verify_kernels.skinny_gemm.host import TILINGS
from verify_kernels.skinny_gemm.tiling import Tiling

torch.set_num_threads(1)

SHAPE = shapes.Projection("f_b", 8, 24, 128)
TWO_ROWS = {"row_tiles": (1, 2, 4), "ctas_per_sm": (1, 2)}
Run = Callable[[Inputs, Tensor], Tensor]


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_COPIES", 2)


# The space


def test_candidates_are_the_valid_part_of_the_product() -> None:
    """Counted another way: every combination, any that Tiling refuses left out."""
    fields = {
        "cluster": (2, 4, 8, 3),
        "span": (1, 2, 4),
        "exchange_buffers": (2, 4),
        "stages": (1, 2, 4, 8),
    }
    found = space.candidates(7168, 8, fields)
    base = {
        name: getattr(TILINGS[7168][8], name)
        for name in space.FIELDS
        if name not in fields
    }
    expected = []
    for values in itertools.product(*fields.values()):
        try:
            expected.append(
                Tiling(7168, 1, **base, **dict(zip(fields, values, strict=True)))
            )
        except ValueError:
            continue
    assert 0 < len(expected) < 3 * 4 * 2 * 4
    assert len(found) == len(set(found)) and set(found) == set(expected)


@pytest.mark.parametrize("k", [128, 768, 7168])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_stages_are_the_deepest_that_fit(k: int, rows: int) -> None:
    found = space.candidates(k, rows, {"cluster": (1, 2, 8), "row_tiles": (1, 2)})
    assert found
    for tiling in found:
        assert tiling.tokens == -(-rows // 8) * 8
        assert tiling.stage_rows == tiling.rows
        if tiling.stages < space.MAX_STAGES:
            with pytest.raises(ValueError):
                dataclasses.replace(tiling, stages=tiling.stages + 1)


def test_what_is_not_given_keeps_the_value_in_use() -> None:
    used = TILINGS[768][8]
    (same,) = space.candidates(768, 8, {"stages": (used.stages,)})
    assert same == used
    (other,) = space.candidates(768, 8, {"stages": (used.stages - 1,)})
    assert other == dataclasses.replace(used, stages=used.stages - 1)
    # 33792 is cut into launches of 16 rows: nothing is in use for 64 at once.
    assert space.in_use(33792, 64) is None
    assert space.candidates(33792, 64, {"cluster": (8,)}) == []


def test_tilings_that_do_the_same_are_tried_once() -> None:
    exchange = {"cluster": (1,), "exchange_buffers": (1, 2, 4, 8)}
    assert len(space.candidates(768, 1, exchange)) == 1
    heights = {"row_tiles": (1, 2), "stage_rows": (8, 16, 24, 32)}
    found = space.candidates(128, 1, heights)
    assert [(t.row_tiles, t.stage_rows) for t in found] == [
        (1, 8),
        (1, 16),
        (2, 24),
        (2, 32),
    ]


def test_a_printed_tiling_can_be_put_into_the_table() -> None:
    for k, by_rows in TILINGS.items():
        for tiling in by_rows.values():
            again = Tiling(k, tiling.token_tiles, **space.spell(tiling))
            assert again == tiling


def test_bad_spaces_are_refused() -> None:
    with pytest.raises(ValueError, match="k=700: no order of sums"):
        space.candidates(700, 1, {})
    with pytest.raises(ValueError, match="rows=65"):
        space.candidates(768, 65, {})
    with pytest.raises(ValueError, match="field='warps'"):
        space.candidates(768, 1, {"warps": (4,)})


# The search


class Shelf:
    """Kernels without a compiler; some tilings run what ``faults`` says."""

    def __init__(self, faults: Mapping[Tiling, Run | Exception] | None = None) -> None:
        self.faults = dict(faults or {})
        self.started: list[Tiling] = []
        self.asked: list[tuple[Tiling, float]] = []

    def start(self, tilings: Sequence[Tiling], shape: shapes.Projection) -> None:
        self.started += tilings

    def kernels(
        self,
        tiling: Tiling,
        shape: shapes.Projection,
        modes: tuple[Mode, ...],
        seconds: float,
    ) -> list[Candidate]:
        self.asked.append((tiling, seconds))
        run = self.faults.get(tiling, row_by_row)
        if isinstance(run, Exception):
            raise run
        return [Candidate(tiling.name, mode, run) for mode in modes]


class Stopwatch(ScriptedTimer):
    """Tiling i of a list takes 20 - i us at first and 30 + i when timed again."""

    def __init__(self, tilings: Sequence[Tiling]) -> None:
        super().__init__()
        self.order = {tiling.name: i for i, tiling in enumerate(tilings)}
        self.groups: list[list[str]] = []

    def measure(
        self, launches: Mapping[Key, timing.Launch], copies: int, floor_us: float
    ) -> dict[Key, Timing | str]:
        again = {name for group in self.groups for name in group}
        self.groups.append([name for name, _ in launches if name in self.order])
        super().measure(launches, copies, floor_us)
        found: dict[Key, Timing | str] = {}
        for name, mode in launches:
            i = self.order.get(name, -100)
            us = 30.0 + i if name in again else 20.0 - i
            late = 1.0 if mode == "plain" else 0.0
            found[name, mode] = Timing(50.0 if i < 0 else us + late, 0.5)
        return found


def run_tune(
    shelf: Shelf,
    timer: timing.Timer,
    path: Path | None = None,
    fields: space.Space | None = None,
    budget: Budget | None = None,
    **changes: Any,
) -> tuple[list[tuple[search.Task, search.Round]], list[str]]:
    tasks = tune.plan([SHAPE], (8,), fields or TWO_ROWS)
    said: list[str] = []
    sheet = tuning_sheet.TuningSheet(path, sheet_at(None)._recorder, "NVIDIA H200")
    given = {"in_use": offering("ours", row_by_row), "best": 2, **changes}
    with torch.inference_mode():
        last = tune.tune(
            tasks,
            settings(timer, rows=(8,)),
            shelf,
            sheet,
            said.append,
            budget or Budget(),
            **given,
        )
    return last, said


def tilings_of(fields: space.Space = TWO_ROWS) -> list[Tiling]:
    return space.candidates(SHAPE.k, 8, fields)


def test_the_best_are_timed_again_and_that_time_decides(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    tried = tilings_of()
    assert len(tried) == 6
    shelf, timer = Shelf(), Stopwatch(tried)
    ((task, found),), said = run_tune(shelf, timer, path)
    assert shelf.started == tried and task.label == "f_b@8 M=8"
    names = [t.name for t in tried]
    # The last two were fastest, 15 and 16 us; again they take 35 and 34.
    assert [sorted(set(group)) for group in timer.groups] == [
        sorted(names),
        sorted(names[4:]),
    ]
    assert found.stage == "final"
    assert [t.tiling.name for t in found.trials] == [names[4], names[5]]
    lines = results.read(path)
    assert len(lines) == 2 * (6 + 2)
    assert [line["shape"]["stage"] for line in lines] == ["search"] * 12 + ["final"] * 4
    last = lines[-4]
    assert (last["op"], last["us"]) == ("skinny_gemm_tiling", 35.0)
    assert last["shape"]["tiling"]["row_tiles"] == tried[4].row_tiles
    assert set(last["peers"]) == {"in_use:plain", "in_use:pdl", "cublas:plain"}
    assert last["bandwidth_share"] == pytest.approx(2 * 24 * 128 / 4.31e6 / 35.0)
    text = "\n".join(said)
    assert "f_b@8 M=8, final" in text and str(space.spell(tried[4])) in text
    assert tuning_sheet.verdict(task, found) == (
        f"f_b@8 M=8 pdl: 50.00 us in use, 34.00 us (-32.0%) {space.spell(tried[4])}"
    )


def one_bit(inputs: Inputs, out: Tensor) -> Tensor:
    """Well within any error, but not the bits of the tiling in use, at M = 1 only."""
    row_by_row(inputs, out)
    if out.shape[0] == 1:
        out.view(torch.int16)[0, 0] ^= 1
    return out


def last_row_unwritten(inputs: Inputs, out: Tensor) -> Tensor:
    row_by_row((inputs[0][:-1], inputs[1]), out[:-1])
    return out


class Flickers:
    """Another bit in one launch of eleven."""

    launches = 0

    def __call__(self, inputs: Inputs, out: Tensor) -> Tensor:
        row_by_row(inputs, out)
        self.launches += 1
        if self.launches % 11 == 0:
            out.view(torch.int16)[0, 0] ^= 1
        return out


@pytest.mark.parametrize(
    ("run", "red"),
    [
        (one_bit, {"same_bits_plain", "same_bits_pdl"}),
        (
            last_row_unwritten,
            {f"{g}_{m}" for g in ("same_bits", "accurate") for m in ("plain", "pdl")}
            | {"repeatable_12_plain", "repeatable_12_pdl"},
        ),
        (Flickers(), {"repeatable_12_plain", "repeatable_12_pdl"}),
    ],
)
def test_a_wrong_tiling_is_red_and_untimed(
    run: Run, red: set[str], tmp_path: Path
) -> None:
    """Field cases F25 and F40: no time for other bits, however fast."""
    path, tried = tmp_path / "tune.jsonl", tilings_of()
    timer = Stopwatch(tried)
    ((_, found),), said = run_tune(Shelf({tried[5]: run}), timer, path)
    assert all(tried[5].name not in group for group in timer.groups)
    assert tried[5] not in [trial.tiling for trial in found.trials]
    assert any("RED" in line and str(space.spell(tried[5])) in line for line in said)
    (line,) = (x for x in results.read(path) if x.get("metric") == "red_gates")
    assert {name for name, passed in line["gates"].items() if not passed} >= red
    assert line["shape"]["tiling"]["stages"] == tried[5].stages


def test_a_tiling_that_cannot_be_had_does_not_stop_the_others() -> None:
    tried = tilings_of()
    shelf = Shelf({tried[0]: RuntimeError("spills"), tried[1]: MemoryError("no")})
    timer = Stopwatch(tried)
    ((_, found),), said = run_tune(shelf, timer)
    assert len(set(timer.groups[0])) == 4 and found.stage == "final"
    assert any("RuntimeError: spills" in line for line in said)
    assert any("MemoryError: no" in line for line in said)


def test_nothing_is_compared_with_a_wrong_tiling_in_use() -> None:
    timer = ScriptedTimer()
    last, said = run_tune(Shelf(), timer, in_use=offering("ours", last_row_unwritten))
    assert last == [] and not timer.timed
    assert "the tiling in use gives wrong results" in said[-1]


def test_large_spaces_are_timed_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "GROUP", 4)
    tried = tilings_of()
    timer = Stopwatch(tried)
    _, said = run_tune(Shelf(), timer)
    assert [len(set(group)) for group in timer.groups] == [4, 2, 2]
    assert sum("of 6 tried" in line for line in said) == 2


class Clock:
    """Goes on when a kernel is asked for."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowShelf(Shelf):
    """Ten seconds a kernel; one that would be late is late."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def kernels(
        self,
        tiling: Tiling,
        shape: shapes.Projection,
        modes: tuple[Mode, ...],
        seconds: float,
    ) -> list[Candidate]:
        self.clock.now += min(10.0, seconds)
        if seconds < 10.0:
            raise TimeoutError(f"{tiling.name} was not compiled in time")
        return super().kernels(tiling, shape, modes, seconds)


@pytest.mark.parametrize("seconds", [45.0, 54.0])
def test_the_budget_ends_the_search_with_all_lines_written(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine tenths are for the search: 40.5 or 48.6 s, which the fifth would exceed."""
    monkeypatch.setattr(search, "GROUP", 2)
    path, every, clock = tmp_path / "tune.jsonl", tilings_of(), Clock()
    shelf, timer = SlowShelf(clock), Stopwatch(every)
    budget = Budget(seconds, clock)
    ((_, found),), said = run_tune(shelf, timer, path, budget=budget)
    assert [tiling for tiling, _ in shelf.asked] == every[:4]
    assert found.stage == "final" and clock.now <= 0.9 * seconds
    assert len(results.read(path)) == 2 * (4 + 2)
    assert any("4 of 6 tried" in line for line in said)


def test_no_last_round_when_all_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "GROUP", 2)
    every, clock = tilings_of(), Clock()

    class Tardy(Stopwatch):
        def measure(
            self, launches: Mapping[Key, timing.Launch], copies: int, floor_us: float
        ) -> dict[Key, Timing | str]:
            clock.now += 30.0
            return super().measure(launches, copies, floor_us)

    budget = Budget(50.0, clock)
    ((_, found),), _ = run_tune(SlowShelf(clock), Tardy(every), budget=budget)
    assert found.stage == "search" and len(found.trials) == 2


def test_tasks_that_were_not_begun_are_named() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    clock.now = 9.5
    last, said = run_tune(Shelf(), ScriptedTimer(), budget=budget)
    assert last == [] and said == ["out of time; not begun: f_b@8 M=8"]


def test_the_error_is_measured_against_fp64_rows_of_the_task() -> None:
    """A search at M = 2 uses the first two rows of data made for more."""
    given = settings(ScriptedTimer(), rows=(2, 8))
    data = Data((SHAPE,), 8, given.device, 2)
    exact = gates.exact_product(data.tokens, data.weights[0][0])
    tilings = tuple(space.candidates(SHAPE.k, 2, {"stages": (1, 2)}))
    task = search.Task(SHAPE, 2, tilings)
    work = search.Search(
        task, data, exact, given, Shelf(), print, offering("ours", row_by_row)
    )
    found = list(work.rounds(Budget(), 1))
    assert [r.stage for r in found] == ["search", "final"]
    assert all(all(t.gates.values()) and t.timings for t in found[0].trials)


# The command


def test_shapes_by_name_and_by_size() -> None:
    found = tune.wanted_shapes(["q_b", "768x7168"], (16, 8))
    assert [(s.label, s.n, s.k) for s in found] == [
        ("q_b@16", 1152, 1536),
        ("q_b@8", 2304, 1536),
        ("768x7168", 768, 7168),
    ]
    with pytest.raises(ValueError, match="shape='gate'"):
        tune.wanted_shapes(["gate"], (8,))
    with pytest.raises(ValueError, match="N must be at least 1"):
        tune.wanted_shapes(["0x768"], (8,))


def test_the_space_is_read_from_options() -> None:
    parse = tune._parser().parse_args
    options = parse(["--shape", "q_b", "--cluster", "1,2,2", "--stage-rows", "14,16"])
    assert space.of_options(options) == {"cluster": (1, 2), "stage_rows": (14, 16)}


def test_the_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    arguments = ["--shape", "in_proj", "--tp", "16", "--rows", "8", "--span", "1,2"]
    assert tune.main([*arguments, "--list"], said.append) == 0
    assert said[0] == "in_proj@16 M=8: 2 tilings" and len(said) == 3
    assert tune.main(["--shape", "24x700", "--list"], said.append) == 2
    assert capsys.readouterr().err.startswith("error: k=700")
    assert tune.main([*arguments, "--best", "0"], said.append) == 2
    assert tune.main([*arguments, "--seconds", "-1"], said.append) == 2
