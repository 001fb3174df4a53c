# SPDX-License-Identifier: Apache-2.0
"""How much sooner a skinny_gemm ends whose weights were brought into L2 before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.bench import ours, timing
from experiments.bench.candidate import OURS, Candidate, Key, Mode, Offer, Point, Timing
from experiments.bench.core import Settings
from experiments.bench.gates import accurate, exact_product, same_bits
from experiments.bench.product import Data, empty
from experiments.bench.shapes import Projection

OP = "prefetch"
#: Weights that are worth it and fit the half of a 60 MB L2 that a plan may fill.
SIZES = (20e6, 25e6)
#: Microseconds between the start of a prefetch and that of the product it is for.
LEADS = (5.0, 10.0, 20.0, 40.0)
#: Cycles a microsecond of an H200 at its highest clock; what a pause took is measured.
_CYCLES = 1980
DECODE_ROWS = 8


def worthwhile(shapes: Iterable[Projection]) -> list[Projection]:
    """Those whose weights have the size to prefetch."""
    return [s for s in shapes if SIZES[0] <= s.weight_bytes <= SIZES[1]]


class Lanes(Protocol):
    """A main stream, and one beside it for prefetches."""

    def pause(self, us: float) -> None:
        """Occupy the main stream without touching memory."""

    def fork(self, work: Callable[[], object]) -> None:
        """Start ``work`` beside what follows on the main stream."""

    def join(self) -> None:
        """Make the main stream wait for what was forked."""


class CudaLanes:
    """The :class:`Lanes` of a CUDA device; its launches can be captured."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()

    def pause(self, us: float) -> None:
        """See :class:`Lanes`."""
        torch.cuda._sleep(int(us * _CYCLES))

    def fork(self, work: Callable[[], object]) -> None:
        """See :class:`Lanes`."""
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            work()

    def join(self) -> None:
        """See :class:`Lanes`."""
        torch.cuda.current_stream().wait_stream(self._side)


def plan(weight: Tensor) -> Callable[[], None]:
    """The launch that prefetches one weight."""
    from verify_kernels.prefetch import PrefetchPlan, prefetch

    return functools.partial(prefetch, PrefetchPlan([weight]))


COLD, WARM, PREFETCHED = "cold", "warm", "prefetched"
_KEY: Key = (OURS, "plain")


def _pause(lead: float) -> Key:
    return f"pause_{lead:g}", "plain"


def _after(lead: float) -> Key:
    return f"{PREFETCHED}_{lead:g}", "plain"


def _net(found: Mapping[Key, Timing | str], work: Key, lead: float) -> Timing | str:
    """Time of ``work`` without its pause; spreads add up."""
    total, pause = found[work], found[_pause(lead)]
    if isinstance(total, str) or isinstance(pause, str):
        return total if isinstance(total, str) else str(pause)
    us = total.us - pause.us
    if us <= 0:
        return f"{total.us:.2f} us with its pause, {pause.us:.2f} us the pause alone"
    return Timing(us, total.spread + pause.spread)


class PrefetchBench:
    """See :class:`experiments.bench.core.Bench`. A point for each state of the weight.

    Every launch is a pause and then the product, in a graph; the time is the graph's
    less that of one with the pauses alone. ``cold``: another weight each time, past
    the L2. ``warm``: the same weight each time. ``prefetched``: as cold, and on another
    stream a prefetch of that weight begins with the pause, which is the lead. Joining
    the streams is part of the time. Plain launches, M <= 8, no peers.

    Args:
        shape: the projection.
        settings: of the run.
        our_offer: gives the product in plain launches.
        make_lanes, make_prefetch: of the device; a launch that prefetches a weight.
    """

    def __init__(
        self,
        shape: Projection,
        settings: Settings,
        our_offer: Callable[[Projection, tuple[Mode, ...]], Offer] = ours.skinny_gemm,
        make_lanes: Callable[[], Lanes] = CudaLanes,
        make_prefetch: Callable[[Tensor], Callable[[], None]] = plan,
    ) -> None:
        self.label = shape.label
        self._shape = shape
        self._settings = settings
        self._our_offer = our_offer
        self._make_lanes = make_lanes
        self._make_prefetch = make_prefetch

    def _product(self) -> Candidate:
        """Raises ValueError if our kernel cannot be had."""
        offer = self._our_offer(self._shape, ("plain",))
        if not offer.candidates:
            raise ValueError(f"no product to prefetch for: {offer.missing}")
        return offer.candidates[0]

    def _data(self, copies: int) -> Data:
        settings = self._settings
        return Data((self._shape,), max(settings.rows), settings.device, copies)

    def _gates(
        self, product: Candidate, x: Tensor, w: Tensor, fetch: Callable[[], None]
    ) -> dict[str, bool]:
        def result() -> Tensor:
            out = empty(self._shape, x.shape[0], x.device)
            return product.run((x, w), out)

        before, expected = w.clone(), result()
        fetch()
        found = result()
        return {
            "accurate": accurate(expected, exact_product(x, before)),
            "same_bits_prefetched": same_bits(found, expected),
            "weights_unchanged": same_bits(w, before),
        }

    def _launches(
        self,
        product: Candidate,
        x: Tensor,
        weights: Sequence[Tensor],
        fetches: Sequence[Callable[[], None]],
    ) -> dict[Key, timing.Launch]:
        lanes = self._make_lanes()
        out = empty(self._shape, x.shape[0], x.device)

        def multiply(copy: int) -> Any:
            return product.run((x, weights[copy]), out)

        def pause(lead: float, copy: int) -> None:
            lanes.pause(lead)

        def plainly(same: bool, copy: int) -> None:
            lanes.pause(LEADS[0])
            multiply(0 if same else copy)

        def prefetched(lead: float, copy: int) -> None:
            lanes.fork(fetches[copy])
            lanes.pause(lead)
            lanes.join()
            multiply(copy)

        found: dict[Key, timing.Launch] = {
            (COLD, "plain"): functools.partial(plainly, False),
            (WARM, "plain"): functools.partial(plainly, True),
        }
        for lead in LEADS:
            found[_pause(lead)] = functools.partial(pause, lead)
            found[_after(lead)] = functools.partial(prefetched, lead)
        return found

    def _point(self, rows: int, state: str, found: Timing | str, lead: float) -> Point:
        name = f"{self.label} {state}"
        shape = {**self._shape.described(), "m": rows, "weights": state}
        if state == PREFETCHED:
            name += f" {lead:g} us"
            shape["lead_us"] = lead
        point = Point(OP, name, shape, rows, self._shape.weight_bytes)
        if isinstance(found, str):
            point.missing[state] = found
        else:
            point.timings[_KEY] = found
        return point

    def measure(self) -> Iterator[Point]:
        """Cold, warm and prefetched at each lead, for each M up to 8."""
        settings, size = self._settings, self._shape.weight_bytes
        product = self._product()
        copies = timing.copies_for(size)
        data = self._data(copies)
        weights = [weight for (weight,) in data.weights]
        fetches = [self._make_prefetch(weight) for weight in weights]
        for rows in settings.rows:
            if rows > DECODE_ROWS:
                break
            x = data.tokens[:rows]
            gates = self._gates(product, x, weights[0], fetches[0])
            found: dict[Key, Timing | str] = {}
            if all(gates.values()):
                found = settings.timer.measure(
                    self._launches(product, x, weights, fetches),
                    copies,
                    timing.floor_us(size),
                )
            states: list[tuple[str, Key, float]] = [
                (COLD, (COLD, "plain"), LEADS[0]),
                (WARM, (WARM, "plain"), LEADS[0]),
            ]
            states += [(PREFETCHED, _after(lead), lead) for lead in LEADS]
            for state, key, lead in states:
                net = _net(found, key, lead) if found else "a gate is red; not timed"
                point = self._point(rows, state, net, lead)
                point.gates[_KEY] = gates
                yield point

    def trace(self, points: Sequence[Point]) -> None:
        """See :class:`experiments.bench.core.Bench`; the pauses are left out."""
        product, data = self._product(), self._data(1)
        (weight,) = data.weights[0]
        fetch = self._make_prefetch(weight)
        for point in points:
            x = data.tokens[: point.rows]
            out = empty(self._shape, point.rows, x.device)

            def launch(copy: int, x: Tensor = x, out: Tensor = out) -> None:
                product.run((x, weight), out)

            def both(copy: int, launch: timing.Launch = launch) -> None:
                fetch()
                launch(copy)

            prefetched = point.shape["weights"] == PREFETCHED
            work = both if prefetched else launch
            point.kernels.update(self._settings.timer.trace({_KEY: work}))
