# SPDX-License-Identifier: Apache-2.0
"""Choices for one weight at one M: bits and error checked, then timed side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from experiments.bench import gates, peers, timing
from experiments.bench.budget import Budget, watched
from experiments.bench.candidate import (
    CUBLAS,
    Candidate,
    Key,
    Mode,
    Offer,
    Timing,
    reason,
)
from experiments.bench.core import Settings, launches
from experiments.bench.moe_front import chained
from experiments.bench.neighbours import neighbours
from experiments.bench.product import Data, empty, first_rows
from experiments.bench.shapes import Projection
from verify_kernels.skinny_gemm.choice import Choice, Outputs

#: Checks and times take milliseconds to seconds; a kernel that has not ended after so
#: many waits for ever.
PATIENCE = 60.0
#: Share of the time after which no choice is begun; times and table have the rest.
SEARCHING = 0.9
#: Choices within this of the fastest are timed once more, against each other.
CLOSE = 0.03

#: "partial": the time was over before all choices were tried.
Stage = Literal["search", "partial", "final"]
Log = Callable[[str], None]


@dataclass(frozen=True)
class Weights:
    """The matrices of one launch, all of one X.

    Attributes:
        name: a projection's, or that of several.
        tp: tensor-parallel size; 0 for a shape that is not K3's.
        parts: the matrices, in the order of the launch.
    """

    name: str
    tp: int
    parts: tuple[Projection, ...]

    @property
    def label(self) -> str:
        """``name@tp``, or the name alone."""
        return f"{self.name}@{self.tp}" if self.tp else self.name

    @property
    def k(self) -> int:
        """Columns."""
        return self.parts[0].k

    @property
    def n(self) -> int:
        """Rows of all matrices together."""
        return sum(part.n for part in self.parts)

    @property
    def outputs(self) -> Outputs:
        """ "bf16" or "fp32" for each matrix."""
        return tuple("fp32" if part.fp32_out else "bf16" for part in self.parts)

    @property
    def bytes(self) -> int:
        """Of all matrices."""
        return sum(part.weight_bytes for part in self.parts)

    def described(self) -> dict[str, Any]:
        """What a result line calls ``shape``, but for M and the choice."""
        if len(self.parts) == 1:
            return self.parts[0].described()
        return {
            "name": self.name,
            "tp": self.tp,
            "n": self.n,
            "k": self.k,
            "out": "+".join(self.outputs),
            "parts": {part.name: part.n for part in self.parts},
        }


@dataclass(frozen=True)
class Task:
    """The choices to try for some weights at M = rows."""

    weights: Weights
    rows: int
    choices: tuple[Choice, ...]

    @property
    def label(self) -> str:
        """``name@tp M=rows``."""
        return f"{self.weights.label} M={self.rows}"


@dataclass
class Trial:
    """What was found about one choice.

    Attributes:
        choice: the choice.
        gates: what was checked; empty if it could not be launched.
        timings: by launch mode, if every gate is green.
        missing: why it has no time.
    """

    choice: Choice
    gates: dict[str, bool] = field(default_factory=dict)
    timings: dict[Mode, Timing] = field(default_factory=dict)
    missing: str = ""

    def us(self, mode: Mode) -> float:
        """Microseconds; infinite if it was not timed."""
        found = self.timings.get(mode)
        return found.us if found else float("inf")


@dataclass
class Round:
    """Choices that were timed side by side, with what they were timed beside.

    Attributes:
        stage: "search", "partial", or "final" among the best.
        trials: fastest in a programmatic chain first, those without a time last.
        beside: the choice in use (``ours``) and cuBLAS.
    """

    stage: Stage
    trials: list[Trial]
    beside: dict[Key, Timing]

    def fastest(self, mode: Mode) -> Trial | None:
        """Of the timed ones."""
        timed = [trial for trial in self.trials if mode in trial.timings]
        return min(timed, key=lambda trial: trial.us(mode), default=None)


class Source(Protocol):
    """Where kernels come from.

    Those of a launch take (x, w_0, w_1, ...) and a list of outputs.
    """

    def start(self, task: Task) -> None:
        """Begin to make a task's kernels, after those of tasks before it."""

    def in_use(self, weights: Weights, modes: tuple[Mode, ...]) -> Offer:
        """What serves the weights now, one a launch mode, named ``ours``."""

    def kernels(
        self, choice: Choice, weights: Weights, modes: Sequence[Mode], seconds: float
    ) -> list[Candidate]:
        """One a launch mode, named after the choice.

        Raises:
            TimeoutError: it cannot be had in ``seconds``.
            Exception: anything else says why it cannot be had at all.
        """


def _speed(trial: Trial) -> tuple[float, float]:
    return trial.us("pdl"), trial.us("plain")


def close(trials: Sequence[Trial], modes: Iterable[Mode], best: int) -> list[Trial]:
    """In each mode up to ``best`` that are within :data:`CLOSE` of the fastest; none
    where there is nothing to tell apart."""
    found: list[Trial] = []
    for mode in modes:
        order = sorted(
            (t for t in trials if mode in t.timings), key=lambda t: t.us(mode)
        )
        near = [t for t in order if t.us(mode) <= order[0].us(mode) * (1 + CLOSE)]
        if len(near) > 1:
            found += [t for t in near[:best] if t not in found]
    return found


class Search:
    """One task's work.

    The choice in use comes first: it must be accurate, and its bits at M, M - 1 and 1
    are those that every other choice must give, in each launch mode.

    Args:
        task: weights, M and choices.
        data: of the weights.
        exact: the product with each matrix, for at least M rows.
        settings: timer, device, launch modes, and launches that must agree.
        source: of kernels.
        log: for what must be said at once.
    """

    def __init__(
        self,
        task: Task,
        data: Data,
        exact: Sequence[gates.Exact],
        settings: Settings,
        source: Source,
        log: Log,
    ) -> None:
        self._task = task
        self._parts = task.weights.parts
        self._data = data
        self._exact = [first_rows(part, task.rows) for part in exact]
        self._settings = settings
        self._source = source
        self._log = log
        offer = source.in_use(task.weights, settings.modes)
        if not offer.candidates:
            raise ValueError(f"the choice in use cannot be had: {offer.missing}")
        cublas = [peers.cublas(part).candidates[0] for part in self._parts]
        self._beside = [*offer.candidates, chained(CUBLAS, "plain", cublas)]
        first = offer.candidates[0]
        if not self._accurate(first):
            raise ValueError(f"{task.label}: the choice in use gives wrong results")
        self._expected = self._results(first)

    def _empty(self, rows: int) -> list[Tensor]:
        return [empty(part, rows, self._settings.device) for part in self._parts]

    def _run(self, candidate: Candidate, x: Tensor) -> list[Tensor]:
        inputs = (x, *self._data.weights[0])
        found: list[Tensor] = candidate.run(inputs, self._empty(x.shape[0]))
        return found

    def _accurate(self, candidate: Candidate) -> bool:
        found = self._run(candidate, self._data.tokens[: self._task.rows])
        return all(map(gates.accurate, found, self._exact))

    def _results(self, candidate: Candidate) -> list[Tensor]:
        rows = self._task.rows
        widths = sorted({rows, max(rows - 1, 1), 1})
        x = self._data.hard_tokens
        return [y for m in widths for y in self._run(candidate, x[:m])]

    def _prepare(self, candidate: Candidate) -> gates.Prepare:
        x, weights = self._data.hard_tokens, self._data.weights[0]

        def prepare(first: int, last: int) -> gates.Job:
            inputs, out = (x[first:last], *weights), self._empty(last - first)
            return gates.Job(
                lambda: candidate.run(inputs, out),
                lambda ys: torch.cat([y.float() for y in ys], 1),
            )

        return prepare

    def _check(self, kernels: Sequence[Candidate]) -> dict[str, bool]:
        found: dict[str, bool] = {}
        count = self._settings.repeats
        with neighbours(self._settings.device) as disturb:
            for kernel in kernels:
                pairs = zip(self._results(kernel), self._expected, strict=True)
                found[f"same_bits_{kernel.mode}"] = all(
                    gates.same_bits(a, b) for a, b in pairs
                )
                found[f"accurate_{kernel.mode}"] = self._accurate(kernel)
                found[f"repeatable_{count}_{kernel.mode}"] = gates.repeatable(
                    self._prepare(kernel), (self._task.rows, 1), count, disturb
                )
        return found

    def _admit(self, trial: Trial, seconds: float) -> list[Candidate]:
        """The kernels to time: none if one is missing or red, and then ``missing``."""
        task, name = self._task, trial.choice.name
        try:
            kernels = self._source.kernels(
                trial.choice, task.weights, self._settings.modes, seconds
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

    def _time(
        self, stage: Stage, trials: Sequence[Trial], timed: Sequence[Candidate]
    ) -> Round:
        if not timed:
            return Round(stage, list(trials), {})
        inputs = [
            (self._data.tokens[: self._task.rows], *copy) for copy in self._data.weights
        ]
        with watched(f"{self._task.label} times", PATIENCE, self._log):
            measured = self._settings.timer.measure(
                launches(
                    [*self._beside, *timed],
                    inputs,
                    functools.partial(self._empty, self._task.rows),
                ),
                len(inputs),
                timing.floor_us(self._task.weights.bytes),
            )
        by_name = {trial.choice.name: trial for trial in trials}
        beside: dict[Key, Timing] = {}
        for key, found in measured.items():
            name, mode = key
            if isinstance(found, Timing) and name in by_name:
                by_name[name].timings[mode] = found
            elif isinstance(found, Timing):
                beside[key] = found
            elif name in by_name:
                by_name[name].missing = found
        return Round(stage, sorted(trials, key=_speed), beside)

    def rounds(self, budget: Budget, best: int) -> Iterator[Round]:
        """All choices, then those that are close to the fastest once more.

        The fastest of many noisy times is too good to be true; the last round's are
        not chosen by themselves. It is left out with ``best`` = 0, and when the
        budget's share for the search is spent.
        """
        kernels: dict[str, list[Candidate]] = {}
        trials: list[Trial] = []
        for choice in self._task.choices:
            trial = Trial(choice)
            try:
                kernels[choice.name] = self._admit(trial, budget.left(SEARCHING))
            except TimeoutError:
                break
            trials.append(trial)
            if budget.spent(SEARCHING):
                break
        if not trials:
            return
        whole = len(trials) == len(self._task.choices)
        timed = [c for t in trials for c in kernels[t.choice.name]]
        yield self._time("search" if whole else "partial", trials, timed)
        again = close(trials, self._settings.modes, best)
        if whole and again and not budget.spent(SEARCHING):
            timed = [c for t in again for c in kernels[t.choice.name]]
            yield self._time("final", [Trial(t.choice, t.gates) for t in again], timed)
