# SPDX-License-Identifier: Apache-2.0
"""skinny_gemm against cuBLAS and vLLM on one projection."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from experiments.bench import gates, ours, peers, timing
from experiments.bench.candidate import Candidate, Mode, Offer, Point
from experiments.bench.core import (
    Settings,
    admit_peers,
    gate_ours,
    time_point,
    trace_point,
)
from experiments.bench.shapes import Projection

OP = "skinny_gemm"
#: In the second set of tokens every 512th channel is 64 times the others, as a few
#: channels of a real residual stream are.
_OUTLIER_EVERY = 512
_OUTLIER_SCALE = 64.0


class _Data:
    """Tokens, weights, and results in fp64."""

    def __init__(self, shape: Projection, settings: Settings, copies: int) -> None:
        generator = torch.Generator(settings.device).manual_seed(shape.n + shape.k)

        def normal(*size: int, std: float = 1.0) -> Tensor:
            empty = torch.empty(*size, dtype=torch.bfloat16, device=settings.device)
            return empty.normal_(0.0, std, generator=generator)

        self.tokens = normal(max(settings.rows), shape.k)
        self.hard_tokens = normal(max(settings.rows), shape.k)
        self.hard_tokens[:, :: min(_OUTLIER_EVERY, shape.k // 2)] *= _OUTLIER_SCALE
        weights = normal(copies, shape.n, shape.k, std=shape.k**-0.5)
        self.weights = list(weights.unbind(0))


class GemmBench:
    """See :class:`experiments.bench.core.Bench`.

    Args:
        shape: the projection.
        settings: of the run.
        our_offer, peer_offer: where the candidates come from.
    """

    def __init__(
        self,
        shape: Projection,
        settings: Settings,
        our_offer: Callable[[Projection, tuple[Mode, ...]], Offer] = ours.skinny_gemm,
        peer_offer: Callable[[Projection, int, tuple[Mode, ...]], Offer] = peers.gemm,
    ) -> None:
        self._shape = shape
        self._settings = settings
        self._our_offer = our_offer
        self._peer_offer = peer_offer

    def _out(self, rows: int) -> Tensor:
        dtype = torch.float32 if self._shape.fp32_out else torch.bfloat16
        return torch.full(
            (rows, self._shape.n),
            float("nan"),
            dtype=dtype,
            device=self._settings.device,
        )

    def _prepare(self, candidate: Candidate, x: Tensor, w: Tensor) -> gates.Prepare:
        def prepare(first: int, last: int) -> gates.Job:
            inputs, out = (x[first:last], w), self._out(last - first)
            return gates.Job(lambda: candidate.run(inputs, out), lambda y: y)

        return prepare

    def _point(self, rows: int) -> Point:
        shape = self._shape
        return Point(
            OP,
            shape.label,
            {
                "name": shape.name,
                "tp": shape.tp,
                "n": shape.n,
                "k": shape.k,
                "m": rows,
                "out": "fp32" if shape.fp32_out else "bf16",
                "same_as": list(shape.aliases),
            },
            rows,
            shape.weight_bytes,
        )

    def measure(self) -> Iterator[Point]:
        """Gates once for all M, then a point for each M."""
        settings = self._settings
        data = _Data(self._shape, settings, timing.copies_for(self._shape.weight_bytes))
        w = data.weights[0]
        most = max(settings.rows)
        exact = gates.exact_product(data.tokens, w)
        hard = gates.exact_product(data.hard_tokens, w)

        def prepare_of(candidate: Candidate) -> gates.Prepare:
            return self._prepare(candidate, data.tokens, w)

        def check(candidate: Candidate) -> dict[str, bool]:
            on_hard = self._prepare(candidate, data.hard_tokens, w)
            with gates.busy_stream(settings.device) as disturb:
                steady = gates.repeatable(
                    on_hard, settings.rows, settings.repeats, disturb
                )
            return {
                "accurate": gates.accurate(prepare_of(candidate)(0, most)(), exact),
                "accurate_outliers": gates.accurate(on_hard(0, most)(), hard),
                "row_invariant": gates.row_invariant(on_hard, range(1, most + 1)),
                f"repeatable_{settings.repeats}": steady,
            }

        offer = self._our_offer(self._shape, settings.modes)
        green, found = gate_ours(offer, check, prepare_of, most)
        for rows in settings.rows:
            point = self._point(rows)
            point.missing.update(green.missing)
            point.gates.update(found)
            part = gates.Exact(
                exact.value[:rows], exact.magnitude[:rows], exact.k, exact.bf16_error
            )
            admitted = admit_peers(
                point,
                self._peer_offer(self._shape, rows, settings.modes),
                prepare_of,
                functools.partial(gates.accurate, exact=part),
            )
            time_point(
                point,
                green.candidates + admitted,
                [(data.tokens[:rows], weight) for weight in data.weights],
                functools.partial(self._out, rows),
                settings.timer,
            )
            yield point

    def trace(self, points: Sequence[Point]) -> None:
        """See :class:`experiments.bench.core.Bench`."""
        data = _Data(self._shape, self._settings, 1)
        own = self._our_offer(self._shape, self._settings.modes).candidates
        for point in points:
            peers_there = self._peer_offer(
                self._shape, point.rows, self._settings.modes
            )
            trace_point(
                point,
                own + peers_there.candidates,
                [(data.tokens[: point.rows], data.weights[0])],
                functools.partial(self._out, point.rows),
                self._settings.timer,
            )
