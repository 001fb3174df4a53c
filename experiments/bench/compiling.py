# SPDX-License-Identifier: Apache-2.0
"""Tilings compiled by several processes through the kernel cache on disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from experiments.bench.candidate import reason
from verify_kernels.common import variant
from verify_kernels.skinny_gemm import host
from verify_kernels.skinny_gemm.tiling import Tiling

Work = tuple[Tiling, str]


def compiled(tiling: Tiling, output: str, arch: str) -> Any:
    """The kernel of ``tiling`` for one matrix, from the cache or compiled into it.

    The cache finds variants by their name among those the package ships; one that is
    only tried is entered there for this process.

    Args:
        tiling: any valid one.
        output: "bf16" or "fp32".
        arch: as in :data:`verify_kernels.common.variant.ARCHITECTURES`.
    """
    wanted = host._variant(tiling, (output,))
    variant._registry(wanted.op).setdefault(wanted.name, wanted)
    return variant.cached(wanted, arch)


def _without_device() -> None:
    """A compiling process must not open the device that is being timed."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def compile_one(tiling: Tiling, output: str, arch: str) -> str:
    """Compile into the cache; "" or why it failed."""
    try:
        compiled(tiling, output, arch)
    except Exception as error:
        return reason(error)
    return ""


class Compilers:
    """Processes that compile in the background, in the order they are asked.

    Args:
        arch: architecture to compile for.
        workers: processes; default two fewer than the CPUs, one at least, so that
            launches are not held up.
        work: what a process does; must be importable there.
    """

    def __init__(
        self,
        arch: str,
        workers: int | None = None,
        work: Callable[[Tiling, str, str], str] = compile_one,
    ) -> None:
        self._arch = arch
        self._work = work
        self._futures: dict[Work, Future[str]] = {}
        # Started anew, not forked: a fork of a process that uses CUDA may hang.
        self._pool = ProcessPoolExecutor(
            workers or max((os.cpu_count() or 1) - 2, 1),
            multiprocessing.get_context("spawn"),
            _without_device,
        )

    def start(self, tilings: Sequence[Tiling], output: str) -> None:
        """Ask for tilings; one that was asked for is not compiled again."""
        for tiling in tilings:
            if (tiling, output) not in self._futures:
                self._futures[tiling, output] = self._pool.submit(
                    self._work, tiling, output, self._arch
                )

    def wait(self, tiling: Tiling, output: str, seconds: float) -> str:
        """Wait for one; "" or why it could not be compiled.

        Raises:
            TimeoutError: it was not ready in time.
        """
        limit = None if seconds == float("inf") else seconds
        try:
            return self._futures[tiling, output].result(limit)
        except TimeoutError:
            raise
        except Exception as error:
            return reason(error)

    def close(self) -> None:
        """Drop what has not begun; returns when the rest, seconds each, is done."""
        self._pool.shutdown(cancel_futures=True)
