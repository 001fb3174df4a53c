# SPDX-License-Identifier: Apache-2.0
"""The rows of one decode step: the contract every verify op shares."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

#: Rows of one request: the committed token and up to seven drafts.
MAX_WIDTH = 8
#: Rows of one step over all requests.
MAX_ROWS = 64


@dataclass(frozen=True)
class VerifyBatch:
    """B requests, request b owning rows ``row_start[b] .. row_start[b + 1] - 1``.

    Widths run from 0 (padding) to 8 and are read from ``row_start`` alone; the host may
    know their sum and nothing else. Row t of a request sees its history and rows 0..t.
    Rows from ``row_start[B]`` on are padding: never read into live rows, never written.

    Attributes:
        row_start: int32 [B + 1], on the device.
        history: int32 [B], committed tokens before row 0.
        state_slots: int32 [B], the request's recurrent-state slot; <= 0 means no
            request: read nothing, write nothing, output zero.
        accepted: int32 [B], rows of the *previous* step that were accepted, its
            committed token included; read by ops that fold or start from snapshots.
        block_table: int32 [B, blocks], pages of the paged cache, or None.
    """

    row_start: Tensor
    history: Tensor
    state_slots: Tensor
    accepted: Tensor
    block_table: Tensor | None = None

    @property
    def size(self) -> int:
        """B, the requests of the step."""
        return self.row_start.shape[0] - 1

    def check(self) -> None:
        """Read the device and raise ValueError for what breaks the contract.

        For tests and eager debugging: it synchronises, so no decode path calls it.
        """
        for name in ("row_start", "history", "state_slots", "accepted"):
            tensor = getattr(self, name)
            length = self.size + (name == "row_start")
            if tensor.dtype != torch.int32 or tuple(tensor.shape) != (length,):
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be int32 "
                    f"[{length}]"
                )
        starts = self.row_start.tolist()
        widths = [end - begin for begin, end in itertools.pairwise(starts)]
        if starts[0] != 0 or any(not 0 <= width <= MAX_WIDTH for width in widths):
            raise ValueError(
                f"row_start is {starts}; it must begin with 0 and give every request "
                f"0 to {MAX_WIDTH} rows"
            )
        if starts[-1] > MAX_ROWS:
            raise ValueError(f"row_start ends at {starts[-1]}; at most {MAX_ROWS} rows")
        live = [slot for slot in self.state_slots.tolist() if slot > 0]
        if len(set(live)) != len(live):
            raise ValueError(f"state_slots {live} name one slot for two requests")
