# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled by several processes through the cache on disk, and audited."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from experiments.bench.candidate import reason
from verify_kernels.audit import audit
from verify_kernels.audit.cubin import resources
from verify_kernels.common import variant
from verify_kernels.common.variant import ARCHITECTURES, Variant
from verify_kernels.skinny_gemm import host
from verify_kernels.skinny_gemm.choice import Cut, Outputs


class _Unspilled(Variant):
    """A variant that is refused, and not cached, if its registers spill: the audit
    forbids it, so its time would be of no use."""

    def compile(self, arch: str, dump: Path | None = None) -> Any:
        """See :class:`verify_kernels.common.variant.Variant`."""
        with tempfile.TemporaryDirectory() as scratch:
            directory = dump or Path(scratch)
            kernel = super().compile(arch, directory)
            for cubin in directory.glob("*.cubin"):
                for found in resources(cubin.read_bytes()).values():
                    if spilled := max(found.frame_bytes, found.stack_bytes):
                        raise ValueError(
                            f"{self.name}: registers spill, {spilled} bytes a thread"
                        )
        return kernel


def compiled(cut: Cut, outputs: Outputs, arch: str) -> Any:
    """The kernel of ``cut``, from the cache or compiled into it.

    The cache finds variants by their name among those the package ships; one that is
    only tried is entered there for this process.

    Args:
        cut: any valid one.
        outputs: "bf16" or "fp32" for each matrix of a launch.
        arch: as in :data:`verify_kernels.common.variant.ARCHITECTURES`.

    Raises:
        ValueError: its registers spill.
    """
    wanted = _Unspilled(**vars(host.variant(cut, outputs)))
    variant._registry(wanted.op).setdefault(wanted.name, wanted)
    return variant.cached(wanted, arch)


def _without_device() -> None:
    """A compiling process must not open the device that is being timed."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def compile_one(cut: Cut, outputs: Outputs, arch: str) -> str:
    """Compile into the cache; "" or why it failed."""
    try:
        compiled(cut, outputs, arch)
    except Exception as error:
        return reason(error)
    return ""


def faults(cut: Cut, outputs: Outputs) -> str:
    """What the audit finds in a kernel on any architecture; "" if nothing."""
    try:
        wanted = host.variant(cut, outputs)
        reports = [audit(wanted, arch) for arch in ARCHITECTURES]
    except Exception as error:
        return reason(error)
    found = [f"{r.arch}: {finding}" for r in reports for finding in r.findings]
    return "; ".join(found)


def _processes(workers: int | None) -> ProcessPoolExecutor:
    """Started anew, not forked: a fork of a process that uses CUDA may hang."""
    return ProcessPoolExecutor(
        workers or max((os.cpu_count() or 1) - 2, 1),
        multiprocessing.get_context("spawn"),
        _without_device,
    )


def audited(
    kernels: Collection[tuple[Cut, Outputs]], workers: int | None = None
) -> dict[tuple[Cut, Outputs], str]:
    """:func:`faults` of each kernel that has any, found by several processes."""
    with _processes(workers) as pool:
        jobs = {kernel: pool.submit(faults, *kernel) for kernel in kernels}
        found = {kernel: job.result() for kernel, job in jobs.items()}
    return {kernel: why for kernel, why in found.items() if why}


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
        work: Callable[[Cut, Outputs, str], str] = compile_one,
    ) -> None:
        self._arch = arch
        self._work = work
        self._futures: dict[tuple[Cut, Outputs], Future[str]] = {}
        self._pool = _processes(workers)

    def start(self, cuts: Iterable[Cut], outputs: Outputs) -> None:
        """Ask for kernels; one that was asked for is not compiled again."""
        for cut in cuts:
            if (cut, outputs) not in self._futures:
                self._futures[cut, outputs] = self._pool.submit(
                    self._work, cut, outputs, self._arch
                )

    def wait(self, cut: Cut, outputs: Outputs, seconds: float) -> str:
        """Wait for one; "" or why it could not be compiled.

        Raises:
            TimeoutError: it was not ready in time.
        """
        limit = None if seconds == float("inf") else seconds
        try:
            return self._futures[cut, outputs].result(limit)
        except TimeoutError:
            raise
        except Exception as error:
            return reason(error)

    def close(self) -> None:
        """Drop what has not begun; returns when the rest, seconds each, is done."""
        self._pool.shutdown(cancel_futures=True)
