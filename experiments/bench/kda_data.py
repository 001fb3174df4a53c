# SPDX-License-Identifier: Apache-2.0
"""Inputs, weights and states of a KDA step, in as many copies as a rotation needs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from experiments.byte_model import HEADS, PACKED_ROW_MULTIPLE
from verify_kernels import VerifyBatch
from verify_kernels.kda import KdaFoldState, KdaVerifyWeights
from verify_kernels.kda.host import DIM, TAPS, packed_width

#: What our kernel is timed in.
FOLD, SNAPSHOT = "fold", "snapshot"
LAYOUTS = (FOLD, SNAPSHOT)


@dataclass(frozen=True)
class KdaShape:
    """One rank's heads and a step of requests that all have ``width`` rows."""

    tp: int
    heads: int
    requests: int
    width: int

    @classmethod
    def of(cls, tp: int, requests: int, width: int) -> KdaShape:
        """K3's heads over ``tp`` ranks.

        Raises:
            ValueError: if they do not divide.
        """
        if HEADS % tp:
            raise ValueError(f"tp={tp}: it must divide K3's {HEADS} heads")
        return cls(tp, HEADS // tp, requests, width)

    @property
    def label(self) -> str:
        """For tables."""
        return f"H={self.heads} B={self.requests} q={self.width}"

    @property
    def rows(self) -> int:
        """M."""
        return self.requests * self.width

    @property
    def state_bytes(self) -> int:
        """Of one fp32 state."""
        return 4 * self.heads * DIM * DIM

    @property
    def packed_columns(self) -> int:
        """Of the packed projection, padded as vLLM pads it."""
        padding = -packed_width(self.heads) % PACKED_ROW_MULTIPLE
        return packed_width(self.heads) + padding

    def described(self) -> dict[str, Any]:
        """What a result line calls ``shape``, but for the layout."""
        return {
            "heads": self.heads,
            "tp": self.tp,
            "requests": self.requests,
            "width": self.width,
            "m": self.rows,
        }


class KdaData:
    """A step over ``copies`` layers: each has states, windows and weights of its own.

    The packed projection and the accepted counts are shared. W_fb and f_a lie on grids
    on which their products add up exactly, so that every kernel rounds the same decay
    input to bf16; norm weights are bf16 values, for kernels that hold them so.

    Attributes:
        packed: bf16 [M, P].
        row_start: int32 [B + 1].
        weights: of each copy.
        fold, fold_batches: states in the fold layout, and the step of each copy.
        state, window: vLLM's slots, fp32 [1 + copies B q, H, 128, 128] and bf16
            [.., q + 2, 3 H 128]; slot 0 belongs to nobody.
        tables: int32 [copies, B, q], a line of slots for each request.
        told_fold, told: int32 [B], accepted counts of the fold layout and of vLLM's.
        batches: the step of each copy in vLLM's slots.
        start_state, start_window: [B, H, 128, 128] and [B, 3, 3 H 128], where every
            request begins.
    """

    def __init__(
        self, shape: KdaShape, copies: int, device: torch.device, seed: int = 0
    ) -> None:
        self.shape = shape
        self.copies = copies
        self._device = device
        heads, requests, width = shape.heads, shape.requests, shape.width
        self._generator = torch.Generator(device).manual_seed(seed)
        channels = heads * DIM
        w_fb = (self._grid(copies * channels, DIM) / 32).bfloat16()
        conv = self._normal(copies, 3 * channels, TAPS) / 2
        shared = KdaVerifyWeights(
            w_fb=w_fb[:channels],
            conv=conv[0],
            a_log=self._normal(heads) / 2,
            dt_bias=self._normal(heads, DIM),
            norm=(1 + 0.3 * self._normal(DIM)).bfloat16().float(),
        )
        self.weights = [
            replace(shared, w_fb=w, conv=c)
            for w, c in zip(w_fb.split(channels), conv, strict=True)
        ]
        self.packed = torch.zeros(
            shape.rows, shape.packed_columns, dtype=torch.bfloat16, device=device
        )
        self.row_start = self._ints(requests + 1) * width
        zeros = torch.zeros(requests, dtype=torch.int32, device=device)
        self.told_fold, self.told = zeros.clone(), zeros.clone()
        slots = 1 + self._ints(copies * requests).view(copies, requests)
        self.fold = KdaFoldState.allocate(1 + copies * requests, heads, device)
        self.fold_batches = [
            VerifyBatch(self.row_start, zeros, line, self.told_fold) for line in slots
        ]
        count = copies * requests * width
        # Tables at multiples of 64 bytes: Triton compiles anew for an address that is
        # not one of 16, and may not while a graph is captured.
        pitch = -(-requests * width // 16) * 16
        self.tables = (
            self._ints(copies * pitch)
            .view(copies, pitch)[:, : requests * width]
            .unflatten(1, (requests, width))
        )
        self.tables.copy_(1 + self._ints(count).view(copies, requests, width))
        self.batches = [
            VerifyBatch(self.row_start, zeros, table[:, 0].contiguous(), self.told)
            for table in self.tables
        ]
        self.state = torch.empty(1 + count, heads, DIM, DIM, device=device)
        self.window = torch.empty(
            1 + count,
            width + TAPS - 2,
            3 * channels,
            dtype=torch.bfloat16,
            device=device,
        )
        self.start_state = self._normal(requests, heads, DIM, DIM)
        self.start_window = self._normal(requests, TAPS - 1, 3 * channels).bfloat16()

    def _normal(self, *size: int) -> Tensor:
        empty = torch.empty(*size, device=self._device)
        return empty.normal_(generator=self._generator)

    def _grid(self, *size: int) -> Tensor:
        """Whole numbers from -8 to 8."""
        return torch.randint(
            -8, 9, size, device=self._device, generator=self._generator
        )

    def _ints(self, count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=self._device)

    def new_rows(self) -> Tensor:
        """A packed projection, NaN where it is padded."""
        heads = self.shape.heads
        packed = torch.full_like(self.packed, torch.nan)
        packed[:, : packed_width(heads)] = self._normal(
            self.shape.rows, packed_width(heads)
        )
        f_at = 4 * heads * DIM
        packed[:, f_at : f_at + DIM] = self._grid(self.shape.rows, DIM) / 8
        return packed

    def reset(self, rest: float) -> None:
        """Every request to its start; slots and entries that hold nothing to ``rest``,
        nothing waits to be folded."""
        shape, copies = self.shape, self.copies
        for name in ("u", "key", "decay"):
            getattr(self.fold, name).fill_(rest)
        self.fold.counts.zero_()
        for tensor in (self.fold.state, self.fold.window, self.state, self.window):
            tensor.fill_(rest)
        past = slice(0, TAPS - 1)
        each = copies, shape.requests
        self.fold.state[1:].unflatten(0, each)[:] = self.start_state
        self.fold.window[1:].unflatten(0, each)[:, :, past] = self.start_window
        lines = *each, shape.width
        self.state[1:].unflatten(0, lines)[:, :, 0] = self.start_state
        self.window[1:].unflatten(0, lines)[:, :, 0, past] = self.start_window

    def tell(self, step: int) -> None:
        """Accepted counts before the first step after `reset`, or any later one: all
        rows of the step before."""
        self.told_fold.fill_(self.shape.width if step else 0)
        self.told.fill_(self.shape.width if step else 1)

    def changing(self, layout: str) -> list[Tensor]:
        """What a step of our kernel in this layout writes."""
        if layout == SNAPSHOT:
            return [self.state, self.window]
        return [getattr(self.fold, f.name) for f in fields(self.fold)]

    def left_by(self, layout: str) -> Tensor:
        """[B, H, 128, 128], the states that a step of our kernel left in copy 0: in the
        fold layout those before its rows, else those after them."""
        if layout == FOLD:
            return self.fold.state[1 : 1 + self.shape.requests]
        return self.state[self.tables[0, :, -1].long()]
