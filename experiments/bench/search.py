# SPDX-License-Identifier: Apache-2.0
"""Tilings of one shape at one M: bits and error checked, then timed side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from experiments.bench import gates, ours, peers, timing
from experiments.bench.budget import Budget, watched
from experiments.bench.candidate import Candidate, Key, Mode, Offer, Timing, reason
from experiments.bench.core import Settings, launches
from experiments.bench.product import Data, empty, first_rows
from experiments.bench.shapes import Projection
from verify_kernels.skinny_gemm.tiling import Tiling

#: Tilings that are timed side by side; between two such groups the time is looked at.
GROUP = 12
#: Checks and times take milliseconds to seconds; a kernel that has not ended after so
#: many waits for ever.
PATIENCE = 60.0
#: Share of the time after which no tiling is begun; the last round has the rest.
SEARCHING = 0.9

Stage = Literal["search", "final"]
Log = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """The tilings to try for one shape at M = rows."""

    shape: Projection
    rows: int
    tilings: tuple[Tiling, ...]

    @property
    def label(self) -> str:
        """``name@tp M=rows``."""
        return f"{self.shape.label} M={self.rows}"


@dataclass
class Trial:
    """What was found about one tiling.

    Attributes:
        tiling: the tiling.
        gates: what was checked; empty if it could not be launched.
        timings: by launch mode, if every gate is green.
        missing: why it has no time.
    """

    tiling: Tiling
    gates: dict[str, bool] = field(default_factory=dict)
    timings: dict[Mode, Timing] = field(default_factory=dict)
    missing: str = ""


@dataclass
class Round:
    """Tilings that were timed side by side, with what they were timed beside.

    Attributes:
        stage: "search", or "final" among the best.
        trials: fastest first, those without a time last.
        beside: the tiling in use (``ours``) and cuBLAS.
    """

    stage: Stage
    trials: list[Trial]
    beside: dict[Key, Timing]


class Source(Protocol):
    """Where the kernel of a tiling comes from."""

    def start(self, tilings: Sequence[Tiling], shape: Projection) -> None:
        """Begin to make kernels, in this order."""

    def kernels(
        self, tiling: Tiling, shape: Projection, modes: tuple[Mode, ...], seconds: float
    ) -> list[Candidate]:
        """One a launch mode, named after the tiling.

        Raises:
            TimeoutError: it cannot be had in ``seconds``.
            Exception: anything else says why it cannot be had at all.
        """


def speed(trial: Trial) -> float:
    """Microseconds in a chain of programmatic launches, or of the mode there is."""
    found = trial.timings.get("pdl") or trial.timings.get("plain")
    return found.us if found else float("inf")


class Search:
    """One task's work.

    The tiling in use comes first: it must be accurate, and its bits at M, M - 1 and 1
    are those that every other tiling must give, in each launch mode.

    Args:
        task: shape, M and tilings.
        data: of the shape; ``exact`` is its product, for at least M rows.
        settings: timer, device, launch modes, and launches that must agree.
        source: of kernels.
        log: for what must be said at once.
        in_use: gives the kernel in use.
    """

    def __init__(
        self,
        task: Task,
        data: Data,
        exact: gates.Exact,
        settings: Settings,
        source: Source,
        log: Log,
        in_use: Callable[[Projection, tuple[Mode, ...]], Offer] = ours.skinny_gemm,
    ) -> None:
        self._task = task
        self._data = data
        self._exact = first_rows(exact, task.rows)
        self._settings = settings
        self._source = source
        self._log = log
        offer = in_use(task.shape, settings.modes)
        if not offer.candidates:
            raise ValueError(f"the tiling in use cannot be had: {offer.missing}")
        self._beside = offer.candidates + peers.cublas(task.shape).candidates
        self._expected = self._results(offer.candidates[0])
        if not gates.accurate(self._plain_result(offer.candidates[0]), self._exact):
            raise ValueError(f"{task.label}: the tiling in use gives wrong results")

    def _run(self, candidate: Candidate, x: Tensor) -> Tensor:
        out = empty(self._task.shape, x.shape[0], self._settings.device)
        (weight,) = self._data.weights[0]
        return candidate.run((x, weight), out)

    def _plain_result(self, candidate: Candidate) -> Tensor:
        return self._run(candidate, self._data.tokens[: self._task.rows])

    def _results(self, candidate: Candidate) -> list[Tensor]:
        rows = self._task.rows
        widths = sorted({rows, max(rows - 1, 1), 1})
        return [self._run(candidate, self._data.hard_tokens[:m]) for m in widths]

    def _check(self, kernels: Sequence[Candidate]) -> dict[str, bool]:
        found: dict[str, bool] = {}
        x, (weight,) = self._data.hard_tokens, self._data.weights[0]
        for kernel in kernels:

            def prepare(first: int, last: int, kernel: Candidate = kernel) -> gates.Job:
                out = empty(self._task.shape, last - first, self._settings.device)
                inputs = (x[first:last], weight)
                return gates.Job(lambda: kernel.run(inputs, out), lambda y: y)

            pairs = zip(self._results(kernel), self._expected, strict=True)
            found[f"same_bits_{kernel.mode}"] = all(
                gates.same_bits(a, b) for a, b in pairs
            )
            found[f"accurate_{kernel.mode}"] = gates.accurate(
                self._plain_result(kernel), self._exact
            )
            count = self._settings.repeats
            with gates.busy_stream(self._settings.device) as disturb:
                found[f"repeatable_{count}_{kernel.mode}"] = gates.repeatable(
                    prepare, (self._task.rows, 1), count, disturb
                )
        return found

    def _admit(self, trial: Trial, seconds: float) -> list[Candidate]:
        """The kernels to time: none if one is missing or red, and then ``missing``."""
        task, name = self._task, trial.tiling.name
        try:
            kernels = self._source.kernels(
                trial.tiling, task.shape, self._settings.modes, seconds
            )
            with watched(f"{task.label} {name}", PATIENCE, self._log):
                trial.gates = self._check(kernels)
        except TimeoutError:
            raise
        except Exception as error:
            trial.missing = reason(error)
            if self._settings.device.type == "cuda":
                # After an illegal access nothing on this device works: raises again.
                torch.cuda.synchronize(self._settings.device)
            return []
        red = [name for name, passed in trial.gates.items() if not passed]
        if red:
            trial.missing = f"RED {', '.join(red)}; not timed"
        return [] if red else kernels

    def _time(self, stage: Stage, trials: list[Trial], timed: list[Candidate]) -> Round:
        if not timed:
            return Round(stage, trials, {})
        rows, shape = self._task.rows, self._task.shape
        inputs = [(self._data.tokens[:rows], w) for (w,) in self._data.weights]
        make_out = functools.partial(empty, shape, rows, self._settings.device)
        with watched(f"{self._task.label} times", PATIENCE, self._log):
            measured = self._settings.timer.measure(
                launches([*self._beside, *timed], inputs, make_out),
                len(inputs),
                timing.floor_us(shape.weight_bytes),
            )
        by_name = {trial.tiling.name: trial for trial in trials}
        beside: dict[Key, Timing] = {}
        for key, found in measured.items():
            name, mode = key
            if name in by_name and isinstance(found, str):
                by_name[name].missing = found
            elif name in by_name and not isinstance(found, str):
                by_name[name].timings[mode] = found
            elif not isinstance(found, str):
                beside[key] = found
        return Round(stage, sorted(trials, key=speed), beside)

    def rounds(self, budget: Budget, best: int) -> Iterator[Round]:
        """Groups of tilings, then the ``best`` of all once more, against each other.

        The fastest of many noisy times is too good to be true; the last round's are
        not chosen by themselves. Groups end early when the budget's share for them is
        spent; the last round is left out when all of it is.
        """
        kernels: dict[str, list[Candidate]] = {}
        every: list[Trial] = []
        tilings = self._task.tilings
        for first in range(0, len(tilings), GROUP):
            trials: list[Trial] = []
            for tiling in tilings[first : first + GROUP]:
                trial = Trial(tiling)
                try:
                    kernels[tiling.name] = self._admit(trial, budget.left(SEARCHING))
                except TimeoutError:
                    break
                trials.append(trial)
                if budget.spent(SEARCHING):
                    break
            if trials:
                timed = [c for t in trials for c in kernels[t.tiling.name]]
                yield self._time("search", trials, timed)
            every += trials
            if budget.spent(SEARCHING):
                break
        fastest = [t for t in sorted(every, key=speed)[:best] if t.timings]
        if fastest and not budget.spent():
            timed = [c for t in fastest for c in kernels[t.tiling.name]]
            finalists = [Trial(t.tiling, t.gates) for t in fastest]
            yield self._time("final", finalists, timed)
