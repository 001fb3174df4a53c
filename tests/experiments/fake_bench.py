# SPDX-License-Identifier: Apache-2.0
"""A timer, candidates and a results sheet for the bench's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import results
from experiments.bench import record, timing
from experiments.bench.candidate import (
    MODES,
    Candidate,
    Inputs,
    Key,
    Mode,
    Offer,
    Timing,
)
from experiments.bench.core import Settings

ROWS = (1, 2, 8)


class ScriptedTimer:
    """Takes 10 µs for everything, or what the script says, and notes what it timed."""

    def __init__(self, script: Mapping[Key, Timing | str] | None = None) -> None:
        self.script = dict(script or {})
        self.timed: list[Key] = []

    def measure(
        self, launches: Mapping[Key, timing.Launch], copies: int, floor_us: float
    ) -> dict[Key, Timing | str]:
        self.timed += list(launches)
        for launch in launches.values():
            for copy in range(copies):
                launch(copy)
        return {key: self.script.get(key, Timing(10.0, 1.0)) for key in launches}

    def trace(self, launches: Mapping[Key, timing.Launch]) -> dict[Key, list[str]]:
        return {key: [f"kernel_of_{key[0]}_{key[1]}"] for key in launches}


def settings(timer: timing.Timer, **changes: Any) -> Settings:
    values = {"rows": ROWS, "repeats": 12, **changes}
    return Settings(timer, torch.device("cpu"), **values)


def row_by_row(inputs: Inputs, out: Tensor) -> Tensor:
    """One fixed-shape product a row, so its bits do not depend on M."""
    x, w = inputs
    for t in range(x.shape[0]):
        out[t] = torch.mv(w.float(), x[t].float())
    return out


def offering(
    name: str, run: Callable[..., Tensor], modes: tuple[Mode, ...] = MODES
) -> Callable[..., Offer]:
    return lambda *_: Offer([Candidate(name, mode, run) for mode in modes])


def sheet_at(path: Path | None) -> record.Sheet:
    recorder = results.Recorder(command="bench", commit="0" * 40)
    return record.Sheet(path, recorder, "NVIDIA H200", "clocks.sm 1980 MHz")
