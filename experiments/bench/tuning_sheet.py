# SPDX-License-Identifier: Apache-2.0
"""What a search for choices writes down and says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import results
from experiments.bench import timing
from experiments.bench.budget import Budget
from experiments.bench.candidate import CUBLAS, OURS, Key, Mode, Timing
from experiments.bench.candidate import spell as spell_key
from experiments.bench.search import Round, Task, Trial
from verify_kernels.skinny_gemm.choice import DESIGNS, Choice, design_of, spell

OP = "skinny_gemm_choice"
IN_USE = "in_use"
#: Choices slower than the fastest beside them by more than this are not written down:
#: they will serve nothing, and there are thousands.
RECORDED = 0.05
_MODES: tuple[Mode, ...] = ("pdl", "plain")


def described(task: Task, choice: Choice, stage: str) -> dict[str, Any]:
    """What a line calls ``shape``: all that `table.points_of` needs."""
    return {
        **task.weights.described(),
        "m": task.rows,
        "stage": stage,
        "cut": spell(choice.cut),
        "run": choice.run,
    }


def best_of_designs(trials: Sequence[Trial], mode: Mode) -> dict[str, Trial]:
    """The fastest of each design that was timed."""
    found: dict[str, Trial] = {}
    for design in DESIGNS:
        timed = [
            trial
            for trial in trials
            if design_of(trial.choice.cut) == design and mode in trial.timings
        ]
        if timed:
            found[design] = min(timed, key=lambda trial: trial.us(mode))
    return found


class TuningSheet:
    """Appends a round's lines to a file as soon as it is over.

    Args:
        path: results file, or None to keep the lines in memory.
        recorder: the run's provenance.
        gpu: name of the device.
        state: of the device, for the notes.
    """

    def __init__(
        self, path: Path | None, recorder: results.Recorder, gpu: str, state: str = ""
    ) -> None:
        self._path = path
        self._recorder = recorder
        self._gpu = gpu
        self._state = state

    @property
    def lines(self) -> list[results.Line]:
        """All of this run."""
        return self._recorder.lines

    def add(self, task: Task, found: Round) -> None:
        """A line for each launch mode of a choice near the fastest, with the best of
        each design beside it, and a line for a red choice."""
        first = len(self.lines)
        for mode in _MODES:
            fastest = found.fastest(mode)
            if fastest is not None:
                limit = (1 + RECORDED) * fastest.us(mode)
                self._times(task, found, mode, limit)
        for trial in found.trials:
            red = [name for name, passed in trial.gates.items() if not passed]
            if red:
                self._recorder.add(
                    "red_gates",
                    len(red),
                    label="measured",
                    variant=OP,
                    shape=described(task, trial.choice, found.stage),
                    gpu=self._gpu,
                    gates=trial.gates,
                    note="not timed",
                )
        if self._path is not None:
            results.append(self._path, self.lines[first:])

    def _times(self, task: Task, found: Round, mode: Mode, limit: float) -> None:
        beside = {_beside_name(key): t.us for key, t in found.beside.items()}
        for design, trial in best_of_designs(found.trials, mode).items():
            beside[spell_key((design, mode))] = trial.us(mode)
        floor = timing.floor_us(task.weights.bytes)
        for trial in found.trials:
            if trial.us(mode) > limit:
                continue
            taken = trial.timings[mode]
            self._recorder.add_op(
                OP,
                taken.us,
                label="measured",
                variant=mode,
                shape=described(task, trial.choice, found.stage),
                gpu=self._gpu,
                gates=trial.gates,
                spread=taken.spread,
                peers=beside,
                floor_us=floor,
                bandwidth_share=floor / taken.us,
                note=self._state,
            )


def _beside_name(key: Key) -> str:
    name, mode = key
    return spell_key((IN_USE if name == OURS else name, mode))


def _row(task: Task, timings: Mapping[Mode, Timing], text: str) -> str:
    pair = [timings.get(mode) for mode in _MODES]
    cells = [f"{t.us:8.2f}" if t else f"{'-':>8}" for t in pair]
    decides = pair[0] or pair[1]
    floor = timing.floor_us(task.weights.bytes)
    share = f"{floor / decides.us:6.1%}" if decides else f"{'-':>6}"
    return f"  {cells[0]} {share} {cells[1]}  {text}"


def summary(task: Task, found: Round) -> Iterator[str]:
    """The best of each design, in each mode, under what they were timed beside."""
    yield f"{task.label}, {found.stage}: us pdl, share of 4.31 TB/s, us plain"
    for name in (OURS, CUBLAS):
        timings = {m: t for (n, m), t in found.beside.items() if n == name}
        if timings:
            yield _row(task, timings, IN_USE if name == OURS else name)
    best = [best_of_designs(found.trials, mode) for mode in _MODES]
    for design in DESIGNS:
        rows = [of_mode[design] for of_mode in best if design in of_mode]
        for trial in {trial.choice: trial for trial in rows}.values():
            yield _row(task, trial.timings, f"{design} {trial.choice.name}")


def progress(task: Task, found: Round, budget: Budget) -> Iterator[str]:
    """How far a task is, and which choices of a round have no time and why."""
    tried = f"{len(found.trials)} of {len(task.choices)} tried"
    yield f"[{budget.elapsed:6.1f} s] {task.label}: {tried}"
    for trial in found.trials:
        if trial.missing:
            yield f"  {trial.choice.name}: {trial.missing}"


def verdict(task: Task, found: Round) -> Iterator[str]:
    """A line a mode: the choice in use against the fastest that was found."""
    for mode in _MODES:
        used, best = found.beside.get((OURS, mode)), found.fastest(mode)
        if used is None or best is None:
            continue
        us = best.us(mode)
        yield (
            f"{task.label} {mode}: {used.us:.2f} us in use, {us:.2f} us "
            f"({us / used.us - 1:+.1%}) {best.choice.name}"
        )
