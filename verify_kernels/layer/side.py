# SPDX-License-Identifier: Apache-2.0
"""Work on a second stream, in eager mode and while a graph is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Side:
    """Work beside the main stream.

    `begin` says from where on it may run, ``with`` encloses it, `mark` names a point in
    it, and the main stream waits for that point (`wait_for_mark`) or for the end
    (`join`). All stays on the main stream where there is no other, or ``may`` says so.

    What is allocated inside may be freed once the main stream has joined: the next work
    beside it waits for the main stream.

    Args:
        stream: the other stream, if there is one.
        may: whether work may leave the main stream, asked at every `begin`.
    """

    def __init__(
        self, stream: torch.cuda.Stream | None, may: Callable[[], bool] = lambda: True
    ) -> None:
        self._stream = stream
        self._may = may
        self._begun, self._marked, self._ended = (torch.cuda.Event() for _ in range(3))
        self._inside: Any = None
        self._apart = False

    def begin(self) -> None:
        """What the main stream has been given so far comes before the work."""
        self._apart = self._stream is not None and self._may()
        if self._apart:
            self._begun.record()

    def __enter__(self) -> None:
        if self._apart:
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()
            self._begun.wait()

    def __exit__(self, *error: Any) -> None:
        if self._apart:
            self._ended.record()
            self._inside.__exit__(*error)

    def mark(self) -> None:
        """The point that `wait_for_mark` waits for; call it inside."""
        if self._apart:
            self._marked.record()

    def wait_for_mark(self) -> None:
        """Have the main stream wait until the marked point is reached."""
        if self._apart:
            self._marked.wait()

    def join(self) -> None:
        """Have the main stream wait until all of it is done."""
        if self._apart:
            self._ended.wait()
