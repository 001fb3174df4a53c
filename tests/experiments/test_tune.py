# SPDX-License-Identifier: Apache-2.0
"""The search for kernels without a GPU: what is tried, refused, timed and said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import results
from experiments.bench import (
    ours,
    peers,
    shapes,
    space,
    table,
    timing,
    tune,
    tuning_sheet,
)
from experiments.bench.budget import Budget
from experiments.bench.candidate import (
    MODES,
    OURS,
    Candidate,
    Inputs,
    Key,
    Mode,
    Offer,
    Timing,
)
from experiments.bench.search import Round, Task, Trial, Weights, close
from tests.experiments.fake_bench import (
    ScriptedTimer,
    offering,
    row_by_row,
    settings,
    sheet_at,
)
from verify_kernels.skinny_gemm import choice as shipped
from verify_kernels.skinny_gemm import host
from verify_kernels.skinny_gemm.choice import Choice, Cut, Outputs
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.tiling import Tiling

torch.set_num_threads(1)

SHAPE = shapes.Projection("f_b", 8, 24, 128)
WEIGHTS = Weights("f_b", 8, (SHAPE,))
#: The last of them is the fastest: see Stopwatch.
TRIED = (
    *(Choice(Tiling(128, stages=stages)) for stages in (1, 2, 3)),
    *(Choice(DirectTiling(128, halves=1, token_chunks=1), run) for run in (2, 4, 8)),
)
Run = Callable[[Inputs, Sequence[Tensor]], Sequence[Tensor]]


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_COPIES", 3)


# The plan


def test_weights_by_name_and_by_size() -> None:
    found = tune.wanted(["q_b", "768x7168", "moe_front"], (16, 8))
    assert [(w.label, w.n, w.k, w.outputs) for w in found] == [
        ("q_b@16", 1152, 1536, ("bf16",)),
        ("q_b@8", 2304, 1536, ("bf16",)),
        ("768x7168", 768, 7168, ("bf16",)),
        ("moe_front@16", 1048, 7168, ("fp32", "bf16", "bf16")),
        ("moe_front@8", 2096, 7168, ("fp32", "bf16", "bf16")),
    ]
    with pytest.raises(ValueError, match="shape='gate'"):
        tune.wanted(["gate"], (8,))
    with pytest.raises(ValueError, match="N must be at least 1"):
        tune.wanted(["0x768"], (8,))


def test_all_weights_without_names() -> None:
    every = tune.wanted([], (16, 8))
    assert len(every) == len(shapes.select((16, 8))) + 2
    assert {w.label for w in every} >= {"in_proj@16", "router@8", "moe_front@8"}
    whole = [w.tp == 1 for w in tune.wanted([], (1, 8))]
    assert whole == sorted(whole) and 1 < sum(whole) < len(whole) - 1


def in_use(weights: Weights, rows: int, pdl: bool) -> Choice:
    found = shipped.choices(weights.k, weights.n, weights.outputs, pdl)
    return next(choice for most, choice in found.items() if rows <= most)


def test_the_choices_in_use_are_tried_first() -> None:
    """So a search of one design finds nothing slower."""
    (weights,) = tune.wanted(["in_proj"], (16,))
    two, eight = tune.plan([weights], (8, 2), space.H200, ["wide"])
    assert (two.rows, eight.rows) == (2, 8)
    both = [in_use(weights, 2, pdl) for pdl in (False, True)]
    assert two.choices == tuple(dict.fromkeys(both))
    used = {in_use(weights, 8, pdl) for pdl in (False, True)}
    assert set(eight.choices[: len(used)]) == used
    wide = space.candidates(weights.n, weights.k, 8, designs=["wide"])
    assert wide and set(eight.choices) == {*used, *wide}
    (plain,) = tune.plan([weights], (2,), space.H200, ["wide"], ("plain",))
    assert plain.choices == (both[0],)


def test_outputs_that_are_new_have_nothing_in_use() -> None:
    assert tune.in_use(grouped(), "pdl") == {}


# The search


def each_part(inputs: Inputs, outs: Sequence[Tensor]) -> Sequence[Tensor]:
    x, *weights = inputs
    for w, out in zip(weights, outs, strict=True):
        row_by_row((x, w), out)
    return outs


class Shelf:
    """Kernels without a compiler; some choices run what ``faults`` says."""

    def __init__(
        self,
        faults: Mapping[Choice, Run | Exception] | None = None,
        used: Run = each_part,
    ) -> None:
        self.faults = dict(faults or {})
        self.used = used
        self.started: list[Task] = []
        self.asked: list[tuple[Choice, float]] = []

    def start(self, task: Task) -> None:
        self.started.append(task)

    def in_use(self, weights: Weights, modes: tuple[Mode, ...]) -> Offer:
        return Offer([Candidate(OURS, mode, self.used) for mode in modes])

    def kernels(
        self, choice: Choice, weights: Weights, modes: Sequence[Mode], seconds: float
    ) -> list[Candidate]:
        self.asked.append((choice, seconds))
        run = self.faults.get(choice, each_part)
        if isinstance(run, Exception):
            raise run
        return [Candidate(choice.name, mode, run) for mode in modes]


class Stopwatch(ScriptedTimer):
    """Each choice of a list is 2 % faster than the one before, the last takes 20 us;
    when timed again choice i takes 30 + i. Plain launches take 1 us more."""

    def __init__(self, choices: Sequence[Choice] = TRIED) -> None:
        super().__init__()
        self.order = {choice.name: i for i, choice in enumerate(choices)}
        self.groups: list[list[str]] = []

    def measure(
        self, launches: Mapping[Key, timing.Launch], copies: int, floor_us: float
    ) -> dict[Key, Timing | str]:
        again = {name for group in self.groups for name in group}
        self.groups.append(sorted({n for n, _ in launches if n in self.order}))
        super().measure(launches, copies, floor_us)
        found: dict[Key, Timing | str] = {}
        for name, mode in launches:
            us = 50.0
            if name in self.order:
                i = self.order[name]
                us = (
                    30.0 + i
                    if name in again
                    else 20 * 1.02 ** (len(self.order) - 1 - i)
                )
            found[name, mode] = Timing(us + (mode == "plain"), 0.5)
        return found


def run_tune(
    shelf: Shelf,
    timer: timing.Timer,
    path: Path | None = None,
    budget: Budget | None = None,
    tasks: Sequence[Task] = (Task(WEIGHTS, 8, TRIED),),
    best: int = 2,
) -> tuple[list[tuple[Task, Round]], list[str]]:
    said: list[str] = []
    recorder = sheet_at(None)._recorder
    sheet = tuning_sheet.TuningSheet(path, recorder, "NVIDIA H200")
    given = settings(timer, rows=(8,))
    with torch.inference_mode():
        last = tune.tune(
            tasks, given, shelf, sheet, said.append, budget or Budget(), best
        )
    return last, said


def names(choices: Sequence[Choice]) -> list[str]:
    return sorted(choice.name for choice in choices)


def test_the_close_ones_are_timed_again_and_that_time_decides(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    shelf, timer = Shelf(), Stopwatch()
    ((task, found),), said = run_tune(shelf, timer, path)
    assert shelf.started == [task] and task.label == "f_b@8 M=8"
    # The last two were within 3 % of each other; again they take 35 and 34 us.
    assert timer.groups == [names(TRIED), names(TRIED[4:])]
    assert found.stage == "final"
    assert [t.choice for t in found.trials] == [TRIED[4], TRIED[5]]
    lines = results.read(path)
    # Of the first round those within 5 %: 20, 20.4 and 20.8 us, in each mode.
    stages = [line["shape"]["stage"] for line in lines]
    assert stages == ["search"] * 6 + ["final"] * 4
    last = lines[6]
    assert (last["op"], last["us"], last["variant"]) == (tuning_sheet.OP, 34.0, "pdl")
    assert shipped.cut_of(last["shape"]["cut"]) == TRIED[4].cut
    assert (last["shape"]["run"], last["shape"]["out"]) == (4, "bf16")
    assert lines[0]["peers"] == {
        "in_use:plain": 51.0,
        "in_use:pdl": 50.0,
        "cublas:plain": 51.0,
        "ring:pdl": pytest.approx(20 * 1.02**3),
        "direct:pdl": 20.0,
    }
    assert last["bandwidth_share"] == pytest.approx(2 * 24 * 128 / 4.31e6 / 34.0)
    text = "\n".join(said)
    assert "f_b@8 M=8, final" in text and f"direct {TRIED[4].name}" in text
    assert list(tuning_sheet.verdict(task, found)) == [
        f"f_b@8 M=8 pdl: 50.00 us in use, 34.00 us (-32.0%) {TRIED[4].name}",
        f"f_b@8 M=8 plain: 51.00 us in use, 35.00 us (-31.4%) {TRIED[4].name}",
    ]
    # The lines are all that the table needs.
    points, left_out = table.points_of(lines)
    assert not left_out
    (pdl,) = (point for point in points if point.pdl)
    assert (pdl.k, pdl.n, pdl.outputs, pdl.rows) == (128, 24, ("bf16",), 8)
    assert pdl.times == {
        TRIED[3]: pytest.approx(20 * 1.02**2),
        TRIED[4]: 34.0,
        TRIED[5]: 35.0,
    }


def test_the_last_round_can_be_left_out() -> None:
    timer = Stopwatch()
    ((_, found),), said = run_tune(Shelf(), timer, best=0)
    assert len(timer.groups) == 1 and found.stage == "search"
    # The best of each design, though all direct ones are faster than any ring.
    text = "\n".join(said)
    assert f"ring {TRIED[2].name}" in text and f"direct {TRIED[5].name}" in text
    assert TRIED[1].name not in text


def test_each_mode_has_its_own_close_ones() -> None:
    times = {"pdl": (10.0, 10.2, 12.0, 10.25), "plain": (14.0, 11.0, 11.1, 15.0)}
    trials = [Trial(choice) for choice in TRIED[:4]]
    for mode, values in times.items():
        for trial, us in zip(trials, values, strict=True):
            trial.timings[mode] = Timing(us, 0.0)  # type: ignore[index]
    of_both = close(trials, ("pdl", "plain"), 2)
    assert [trials.index(trial) for trial in of_both] == [0, 1, 2]
    assert [trials.index(t) for t in close(trials, ("pdl",), 9)] == [0, 1, 3]
    # One alone needs no last round.
    assert close(trials[2:], ("plain",), 2) == []
    assert close([Trial(TRIED[0])], ("pdl",), 2) == []


def one_bit(inputs: Inputs, outs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Well within any error, but not the bits of the choice in use, at M = 1 only."""
    each_part(inputs, outs)
    if outs[0].shape[0] == 1:
        outs[0].view(torch.int16)[0, 0] ^= 1
    return outs


def last_row_unwritten(inputs: Inputs, outs: Sequence[Tensor]) -> Sequence[Tensor]:
    each_part((inputs[0][:-1], *inputs[1:]), [out[:-1] for out in outs])
    return outs


class Flickers:
    """Another bit in one launch of eleven."""

    launches = 0

    def __call__(self, inputs: Inputs, outs: Sequence[Tensor]) -> Sequence[Tensor]:
        each_part(inputs, outs)
        self.launches += 1
        if self.launches % 11 == 0:
            outs[0].view(torch.int16)[0, 0] ^= 1
        return outs


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
def test_a_wrong_choice_is_red_and_untimed(
    run: Run, red: set[str], tmp_path: Path
) -> None:
    """Field cases F25 and F40: no time for other bits, however fast."""
    path, wrong = tmp_path / "tune.jsonl", TRIED[5]
    timer = Stopwatch()
    ((_, found),), said = run_tune(Shelf({wrong: run}), timer, path)
    assert timer.groups[0] == names(TRIED[:5])
    assert wrong not in [trial.choice for trial in found.trials]
    assert any("RED" in line and wrong.name in line for line in said)
    (line,) = (x for x in results.read(path) if x.get("metric") == "red_gates")
    assert {name for name, passed in line["gates"].items() if not passed} >= red
    assert line["shape"]["run"] == wrong.run
    points, _ = table.points_of(results.read(path))
    assert points and all(wrong not in point.times for point in points)


def test_a_choice_that_cannot_be_had_does_not_stop_the_others() -> None:
    shelf = Shelf({TRIED[0]: RuntimeError("spills"), TRIED[1]: MemoryError("no")})
    timer = Stopwatch()
    ((_, found),), said = run_tune(shelf, timer)
    assert timer.groups[0] == names(TRIED[2:]) and found.stage == "final"
    assert any("RuntimeError: spills" in line for line in said)
    assert any("MemoryError: no" in line for line in said)


def test_nothing_is_compared_with_a_wrong_choice_in_use() -> None:
    timer = ScriptedTimer()
    last, said = run_tune(Shelf(used=last_row_unwritten), timer)
    assert last == [] and not timer.timed
    assert "the choice in use gives wrong results" in said[-1]


def grouped() -> Weights:
    outs = {"router": True, "latent_down": False}
    parts = [shapes.Projection(n, 8, 16, 128, fp32) for n, fp32 in outs.items()]
    return Weights("moe_front", 8, tuple(parts))


def swapped(inputs: Inputs, outs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The second matrix's results are the first's: accurate for neither part."""
    each_part((inputs[0], inputs[1], inputs[1]), outs)
    return outs


def test_every_matrix_of_a_launch_is_gated_and_its_bytes_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "cublas", offering("cublas", row_by_row, ("plain",)))
    path = tmp_path / "tune.jsonl"
    shelf, timer = Shelf({TRIED[5]: swapped}), Stopwatch()
    weights = grouped()
    run_tune(shelf, timer, path, tasks=[Task(weights, 8, TRIED)])
    assert timer.groups[0] == names(TRIED[:5])
    lines = [line for line in results.read(path) if "op" in line]
    assert {line["shape"]["out"] for line in lines} == {"fp32+bf16"}
    assert lines[0]["floor_us"] == pytest.approx(2 * 2 * 16 * 128 / 4.31e6)
    points, _ = table.points_of(lines)
    assert {(p.n, p.outputs) for p in points} == {(32, ("fp32", "bf16"))}


def test_data_is_made_once_for_all_m(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(tune.Data):
        def __init__(self, parts: Any, rows: int, *rest: Any) -> None:
            made.append(([part.name for part in parts], rows))
            super().__init__(parts, rows, *rest)

    monkeypatch.setattr(tune, "Data", Counted)
    other = Weights("24x128", 0, (shapes.Projection("24x128", 0, 24, 128),))
    tasks = [Task(w, m, TRIED[:2]) for w in (WEIGHTS, other) for m in (1, 8)]
    last, _ = run_tune(Shelf(), ScriptedTimer(), tasks=tasks, best=0)
    assert [task for task, _ in last] == tasks
    assert made == [(["f_b"], 8), (["24x128"], 8)]


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
        self, choice: Choice, weights: Weights, modes: Sequence[Mode], seconds: float
    ) -> list[Candidate]:
        self.clock.now += min(10.0, seconds)
        if seconds < 10.0:
            raise TimeoutError(f"{choice.name} was not compiled in time")
        return super().kernels(choice, weights, modes, seconds)


@pytest.mark.parametrize("seconds", [45.0, 54.0])
def test_a_point_cut_short_is_written_but_decides_nothing(
    seconds: float, tmp_path: Path
) -> None:
    """Nine tenths are for the search: 40.5 or 48.6 s, which the fifth would exceed."""
    path, clock = tmp_path / "tune.jsonl", Clock()
    shelf, timer = SlowShelf(clock), Stopwatch()
    ((_, found),), said = run_tune(shelf, timer, path, Budget(seconds, clock))
    assert [choice for choice, _ in shelf.asked] == list(TRIED[:4])
    assert timer.groups == [names(TRIED[:4])]
    assert found.stage == "partial" and clock.now <= 0.9 * seconds
    assert any("4 of 6 tried" in line for line in said)
    lines = results.read(path)
    assert lines and table.points_of(lines) == ([], [])


def test_no_last_round_when_the_time_is_spent() -> None:
    clock = Clock()

    class Tardy(Stopwatch):
        def measure(
            self, launches: Mapping[Key, timing.Launch], copies: int, floor_us: float
        ) -> dict[Key, Timing | str]:
            clock.now += 40.0
            return super().measure(launches, copies, floor_us)

    timer = Tardy()
    ((_, found),), _ = run_tune(SlowShelf(clock), timer, budget=Budget(110.0, clock))
    assert found.stage == "search" and len(timer.groups) == 1


def test_tasks_that_were_not_begun_are_named() -> None:
    clock = Clock()
    budget = Budget(10.0, clock)
    clock.now = 9.5
    last, said = run_tune(Shelf(), ScriptedTimer(), budget=budget)
    assert last == [] and said == ["out of time; not begun: f_b@8 M=8"]


def test_an_m_that_nothing_serves_is_said() -> None:
    last, said = run_tune(Shelf(), ScriptedTimer(), tasks=[Task(WEIGHTS, 8, ())])
    assert last == []
    assert said == ["f_b@8 M=8: no kernel serves so many rows in one launch"]


# The kernels


class Instant:
    """Compilers that note what they are asked for; one kernel spills."""

    def __init__(self) -> None:
        self.asked: list[tuple[Cut, Outputs]] = []
        self.awaited: list[tuple[Cut, Outputs]] = []

    def start(self, cuts: Iterable[Cut], outputs: Outputs) -> None:
        self.asked += [(cut, outputs) for cut in cuts]

    def wait(self, cut: Cut, outputs: Outputs, seconds: float) -> str:
        self.awaited.append((cut, outputs))
        return "it spills" if cut == TRIED[0].cut else ""


def test_kernels_are_launched_as_the_package_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[Any, ...]] = []
    weights = grouped()

    def compiled(cut: Cut, outputs: Outputs, arch: str) -> Callable[..., None]:
        assert (outputs, arch) == (("fp32", "bf16"), "sm_90a")
        return lambda *arguments: launched.append((cut, *arguments))

    monkeypatch.setattr(tune, "compiled", compiled)
    monkeypatch.setattr(tune, "device_arch", {0: "sm_90a"}.__getitem__)
    monkeypatch.setattr(host, "clusters_held", lambda device, size: 132 // size)
    source = tune.CudaSource(Instant(), 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="it spills"):
        source.kernels(TRIED[0], weights, MODES, 1.0)
    x, w0, w1, y0, y1 = (torch.zeros(1) for _ in range(5))
    for choice, ctas in ((TRIED[1], 132), (TRIED[3], 16), (TRIED[5], 4)):
        for kernel, pdl in zip(
            source.kernels(choice, weights, ("pdl", "plain"), 1.0), (1, 0), strict=True
        ):
            assert kernel.name == choice.name
            kernel.run((x, w0, w1), [y0, y1])
            assert launched.pop() == (choice.cut, x, [w0, w1], [y0, y1], ctas, pdl)


def test_kernels_in_use_are_compiled_before_what_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first launch binds every M, not only that of the task."""
    monkeypatch.setattr(
        ours, "grouped_gemm", lambda parts, modes: Offer([], {"a": "b"})
    )
    compilers = Instant()
    source = tune.CudaSource(compilers, 0)  # type: ignore[arg-type]
    (weights,) = tune.wanted(["q_b"], (16,))
    source.start(Task(weights, 1, TRIED))
    used = [
        choice.cut
        for pdl in (False, True)
        for choice in shipped.choices(1536, 1152, ("bf16",), pdl).values()
    ]
    tried = [choice.cut for choice in TRIED]
    assert compilers.asked == [(cut, ("bf16",)) for cut in used + tried]
    source.start(Task(weights, 2, TRIED[:1]))
    assert len(compilers.asked) == len(used + tried) + 1
    assert source.in_use(weights, MODES).missing == {"a": "b"}
    assert compilers.awaited == [(cut, ("bf16",)) for cut in used]


# The command


def test_the_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    arguments = ["--shape", "in_proj", "--tp", "16", "--rows", "8"]
    assert tune.main([*arguments, "--design", "ring", "--list"], said.append) == 0
    names = [line.strip() for line in said if line.startswith("  ")]
    assert said[0] == f"in_proj@16 M=8: {len(names)} choices"
    assert "k7168_m8_c4_r16_h16_p2_s3_b2_x4_d1_t1_o1@0" in names
    assert said[-1].startswith(f"1 points, {len(names)} choices")
    for bad, why in (
        (["--shape", "24x700", "--list"], "k=700"),
        (["--design", "narrow", "--list"], "design='narrow'"),
        (["--rows", "65", "--list"], "rows=65"),
        (["--best", "-1"], "best=-1"),
        (["--seconds", "-1"], "seconds=-1"),
        (["--tolerance", "0.2"], "tolerance=0.2"),
        (["--from", "nowhere.jsonl"], "from: lines are read to write"),
        (["--write", "/no/such/place/choices.json"], "write=/no/such/place/choices"),
    ):
        assert tune.main(bad, said.append) == 2
        assert f"error: {why}" in capsys.readouterr().err


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tune.jsonl"
    run_tune(Shelf(), Stopwatch(), path)
    yield path


def test_a_table_is_written_from_recorded_lines(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    out = tmp_path / "choices.json"
    arguments = ["--from", str(recorded), "--write", str(out)]
    assert tune.main([*arguments, "--fresh"], said.append) == 0
    own = shipped.entries_of(out.read_text())
    assert [(e.n, e.rows, e.pdl, e.choice) for e in own] == [
        (24, 8, True, TRIED[3]),
        (24, 8, False, TRIED[3]),
    ]
    assert any("more than 8 rows are cut into launches" in line for line in said)
    assert said[-1] == f"written to {out}"
    assert tune.main(arguments, said.append) == 0
    # What was written by hand is no entry of a measured table.
    assert set(shipped.entries_of(out.read_text())) == {*own, *shipped.measured()}
    assert shipped.unmeasured()
    assert tune.main(["--from", str(tmp_path / "no.jsonl"), *arguments[2:]]) == 2
    assert "no.jsonl does not exist" in capsys.readouterr().err
