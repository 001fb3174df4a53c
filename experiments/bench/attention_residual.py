# SPDX-License-Identifier: Apache-2.0
"""attn_res against vLLM's kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from experiments.bench import gates, ours, peers, timing
from experiments.bench.candidate import Candidate, Inputs, Mode, Offer, Point
from experiments.bench.core import (
    Settings,
    admit_peers,
    gate_ours,
    time_point,
    trace_point,
)
from experiments.bench.neighbours import neighbours
from experiments.byte_model import HIDDEN
from verify_kernels.attn_res.reference import attn_res as reference

OP = "attn_res"
BLOCKS = (4, 8)
CAPACITY = 8
_WEIGHTS = 3
#: Beyond its rounding an element may be off by this much of its row's largest, for the
#: softmax: fp32 scores of 7,168 products are good to a few 1e-5.
_ROW_SLACK = 2.0**-10


def moved_bytes(rows: int, blocks: int, width: int = HIDDEN) -> int:
    """bf16 bytes of a call: blocks, prefix, delta and weights in, prefix and out."""
    return 2 * width * (rows * (blocks + 4) + _WEIGHTS)


class AttnResBench:
    """See :class:`experiments.bench.core.Bench`.

    Every call adds a delta to the prefix, mixes ``blocks`` saved blocks with it and
    norms the result; none writes a block, so the inputs stay what they were but for
    the prefix, which the kernels update in place.

    Args:
        blocks: N, the saved blocks that are mixed.
        settings: of the run.
        width: elements of a row.
        our_offer, peer_offer: where the candidates come from.
    """

    def __init__(
        self,
        blocks: int,
        settings: Settings,
        width: int = HIDDEN,
        our_offer: Callable[[int, tuple[Mode, ...]], Offer] = ours.attn_res,
        peer_offer: Callable[[int, tuple[Mode, ...]], Offer] = peers.attn_res,
    ) -> None:
        self.label = f"N={blocks}"
        self._blocks = blocks
        self._settings = settings
        self._width = width
        self._our_offer = our_offer
        self._peer_offer = peer_offer

    def _inputs(self, rows: int, copies: int) -> list[Inputs]:
        """Copies of (prefix, delta, blocks, norm, query and output norm weights).

        Block scales grow as a residual stream's do, every 512th channel is an outlier,
        and row 0 has two blocks that tie but for one element.
        """
        width, device = self._width, self._settings.device
        generator = torch.Generator(device).manual_seed(rows + self._blocks)

        def normal(*size: int) -> Tensor:
            empty = torch.empty(*size, dtype=torch.bfloat16, device=device)
            return empty.normal_(generator=generator)

        prefix, delta = normal(copies, rows, width), normal(copies, rows, width)
        blocks = normal(copies, rows, CAPACITY, width)
        blocks *= torch.arange(1, CAPACITY + 1, device=device)[:, None]
        blocks[..., ::512] *= 64.0
        blocks[:, 0, 1] = blocks[:, 0, 0]
        blocks[:, 0, 1, 1] += 1.0
        norm, output_norm = 1 + normal(width) / 8, 1 + normal(width) / 8
        query = normal(width) * 2 * width**-0.5
        return [
            (prefix[i], delta[i], blocks[i], norm, query, output_norm)
            for i in range(copies)
        ]

    def _out(self, rows: int) -> Tensor:
        return torch.full(
            (rows, self._width),
            float("nan"),
            dtype=torch.bfloat16,
            device=self._settings.device,
        )

    def _prepare(self, candidate: Candidate, inputs: Inputs) -> gates.Prepare:
        """Rows alone; a result row is the output and the new prefix."""

        def prepare(first: int, last: int) -> gates.Job:
            prefix, delta, blocks, *weights = inputs
            own = prefix[first:last].clone()
            call = (own, delta[first:last], blocks[first:last], *weights)
            out = self._out(last - first)
            return gates.Job(
                lambda: candidate.run(call, out), lambda y: torch.cat((y, own), 1)
            )

        return prepare

    def _correct(self, inputs: Inputs) -> Callable[[Tensor], bool]:
        exact, prefix = reference(*inputs, num_blocks=self._blocks)
        rounding = gates.relative_error(exact.to(torch.bfloat16), exact)
        slack = gates.BF16_STEP * exact.abs()
        slack += _ROW_SLACK * exact.abs().amax(1, keepdim=True)

        def correct(result: Tensor) -> bool:
            out = result[:, : self._width]
            return (
                gates.same_bits(result[:, self._width :], prefix)
                and bool(((out.double() - exact).abs() <= slack).all())
                and gates.relative_error(out, exact) <= 2 * rounding
            )

        return correct

    def measure(self) -> Iterator[Point]:
        """Gates once for all M, then a point for each M."""
        settings = self._settings
        most = max(settings.rows)
        (checked,) = self._inputs(most, 1)
        correct = self._correct(checked)

        def prepare_of(candidate: Candidate) -> gates.Prepare:
            return self._prepare(candidate, checked)

        def check(candidate: Candidate) -> dict[str, bool]:
            prepare = prepare_of(candidate)
            with neighbours(settings.device) as disturb:
                steady = gates.repeatable(
                    prepare, settings.rows, settings.repeats, disturb
                )
            return {
                "accurate": correct(prepare(0, most)()),
                "row_invariant": gates.row_invariant(prepare, range(1, most + 1)),
                f"repeatable_{settings.repeats}": steady,
            }

        offer = self._our_offer(self._blocks, settings.modes)
        green, found = gate_ours(offer, check, prepare_of, most)
        for rows in settings.rows:
            size = moved_bytes(rows, self._blocks, self._width)
            point = Point(
                OP,
                self.label,
                {"blocks": self._blocks, "m": rows, "width": self._width},
                rows,
                size,
            )
            point.missing.update(green.missing)
            point.gates.update(found)
            few: Inputs = tuple(t[:rows] for t in checked[:3])
            admitted = admit_peers(
                point,
                self._peer_offer(self._blocks, settings.modes),
                prepare_of,
                self._correct((*few, *checked[3:])),
            )
            time_point(
                point,
                green.candidates + admitted,
                self._inputs(rows, timing.copies_for(size)),
                functools.partial(self._out, rows),
                settings.timer,
            )
            yield point

    def trace(self, points: Sequence[Point]) -> None:
        """See :class:`experiments.bench.core.Bench`."""
        modes = self._settings.modes
        both = self._our_offer(self._blocks, modes) + self._peer_offer(
            self._blocks, modes
        )
        for point in points:
            trace_point(
                point,
                both.candidates,
                self._inputs(point.rows, 1),
                functools.partial(self._out, point.rows),
                self._settings.timer,
            )
