# SPDX-License-Identifier: Apache-2.0
"""Ways to run a step whose data are not one product's: KDA's and the experts'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from experiments.bench.candidate import Key, Mode, Point
from experiments.bench.core import Settings

#: A step and its data.
Data = TypeVar("Data")
#: Runs a step with one of its copies of data; the result is the same buffer each time.
Run = Callable[[int], Tensor]


@dataclass(frozen=True)
class Way(Generic[Data]):
    """One way to run a step.

    Attributes:
        name: ours or the peer's, as its bench spells it.
        mode: how its kernels are launched.
        make: prepares it for some data; what it returns may overwrite its last result.
        note: what a reader should know.
        part: what of the step it runs, where a bench times parts.
    """

    name: str
    mode: Mode
    make: Callable[[Data], Run]
    note: str = ""
    part: str = ""

    @property
    def key(self) -> Key:
        """(name, mode)."""
        return self.name, self.mode


@dataclass(frozen=True)
class Ways(Generic[Data]):
    """Ways of one source, and those it cannot offer with the reason."""

    ways: list[Way[Data]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: Ways[Data]) -> Ways[Data]:
        return Ways(self.ways + other.ways, {**self.missing, **other.missing})


def settled(device: torch.device) -> None:
    """Wait until data that any stream made are there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trace_ways(
    points: Sequence[Point], ways: Ways[Data], data: Data, settings: Settings
) -> None:
    """Enter the kernels of a step of each way that a point has timed."""
    for point in points:
        runs = {
            way.key: way.make(data) for way in ways.ways if way.key in point.timings
        }
        for run in runs.values():
            run(0)
        settled(settings.device)
        point.kernels.update(settings.timer.trace(runs))
