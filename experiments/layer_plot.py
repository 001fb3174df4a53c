# SPDX-License-Identifier: Apache-2.0
"""A figure of layer traces: GPU time of a layer under stock and under our executor.

    python -m experiments.layer_plot RESULTS.jsonl FIGURE.png

RESULTS has the lines of ``experiments.step_times`` or ``experiments.layer_trace``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import results
from experiments.plots import _DPI, PALETTE, _caption, _matplotlib
from experiments.results import Line

METRIC = "layer_gpu_us"
KINDS = {"kda": "KDA layer with MoE", "mla": "MLA layer with MoE"}
SIDES = {"stock": "vLLM 0.33", "ours": "dspark-k3"}


def bars(lines: Sequence[Line], kind: str) -> dict[tuple[int, int], dict[str, float]]:
    """(drafts, batch) -> {"stock": µs, "ours": µs} of one kind of layer, sorted.

    Points that one side lacks are left out. Raises ValueError if none has both.
    """
    found: dict[tuple[int, int], dict[str, float]] = {}
    for line in lines:
        if line.get("metric") == METRIC and line["shape"]["kind"] == kind:
            at = line["shape"]["k"], line["shape"]["batch"]
            found.setdefault(at, {})[line["variant"]] = line["value"]
    both = {at: found[at] for at in sorted(found) if set(found[at]) >= set(SIDES)}
    if not both:
        raise ValueError(
            f"no {METRIC} of a {kind} layer for both {' and '.join(SIDES)}: record "
            "both with python -m experiments.step_times --target stock,ours"
        )
    return both


def draw(lines: Sequence[Line], out: Path) -> None:
    """Write the figure; raises ValueError as `bars` does."""
    pyplot = _matplotlib()
    figure, axes = pyplot.subplots(1, len(KINDS), figsize=(10, 4.4), sharey=True)
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        _panel(axis, bars(lines, kind), title)
    axes[0].set_ylabel("GPU time of a layer (µs)")
    axes[0].legend(frameon=False, loc="upper left")
    first = next(line for line in lines if line.get("metric") == METRIC)
    _caption(
        figure,
        f"Measured on one {first['gpu']}: a rank's share at TP {first['shape']['tp']} "
        "without its collectives, CUDA-graph replay, median over layers.\n"
        "Each pair: drafts k, batch B; a verify step has B (k + 1) rows.",
    )
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(out, dpi=_DPI)
    pyplot.close(figure)


def _panel(
    axis: Any, points: dict[tuple[int, int], dict[str, float]], title: str
) -> None:
    width = 0.38
    for i, (side, label) in enumerate(SIDES.items()):
        values = [point[side] for point in points.values()]
        at = [x + (i - 0.5) * width for x in range(len(points))]
        drawn = axis.bar(at, values, width, label=label, color=PALETTE[1 - i])
        axis.bar_label(drawn, fmt="%.0f", fontsize=8)
    axis.set_xticks(range(len(points)), [f"k={k}\nB={b}" for k, b in points])
    axis.set_title(title)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.layer_plot", description=__doc__
    )
    parser.add_argument("source", type=Path, help="result lines")
    parser.add_argument("out", type=Path, help="figure to write")
    options = parser.parse_args(arguments)
    try:
        draw(results.read(options.source), options.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{options.out} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
