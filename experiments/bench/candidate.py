# SPDX-License-Identifier: Apache-2.0
"""What is compared at one point, and what is found out about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

#: How a kernel follows the one before it: ordinary launches, or programmatic dependent
#: launches, where it may start while its predecessor drains.
Mode = Literal["plain", "pdl"]
MODES: tuple[Mode, ...] = ("plain", "pdl")
OURS = "ours"
CUBLAS = "cublas"

Key = tuple[str, Mode]
Inputs = Sequence[Tensor]


@dataclass(frozen=True)
class Candidate:
    """One way to compute an op.

    Attributes:
        name: ``ours`` or the peer's.
        mode: how its kernels are launched.
        run: (inputs, out) -> result; ``out`` is a buffer of the result's shape and
            dtype, which the candidate may fill or ignore. An op with several results
            has a list of buffers and of results.
        note: what a reader should know, such as the backend a peer chose.
    """

    name: str
    mode: Mode
    run: Callable[[Inputs, Any], Any]
    note: str = ""

    @property
    def key(self) -> Key:
        """(name, mode)."""
        return self.name, self.mode


def spell(key: Key) -> str:
    """``name:mode``."""
    return ":".join(key)


def reason(error: BaseException) -> str:
    """An exception on one line of at most 200 characters."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:200]


@dataclass(frozen=True)
class Offer:
    """Candidates of one source, and those it cannot offer with the reason."""

    candidates: list[Candidate] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: Offer) -> Offer:
        return Offer(
            self.candidates + other.candidates, {**self.missing, **other.missing}
        )


@dataclass(frozen=True)
class Timing:
    """Microseconds a launch: the median of the rounds, and their max - min."""

    us: float
    spread: float


@dataclass
class Point:
    """One shape at one M.

    Attributes:
        op: the op's name.
        label: the shape's name for tables.
        shape: what a result line calls ``shape``.
        rows: M.
        bytes: what must be read or written; the floor counts these.
        timings: of the candidates whose gates are green.
        gates: of every candidate of ours that ran.
        missing: what was not timed, and why.
        notes: of the candidates.
        moved: peers whose rows do not have the bits of the same rows at M = 1.
        kernels: names from a trace.
    """

    op: str
    label: str
    shape: dict[str, Any]
    rows: int
    bytes: int
    timings: dict[Key, Timing] = field(default_factory=dict)
    gates: dict[Key, dict[str, bool]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    kernels: dict[Key, list[str]] = field(default_factory=dict)

    def enter(self, times: Mapping[Key, Timing | str]) -> None:
        """What a timer gave: times, or why there is none."""
        for key, time in times.items():
            if isinstance(time, str):
                self.missing[spell(key)] = time
            else:
                self.timings[key] = time

    def peers(self) -> dict[Key, Timing]:
        """Timings of everybody else."""
        return {k: t for k, t in self.timings.items() if k[0] != OURS}

    def times(self) -> str:
        """All of them in a line, shortest first: a table has the best peer only."""
        order = sorted(self.timings.items(), key=lambda item: item[1].us)
        found = ", ".join(f"{spell(key)} {timing.us:.2f}" for key, timing in order)
        return f"{found} us"

    def red(self) -> Mapping[Key, list[str]]:
        """Our candidates with a red gate, and which."""
        found = {
            key: [name for name, passed in gates.items() if not passed]
            for key, gates in self.gates.items()
        }
        return {key: names for key, names in found.items() if names}
