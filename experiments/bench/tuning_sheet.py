# SPDX-License-Identifier: Apache-2.0
"""What a search for tilings writes down and says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from experiments import results
from experiments.bench import space, timing
from experiments.bench.budget import Budget
from experiments.bench.candidate import CUBLAS, OURS, Key, Mode, Timing
from experiments.bench.candidate import spell as spell_key
from experiments.bench.search import Round, Task

OP = "skinny_gemm_tiling"
IN_USE = "in_use"
_MODES: tuple[Mode, ...] = ("pdl", "plain")


class TuningSheet:
    """Appends a round's lines to a file as soon as it is over."""

    def __init__(
        self, path: Path | None, recorder: results.Recorder, gpu: str, state: str = ""
    ) -> None:
        self._path = path
        self._recorder = recorder
        self._gpu = gpu
        self._state = state

    def add(self, task: Task, found: Round) -> None:
        """A line for each launch mode of a timed tiling, and one for a red tiling."""
        first = len(self._recorder.lines)
        beside = {_beside_name(key): t.us for key, t in found.beside.items()}
        for trial in found.trials:
            shape = {
                **task.shape.described(),
                "m": task.rows,
                "stage": found.stage,
                "tiling": {name: getattr(trial.tiling, name) for name in space.FIELDS},
            }
            for mode, taken in trial.timings.items():
                floor = timing.floor_us(task.shape.weight_bytes)
                self._recorder.add_op(
                    OP,
                    taken.us,
                    label="measured",
                    variant=mode,
                    shape=shape,
                    gpu=self._gpu,
                    gates=trial.gates,
                    spread=taken.spread,
                    peers=beside,
                    floor_us=floor,
                    bandwidth_share=floor / taken.us,
                    note=self._state,
                )
            red = [name for name, passed in trial.gates.items() if not passed]
            if red:
                self._recorder.add(
                    "red_gates",
                    len(red),
                    label="measured",
                    variant=OP,
                    shape=shape,
                    gpu=self._gpu,
                    gates=trial.gates,
                    note="not timed",
                )
        if self._path is not None:
            results.append(self._path, self._recorder.lines[first:])


def _beside_name(key: Key) -> str:
    name, mode = key
    return spell_key((IN_USE if name == OURS else name, mode))


def _row(task: Task, timings: Mapping[Mode, Timing], text: str) -> str:
    pair = [timings.get(mode) for mode in _MODES]
    cells = [f"{t.us:8.2f}" if t else f"{'-':>8}" for t in pair]
    decides = pair[0] or pair[1]
    floor = timing.floor_us(task.shape.weight_bytes)
    share = f"{floor / decides.us:6.1%}" if decides else f"{'-':>6}"
    return f"  {cells[0]} {share} {cells[1]}  {text}"


def summary(task: Task, found: Round, best: int) -> Iterator[str]:
    """The best tilings of a round under what they were timed beside."""
    yield f"{task.label}, {found.stage}: us pdl, share of 4.31 TB/s, us plain"
    for name in (OURS, CUBLAS):
        timings = {m: t for (n, m), t in found.beside.items() if n == name}
        if timings:
            yield _row(task, timings, IN_USE if name == OURS else name)
    for trial in found.trials[:best]:
        if trial.timings:
            yield _row(task, trial.timings, str(space.spell(trial.tiling)))


def progress(task: Task, done: int, found: Round, budget: Budget) -> Iterator[str]:
    """How far a task is, and which tilings of a round have no time and why."""
    yield f"[{budget.elapsed:6.1f} s] {task.label}: {done} of {len(task.tilings)} tried"
    for trial in found.trials:
        if trial.missing:
            yield f"  {space.spell(trial.tiling)}: {trial.missing}"


def verdict(task: Task, found: Round) -> str:
    """One line: the tiling in use against the fastest that was found."""
    (fastest, *_) = found.trials
    mode: Mode = "pdl" if "pdl" in fastest.timings else "plain"
    used, best = found.beside.get((OURS, mode)), fastest.timings.get(mode)
    if used is None or best is None:
        return f"{task.label}: nothing to compare"
    change = best.us / used.us - 1
    return (
        f"{task.label} {mode}: {used.us:.2f} us in use, {best.us:.2f} us "
        f"({change:+.1%}) {space.spell(fastest.tiling)}"
    )
