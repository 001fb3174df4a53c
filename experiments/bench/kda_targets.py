# SPDX-License-Identifier: Apache-2.0
"""What the KDA kernel has to reach, and its figures beside that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from experiments.bench.candidate import OURS, Key, Point
from experiments.bench.kda_peers import NATIVE, STOCK
from experiments.bench.timing import FLOOR_RATE, floor_us
from verify_kernels.kda.host import DIM

_CHAINED: Key = (OURS, "pdl")


@dataclass(frozen=True)
class Target:
    """One requirement.

    Attributes:
        name: of its verdict.
        applies: to these shapes, as :meth:`KdaShape.described` says them.
        peer: the peer's time over ours must reach ``least``; None for the time to move
            two states a request, of which ours may be ``1 / least``.
        least: the ratio.
    """

    name: str
    applies: Callable[[dict[str, Any]], bool]
    peer: Key | None
    least: float


def _at(requests: int, width: int, *heads: int) -> Callable[[dict[str, Any]], bool]:
    return lambda shape: (
        (shape["requests"], shape["width"]) == (requests, width)
        and shape["heads"] in heads
    )


TARGETS = (
    Target("stock_3x", _at(1, 8, 96), (STOCK, "pdl"), 3.0),
    Target("stock_2x", _at(1, 8, 6, 12), (STOCK, "pdl"), 2.0),
    Target(
        "stock_2x",
        lambda shape: shape["width"] == 1 and shape["heads"] == 6,
        (STOCK, "pdl"),
        2.0,
    ),
    Target("native", lambda shape: shape["width"] == 1, (NATIVE, "plain"), 1.0),
    Target("two_states", _at(8, 8, 96), None, 1 / 1.4),
)


def _states_us(point: Point) -> float:
    """Microseconds to move two fp32 states a request at the rate of every floor."""
    shape = point.shape
    return floor_us(2 * shape["requests"] * shape["heads"] * DIM * DIM * 4)


def ratio(point: Point, target: Target) -> float | None:
    """What the target asks of our programmatic launches; None if it does not apply or
    one of the two times is missing."""
    ours = point.timings.get(_CHAINED)
    if ours is None or not target.applies(point.shape):
        return None
    if target.peer is None:
        return _states_us(point) / ours.us
    peer = point.timings.get(target.peer)
    return None if peer is None else peer.us / ours.us


def verdicts(point: Point) -> dict[str, bool | None]:
    """Each requirement on this point."""
    found: dict[str, bool | None] = {}
    for target in TARGETS:
        reached = ratio(point, target)
        if reached is not None or target.name not in found:
            found[target.name] = None if reached is None else reached >= target.least
    return found


def lines(points: Iterable[Point]) -> Iterator[str]:
    """A line for each figure that has a target."""
    for point in points:
        for target in TARGETS:
            reached = ratio(point, target)
            if reached is None:
                continue
            us = point.timings[_CHAINED].us
            if target.peer is None:
                other = _states_us(point)
                what = f"two states a request {other:.2f} us at {FLOOR_RATE / 1e12:.2f}"
                text = f"{us / other:.2f}x that (target <= {1 / target.least:.2f}x)"
                yield f"{point.label}: {us:.2f} us; {what} TB/s; {text}"
                continue
            other = point.timings[target.peer].us
            text = f"{reached:.2f}x (target >= {target.least:.2f}x)"
            yield f"{point.label}: {us:.2f} us; {target.peer[0]} {other:.2f} us; {text}"


def summaries(points: Iterable[Point]) -> Iterator[str]:
    """All times of each point."""
    for point in points:
        yield f"{point.label}: {point.times()}"
