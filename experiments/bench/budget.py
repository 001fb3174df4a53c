# SPDX-License-Identifier: Apache-2.0
"""The time a command may take on a borrowed machine, and who was at work at its end."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Exit code of a process whose device did not answer.
STUCK = 3


class Budget:
    """Seconds from now on.

    Args:
        seconds: to spend; None for as many as it takes.
        clock: seconds of a steady clock.

    Raises:
        ValueError: for a budget that is not positive.
    """

    def __init__(
        self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds={seconds}: give a positive number, or none")
        self._seconds = float("inf") if seconds is None else seconds
        self._clock = clock
        self._begin = clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begin

    def left(self, share: float = 1.0) -> float:
        """What remains of this share of the seconds, 0 at least; infinite if no limit
        was given."""
        return max(share * self._seconds - self.elapsed, 0.0)

    def spent(self, share: float = 1.0) -> bool:
        """Whether this share of the seconds has gone by."""
        return not self.left(share)


def _give_up(name: str, seconds: float, log: Callable[[str], None]) -> None:
    log(f"{name} has not ended in {seconds:.0f} s: the process stops here")
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(STUCK)


@contextmanager
def watched(
    name: str,
    seconds: float,
    log: Callable[[str], None],
    stop: Callable[..., None] = _give_up,
) -> Iterator[None]:
    """Name the work and end the process if the block takes longer than ``seconds``;
    its exit code is then :data:`STUCK`.

    A kernel that waits for ever cannot be cancelled, and Python is not asked again
    while a thread waits for the device; another thread is.
    """
    timer = threading.Timer(seconds, functools.partial(stop, name, seconds, log))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
