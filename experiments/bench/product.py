# SPDX-License-Identifier: Apache-2.0
"""What skinny_gemm's benches share: Y_g = X W_g^T for one or more weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.bench import gates, timing
from experiments.bench.candidate import Candidate, Offer, Point
from experiments.bench.core import (
    Settings,
    admit_peers,
    gate_ours,
    time_point,
    trace_point,
)
from experiments.bench.neighbours import neighbours
from experiments.bench.shapes import Projection

#: In the second set of tokens every 512th channel is 64 times the others, as a few
#: channels of a real residual stream are.
_OUTLIER_EVERY = 512
_OUTLIER_SCALE = 64.0


def empty(part: Projection, rows: int, device: torch.device) -> Tensor:
    """An output full of NaN, [rows, n] in the projection's dtype."""
    dtype = torch.float32 if part.fp32_out else torch.bfloat16
    return torch.full((rows, part.n), float("nan"), dtype=dtype, device=device)


class Data:
    """Tokens and weights, the same for the same shapes.

    Attributes:
        tokens, hard_tokens: bf16 [rows, k]; the second with outlier channels.
        weights: for each copy the weight of each part, bf16 [n, k].
    """

    def __init__(
        self, parts: Sequence[Projection], rows: int, device: torch.device, copies: int
    ) -> None:
        k = parts[0].k
        generator = torch.Generator(device).manual_seed(sum(p.n for p in parts) + k)

        def normal(*size: int, std: float = 1.0) -> Tensor:
            buffer = torch.empty(*size, dtype=torch.bfloat16, device=device)
            return buffer.normal_(0.0, std, generator=generator)

        self.tokens = normal(rows, k)
        self.hard_tokens = normal(rows, k)
        self.hard_tokens[:, :: min(_OUTLIER_EVERY, k // 2)] *= _OUTLIER_SCALE
        stacks = [normal(copies, part.n, k, std=k**-0.5) for part in parts]
        self.weights = list(zip(*(stack.unbind(0) for stack in stacks), strict=True))


def first_rows(exact: gates.Exact, rows: int) -> gates.Exact:
    """The first rows of a product."""
    return gates.Exact(
        exact.value[:rows], exact.magnitude[:rows], exact.k, exact.bf16_error
    )


class ProductBench:
    """See :class:`experiments.bench.core.Bench`.

    A candidate is given (x, w) and an output; with several parts (x, w_0, w_1, ...)
    and a list of outputs.

    Args:
        op: the op's name in results.
        label: the point's name in tables.
        shape: what a result line says of it, but for ``m``.
        parts: the projections of one X.
        settings: of the run.
        ours, peers: candidates; the peers at M.
    """

    def __init__(
        self,
        op: str,
        label: str,
        shape: Mapping[str, Any],
        parts: Sequence[Projection],
        settings: Settings,
        ours: Callable[[], Offer],
        peers: Callable[[int], Offer],
    ) -> None:
        self.label = label
        self._op = op
        self._shape = dict(shape)
        self._parts = tuple(parts)
        self._settings = settings
        self._ours = ours
        self._peers = peers
        self._bytes = sum(part.weight_bytes for part in parts)

    def _data(self, copies: int) -> Data:
        settings = self._settings
        return Data(self._parts, max(settings.rows), settings.device, copies)

    def _out(self, rows: int) -> Tensor | list[Tensor]:
        outs = [empty(part, rows, self._settings.device) for part in self._parts]
        return outs if len(outs) > 1 else outs[0]

    def _joined(self, result: Any) -> Tensor:
        """One tensor to compare; fp32 holds every bf16 exactly."""
        if isinstance(result, Tensor):
            return result
        return torch.cat([part.float() for part in result], 1)

    def _prepare(
        self, candidate: Candidate, x: Tensor, weights: Sequence[Tensor]
    ) -> gates.Prepare:
        def prepare(first: int, last: int) -> gates.Job:
            inputs, out = (x[first:last], *weights), self._out(last - first)
            return gates.Job(lambda: candidate.run(inputs, out), self._joined)

        return prepare

    def _accurate(self, exacts: Sequence[gates.Exact], result: Tensor) -> bool:
        if len(exacts) == 1:
            return gates.accurate(result, exacts[0])
        columns = result.split([part.n for part in self._parts], 1)
        return all(
            gates.accurate(column if part.fp32_out else column.bfloat16(), exact)
            for part, column, exact in zip(self._parts, columns, exacts, strict=True)
        )

    def measure(self) -> Iterator[Point]:
        """Gates once for all M, then a point for each M."""
        settings = self._settings
        data = self._data(timing.copies_for(self._bytes))
        weights = data.weights[0]
        most = max(settings.rows)
        exact = [gates.exact_product(data.tokens, w) for w in weights]
        hard = [gates.exact_product(data.hard_tokens, w) for w in weights]

        def prepare_of(candidate: Candidate) -> gates.Prepare:
            return self._prepare(candidate, data.tokens, weights)

        def check(candidate: Candidate) -> dict[str, bool]:
            on_hard = self._prepare(candidate, data.hard_tokens, weights)
            with neighbours(settings.device) as disturb:
                steady = gates.repeatable(
                    on_hard, settings.rows, settings.repeats, disturb
                )
            return {
                "accurate": self._accurate(exact, prepare_of(candidate)(0, most)()),
                "accurate_outliers": self._accurate(hard, on_hard(0, most)()),
                "row_invariant": gates.row_invariant(on_hard, range(1, most + 1)),
                f"repeatable_{settings.repeats}": steady,
            }

        green, found = gate_ours(self._ours(), check, prepare_of, most)
        for rows in settings.rows:
            shape = {**self._shape, "m": rows}
            point = Point(self._op, self.label, shape, rows, self._bytes)
            point.missing.update(green.missing)
            point.gates.update(found)
            admitted = admit_peers(
                point,
                self._peers(rows),
                prepare_of,
                functools.partial(
                    self._accurate, [first_rows(part, rows) for part in exact]
                ),
            )
            time_point(
                point,
                green.candidates + admitted,
                [(data.tokens[:rows], *copy) for copy in data.weights],
                functools.partial(self._out, rows),
                settings.timer,
            )
            yield point

    def trace(self, points: Sequence[Point]) -> None:
        """See :class:`experiments.bench.core.Bench`."""
        data = self._data(1)
        own = self._ours().candidates
        for point in points:
            trace_point(
                point,
                own + self._peers(point.rows).candidates,
                [(data.tokens[: point.rows], *data.weights[0])],
                functools.partial(self._out, point.rows),
                self._settings.timer,
            )
