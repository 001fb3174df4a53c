# SPDX-License-Identifier: Apache-2.0
"""What the experts' kernels have to reach, and their figures beside that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from experiments.bench.candidate import OURS, Key, Point
from experiments.bench.experts_peers import HUMMING
from experiments.bench.experts_ways import EXPERTS
from experiments.bench.timing import FLOOR_RATE, floor_us

_CHAINED: Key = (OURS, "pdl")
_HUMMING: Key = (HUMMING, "plain")


@dataclass(frozen=True)
class Target:
    """One requirement on our programmatic launches of the experts alone.

    Attributes:
        name: of its verdict.
        applies: to these shapes, as a point says them.
        peer: the peer's time over ours must reach ``least``; None for the time to read
            the distinct experts' weights.
        least: the ratio.
    """

    name: str
    applies: Callable[[dict[str, Any]], bool]
    peer: Key | None
    least: float


def _whole(shape: dict[str, Any]) -> bool:
    return shape["tp"] == 1 and shape["m"] in (1, 2, 4, 8)


def _share(shape: dict[str, Any]) -> bool:
    return shape["tp"] in (8, 16)


TARGETS = (
    Target("bandwidth", _whole, None, 0.80),
    Target("humming_1.15x", _whole, _HUMMING, 1.15),
    Target("humming_1.5x", _share, _HUMMING, 1.5),
)


def ratio(point: Point, target: Target) -> float | None:
    """What the target asks; None if it does not apply or a time is missing."""
    ours = point.timings.get(_CHAINED)
    if (
        ours is None
        or point.shape["part"] != EXPERTS
        or not target.applies(point.shape)
    ):
        return None
    if target.peer is None:
        return floor_us(point.bytes) / ours.us
    peer = point.timings.get(target.peer)
    return None if peer is None else peer.us / ours.us


def verdicts(point: Point) -> dict[str, bool | None]:
    """Each requirement on this point."""
    found: dict[str, bool | None] = {}
    for target in TARGETS:
        reached = ratio(point, target)
        found[target.name] = None if reached is None else reached >= target.least
    return found


def _place(point: Point) -> str:
    return f"{point.label}/{point.rows}, {point.shape['distinct']} experts"


def lines(points: Iterable[Point]) -> Iterator[str]:
    """A line for each figure that has a target."""
    for point in points:
        for target in TARGETS:
            reached = ratio(point, target)
            if reached is None:
                continue
            start = f"{_place(point)}: {point.timings[_CHAINED].us:.2f} us"
            if target.peer is None:
                what = f"{point.bytes / 1e6:.1f} MB at {FLOOR_RATE / 1e12:.2f} TB/s"
                share = f"{reached:.1%} (target >= {target.least:.0%})"
                yield f"{start}; {what} {floor_us(point.bytes):.2f} us; {share}"
                continue
            other = f"{target.peer[0]} {point.timings[target.peer].us:.2f} us"
            yield f"{start}; {other}; {reached:.2f}x (target >= {target.least:.2f}x)"


def summaries(points: Iterable[Point]) -> Iterator[str]:
    """All times of each point."""
    for point in points:
        yield f"{_place(point)}: {point.times()}"
