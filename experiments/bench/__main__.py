# SPDX-License-Identifier: Apache-2.0
"""``python -m experiments.bench OP [OP ...]``"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from experiments import results
from experiments.bench import (
    attention_residual,
    bandwidth,
    experts,
    experts_peers,
    gemm,
    kda,
    kda_peers,
    markov,
    mla,
    mla_data,
    mla_peers,
    moe_front,
    peers,
    record,
    weight_prefetch,
)
from experiments.bench.budget import Budget
from experiments.bench.candidate import Point, reason
from experiments.bench.core import Bench, Settings
from experiments.bench.report import remarks, table
from experiments.bench.shapes import NAMES, TENSOR_PARALLEL, integers, select
from experiments.bench.timing import FLOOR_RATE, CudaTimer
from verify_kernels.batch import MAX_ROWS

DEFAULT_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SHAPE_HELP = f"of {', '.join(NAMES)}; mla alone: of {', '.join(mla_data.PARTS)}"
_QUICK_ROWS = (1, 8, 64)
_QUICK_SHAPES = ("in_proj", "o_proj", "router", "shared_down")
_QUICK_TP = (8, 16)
_QUICK_REPEATS = 100
#: Share of a budget for times; kernel names and the table have the rest.
_MEASURING = 0.8

Log = Callable[[str], None]
#: Flushed, so that a command cut by a time limit leaves what it said.
_say: Log = functools.partial(print, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench",
        description="Gate and time kernels beside their peers on this GPU.",
    )
    add = parser.add_argument
    add("ops", nargs="+", metavar="OP", help=f"one or more of {', '.join(OPS)}")
    add("--rows", type=integers, help=f"M to time (default {DEFAULT_ROWS})")
    add("--shape", nargs="+", default=[], help=_SHAPE_HELP)
    add(
        "--tp",
        type=integers,
        help=f"tensor-parallel sizes (default {TENSOR_PARALLEL})",
    )
    add(
        "--pdl",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time chains of programmatic dependent launches",
    )
    add("--out", type=Path, help="results file to append lines to; a table beside it")
    add("--quick", action="store_true", help="a few shapes, M = 1, 8, 64")
    add("--repeats", type=int, help="launches that must agree in bits (default 1000)")
    add("--rounds", type=int, default=7, help="replays a time is the median of")
    add(
        "--seconds",
        type=float,
        help="begin no point after 4/5 of these; imports are not counted",
    )
    add("--commit", help="commit to record where git cannot tell")
    return parser


def _gemms(options: argparse.Namespace, settings: Settings) -> list[Bench]:
    names = options.shape or (_QUICK_SHAPES if options.quick else ())
    shapes = select(_sizes(options), names)
    return [gemm.GemmBench(shape, settings) for shape in shapes]


def _fronts(options: argparse.Namespace, settings: Settings) -> list[Bench]:
    sizes = [tp for tp in _sizes(options) if tp in moe_front.TENSOR_PARALLEL]
    return [moe_front.MoeFrontBench(tp, settings) for tp in sizes]


def _residuals(options: argparse.Namespace, settings: Settings) -> list[Bench]:
    blocks = attention_residual.BLOCKS
    return [attention_residual.AttnResBench(n, settings) for n in blocks]


def _prefetches(options: argparse.Namespace, settings: Settings) -> list[Bench]:
    shapes = weight_prefetch.worthwhile(select(_sizes(options), options.shape))
    return [weight_prefetch.PrefetchBench(shape, settings) for shape in shapes]


def _kdas(options: argparse.Namespace, settings: Settings) -> list[Bench]:
    shapes = kda.shapes(_sizes(options), settings.rows)
    return [kda.KdaBench(shape, settings) for shape in shapes]


def _experts(options: argparse.Namespace, settings: Settings) -> list[Bench]:
    found = experts.shares(_sizes(options))
    return [experts.ExpertsBench(shape, settings) for shape in found]


def _mlas(options: argparse.Namespace, settings: Settings) -> list[Bench]:
    parts = [part for part in mla_data.PARTS if part in options.shape]
    found = mla.shapes(_sizes(options), settings.rows, parts or mla_data.PARTS)
    return [mla.MlaBench(shape, settings) for shape in found]


def _markovs(options: argparse.Namespace, settings: Settings) -> list[Bench]:
    return [markov.MarkovBench(s, settings) for s in markov.shapes(settings.rows)]


_MAKERS: dict[str, Callable[[argparse.Namespace, Settings], list[Bench]]] = {
    gemm.OP: _gemms,
    moe_front.OP: _fronts,
    attention_residual.OP: _residuals,
    weight_prefetch.OP: _prefetches,
    kda.OP: _kdas,
    experts.OP: _experts,
    mla.OP: _mlas,
    markov.OP: _markovs,
}
OPS = tuple(_MAKERS)


def _sizes(options: argparse.Namespace) -> tuple[int, ...]:
    return options.tp or (_QUICK_TP if options.quick else TENSOR_PARALLEL)


def benches(options: argparse.Namespace, settings: Settings) -> list[Bench]:
    """What the options ask for; shapes of the whole model (TP 1) last.

    Raises:
        ValueError: for an op, a shape or a size that is not there, or if nothing is
            asked for.
    """
    for op in options.ops:
        if op not in OPS:
            raise ValueError(f"op={op!r}: use one of {', '.join(OPS)}")
    found = [
        bench
        for op, make in _MAKERS.items()
        if op in options.ops
        for bench in make(options, settings)
    ]
    if not found:
        raise ValueError(
            f"ops={options.ops}, tp={_sizes(options)}, shape={options.shape}: there is "
            "nothing to measure; leave one of them out"
        )
    return sorted(found, key=lambda bench: bench.label.endswith("@1"))


def chosen_rows(options: argparse.Namespace) -> tuple[int, ...]:
    """M to time, ascending.

    Raises:
        ValueError: unless each is 1 to 64.
    """
    rows = options.rows or (_QUICK_ROWS if options.quick else DEFAULT_ROWS)
    for m in rows:
        if not 1 <= m <= MAX_ROWS:
            raise ValueError(f"rows={m}: a step has 1 to {MAX_ROWS} rows")
    return tuple(sorted(rows))


def run(
    work: Sequence[Bench], sheet: record.Sheet, log: Log, budget: Budget | None = None
) -> list[Point]:
    """Measure, save each point at once, then trace and save again with kernel names.

    The profiler stays attached once it has run, so all times are taken before the
    first trace. A bench that raises is said and does not stop the others. When the
    budget's share for times is spent no further point is begun, and when all of it is,
    no further trace; what was left out is said.
    """
    budget = budget or Budget()
    measured: list[tuple[Bench, list[Point]]] = []
    for number, bench in enumerate(work, start=1):
        if budget.spent(_MEASURING):
            later = ", ".join(other.label for other in work[number - 1 :])
            log(f"out of time; not begun: {later}")
            break
        points: list[Point] = []
        measured.append((bench, points))
        try:
            for point in bench.measure():
                points.append(point)
                sheet.add(point)
                if budget.spent(_MEASURING):
                    log(
                        f"out of time in {bench.label} after {point.label}/{point.rows}"
                    )
                    break
        except Exception as error:
            log(f"{bench.label} stopped after {len(points)} points: {reason(error)}")
        if points:
            log(
                f"[{budget.elapsed:6.1f} s] {number}/{len(work)} "
                f"{points[0].op} {bench.label}"
            )
        gc.collect()
    for bench, points in measured:
        if budget.spent():
            log(f"out of time; no kernel names from {bench.label} on")
            break
        try:
            bench.trace(points)
        except Exception as error:
            log(f"no kernel names for {bench.label}: {reason(error)}")
    every = [point for _, points in measured for point in points]
    sheet.rewrite(every)
    return every


def _bandwidth_line(rates: dict[str, float], failed: dict[str, str]) -> Iterator[str]:
    for name, why in failed.items():
        yield f"{name} not available: {why}"
    text = ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in rates.items())
    yield f"TB/s here: {text}; floors and shares use {FLOOR_RATE / 1e12:.2f}"


def main(arguments: Sequence[str] | None = None, log: Log = _say) -> int:
    """Run the command; returns its exit code: 2 for bad input or no GPU."""
    options = _parser().parse_args(arguments)
    try:
        budget = Budget(options.seconds)
        rows = chosen_rows(options)
        if not torch.cuda.is_available():
            raise ValueError("device: the bench times kernels and needs a CUDA GPU")
        peers.preload()
        if kda.OP in options.ops:
            kda_peers.preload()
        if experts.OP in options.ops:
            experts_peers.preload()
        if mla.OP in options.ops:
            mla_peers.preload()
        if markov.OP in options.ops:
            markov.preload()
        settings = Settings(
            CudaTimer(options.rounds),
            torch.device("cuda"),
            rows,
            ("plain", "pdl") if options.pdl else ("plain",),
            options.repeats or (_QUICK_REPEATS if options.quick else 1000),
        )
        work = benches(options, settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name()
    rates, failed = bandwidth.measure()
    state = record.gpu_state()
    recorder = results.Recorder(
        command="python -m experiments.bench " + " ".join(arguments or sys.argv[1:]),
        versions=record.versions(),
        commit=options.commit,
    )
    sheet = record.Sheet(options.out, recorder, gpu, state)
    sheet.rates(rates)
    log(f"{gpu}; {state}")
    for line in _bandwidth_line(rates, failed):
        log(line)
    with torch.inference_mode():
        points = run(work, sheet, log, budget)
    text = f"{table(points)}\n\n{remarks(points)}"
    if options.out is not None:
        options.out.with_suffix(".txt").write_text(text + "\n")
    log(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
