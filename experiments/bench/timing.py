# SPDX-License-Identifier: Apache-2.0
"""Times by CUDA-graph replay, interleaved, with the data rotated past the L2 cache."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from experiments.bench.candidate import Key, Timing, reason

#: Bytes between two uses of the same data: five times the 60 MB L2 of an H200.
ROTATION_BYTES = 300e6
MAX_COPIES = 4096
MIN_LAUNCHES = 24
#: A replay lasts at least this long, so its start is below 1 % of it.
MIN_REPLAY_US = 400.0
#: Bytes a second of an H200, read: what the floors of every table divide by.
FLOOR_RATE = 4.31e12

Launch = Callable[[int], object]


def copies_for(size: int) -> int:
    """How many copies of ``size`` bytes make up a rotation."""
    return min(max(math.ceil(ROTATION_BYTES / size), 1), MAX_COPIES)


def launches_for(copies: int, floor_us: float) -> int:
    """Launches of one graph: every copy, 24 at least, and 400 µs at the floor."""
    return max(MIN_LAUNCHES, copies, math.ceil(MIN_REPLAY_US / max(floor_us, 1.0)))


def floor_us(size: int) -> float:
    """Microseconds to move ``size`` bytes at 4.31 TB/s."""
    return size / FLOOR_RATE * 1e6


class Timer(Protocol):
    """Measures launches that are given by the index of the copy they work on."""

    def measure(
        self, launches: Mapping[Key, Launch], copies: int, floor_us: float
    ) -> dict[Key, Timing | str]:
        """Time a launch of each, or the reason why one could not be timed."""

    def trace(self, launches: Mapping[Key, Launch]) -> dict[Key, list[str]]:
        """Names of the kernels that one launch of each runs, in order."""


class CudaTimer:
    """The :class:`Timer` of a CUDA device.

    Make it after vLLM has been imported: it sets a stream of its own as the current
    one, and vLLM learns of streams only through the ``set_stream`` it replaces.

    Args:
        rounds: replays of each candidate; a round replays every one once, beginning
            with another each time.
    """

    def __init__(self, rounds: int = 7) -> None:
        self._rounds = rounds
        torch.cuda.set_stream(torch.cuda.Stream())
        self._pool = torch.cuda.graph_pool_handle()
        # A pool that no graph holds may not be captured into again.
        word = torch.zeros(1, device="cuda")
        self._holder = self._capture(lambda _: word.zero_(), 1, 1)

    def _capture(self, launch: Launch, count: int, copies: int) -> Any:
        """A graph of ``count`` launches.

        ``torch.cuda.graph`` would collect garbage and empty the allocator's cache each
        time: 0.1 s and more for each of thousands of captures.
        """
        launch(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            for i in range(count):
                launch(i % copies)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    def measure(
        self, launches: Mapping[Key, Launch], copies: int, floor_us: float
    ) -> dict[Key, Timing | str]:
        """See :class:`Timer`."""
        count = launches_for(copies, floor_us)
        result: dict[Key, Timing | str] = {}
        graphs: dict[Key, Any] = {}
        for key, launch in launches.items():
            try:
                graphs[key] = self._capture(launch, count, copies)
            except Exception as error:
                result[key] = reason(error)
        keys = list(graphs)
        samples: dict[Key, list[float]] = {key: [] for key in keys}
        for key in keys:
            graphs[key].replay()
        for turn in range(self._rounds):
            first = turn % max(len(keys), 1)
            events = []
            for key in keys[first:] + keys[:first]:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graphs[key].replay()
                end.record()
                events.append((key, begin, end))
            torch.cuda.synchronize()
            for key, begin, end in events:
                samples[key].append(begin.elapsed_time(end) * 1e3 / count)
        for key, values in samples.items():
            result[key] = Timing(statistics.median(values), max(values) - min(values))
        return result

    def trace(self, launches: Mapping[Key, Launch]) -> dict[Key, list[str]]:
        """See :class:`Timer`; a spin kernel before each launch tells them apart."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for launch in launches.values():
                torch.cuda._sleep(1)
                launch(0)
            torch.cuda.synchronize()
        found = [
            event for event in profiler.events() if event.device_type == DeviceType.CUDA
        ]
        names = [e.name for e in sorted(found, key=lambda e: e.time_range.start)]
        return dict(zip(launches, split_at_spin(names), strict=True))


def split_at_spin(names: list[str]) -> list[list[str]]:
    """Kernel names in order of time, cut at each ``spin_kernel``."""
    parts: list[list[str]] = []
    for name in names:
        if "spin_kernel" in name:
            parts.append([])
        elif parts:
            parts[-1].append(name)
    return parts
