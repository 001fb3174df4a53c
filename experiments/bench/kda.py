# SPDX-License-Identifier: Apache-2.0
"""KDA from the packed projection to the gated output, against vLLM's chain of kernels.

A point is one rank's heads, B requests and the rows of each. Its figures are of a step
whose predecessor was accepted whole: the fold layout has that many rows to fold, and
vLLM's slots begin at the last snapshot. Every launch has states, windows and weights of
its own, rotated past the L2; the packed projection is the same one, in the L2 as
in_proj leaves it. Our kernel contains the W_fb product, so every peer's time does too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.bench import gates, kda_peers, kda_ways, timing
from experiments.bench.candidate import OURS, Key, Mode, Point, Timing, reason, spell
from experiments.bench.core import Settings
from experiments.bench.kda_data import FOLD, LAYOUTS, KdaData, KdaShape
from experiments.bench.neighbours import neighbours
from experiments.bench.ways import Run, Way, Ways
from verify_kernels.kda import reference
from verify_kernels.kda.host import DIM, TAPS
from verify_kernels.kda.reference import KdaRows, KdaState, KdaWeights

OP = "kda"
#: (requests, rows of each), those with a requirement first.
STEPS = (
    (1, 8), (8, 8), (1, 1), (8, 1), (2, 4), (64, 1), (1, 4), (2, 8), (8, 4), (8, 2),
    (1, 2), (2, 2), (2, 1), (32, 1),
)  # fmt: skip
#: Error of a peer over the norm of the result. Peers round q, k, v and o to bf16, which
#: makes 0.005 to 0.006 of it (in Triton's interpreter); a wrong argument, about 1.
PEER_ERROR = 2.0**-6


def shapes(tps: Iterable[int], rows: Sequence[int]) -> list[KdaShape]:
    """Every step whose number of rows is in ``rows``, over all sizes; in the order of
    `STEPS`, since a budget cuts what comes last.

    Raises:
        ValueError: for a size that does not divide K3's heads.
    """
    sizes = list(tps)
    return [
        KdaShape.of(tp, requests, width)
        for requests, width in STEPS
        if requests * width in rows
        for tp in sizes
    ]


def moved_bytes(shape: KdaShape, layout: str) -> int:
    """Bytes that a layout must move: a request's states (fold: one read, one written;
    snapshots: one read, one written a row), W_fb and the packed rows."""
    states = 2 if layout == FOLD else 1 + shape.width
    return (
        shape.requests * states * shape.state_bytes
        + 2 * shape.heads * DIM * DIM
        + 2 * shape.rows * shape.packed_columns
    )


@dataclass(frozen=True)
class Truth:
    """The second of two steps, every row accepted, in one precision.

    Attributes:
        out: [M, H, 128].
        before, after: [B, H, 128, 128], states before its rows and after all of them.
    """

    out: Tensor
    before: Tensor
    after: Tensor

    @classmethod
    def of(cls, data: KdaData, steps: Sequence[Tensor], dtype: torch.dtype) -> Truth:
        """Of the first copy."""
        shape, w = data.shape, data.weights[0]
        heads, device = shape.heads, w.conv.device
        cache = KdaState.allocate(shape.requests + 1, heads, DIM, DIM, dtype, device)
        cache.state[1:] = data.start_state
        taps = w.conv.to(dtype).view(3, heads, DIM, TAPS).permute(0, 3, 1, 2)
        past = data.start_window.unflatten(2, (3, heads, DIM))
        for i, name in enumerate("qkv"):
            getattr(cache, f"window_{name}")[1:] = past[:, :, i]
        weights = KdaWeights(
            taps[0],
            taps[1],
            taps[2],
            w.a_log.to(dtype),
            w.dt_bias.to(dtype),
            w.norm.to(dtype),
            w.lower_bound,
            w.norm_eps,
        )
        for number, packed in enumerate(steps):
            data.tell(number)
            rows = KdaRows.unpack(
                packed.to(dtype), w.w_fb.to(dtype), heads, DIM, bf16_decay=True
            )
            out = reference.verify(
                data.fold_batches[0], rows, weights, cache, fold=True
            )
        before = cache.state[1:].clone()
        for slot in range(1, shape.requests + 1):
            reference.commit(cache, slot, shape.width)
        return cls(out, before, cache.state[1:])


#: Axes of what is compared as one: a row of outputs [M, H, 128], a request's states
#: [B, H, 128, 128].
ROW, STATE = (-1,), (-3, -2, -1)


def no_worse(
    found: Tensor, exact: Tensor, plain: Tensor, axes: tuple[int, ...]
) -> bool:
    """At most twice the error of fp32 torch, and 2^-23 of the exact norm for the
    approximate exponential and root. Norms are over ``axes``; every other index is
    compared for itself.

    The error of fp32 torch is itself a draw, so what is compared must be large enough
    for its norm to be steady. Outputs are: each has the error of its rounding to bf16.
    States are compared a request at a time: of thousands of fp32 rows, or of 768
    heads, torch is by chance nearly exact in some, and a kernel just as accurate is
    above twice that (red on an H200 while every test of the kernel passed, 2026-11-30).
    One head among 96 is red at about 17 times torch's error: sqrt(95 + 17^2) is twice
    sqrt(96). A head that is wrong is off by a part of its state, 10^4 times that.
    """
    norm = torch.linalg.vector_norm
    error = norm(found.double() - exact, dim=axes)
    allowed = 2 * norm(plain.double() - exact, dim=axes)
    floor = gates.FP32_ULP * norm(exact, dim=axes)
    return bool((error <= allowed + floor).all())


class KdaBench:
    """See :class:`experiments.bench.core.Bench`: one step, a point for each layout.

    Args:
        shape: the step.
        settings: of the run; its rows are not read.
        our_ways: of a layout.
        peer_ways: of a step.
    """

    def __init__(
        self,
        shape: KdaShape,
        settings: Settings,
        our_ways: Callable[[str, Sequence[Mode]], Ways[KdaData]] = kda_ways.ours,
        peer_ways: Callable[
            [KdaShape, Sequence[Mode]], Ways[KdaData]
        ] = kda_peers.peers,
    ) -> None:
        self.label = shape.label
        self._shape = shape
        self._settings = settings
        self._our_ways = our_ways
        self._peer_ways = peer_ways

    def _second(self, run: Run, data: KdaData, steps: list[Tensor]) -> Tensor:
        """A copy of the output of the second step."""
        data.reset(torch.nan)
        for number, packed in enumerate(steps):
            data.packed.copy_(packed)
            data.tell(number)
            out = run(0)
        return out.clone()

    def _gate(
        self,
        layout: str,
        ways: Sequence[Way[KdaData]],
        data: KdaData,
        steps: list[Tensor],
        truths: tuple[Truth, Truth],
    ) -> dict[Key, dict[str, bool]]:
        """Gates of our kernel in one layout, by launch mode."""
        exact, plain = truths
        state = "before" if layout == FOLD else "after"
        runs = [way.make(data) for way in ways]
        outs = []
        found: dict[Key, dict[str, bool]] = {}
        for way, run in zip(ways, runs, strict=True):
            outs.append(self._second(run, data, steps))
            found[OURS, way.mode] = {
                "accurate": no_worse(outs[-1], exact.out, plain.out.bfloat16(), ROW),
                "accurate_state": no_worse(
                    data.left_by(layout),
                    getattr(exact, state),
                    getattr(plain, state),
                    STATE,
                ),
                "modes_equal": gates.same_bits(outs[-1], outs[0]),
            }
        if outs:
            self._second(runs[0], data, steps[:1])
            data.packed.copy_(steps[1])
            data.tell(1)
            steady = self._repeatable(runs, data, layout, outs[0])
            for verdicts in found.values():
                verdicts[f"repeatable_{self._settings.repeats}"] = steady
        return found

    def _repeatable(
        self, runs: list[Run], data: KdaData, layout: str, right: Tensor
    ) -> bool:
        """Launches from the same state, modes in turn, another stream busy."""
        kept = [x.clone() for x in data.changing(layout)]
        wrong = torch.zeros((), dtype=torch.int64, device=right.device)
        with neighbours(self._settings.device) as disturb:
            for number in range(self._settings.repeats):
                if number % 8 == 0:
                    disturb()
                for now, then in zip(data.changing(layout), kept, strict=True):
                    now.copy_(then)
                wrong += (runs[number % len(runs)](0) != right).sum()
        return int(wrong) == 0

    def _admit(
        self, data: KdaData, steps: list[Tensor], exact: Tensor, missing: dict[str, str]
    ) -> list[Way[KdaData]]:
        """Peers that run and are right; the others, with why, go to ``missing``."""
        offer = self._peer_ways(self._shape, self._settings.modes)
        missing.update(offer.missing)
        admitted = []
        for way in offer.ways:
            try:
                result = self._second(way.make(data), data, steps)
            except Exception as problem:
                missing[spell(way.key)] = reason(problem)
                continue
            error = gates.relative_error(result, exact)
            if error <= PEER_ERROR:
                admitted.append(way)
            else:
                missing[spell(way.key)] = f"its result is off by {error:.2g}; not timed"
        return admitted

    def measure(self) -> Iterator[Point]:
        """A point for the fold layout and one for vLLM's slots, timed together."""
        shape, settings = self._shape, self._settings
        data = KdaData(shape, 1, settings.device)
        steps = [data.new_rows(), data.new_rows()]
        exact, plain = (
            Truth.of(data, steps, kind) for kind in (torch.float64, torch.float32)
        )
        missing: dict[str, str] = {}
        found: list[Point] = []
        timed: list[Way[KdaData]] = []
        for layout in LAYOUTS:
            offer = self._our_ways(layout, settings.modes)
            point = Point(
                OP,
                f"{shape.label} {layout}",
                {**shape.described(), "layout": layout},
                shape.rows,
                moved_bytes(shape, layout),
            )
            point.missing.update(offer.missing)
            try:
                gated = self._gate(layout, offer.ways, data, steps, (exact, plain))
                point.gates.update(gated)
            except Exception as error:
                point.missing[OURS] = reason(error)
            red = point.red()
            for way in offer.ways:
                key = OURS, way.mode
                if key in point.gates and key not in red:
                    timed.append(way)
            found.append(point)
        timed += self._admit(data, steps, exact.out, missing)
        last = steps[1]
        del data, steps, exact, plain
        times = self._times(timed, last, found[0].bytes)
        for point in found:
            point.missing.update(missing)
            self._enter(point, timed, times)
            yield point

    def _ready(self, copies: int, rows: Tensor | None = None) -> KdaData:
        """Data for steps after the first."""
        data = KdaData(self._shape, copies, self._settings.device)
        data.reset(0.0)
        data.packed.copy_(data.new_rows() if rows is None else rows)
        data.tell(1)
        return data

    def _times(
        self, ways: Sequence[Way[KdaData]], rows: Tensor, size: int
    ) -> dict[Key, Timing | str]:
        """Over so many copies that the states alone, whatever the layout, do not fit
        the L2."""
        copies = timing.copies_for(self._shape.requests * self._shape.state_bytes)
        data = self._ready(copies, rows)
        return self._settings.timer.measure(
            {way.key: way.make(data) for way in ways}, copies, timing.floor_us(size)
        )

    def _key(self, way: Way[KdaData], point: Point) -> Key | None:
        """Where a time goes in a point; None if it is of our other layout."""
        if way.name not in LAYOUTS:
            return way.key
        return (OURS, way.mode) if way.name == point.shape["layout"] else None

    def _enter(
        self,
        point: Point,
        ways: Sequence[Way[KdaData]],
        times: dict[Key, Timing | str],
    ) -> None:
        for way in ways:
            key, time = self._key(way, point), times[way.key]
            if key is None:
                continue
            point.enter({key: time})
            if way.note and key in point.timings:
                point.notes[spell(key)] = way.note

    def trace(self, points: Sequence[Point]) -> None:
        """See :class:`experiments.bench.core.Bench`."""
        modes = self._settings.modes
        every = self._peer_ways(self._shape, modes)
        for layout in LAYOUTS:
            every += self._our_ways(layout, modes)
        timed = [
            way
            for way in every.ways
            if any(self._key(way, point) in point.timings for point in points)
        ]
        data = self._ready(1)
        names = self._settings.timer.trace({way.key: way.make(data) for way in timed})
        for point in points:
            for way in timed:
                key = self._key(way, point)
                if key is not None and key in point.timings:
                    point.kernels[key] = names[way.key]
