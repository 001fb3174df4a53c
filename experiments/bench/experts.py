# SPDX-License-Identifier: Apache-2.0
"""A rank's routed experts, alone and after routing, against vLLM's layer.

A point is a share, M rows, how they choose (`experts_data.ROUTINGS`) and a part: the
experts with ids and weights given, or the chain of routing and experts. The floor
counts the distinct experts' weights. Launches after each other have other experts of
one bank, so that none is left in the L2; the rows are the same and in the L2, as the
latent projection leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from experiments.bench import experts_peers, experts_ways, gates, timing
from experiments.bench.candidate import OURS, Key, Mode, Point, reason, spell
from experiments.bench.core import Settings
from experiments.bench.experts_data import (
    ROUTINGS,
    ExpertsShape,
    Step,
    Truth,
    Weights,
)
from experiments.bench.experts_ways import PARTS
from experiments.bench.neighbours import neighbours
from experiments.bench.ways import Run, Way, Ways

OP = "experts"
#: Error of a peer over the norm of the result. Peers round gate, up, SiTU and every
#: expert's output to bf16; a wrong argument or a wrong expert makes about 1.
PEER_ERROR = 2.0**-6
#: Choices in turn, where the bytes alone would ask for fewer.
_MIN_COPIES = 4


def copies_of(size: int) -> int:
    """Choices that a rotation takes in turn, for steps of ``size`` bytes."""
    return max(timing.copies_for(size), _MIN_COPIES)


def no_worse(found: Tensor, truth: Truth) -> bool:
    """At most twice the error of fp32 torch with a model's roundings: the mean square's
    root, and the largest. Errors are over the root mean square of their row."""
    exact = truth.exact
    scale = exact.square().mean(1, keepdim=True).sqrt()
    own, plain = ((x.double() - exact) / scale for x in (found, truth.plain))
    mean = own.square().mean() <= 4 * plain.square().mean()
    return bool(mean & (own.abs().max() <= 2 * plain.abs().max()))


class ExpertsBench:
    """See :class:`experiments.bench.core.Bench`: one share, a point for each M, routing
    and part.

    Args:
        shape: the share.
        settings: of the run.
        our_ways: of the weights.
        peer_ways: of a share, its weights and a step of the most rows.
    """

    def __init__(
        self,
        shape: ExpertsShape,
        settings: Settings,
        our_ways: Callable[[Weights, Sequence[Mode]], Ways[Step]] = experts_ways.ours,
        peer_ways: Callable[
            [ExpertsShape, Weights, Step], Ways[Step]
        ] = experts_peers.peers,
    ) -> None:
        self.label = f"{OP}@{shape.tp}"
        self._shape = shape
        self._settings = settings
        self._our_ways = our_ways
        self._peer_ways = peer_ways

    def _step(self, routing: str, rows: int, copies: int = 1) -> Step:
        device = self._settings.device
        return Step.draw(self._shape, routing, rows, copies, device)

    def _ways(self) -> tuple[Weights, Ways[Step], Ways[Step]]:
        """The bank, ours and the peers'."""
        weights = Weights.draw(self._shape, self._settings.device)
        warm = self._step(ROUTINGS[0], max(self._settings.rows))
        own = self._our_ways(weights, self._settings.modes)
        return weights, own, self._peer_ways(self._shape, weights, warm)

    def _point(self, routing: str, part: str, step: Step) -> Point:
        distinct = step.distinct()
        described = {
            **self._shape.described(),
            "m": step.rows,
            "routing": routing,
            "distinct": distinct,
            "part": part,
        }
        return Point(
            OP,
            f"{part}@{self._shape.tp} {routing}",
            described,
            step.rows,
            self._shape.live_bytes(distinct),
        )

    def _repeatable(self, runs: Sequence[Run], step: Step) -> bool:
        """Launches that take two choices in turn, modes in turn, another stream busy;
        every result begins as NaN."""
        copies = range(min(step.copies, 2))
        right = [runs[0](copy).clone() for copy in copies]
        wrong = torch.zeros((), dtype=torch.int64, device=step.latent.device)
        with neighbours(self._settings.device) as disturb:
            for number in range(self._settings.repeats):
                if number % 8 == 0:
                    disturb()
                copy = number // len(runs) % len(copies)
                out = runs[number % len(runs)](copy)
                wrong += (out != right[copy]).sum()
                out.fill_(torch.nan)
        return int(wrong) == 0

    def _gate(
        self, ways: Sequence[Way[Step]], step: Step, truth: Truth
    ) -> tuple[dict[Key, dict[str, bool]], dict[str, str]]:
        """Gates of our ways of one part by launch mode, and why one did not run."""
        found: dict[Key, dict[str, bool]] = {}
        missing: dict[str, str] = {}
        runs: list[Run] = []
        outs: dict[Key, Tensor] = {}
        for way in ways:
            try:
                run = way.make(step)
                out = run(0).clone()
                verdicts = {
                    "accurate": no_worse(out, truth),
                    "row_invariant": gates.same_bits(out, _row_by_row(way, step)),
                }
            except Exception as error:
                missing[spell(way.key)] = reason(error)
                continue
            found[way.key] = verdicts
            runs.append(run)
            outs[way.key] = out
        plain = outs.get((OURS, "plain"))
        for key, verdicts in found.items():
            if key[1] == "pdl" and plain is not None:
                verdicts["pdl_equals_plain"] = gates.same_bits(outs[key], plain)
        if runs:
            steady = self._repeatable(runs, step)
            for verdicts in found.values():
                verdicts[f"repeatable_{self._settings.repeats}"] = steady
        return found, missing

    def _admit(
        self, ways: Sequence[Way[Step]], step: Step, truth: Truth, point: Point
    ) -> list[Way[Step]]:
        """Peers that run and are right; the others, with why, are missing."""
        admitted = []
        for way in ways:
            try:
                out = way.make(step)(0).clone()
                alone = _row_by_row(way, step)
            except Exception as error:
                point.missing[spell(way.key)] = reason(error)
                continue
            wrong = gates.relative_error(out, truth.exact)
            if not wrong <= PEER_ERROR:
                point.missing[spell(way.key)] = (
                    f"its result is off by {wrong:.2g}; not timed"
                )
                continue
            if not gates.same_bits(out, alone):
                point.moved.append(spell(way.key))
            if way.note:
                point.notes[spell(way.key)] = way.note
            admitted.append(way)
        return admitted

    def measure(self) -> Iterator[Point]:
        """A part after the other: whatever routing does to a device, the experts alone
        have been measured before it."""
        weights, own, others = self._ways()
        for part in PARTS:
            for routing in ROUTINGS:
                for rows in self._settings.rows:
                    # One row has nobody to share experts with.
                    if rows > 1 or routing == ROUTINGS[0]:
                        yield self._measure(routing, rows, part, weights, own, others)

    def _measure(
        self,
        routing: str,
        rows: int,
        part: str,
        weights: Weights,
        own: Ways[Step],
        others: Ways[Step],
    ) -> Point:
        size = self._shape.live_bytes(self._step(routing, rows).distinct())
        step = self._step(routing, rows, copies_of(size))
        truth = Truth.of(step, weights)
        point = self._point(routing, part, step)
        point.missing.update({**own.missing, **others.missing})
        mine = [way for way in own.ways if way.part == part]
        gated, missing = self._gate(mine, step, truth)
        point.gates.update(gated)
        point.missing.update(missing)
        red = point.red()
        timed = [way for way in mine if way.key in gated and way.key not in red]
        theirs = [way for way in others.ways if way.part == part]
        timed += self._admit(theirs, step, truth, point)
        times = self._settings.timer.measure(
            {way.key: way.make(step) for way in timed},
            step.copies,
            timing.floor_us(size),
        )
        point.enter(times)
        return point

    def trace(self, points: Sequence[Point]) -> None:
        """See :class:`experiments.bench.core.Bench`."""
        if not any(point.timings for point in points):
            return
        _, own, others = self._ways()
        every = (own + others).ways
        for point in points:
            step = self._step(point.shape["routing"], point.rows)
            ways = [
                way
                for way in every
                if way.part == point.shape["part"] and way.key in point.timings
            ]
            names = self._settings.timer.trace(
                {way.key: way.make(step) for way in ways}
            )
            point.kernels.update(names)


def _row_by_row(way: Way[Step], step: Step) -> Tensor:
    """Every row of the first copy alone, [M, L]."""
    return torch.cat(
        [way.make(step.part(t, t + 1))(0).clone() for t in range(step.rows)]
    )


def shares(tps: Sequence[int]) -> list[ExpertsShape]:
    """K3's at these sizes.

    Raises:
        ValueError: for a size that the kernels have no share for.
    """
    return [ExpertsShape.of(tp) for tp in tps]
