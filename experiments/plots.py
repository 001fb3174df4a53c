# SPDX-License-Identifier: Apache-2.0
"""Four figures from a results directory, each readable on its own.

matplotlib is imported inside :func:`render` only; it comes with the extra ``bench``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments import results
from experiments.results import Line

#: Okabe and Ito's palette, safe for the common colour deficiencies.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
#: One style a label, so that a figure says where each curve comes from.
STYLES = {"measured": "-", "recorded": "--", "modelled": ":"}
_GREY = "#666666"
_MAX_CURVES = len(PALETTE)
_DPI = 150

Row = tuple[float, float]


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "plots need matplotlib; install the extra: pip install 'dspark-k3[bench]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 9.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 11,
            "svg.fonttype": "none",
            "svg.hashsalt": "dspark-k3",
        }
    )
    return pyplot


def _pick(lines: Sequence[Line], metric: str) -> list[Line]:
    return [line for line in lines if line.get("metric") == metric]


def _by_variant(lines: Sequence[Line], key: str) -> dict[str, list[Row]]:
    """variant -> sorted (shape[key], value)."""
    found: dict[str, dict[float, float]] = {}
    for line in lines:
        found.setdefault(line["variant"], {})[line["shape"][key]] = line["value"]
    return {name: sorted(points.items()) for name, points in found.items()}


def _labels(lines: Sequence[Line]) -> dict[str, str]:
    return {line["variant"]: line["label"] for line in lines}


def _spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions near the wanted ones, at least ``gap`` apart, in the same order."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = list(wanted)
    for _ in range(200):
        moved = False
        for low, high in itertools.pairwise(order):
            overlap = gap - (placed[high] - placed[low])
            if overlap > 1e-9:
                placed[low] -= overlap / 2
                placed[high] += overlap / 2
                moved = True
        if not moved:
            break
    return placed


def _end_labels(
    axes: Any, ends: Sequence[tuple[float, float, str, str]], x: float
) -> None:
    """Name each curve at column ``x``; ends are (end x, end y, text, colour)."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.06
    ys = _spread([end[1] for end in ends], gap)
    for (end_x, end_y, text, colour), y in zip(ends, ys, strict=True):
        axes.annotate(
            text,
            (end_x, end_y),
            xytext=(x, y),
            textcoords="data",
            color=colour,
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.6},
            annotation_clip=False,
        )


def _caption(figure: Any, text: str) -> None:
    figure.text(0.01, 0.012, text, fontsize=7.5, color=_GREY, va="bottom", wrap=True)


def _curves(
    axes: Any, series: dict[str, list[Row]], labels: dict[str, str]
) -> list[tuple[float, float, str, str]]:
    ends = []
    for (name, points), colour in zip(series.items(), PALETTE, strict=False):
        xs, ys = zip(*points, strict=True)
        label = labels[name]
        axes.plot(xs, ys, STYLES[label], color=colour, marker="o", ms=4, lw=1.6)
        ends.append((xs[-1], ys[-1], f"{name} ({label})", colour))
    return ends


def _shortlist(series: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """At most as many curves as colours, evenly chosen, first and last kept."""
    names = list(series)
    if len(names) <= _MAX_CURVES:
        return series
    step = (len(names) - 1) / (_MAX_CURVES - 1)
    return {
        names[round(i * step)]: series[names[round(i * step)]]
        for i in range(_MAX_CURVES)
    }


def _machine(line: Line) -> str:
    return f"{line['gpu']}, step times of {line['shape'].get('profile', '?')}"


def _first_batch(lines: Sequence[Line]) -> list[Line]:
    batch = min((line["shape"]["batch"] for line in lines), default=1)
    return [line for line in lines if line["shape"]["batch"] == batch]


def _acceptance(pyplot: Any, lines: Sequence[Line]) -> Any:
    chosen = _pick(lines, "survival")
    if not chosen:
        return None
    series = _shortlist(_by_variant(chosen, "position"))
    figure, axes = pyplot.subplots(figsize=(8.4, 4.6))
    ends = _curves(axes, series, _labels(chosen))
    axes.set_ylim(0, 1.02)
    last = max(points[-1][0] for points in series.values())
    axes.set_xlim(0.8, last + 0.2)
    axes.set_xticks(range(1, int(last) + 1))
    axes.set_xlabel("draft position k")
    axes.set_ylabel("survival rate: P(first k drafts accepted)")
    axes.set_title("How far drafts survive verification")
    _end_labels(axes, ends, last + 0.35)
    _caption(
        figure,
        "Acceptance only, no GPU timing. Solid: measured in this run; dashed: "
        "recorded by others; dotted: modelled. Sum of a curve + 1 = acceptance length.",
    )
    figure.subplots_adjust(left=0.085, right=0.69, bottom=0.17, top=0.92)
    return figure


def _speedup(pyplot: Any, lines: Sequence[Line]) -> Any:
    even = _first_batch(_pick(lines, "break_even_length"))
    if not even:
        return None
    rows = sorted((line["shape"]["k"], line["value"]) for line in even)
    figure, axes = pyplot.subplots(figsize=(8.4, 5.0))
    shades = pyplot.get_cmap("viridis")([i / max(1, len(rows)) for i in range(8)])
    colours = {k: shades[i % 8] for i, (k, _) in enumerate(rows)}
    for k, break_even in rows:
        xs = [1.0, k + 1.0]
        axes.plot(xs, [x / break_even for x in xs], "-", color=colours[k], lw=1.6)
        axes.annotate(
            f"k={k}",
            (xs[1], xs[1] / break_even),
            xytext=(4, 3),
            textcoords="offset points",
            color=colours[k],
            fontsize=9,
        )
    axes.axhline(1.0, color="black", lw=1, ls=(0, (4, 3)))
    gains = _first_batch(_pick(lines, "speedup"))
    even_at = dict(rows)
    marks = "osD^vP*"
    for index, name in enumerate(_shortlist(_by_variant(gains, "k"))):
        own = [g for g in gains if g["variant"] == name and g["shape"]["k"] in colours]
        # The curve's own length at k, so that a mark lies on the line of its k.
        points = [(g["value"] * even_at[g["shape"]["k"]], g["value"]) for g in own]
        if points:
            label = _labels(_pick(lines, "survival")).get(name, own[0]["label"])
            axes.plot(
                *zip(*points, strict=True),
                marks[index % len(marks)],
                ms=5,
                mfc="white" if label != "measured" else PALETTE[index],
                color=PALETTE[index],
                label=f"{name} (acceptance {label})",
                zorder=3,
            )
    top = max(k + 1 for k, _ in rows)
    axes.set_xlim(0.9, top + 0.6)
    axes.set_ylim(0, max((k + 1) / e for k, e in rows) * 1.08)
    axes.text(top + 0.55, 1.02, "break-even", ha="right", va="bottom", fontsize=8.5)
    axes.set_xlabel("acceptance length (tokens committed per verify step, bonus incl.)")
    axes.set_ylabel("speed-up over no speculation")
    batch = even[0]["shape"]["batch"]
    axes.set_title(f"Speed-up against acceptance length, batch {batch}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", frameon=False, fontsize=8.5)
    _caption(
        figure,
        f"{_machine(even[0])} ({even[0]['label']}). A line ends where all k "
        "drafts are accepted.\nFilled marks: measured acceptance; hollow: recorded or "
        "modelled.",
    )
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.185, top=0.92)
    return figure


def _best_k(pyplot: Any, lines: Sequence[Line]) -> Any:
    chosen = _pick(lines, "best_draft_length")
    if not chosen:
        return None
    batches = sorted({line["shape"]["batch"] for line in chosen})
    figure, axes = pyplot.subplots(figsize=(8.4, 4.4))
    ends = []
    for index, batch in enumerate(batches[: len(PALETTE)]):
        rows = sorted(
            (line["shape"]["acceptance_length"], line["value"])
            for line in chosen
            if line["shape"]["batch"] == batch
        )
        xs = [x for x, _ in rows]
        # Steps of different batches coincide often: a small shift keeps all visible.
        ys = [y + (index - (len(batches) - 1) / 2) * 0.09 for _, y in rows]
        axes.step(xs, ys, where="post", color=PALETTE[index], lw=1.8)
        ends.append((xs[-1], ys[-1], f"batch {batch}", PALETTE[index]))
    top = int(max(line["value"] for line in chosen))
    drafts = chosen[0]["shape"]["drafts"]
    axes.set_ylim(-0.3, max(top, drafts) + 0.4)
    axes.set_yticks(range(max(top, drafts) + 1))
    axes.set_xlabel(f"acceptance length at k = {drafts} (constant conditional rate)")
    axes.set_ylabel("fastest draft length k (0: do not draft)")
    axes.set_title("Which fixed draft length pays")
    axes.grid(axis="y", lw=0.4, color="#dddddd")
    _end_labels(axes, ends, max(end[0] for end in ends) + 0.2)
    _caption(
        figure,
        f"{_machine(chosen[0])} (modelled), geometric acceptance "
        "(modelled). Steps are shifted a little so that equal ones show.",
    )
    figure.subplots_adjust(left=0.075, right=0.87, bottom=0.17, top=0.92)
    return figure


def _tokens(pyplot: Any, lines: Sequence[Line]) -> Any:
    chosen = _first_batch(_pick(lines, "tokens_per_second_per_user"))
    if not chosen:
        return None
    series = _shortlist(_by_variant(chosen, "k"))
    figure, axes = pyplot.subplots(figsize=(8.4, 4.6))
    acceptance = _labels(_pick(lines, "survival"))
    labels = {n: acceptance.get(n, label) for n, label in _labels(chosen).items()}
    ends = _curves(axes, series, labels)
    plain = next(iter(series.values()))[0][1]
    axes.axhline(plain, color="black", lw=1, ls=(0, (4, 3)))
    high = max(y for points in series.values() for _, y in points)
    axes.set_ylim(0, high * 1.1)
    last = max(points[-1][0] for points in series.values())
    axes.set_xlim(-0.2, last + 0.2)
    axes.set_xticks(range(int(last) + 1))
    axes.text(
        last + 0.15, plain * 0.97, "no drafts", ha="right", va="top", fontsize=8.5
    )
    axes.set_xlabel("draft length k")
    axes.set_ylabel("tokens/s per user")
    batch = chosen[0]["shape"]["batch"]
    axes.set_title(f"Speed that one user sees, batch {batch}")
    _end_labels(axes, ends, last + 0.35)
    _caption(
        figure,
        f"{_machine(chosen[0])} ({chosen[0]['label']}). Brackets say where the "
        "acceptance comes from.",
    )
    figure.subplots_adjust(left=0.085, right=0.69, bottom=0.17, top=0.92)
    return figure


FIGURES: dict[str, Callable[[Any, Sequence[Line]], Any]] = {
    "acceptance_by_position": _acceptance,
    "speedup_by_acceptance": _speedup,
    "best_draft_length": _best_k,
    "tokens_per_user": _tokens,
}


def render(source: Path, out: Path | None = None) -> list[Path]:
    """Draw the figures as PNG (150 dpi) and SVG.

    Args:
        source: results directory or file.
        out: where to write; default the directory of the results.

    Returns:
        Files written; a figure whose lines are absent is left out.

    Raises:
        ValueError: no readable results, nothing to draw, or no matplotlib.
    """
    lines = results.read(source)
    folder = out or (source if source.is_dir() else source.parent)
    pyplot = _matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, draw in FIGURES.items():
        figure = draw(pyplot, lines)
        if figure is None:
            continue
        for suffix in ("png", "svg"):
            path = folder / f"{name}.{suffix}"
            metadata = {"Date": None} if suffix == "svg" else None
            figure.savefig(path, dpi=_DPI, metadata=metadata)
            written.append(path)
        pyplot.close(figure)
    if not written:
        raise ValueError(
            f"{source} has no line that a plot needs; run 'dspark-k3 sweep --out DIR'"
        )
    return written
