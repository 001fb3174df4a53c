# SPDX-License-Identifier: Apache-2.0
"""MLA's verify kernels against vLLM's: attention over a paged cache, alone, for a
drafter's block, and in its sublayer from the packed projection's input to o_proj's
output.

A point is one rank's heads and a step of requests alike. Every launch has a cache and
weights of its own, rotated past the L2; the step's rows are the same ones, in the L2 as
the kernel before leaves them. The floor counts each request's lines once, a sublayer's
weights, and the rows in and out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from experiments.bench import gates, mla_peers, mla_ways, timing
from experiments.bench.candidate import OURS, Key, Mode, Point, reason, spell
from experiments.bench.core import Settings
from experiments.bench.mla_data import CORE, DRAFT, PARTS, SUBLAYER, MlaData, MlaShape
from experiments.bench.neighbours import neighbours
from experiments.bench.ways import Run, Way, Ways, settled, trace_ways

OP = "mla"
CONTEXTS = (1024, 8192, 32768, 131072)
SUBLAYER_CONTEXTS = (1024, 8192)
DRAFT_CONTEXT = 32768
#: Rows of a drafter's block; its step has one more.
DRAFTS = 7
SUBLAYER_SIZES = (16, 8)
DRAFT_SIZES = (16, 1)
#: Error of a peer over the norm of the result. Rounding makes 0.01 of it at most, in a
#: sublayer; a wrong argument, about 1.
PEER_ERROR = 2.0**-5
#: Contexts above the first have at most so many repeats: each takes long.
LONG_CONTEXT, LONG_REPEATS = 40_000, 20
#: Copies that repeats take in turn.
_IN_TURN = 2


def shapes(
    tps: Iterable[int], rows: Sequence[int], parts: Sequence[str] = PARTS
) -> list[MlaShape]:
    """Every step whose number of rows is in ``rows``, what matters most first, since a
    budget cuts what comes last. A drafter's block counts with the step that it drafts
    for.

    Raises:
        ValueError: for a size that does not divide K3's heads.
    """
    sizes = sorted(set(tps), reverse=True)

    def core(among: Sequence[int], requests: int, *widths: int) -> list[MlaShape]:
        return [
            MlaShape.of(CORE, tp, requests, width, context)
            for tp in among
            for width in widths
            for context in (CONTEXTS if requests == 1 else CONTEXTS[:-1])
        ]

    sublayers = [
        MlaShape.of(SUBLAYER, tp, 1, width, context)
        for tp in sizes
        if tp in SUBLAYER_SIZES
        for width in (1, 8)
        for context in SUBLAYER_CONTEXTS
    ]
    blocks = [
        MlaShape.of(DRAFT, tp, 1, DRAFTS, DRAFT_CONTEXT)
        for tp in reversed(sizes)
        if tp in DRAFT_SIZES
    ]
    every = [
        *core(sizes[:1], 1, 1, 8),
        *sublayers,
        *core(sizes[1:], 1, 1, 8),
        *blocks,
        *core(sizes, 8, 1, 8),
        *core(sizes, 1, 4),
        *core(sizes, 8, 4),
    ]
    return [
        shape
        for shape in every
        if shape.part in parts and shape.rows + (shape.part == DRAFT) in rows
    ]


def no_worse(found: Tensor, exact: Tensor, plain: Tensor) -> bool:
    """Each row at most twice as far from fp64 as plain bf16 torch is."""

    def error(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm((x.double() - exact).flatten(1), dim=1)

    return bool((error(found) <= 2 * error(plain)).all())


def _alone(way: Way[MlaData], data: MlaData) -> tuple[list[int], Tensor]:
    """The first request's first row and last, the step's last, and what each is in a
    step of its own."""
    rows = sorted({0, data.shape.width - 1, data.shape.rows - 1})
    found = [way.make(data.alone(row))(0).clone() for row in rows]
    return rows, torch.cat(found)


class MlaBench:
    """See :class:`experiments.bench.core.Bench`: one step, one point.

    Args:
        shape: the step.
        settings: of the run; its rows are not read.
        our_ways: of a part.
        peer_ways: of a step.
    """

    def __init__(
        self,
        shape: MlaShape,
        settings: Settings,
        our_ways: Callable[[str, Sequence[Mode]], Ways[MlaData]] = mla_ways.ours,
        peer_ways: Callable[[MlaShape], Ways[MlaData]] = mla_peers.peers,
    ) -> None:
        self.label = shape.label
        self._shape = shape
        self._settings = settings
        long = shape.context > LONG_CONTEXT
        self._repeats = (
            min(settings.repeats, LONG_REPEATS) if long else settings.repeats
        )
        self._our_ways = our_ways
        self._peer_ways = peer_ways

    def _repeatable(self, runs: Sequence[Run], data: MlaData) -> bool:
        """Launches that take two copies in turn, modes in turn, another stream busy;
        every result begins as NaN."""
        copies = range(min(len(data.caches), _IN_TURN))
        right = [runs[0](copy).clone() for copy in copies]
        wrong = torch.zeros((), dtype=torch.int64, device=data.rows.device)
        with neighbours(self._settings.device) as disturb:
            for number in range(self._repeats):
                if number % 8 == 0:
                    disturb()
                copy = number // len(runs) % len(copies)
                out = runs[number % len(runs)](copy)
                wrong += (out != right[copy]).sum()
                out.fill_(torch.nan)
        return int(wrong) == 0

    def _gate(
        self,
        ways: Sequence[Way[MlaData]],
        data: MlaData,
        exact: Tensor,
        plain: Tensor,
        point: Point,
    ) -> None:
        """Enter the gates of our ways, and why one did not run."""
        runs: list[Run] = []
        outs: dict[Key, Tensor] = {}
        for way in ways:
            try:
                run = way.make(data)
                out = run(0).clone()
                rows, alone = _alone(way, data)
            except Exception as error:
                point.missing[spell(way.key)] = reason(error)
                continue
            point.gates[way.key] = {
                "accurate": no_worse(out, exact, plain),
                "row_invariant": gates.same_bits(out[rows], alone),
            }
            runs.append(run)
            outs[way.key] = out
        reference = outs.get((OURS, "plain"))
        for key, verdicts in point.gates.items():
            if key[1] == "pdl" and reference is not None:
                verdicts["pdl_equals_plain"] = gates.same_bits(outs[key], reference)
        if runs:
            steady = self._repeatable(runs, data)
            for verdicts in point.gates.values():
                verdicts[f"repeatable_{self._repeats}"] = steady

    def _admit(
        self,
        ways: Sequence[Way[MlaData]],
        data: MlaData,
        exact: Tensor,
        point: Point,
    ) -> list[Way[MlaData]]:
        """Peers that run and are right; the others, with why, are missing."""
        admitted = []
        for way in ways:
            try:
                out = way.make(data)(0).clone()
                rows, alone = _alone(way, data)
            except Exception as problem:
                point.missing[spell(way.key)] = reason(problem)
                continue
            error = gates.relative_error(out, exact)
            if not error <= PEER_ERROR:
                point.missing[spell(way.key)] = (
                    f"its result is off by {error:.2g}; not timed"
                )
                continue
            if not gates.same_bits(out[rows], alone):
                point.moved.append(spell(way.key))
            if way.note:
                point.notes[spell(way.key)] = way.note
            admitted.append(way)
        return admitted

    def measure(self) -> Iterator[Point]:
        """The point."""
        shape, settings = self._shape, self._settings
        size = shape.moved_bytes
        copies = timing.copies_for(shape.copy_bytes)
        data = MlaData.draw(shape, copies, settings.device)
        settled(settings.device)
        exact, plain = (data.truth(k) for k in (torch.float64, torch.bfloat16))
        point = Point(OP, shape.label, shape.described(), shape.rows, size)
        own = self._our_ways(shape.part, settings.modes)
        others = self._peer_ways(shape)
        point.missing.update({**own.missing, **others.missing})
        self._gate(own.ways, data, exact, plain, point)
        red = point.red()
        timed = [way for way in own.ways if way.key in point.gates.keys() - red.keys()]
        timed += self._admit(others.ways, data, exact, point)
        runs = {way.key: way.make(data) for way in timed}
        settled(settings.device)
        times = settings.timer.measure(runs, copies, timing.floor_us(size))
        point.enter(times)
        yield point

    def trace(self, points: Sequence[Point]) -> None:
        """See :class:`experiments.bench.core.Bench`."""
        every = self._our_ways(self._shape.part, self._settings.modes)
        every += self._peer_ways(self._shape)
        data = MlaData.draw(self._shape, 1, self._settings.device)
        trace_ways(points, every, data, self._settings)


def summaries(points: Iterable[Point]) -> Iterator[str]:
    """All times of each point, and each peer's over ours; a red point has none of ours
    and no such ratio."""
    for point in points:
        ours = [point.timings[k] for k in point.gates if k in point.timings]
        text = f"{point.label}: {point.times()}"
        if ours:
            best = min(time.us for time in ours)
            order = sorted(point.peers().items(), key=lambda item: item[1].us)
            ratios = [f"{key[0]} {time.us / best:.2f}x" for key, time in order]
            text += f"; over ours: {', '.join(ratios) or 'no peer'}"
        yield text
