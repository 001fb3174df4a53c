# SPDX-License-Identifier: Apache-2.0
"""``python -m experiments.bench.tune``: faster tilings for skinny_gemm on this GPU.

Tries every valid tiling of a space on each shape at each M. All of them give the same
bits, which is checked, so only speed decides; what is found goes into
``verify_kernels.skinny_gemm.host.CHOICES`` by hand. For example

    python -m experiments.bench.tune --shape in_proj --tp 16 --rows 8 \\
        --cluster 2,4,8 --span 1,2 --ctas-per-sm 1,2 --seconds 300 --out tune.jsonl
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from experiments import results
from experiments.bench import gates, ours, record, space, timing
from experiments.bench.budget import Budget
from experiments.bench.candidate import Candidate, Inputs, Mode, Offer, reason
from experiments.bench.compiling import Compilers, compiled
from experiments.bench.core import Settings
from experiments.bench.product import Data
from experiments.bench.search import SEARCHING, Log, Round, Search, Source, Task
from experiments.bench.shapes import NAMES, Projection, integers, select
from experiments.bench.tuning_sheet import TuningSheet, progress, summary, verdict
from verify_kernels.common.variant import device_arch
from verify_kernels.skinny_gemm import host
from verify_kernels.skinny_gemm.tiling import Tiling

InUse = Callable[[Projection, tuple[Mode, ...]], Offer]
_say: Log = functools.partial(print, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.tune",
        description="Search for faster tilings of skinny_gemm on this GPU. A field "
        "that is not given keeps the value in use; stages is the deepest that fits.",
    )
    add = parser.add_argument
    add("--shape", nargs="+", required=True, help=f"N x K or of {', '.join(NAMES)}")
    add("--tp", type=integers, default=(8, 16), help="of named shapes (default 8,16)")
    add("--rows", type=integers, default=(1, 8), help="M to tune for (default 1,8)")
    space.add_options(parser)
    add("--best", type=int, default=3, help="tilings in the last round, and printed")
    add(
        "--pdl",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time chains of programmatic dependent launches, which then decide",
    )
    add("--seconds", type=float, help="stop after so many; imports are not counted")
    add("--rounds", type=int, default=7, help="replays a time is the median of")
    add("--repeats", type=int, default=50, help="launches that must agree in bits")
    add("--workers", type=int, help="compiling processes (default: CPUs less two)")
    add("--out", type=Path, help="results file to append lines to, after every group")
    add("--list", action="store_true", help="say what would be tried; needs no GPU")
    add("--commit", help="commit to record where git cannot tell")
    return parser


def wanted_shapes(names: Sequence[str], tps: Sequence[int]) -> list[Projection]:
    """Projections by name at each size, and N x K.

    Raises:
        ValueError: for a name or a size that is not there.
    """
    sizes = [re.fullmatch(r"(\d+)x(\d+)", name) for name in names]
    named = [name for name, size in zip(names, sizes, strict=True) if not size]
    found = select(tps, named) if named else []
    for size in sizes:
        if size:
            n, k = map(int, size.groups())
            if n < 1:
                raise ValueError(f"shape={size.string!r}: N must be at least 1")
            found.append(Projection(size.string, 0, n, k))
    return found


def plan(
    shapes: Sequence[Projection], rows: Sequence[int], fields: space.Space
) -> list[Task]:
    """A task for each shape and M, ascending.

    Raises:
        ValueError: as :func:`experiments.bench.space.candidates`.
    """
    return [
        Task(shape, m, tuple(space.candidates(shape.k, m, fields)))
        for shape in shapes
        for m in sorted(rows)
    ]


class CudaSource:
    """Kernels for this device, compiled in the background."""

    def __init__(self, compilers: Compilers, device: int) -> None:
        self._compilers = compilers
        self._device = device

    @staticmethod
    def _output(shape: Projection) -> str:
        return "fp32" if shape.fp32_out else "bf16"

    def start(self, tilings: Sequence[Tiling], shape: Projection) -> None:
        """See :class:`experiments.bench.search.Source`."""
        self._compilers.start(tilings, self._output(shape))

    def kernels(
        self, tiling: Tiling, shape: Projection, modes: tuple[Mode, ...], seconds: float
    ) -> list[Candidate]:
        """See :class:`experiments.bench.search.Source`."""
        output = self._output(shape)
        if why := self._compilers.wait(tiling, output, seconds):
            raise RuntimeError(why)
        kernel = compiled(tiling, output, device_arch(self._device))
        ctas = host._clusters(self._device, tiling.cluster) * tiling.cluster

        def run(pdl: int, inputs: Inputs, out: torch.Tensor) -> torch.Tensor:
            x, w = inputs
            kernel(x, [w], [out], ctas, pdl)
            return out

        return [
            Candidate(tiling.name, mode, functools.partial(run, int(mode == "pdl")))
            for mode in modes
        ]


def tune(
    tasks: Sequence[Task],
    settings: Settings,
    source: Source,
    sheet: TuningSheet,
    log: Log,
    budget: Budget,
    best: int = 3,
    in_use: InUse = ours.skinny_gemm,
) -> list[tuple[Task, Round]]:
    """Search task after task until all are done or the budget is spent.

    Returns:
        for each task that was begun its last round, the one between the best tilings
        unless the time ended before.
    """
    for task in tasks:
        source.start(task.tilings, task.shape)
    last: list[tuple[Task, Round]] = []
    shape: Projection | None = None
    for number, task in enumerate(tasks):
        if budget.spent(SEARCHING):
            log(f"out of time; not begun: {', '.join(t.label for t in tasks[number:])}")
            break
        if not task.tilings:
            log(f"{task.label}: no tiling of this space is valid")
            continue
        done = 0
        found: Round | None = None
        try:
            if task.shape != shape:
                copies = timing.copies_for(task.shape.weight_bytes)
                most = max(t.rows for t in tasks)
                data = Data((task.shape,), most, settings.device, copies)
                exact = gates.exact_product(data.tokens, data.weights[0][0])
                shape = task.shape
            search = Search(task, data, exact, settings, source, log, in_use)
            for found in search.rounds(budget, best):
                sheet.add(task, found)
                if found.stage == "search":
                    done += len(found.trials)
                    for line in progress(task, done, found, budget):
                        log(line)
        except Exception as error:
            log(f"{task.label} stopped after {done} tilings: {reason(error)}")
        if found is not None:
            last.append((task, found))
            for line in summary(task, found, best):
                log(line)
    return last


def _list(tasks: Sequence[Task], log: Log) -> None:
    for task in tasks:
        log(f"{task.label}: {len(task.tilings)} tilings")
        for tiling in task.tilings:
            log(f"  {space.spell(tiling)}")


def main(arguments: Sequence[str] | None = None, log: Log = _say) -> int:
    """Run the command; returns its exit code: 2 for bad input or no GPU."""
    options = _parser().parse_args(arguments)
    try:
        budget = Budget(options.seconds)
        if options.best < 1:
            raise ValueError(f"best={options.best}: the last round needs at least 1")
        shapes = wanted_shapes(options.shape, options.tp)
        tasks = plan(shapes, options.rows, space.of_options(options))
        if options.list:
            _list(tasks, log)
            return 0
        if not torch.cuda.is_available():
            raise ValueError(
                "device: tilings are timed, which needs a CUDA GPU; use --list to see "
                "what would be tried"
            )
        device = torch.device("cuda", torch.cuda.current_device())
        arch = device_arch(device.index)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    compilers = Compilers(arch, options.workers)
    try:
        modes: tuple[Mode, ...] = ("plain", "pdl") if options.pdl else ("plain",)
        settings = Settings(
            timing.CudaTimer(options.rounds),
            device,
            tuple(sorted(options.rows)),
            modes,
            options.repeats,
        )
        recorder = results.Recorder(
            command="python -m experiments.bench.tune "
            + " ".join(arguments or sys.argv[1:]),
            versions=record.versions(),
            commit=options.commit,
        )
        gpu = torch.cuda.get_device_name(device)
        sheet = TuningSheet(options.out, recorder, gpu, record.gpu_state())
        source = CudaSource(compilers, device.index)
        with torch.inference_mode():
            last = tune(tasks, settings, source, sheet, log, budget, options.best)
    finally:
        compilers.close()
    for task, found in last:
        log(verdict(task, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
