# SPDX-License-Identifier: Apache-2.0
"""Acceptance lengths 1 to 8 in the running engine, stock beside ours, and the model.

``python -m experiments.engine_sweep measure --layers 40 --k 0,7 --batch 1,8 --out
sweep.jsonl`` starts an engine for each target and draft length and lets it decode at
each acceptance length (`experiments.gpu_engine.lengths`); run again with other ``--k``
it adds to the file. ``python -m experiments.engine_sweep report sweep.jsonl
[--plot sweep.png]`` prints speed-ups and draws them.

Of every point it compares speed-ups over plain decoding, tokens a step over the time of
a step, with three times of a step:

    wall    as the engine ran by itself
    GPU     enqueued ahead of the GPU, at this length
    model   as GPU, once for all lengths: T_draft + T_verify of `experiments.speedup`

``host`` says how much longer a step took by itself than its GPU time; where that is
much, the host was what limits, and wall says nothing of the kernels. Text is not
compared: synthetic rejection accepts drafts that the target would not have taken, so
these are times and no claim of equal text.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import k3_shapes, layer_plot, results
from experiments.gpu_engine import fleet, lengths, lines
from experiments.plots import _DPI, PALETTE, _caption, _matplotlib
from experiments.results import Line

STEP, TOKENS = "sweep_step_wall_us", "sweep_acceptance_length"
AT_LENGTH = "sweep_step_gpu_us"
GPU_STEP = "step_gpu_us"
#: A step by itself may take this much longer than the GPU's part of it.
HOST = 0.05
#: Lengths of AL(7), 8 being what vLLM's verify step gives at most.
LENGTHS = tuple(float(length) for length in range(1, k3_shapes.MAX_DRAFTS + 2))
_SIZES = ("k", "batch")
SIDES = {**layer_plot.SIDES, "drafter": "dspark-k3, in the drafter too"}


@dataclass(frozen=True)
class Point:
    """A target's decoding with k drafts at one length.

    Attributes:
        target, k, batch: of the engine; ``batch`` requests at once.
        length: AL(7) of the curve.
        tokens: a step and request, as the engine counted them.
        wall_us: a step as it ran.
        gpu_us: a step's GPU time.
        model_us: that of the engine at any length.
    """

    target: str
    k: int
    batch: int
    length: float
    tokens: float
    wall_us: float
    gpu_us: float
    model_us: float

    @property
    def per_second(self) -> float:
        """Tokens a second and request, by the wall."""
        return self.tokens / self.wall_us * 1e6

    @property
    def host(self) -> float:
        """Share by which a step took longer than its GPU time."""
        return self.wall_us / self.gpu_us - 1

    def over(self, other: Point) -> tuple[float, float, float]:
        """Speed-up over other decoding: by the wall, in GPU time, and by the model."""
        gain = self.tokens / other.tokens
        return (
            gain * other.wall_us / self.wall_us,
            gain * other.gpu_us / self.gpu_us,
            gain * other.model_us / self.model_us,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.engine_sweep",
        description="Acceptance lengths 1 to 8 in the engine, stock beside ours.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("measure", help="run engines; adds lines to --out")
    lines.common_arguments(run)
    add = run.add_argument
    add("--k", type=lines.numbers, default=(0, 7), help="draft lengths (default 0,7)")
    add("--batch", type=lines.numbers, default=(1, 8), help="requests (default 1,8)")
    add("--lengths", type=lines.numbers, default=LENGTHS, help="AL(7), of 1 to 8")
    add("--wall", type=int, default=200, help="steps a length (default 200)")
    add("--out", type=Path, required=True, help="result lines, added to")
    report = commands.add_parser("report", help="speed-ups from result lines")
    report.add_argument("source", type=Path, help="what measure wrote")
    report.add_argument("--plot", type=Path, help="figure to write")
    return parser


def add_lines(
    recorder: results.Recorder, plan: Mapping[str, Any], point: Any, gpu: str
) -> None:
    """Lines of one batch size: the GPU's step, then step and tokens at each length."""
    lines.add_point(recorder, plan, point, gpu)
    for at in point["lengths"]:
        shape = {
            key: plan[key] for key in ("layers", "tp", "k", "block_size", "prompt")
        }
        shape |= {"batch": point["batch"], "rows": point["rows"]}
        shape["length"] = at["length"]
        for metric, value, unit, spread in (
            (STEP, at["wall_us"], "us", at["spread"]),
            (AT_LENGTH, at["gpu_us"], "us", None),
            (TOKENS, at["acceptance_length"], "tokens a step and request", None),
        ):
            recorder.add(
                metric,
                value,
                label="measured",
                variant=plan["target"],
                shape=shape,
                gpu=gpu,
                unit=unit,
                gates={
                    "graph": point["graph"],
                    "rows_as_asked": point["executed_rows"] == point["rows"],
                    "drafts_proposed": abs(at["drafts"] - plan["k"]) < 0.5,
                },
                spread=spread,
                note=f"{lines.note(plan)} by position, geometric with AL(7) = "
                f"{at['length']:g}; {at['steps']} steps, no claim of equal text",
            )


def points(found: Sequence[Line]) -> list[Point]:
    """The points of result lines, later lines instead of earlier ones.

    Raises ValueError for a point without all of its lines, or with a red gate.
    """
    values: dict[str, dict[tuple[Any, ...], float]] = {
        metric: {} for metric in (STEP, AT_LENGTH, TOKENS, GPU_STEP)
    }
    for line in found:
        metric = line.get("metric")
        if metric not in values:
            continue
        red = sorted(name for name, passed in line["gates"].items() if not passed)
        at: tuple[Any, ...] = (line["variant"], *(line["shape"][n] for n in _SIZES))
        if metric != GPU_STEP:
            at += (line["shape"]["length"],)
        if red:
            raise ValueError(f"{metric} of {at}: gate {red[0]} is red; measure again")
        values[metric][at] = line["value"]
    made = []
    for at, wall in sorted(values[STEP].items()):
        further = []
        for metric, key in ((TOKENS, at), (AT_LENGTH, at), (GPU_STEP, at[:3])):
            if key not in values[metric]:
                raise ValueError(f"no {metric} of {key}")
            further.append(values[metric][key])
        tokens, gpu, model = further
        target, k, batch, length = at
        made.append(Point(target, k, batch, length, tokens, wall, gpu, model))
    return made


def plain_of(found: Sequence[Point]) -> dict[tuple[str, int], Point]:
    """(target, batch) -> its plain decoding; our kernels in the drafter change nothing
    there.

    Raises ValueError for a target and batch that has none.
    """
    plain = {(p.target, p.batch): p for p in found if p.k == 0}
    for (target, batch), point in list(plain.items()):
        if target == "ours":
            plain.setdefault(("drafter", batch), point)
    for point in found:
        if (point.target, point.batch) not in plain:
            raise ValueError(
                f"{point.target} with batch {point.batch} has no plain decoding to "
                "compare with: measure --k 0 too"
            )
    return plain


def table(found: Sequence[Point]) -> str:
    """A line a point: its step, speed-ups over plain decoding of its own target, and in
    GPU time over stock, plain and with as many drafts."""
    plain = plain_of(found)
    at = {(p.target, p.k, p.batch, p.length): p for p in found}
    rows = [
        f"{'target':8} {'k':>2} {'B':>2} {'AL(7)':>5} {'tokens':>6} {'wall µs':>9} "
        f"{'GPU µs':>9} {'host':>5} {'tok/s':>7} | {'wall':>6} {'GPU':>6} {'model':>6} "
        f"{'off':>5} | {'stock':>6} {'same k':>6}"
    ]
    for p in found:
        wall, gpu, model = p.over(plain[p.target, p.batch])
        others = (
            plain.get(("stock", p.batch)),
            at.get(("stock", p.k, p.batch, p.length)),
        )
        over = ["-" if o is None else f"{p.over(o)[1]:.2f}x" for o in others]
        rows.append(
            f"{p.target:8} {p.k:2} {p.batch:2} {p.length:5g} {p.tokens:6.2f} "
            f"{p.wall_us:9.1f} {p.gpu_us:9.1f} {p.host:5.0%} {p.per_second:7.1f} | "
            f"{wall:5.2f}x {gpu:5.2f}x {model:5.2f}x {gpu / model - 1:5.1%} | "
            f"{over[0]:>6} {over[1]:>6}"
        )
    behind = [p for p in found if p.host > HOST]
    rows.append(
        f"{len(behind)} of {len(found)} points took over {HOST:.0%} longer by the wall "
        "than in GPU time: the host was behind there"
    )
    return "\n".join(rows)


def draw(found: Sequence[Point], gpu: str, how: str, out: Path) -> None:
    """Speed-up over vLLM's plain decoding against acceptance length, a panel a batch.

    Raises ValueError as `plain_of`, and without plain decoding of stock vLLM.
    """
    plain = plain_of(found)
    batches = sorted({p.batch for p in found})
    if any(("stock", batch) not in plain for batch in batches):
        raise ValueError("speed-ups are over stock's plain decoding: measure it too")
    pyplot = _matplotlib()
    size = (5.2 * len(batches), 4.6)
    figure, axes = pyplot.subplots(1, len(batches), figsize=size, squeeze=False)
    for axis, batch in zip(axes[0], batches, strict=True):
        base = plain["stock", batch]
        of_batch = [p for p in found if p.batch == batch]
        _panel(axis, of_batch, base)
        axis.set_title(f"{batch} request{'s' if batch > 1 else ''} at once")
        axis.set_xlabel("acceptance length (tokens a step and request, as counted)")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("speed-up over vLLM's plain decoding")
    axes[0][0].legend(frameon=False, loc="upper left")
    _caption(
        figure,
        f"Measured on one {gpu}: {how}, synthetic acceptance.\nLines: in GPU time; "
        "marks: by the wall, where the host kept up; level: plain decoding.",
    )
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(out, dpi=_DPI)
    pyplot.close(figure)


def _panel(axis: Any, found: Sequence[Point], base: Point) -> None:
    """A line in GPU time, and marks by the wall for the points that had a fast host."""
    styles = {
        "stock": ("o", PALETTE[1]),
        "ours": ("s", PALETTE[0]),
        "drafter": ("D", PALETTE[2]),
    }
    dashes = ("-", "--", ":", "-.")
    drafts = sorted({p.k for p in found if p.k}, reverse=True)
    for target, (mark, colour) in styles.items():
        for dash, k in zip(dashes, drafts, strict=False):
            line = [p for p in found if p.target == target and p.k == k]
            if not line:
                continue
            line.sort(key=lambda p: p.tokens)
            gains = [p.over(base)[1] for p in line]
            label = f"{SIDES[target]}, k = {k}"
            at = [p.tokens for p in line]
            axis.plot(at, gains, dash, color=colour, linewidth=1.4, label=label)
            kept_up = [p for p in line if max(p.host, base.host) <= HOST]
            axis.plot(
                [p.tokens for p in kept_up],
                [p.over(base)[0] for p in kept_up],
                mark,
                color=colour,
                markersize=5,
                fillstyle="full" if k == drafts[0] else "none",
            )
        for p in found:
            if p.target == target and p.k == 0:
                axis.axhline(p.over(base)[1], color=colour, linewidth=0.8, alpha=0.5)


def _measure(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    start: fleet.Launch | None,
) -> int:
    """Run the engines and add their lines; what went wrong is said at the end."""
    spec = functools.partial(lengths.spec, lengths=options.lengths)
    outcomes, recorder = lines.measured(parser, options, start, spec, wall=options.wall)
    wrong = []
    for outcome in outcomes.values():
        if outcome.error:
            wrong.append(f"{outcome.name}: {outcome.error}")
            continue
        for point in outcome.result["points"]:
            add_lines(recorder, outcome.result["plan"], point, outcome.result["gpu"])
    lines.save(recorder, options.out)
    for line in wrong:
        lines.say(f"WRONG: {line}")
    return 1 if wrong else 0


def main(
    arguments: Sequence[str] | None = None,
    start: fleet.Launch | None = None,
    say: Callable[[str], None] = lines.say,
) -> int:
    """Run the command; ``start`` starts an engine's process."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "measure":
        return _measure(parser, options, start)
    try:
        read = results.read(options.source)
        found = points(read)
        say(table(found))
        if options.plot is not None:
            first = next(line for line in read if line.get("metric") == STEP)
            shape = first["shape"]
            draw(
                found,
                first["gpu"],
                f"K3's widths, {shape['layers']} layers, a rank's share at TP "
                f"{shape['tp']} without its collectives",
                options.plot,
            )
            say(f"{options.plot} written")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
