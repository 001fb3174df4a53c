# SPDX-License-Identifier: Apache-2.0
"""Kernels and GPU time of a KDA and of an MLA layer, from traces of real steps.

``python -m experiments.layer_trace --layers 8 --tp 16 [--k 7] [--batch 1]
[--target stock,ours] [--out FILE.jsonl]`` runs a K3 cut in depth in vLLM, each target
in a process of its own, traces decode or verify steps and prints for each kind of layer
(dense: KDA with the dense MLP; kda, mla: with MoE) the kernels, the GPU time and what
each kernel adds to it, and the step in all. ``experiments.gpu_engine.segment`` says how
a trace is cut.
Exit code 1 if an engine or a trace failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.gpu_engine import fleet, lines
from experiments.gpu_engine.segment import (
    LayerTime,
    Share,
    Step,
    busy_us,
    by_name,
    read_trace,
    split_steps,
)

_WIDTH = 96


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.layer_trace",
        description="Kernels and GPU time a layer, stock and ours, on this GPU.",
    )
    lines.common_arguments(parser)
    add = parser.add_argument
    add("--k", type=lines.numbers, default=(7,), help="draft lengths (default 7)")
    add("--batch", type=lines.numbers, default=(1,), help="requests (default 1)")
    add("--out", type=Path, help="results file to append lines to")
    add("--names", type=int, default=40, help="kernel names printed a kind")
    return parser


def describe(
    title: str,
    point: Mapping[str, Any],
    steps: Sequence[Step],
    times: Mapping[str, LayerTime],
    most: int,
) -> str:
    """The text of one traced batch size."""
    kernels = [kernel for step in steps for kernel in step.kernels]
    launches = sum(not kernel.copy for kernel in kernels) / len(steps)
    busy = sum(busy_us(step.kernels) for step in steps) / len(steps)
    found = [
        f"{title}: batch {point['batch']}, {point['rows']} rows: "
        f"{point['step_us']:.1f} µs a step by events, under the profiler "
        f"{busy:.1f} µs busy in {launches:.0f} kernels"
    ]
    for kind, time in times.items():
        found.append(
            f"  {kind} layer ({time.layers} of them): {time.span_us:.2f} µs span, "
            f"{time.mlp_us:.2f} µs of it the MLP's, "
            f"{time.busy_us:.2f} µs busy, {time.kernels:.1f} kernels, "
            f"{time.copies:.1f} copies, {time.collective_us:.2f} µs of collectives"
        )
        found += _named(time.names, most)
    around = by_name([[*step.before, *step.after] for step in steps])
    found.append("  around the layers (input, final mix, head, sampling, drafts):")
    found += _named(around, most)
    return "\n".join(found)


def _named(names: Mapping[str, Share], most: int) -> list[str]:
    head = f"    {'adds µs':>8} {'long µs':>8} {'times':>6}"
    listed = list(names.items())[:most]
    rows = [
        f"    {of.added_us:8.2f} {of.us:8.2f} {of.launches:6.2f}  {name[:_WIDTH]}"
        for name, of in listed
    ]
    return [head, *rows] if rows else []


def _uncut(path: str | None, most: int) -> str:
    """The kernels a step of a trace that could not be cut into layers."""
    if path is None:
        return ""
    try:
        return "\n".join(_named(by_name(split_steps(read_trace(Path(path)))), most))
    except ValueError as error:
        return str(error)


def main(
    arguments: Sequence[str] | None = None, start: fleet.Launch | None = None
) -> int:
    """Run the command; ``start`` starts an engine's process."""
    parser = _parser()
    options = parser.parse_args(arguments)
    outcomes, recorder = lines.measured(parser, options, start)
    failed = [name for name, outcome in outcomes.items() if outcome.error]
    for name, outcome in outcomes.items():
        if outcome.error:
            continue
        plan, gpu = outcome.result["plan"], outcome.result["gpu"]
        lines.say(f"{name}: steps by who ran them: {outcome.result['counters'] or '-'}")
        for point in outcome.result["points"]:
            lines.add_point(recorder, plan, point, gpu)
            try:
                if point["trace"] is None:
                    raise ValueError("no step was traced")
                steps = lines.traced_steps(Path(point["trace"]), plan["layers"])
                times = lines.times_of(plan, steps)
            except ValueError as error:
                failed.append(name)
                lines.say(f"{name} batch {point['batch']}: no layers: {error}")
                lines.say(_uncut(point["trace"], options.names))
                continue
            lines.add_layers(recorder, plan, point, gpu, times)
            lines.say(describe(name, point, steps, times, options.names))
    lines.save(recorder, options.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
