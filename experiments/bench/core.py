# SPDX-License-Identifier: Apache-2.0
"""The part every op's bench shares: gate, time, trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.bench import timing
from experiments.bench.candidate import (
    MODES,
    Candidate,
    Inputs,
    Key,
    Mode,
    Offer,
    Point,
    reason,
    spell,
)
from experiments.bench.gates import Prepare, same_bits


@dataclass(frozen=True)
class Settings:
    """What a run is made with.

    Attributes:
        timer: takes the times.
        device: where the data lives.
        rows: the M to time, ascending.
        modes: launch modes of our kernels and of those peers that have both.
        repeats: launches that must agree bit for bit.
    """

    timer: timing.Timer
    device: torch.device
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    modes: tuple[Mode, ...] = MODES
    repeats: int = 1000


class Bench(Protocol):
    """One shape of one op at several M.

    Attributes:
        label: its name in tables.
    """

    label: str

    def measure(self) -> Iterator[Point]:
        """Gate and time each M in turn."""

    def trace(self, points: Sequence[Point]) -> None:
        """Fill the kernel names of measured points of this shape."""


def gate_ours(
    offer: Offer,
    check: Callable[[Candidate], dict[str, bool]],
    prepare_of: Callable[[Candidate], Prepare],
    rows: int,
) -> tuple[Offer, dict[Key, dict[str, bool]]]:
    """Gate each candidate; one that raises is missing, with the reason.

    Programmatic launch must also give the bits of plain launch.

    Returns:
        the candidates whose gates are all green, and the gates of all that ran.
    """
    missing = dict(offer.missing)
    gates: dict[Key, dict[str, bool]] = {}
    results: dict[Key, Tensor] = {}
    for candidate in offer.candidates:
        try:
            gates[candidate.key] = check(candidate)
            results[candidate.key] = prepare_of(candidate)(0, rows)()
        except Exception as error:
            gates.pop(candidate.key, None)
            missing[spell(candidate.key)] = reason(error)
    for (name, mode), result in results.items():
        plain = results.get((name, "plain"))
        if mode == "pdl" and plain is not None:
            gates[name, mode]["pdl_equals_plain"] = same_bits(result, plain)
    green = [
        c for c in offer.candidates if c.key in gates and all(gates[c.key].values())
    ]
    return Offer(green, missing), gates


def admit_peers(
    point: Point,
    offer: Offer,
    prepare_of: Callable[[Candidate], Prepare],
    correct: Callable[[Tensor], bool],
) -> list[Candidate]:
    """Peers that run and are right; the others, with why, go to ``point.missing``."""
    point.missing.update(offer.missing)
    admitted = []
    for candidate in offer.candidates:
        prepare = prepare_of(candidate)
        try:
            result = prepare(0, point.rows)()
            alone = torch.cat([prepare(t, t + 1)() for t in range(point.rows)])
        except Exception as error:
            point.missing[spell(candidate.key)] = reason(error)
            continue
        if not correct(result):
            point.missing[spell(candidate.key)] = "its result is wrong; not timed"
            continue
        if not same_bits(result, alone):
            point.moved.append(spell(candidate.key))
        if candidate.note:
            point.notes[spell(candidate.key)] = candidate.note
        admitted.append(candidate)
    return admitted


def launches(
    candidates: Sequence[Candidate],
    inputs: Sequence[Inputs],
    make_out: Callable[[], Any],
) -> dict[Key, timing.Launch]:
    """What a timer runs: each candidate on copy i, into a buffer of its own."""

    def launch(candidate: Candidate, out: Any, copy: int) -> Any:
        return candidate.run(inputs[copy], out)

    return {c.key: functools.partial(launch, c, make_out()) for c in candidates}


def time_point(
    point: Point,
    candidates: Sequence[Candidate],
    inputs: Sequence[Inputs],
    make_out: Callable[[], Any],
    timer: timing.Timer,
) -> None:
    """Time the candidates beside one another and enter the result in ``point``."""
    point.enter(
        timer.measure(
            launches(candidates, inputs, make_out),
            len(inputs),
            timing.floor_us(point.bytes),
        )
    )


def trace_point(
    point: Point,
    candidates: Sequence[Candidate],
    inputs: Sequence[Inputs],
    make_out: Callable[[], Any],
    timer: timing.Timer,
) -> None:
    """Enter the kernels of one launch of each timed candidate in ``point``."""
    timed = [c for c in candidates if c.key in point.timings]
    point.kernels.update(timer.trace(launches(timed, inputs, make_out)))
