# SPDX-License-Identifier: Apache-2.0
"""``python -m experiments.bench.tune``: which kernel of skinny_gemm serves what.

Tries kernels of every design on each shape at each M. All of them give the same bits,
which is checked, so only speed decides. Everything that an H200 should know:

    python -m experiments.bench.tune --seconds 300 --out tune.jsonl \\
        --write verify_kernels/skinny_gemm/choices.json

and the same table again from the recorded lines, without a GPU:

    python -m experiments.bench.tune --from tune.jsonl \\
        --write verify_kernels/skinny_gemm/choices.json

What was not measured keeps its entry in the package's table, and entries that were
written by hand (``choices_unmeasured.json``) end where measured ones begin: for widths
that no GPU has timed,

    python -m experiments.bench.tune --tp 2,4,32 --shape o_proj shared_down dense_down \
        --audit --out tune.jsonl --write verify_kernels/skinny_gemm/choices.json
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments import results
from experiments.bench import gates, ours, record, space, table, timing
from experiments.bench.budget import Budget
from experiments.bench.candidate import MODES, Candidate, Inputs, Mode, Offer, reason
from experiments.bench.compiling import Compilers, audited, compiled
from experiments.bench.core import Settings
from experiments.bench.product import Data
from experiments.bench.search import (
    SEARCHING,
    Log,
    Round,
    Search,
    Source,
    Task,
    Weights,
)
from experiments.bench.shapes import NAMES, Projection, integers, moe_front, select
from experiments.bench.tuning_sheet import TuningSheet, progress, summary, verdict
from verify_kernels.common.variant import device_arch
from verify_kernels.skinny_gemm import choice as shipped
from verify_kernels.skinny_gemm import host
from verify_kernels.skinny_gemm.choice import Choice, Cut

#: The three projections of a MoE layer's input in one launch.
GROUP = "moe_front"
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_say: Log = functools.partial(print, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.tune",
        description="Search for the fastest kernels of skinny_gemm on this GPU, and "
        "write the table of which serves what.",
    )
    add = parser.add_argument
    names = ", ".join((*NAMES, GROUP))
    add("--shape", nargs="+", default=[], help=f"N x K or of {names} (default: all)")
    add("--tp", type=integers, default=(16, 8), help="of named shapes (default 16,8)")
    add("--rows", type=integers, default=_ROWS, help=f"M to tune for (default {_ROWS})")
    designs = ", ".join(shipped.DESIGNS)
    add("--design", nargs="+", default=[], help=f"of {designs} (default: all)")
    add("--best", type=int, default=3, help="choices in the last round; 0: none")
    add(
        "--pdl",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also chains of programmatic dependent launches",
    )
    add("--seconds", type=float, help="stop after so many; imports are not counted")
    add("--rounds", type=int, default=5, help="replays a time is the median of")
    add("--repeats", type=int, default=8, help="launches that must agree in bits")
    add("--workers", type=int, help="compiling processes (default: CPUs less two)")
    add("--out", type=Path, help="results file to append lines to, after every point")
    add("--write", type=Path, metavar="PATH", help="where to write choices.json")
    add(
        "--from",
        nargs="+",
        type=Path,
        default=[],
        dest="recorded",
        metavar="FILE",
        help="results files to write the table from, instead of measuring",
    )
    add(
        "--fresh",
        action="store_true",
        help="keep no entry of the package's table that was not measured",
    )
    add(
        "--audit",
        action="store_true",
        help="ship no kernel that the audit finds fault with on any architecture; "
        "about two seconds a kernel and CPU",
    )
    add(
        "--tolerance",
        type=float,
        default=table.TOLERANCE,
        help="how much slower than the fastest a kernel may be, so that fewer are "
        f"shipped (default {table.TOLERANCE})",
    )
    add("--list", action="store_true", help="say what would be tried; needs no GPU")
    add("--commit", help="commit to record where git cannot tell")
    return parser


def wanted(names: Sequence[str], tps: Sequence[int]) -> list[Weights]:
    """Weights by name at each size, and N x K; all of each size without names. Those
    of TP 1, which take longest, come last.

    Raises:
        ValueError: for a name or a size that is not there.
    """
    sizes = [re.fullmatch(r"(\d+)x(\d+)", name) for name in names]
    named = [name for name, size in zip(names, sizes, strict=True) if not size]
    single = [name for name in named if name != GROUP]
    found: list[Projection] = []
    if single or not names:
        found += select(tps, single)
    for size in sizes:
        if size:
            n, k = map(int, size.groups())
            if n < 1:
                raise ValueError(f"shape={size.string!r}: N must be at least 1")
            found.append(Projection(size.string, 0, n, k))
    weights = [Weights(part.name, part.tp, (part,)) for part in found]
    if GROUP in named or not names:
        weights += [Weights(GROUP, tp, moe_front(tp)) for tp in tps]
    return sorted(weights, key=lambda one: one.tp == 1)


def in_use(weights: Weights, mode: Mode) -> dict[int, Choice]:
    """The package's choices by the M they serve at most; none for new outputs."""
    try:
        return shipped.choices(weights.k, weights.n, weights.outputs, mode == "pdl")
    except KeyError:
        return {}


def _choices(
    weights: Weights,
    rows: int,
    held: space.Held,
    designs: Sequence[str],
    modes: Sequence[Mode],
) -> tuple[Choice, ...]:
    used = [in_use(weights, mode).items() for mode in modes]
    first = [[c for most, c in found if rows <= most][:1] for found in used]
    tried = space.candidates(weights.n, weights.k, rows, held, designs)
    return tuple(dict.fromkeys([*itertools.chain(*first), *tried]))


def plan(
    weights: Sequence[Weights],
    rows: Sequence[int],
    held: space.Held,
    designs: Sequence[str] = (),
    modes: Sequence[Mode] = MODES,
) -> list[Task]:
    """A task for each of the weights and each M, ascending. The choices in use are
    tried too, so a search of few designs can only find something faster.

    Raises:
        ValueError: as :func:`experiments.bench.space.candidates`.
    """
    return [
        Task(one, m, _choices(one, m, held, designs, modes))
        for one in weights
        for m in sorted(rows)
    ]


class CudaSource:
    """Kernels for this device, compiled in the background."""

    def __init__(self, compilers: Compilers, device: int) -> None:
        self._compilers = compilers
        self._device = device
        self._loaded = functools.cache(compiled)
        self._used: dict[Weights, list[Cut]] = {}

    def start(self, task: Task) -> None:
        """See :class:`experiments.bench.search.Source`."""
        weights = task.weights
        if weights not in self._used:
            every = [in_use(weights, mode) for mode in MODES]
            cuts = [choice.cut for found in every for choice in found.values()]
            self._used[weights] = cuts
            self._compilers.start(cuts, weights.outputs)
        self._compilers.start((c.cut for c in task.choices), weights.outputs)

    def in_use(self, weights: Weights, modes: tuple[Mode, ...]) -> Offer:
        """See :class:`experiments.bench.search.Source`. Waits for the kernels of every
        M: the first launch would compile them here, one after the other."""
        for cut in self._used[weights]:
            self._compilers.wait(cut, weights.outputs, float("inf"))
        return ours.grouped_gemm(weights.parts, modes)

    def kernels(
        self, choice: Choice, weights: Weights, modes: Sequence[Mode], seconds: float
    ) -> list[Candidate]:
        """See :class:`experiments.bench.search.Source`."""
        if why := self._compilers.wait(choice.cut, weights.outputs, seconds):
            raise RuntimeError(why)
        kernel = self._loaded(choice.cut, weights.outputs, device_arch(self._device))
        ctas = host.grid(choice, weights.n, self._device)

        def run(
            pdl: int, inputs: Inputs, outs: list[torch.Tensor]
        ) -> list[torch.Tensor]:
            x, *ws = inputs
            kernel(x, ws, outs, ctas, pdl)
            return outs

        return [
            Candidate(choice.name, mode, functools.partial(run, int(mode == "pdl")))
            for mode in modes
        ]


def _copies(size: int) -> int:
    """Half of what the bench rotates, 2.5 times the L2: more would time the same and
    take twice as long to make."""
    return -(-timing.copies_for(size) // 2)


def tune(
    tasks: Sequence[Task],
    settings: Settings,
    source: Source,
    sheet: TuningSheet,
    log: Log,
    budget: Budget,
    best: int = 3,
) -> list[tuple[Task, Round]]:
    """Search task after task until all are done or the budget is spent.

    Returns:
        the last round of each task that had one.
    """
    for task in tasks:
        source.start(task)
    last: list[tuple[Task, Round]] = []
    weights: Weights | None = None
    for number, task in enumerate(tasks):
        if budget.spent(SEARCHING):
            log(f"out of time; not begun: {', '.join(t.label for t in tasks[number:])}")
            break
        if not task.choices:
            log(f"{task.label}: no kernel serves so many rows in one launch")
            continue
        found: Round | None = None
        try:
            if task.weights != weights:
                weights = None
                most, copies = max(t.rows for t in tasks), _copies(task.weights.bytes)
                data = Data(task.weights.parts, most, settings.device, copies)
                exact = [gates.exact_product(data.tokens, w) for w in data.weights[0]]
                weights = task.weights
            search = Search(task, data, exact, settings, source, log)
            for found in search.rounds(budget, best):
                sheet.add(task, found)
                if found.stage != "final":
                    for line in progress(task, found, budget):
                        log(line)
        except Exception as error:
            log(f"{task.label} stopped: {reason(error)}")
        if found is not None:
            last.append((task, found))
            for line in summary(task, found):
                log(line)
    return last


def _list(tasks: Sequence[Task], log: Log) -> None:
    for task in tasks:
        log(f"{task.label}: {len(task.choices)} choices")
        for choice in task.choices:
            log(f"  {choice.name}")
    kernels = {(c.cut, task.weights.outputs) for task in tasks for c in task.choices}
    total = sum(len(task.choices) for task in tasks)
    log(f"{len(tasks)} points, {total} choices, {len(kernels)} kernels")


def _write(
    path: Path, lines: Sequence[results.Line], options: argparse.Namespace, log: Log
) -> None:
    earlier = () if options.fresh else shipped.measured()
    refuse = functools.partial(audited, workers=options.workers)
    text, said = table.rebuilt(
        lines,
        earlier,
        options.tolerance,
        refuse if options.audit else lambda kernels: {},
    )
    path.write_text(text)
    for line in (*said, f"written to {path}"):
        log(line)


def _measure(
    tasks: Sequence[Task],
    device: torch.device,
    options: argparse.Namespace,
    budget: Budget,
    command: str,
    log: Log,
) -> list[results.Line]:
    compilers = Compilers(device_arch(device.index), options.workers)
    try:
        settings = Settings(
            timing.CudaTimer(options.rounds),
            device,
            tuple(sorted(options.rows)),
            _modes(options),
            options.repeats,
        )
        recorder = results.Recorder(
            command=f"python -m experiments.bench.tune {command}",
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
        for line in verdict(task, found):
            log(line)
    return sheet.lines


def _modes(options: argparse.Namespace) -> tuple[Mode, ...]:
    return MODES if options.pdl else ("plain",)


def _check(options: argparse.Namespace) -> None:
    if options.best < 0:
        raise ValueError(f"best={options.best}: the last round has so many, 0 or more")
    table.check_tolerance(options.tolerance)
    if options.write is None and options.recorded:
        raise ValueError("from: lines are read to write a table; give --write PATH")
    if options.write is not None and not options.write.absolute().parent.is_dir():
        raise ValueError(f"write={options.write}: there is no such directory; make it")


def main(arguments: Sequence[str] | None = None, log: Log = _say) -> int:
    """Run the command; returns its exit code: 2 for bad input or no GPU, 1 if nothing
    was measured that could be written."""
    options = _parser().parse_args(arguments)
    cuda = torch.cuda.is_available()
    try:
        budget = Budget(options.seconds)
        _check(options)
        if options.recorded:
            lines = [line for path in options.recorded for line in results.read(path)]
            _write(options.write, lines, options, log)
            return 0
        weights = wanted(options.shape, options.tp)
        held = space.H200
        if cuda:
            device = torch.device("cuda", torch.cuda.current_device())
            device_arch(device.index)
            held = {
                size: host.clusters_held(device.index, size)
                for size in space.CLUSTER_SIZES
            }
        tasks = plan(weights, options.rows, held, options.design, _modes(options))
        if options.list:
            _list(tasks, log)
            return 0
        if not cuda:
            raise ValueError(
                "device: kernels are timed, which needs a CUDA GPU; use --list to see "
                "what would be tried"
            )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = " ".join(arguments if arguments is not None else sys.argv[1:])
    lines = _measure(tasks, device, options, budget, command, log)
    if options.write is not None:
        try:
            _write(options.write, lines, options, log)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
