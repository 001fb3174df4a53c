# SPDX-License-Identifier: Apache-2.0
"""From times of many kernels to the few that are shipped, and which serves what."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.bench.tuning_sheet import OP, RECORDED
from experiments.results import Line
from verify_kernels.batch import MAX_ROWS
from verify_kernels.skinny_gemm.choice import (
    Choice,
    Cut,
    Entry,
    Outputs,
    cut_of,
    entries_of,
    spell,
)

#: A shipped kernel may be slower than the fastest that was tried by this much: times
#: of one kernel differ by 1 to 2 % from run to run, and every kernel must be compiled.
TOLERANCE = 0.02

Kernel = tuple[Cut, Outputs]
Refuse = Callable[[Collection[Kernel]], Mapping[Kernel, str]]


@dataclass(frozen=True)
class Served:
    """One thing to be served: a shape, an M and a launch mode.

    Attributes:
        k, n, outputs: of the weights of a launch.
        rows: M.
        pdl: in a chain of programmatic launches, or of plain ones.
        times: microseconds of each choice that was tried.
    """

    k: int
    n: int
    outputs: Outputs
    rows: int
    pdl: bool
    times: Mapping[Choice, float] = field(hash=False, compare=False)

    def enough(self, tolerance: float) -> set[Kernel]:
        """Kernels that are nearly as fast as the fastest here."""
        limit = min(self.times.values()) * (1 + tolerance)
        return {(c.cut, self.outputs) for c, us in self.times.items() if us <= limit}

    def fastest(self, among: set[Kernel]) -> Choice:
        """The fastest choice of these kernels."""
        return min(
            (c for c in self.times if (c.cut, self.outputs) in among),
            key=lambda c: (self.times[c], c.name),
        )

    def without(self, kernels: Collection[Kernel]) -> Served:
        """The same with the other kernels' times only."""
        left = {
            c: us
            for c, us in self.times.items()
            if (c.cut, self.outputs) not in kernels
        }
        return replace(self, times=left)

    def loss(self, choice: Choice) -> float:
        """Its time over that of the fastest, less 1."""
        return self.times[choice] / min(self.times.values()) - 1


def check_tolerance(tolerance: float) -> None:
    """Raise ValueError for one beyond what lines hold."""
    if not 0 <= tolerance <= RECORDED:
        raise ValueError(
            f"tolerance={tolerance}: use 0 to {RECORDED}; slower choices are not "
            "recorded"
        )


def few_kernels(points: Sequence[Served], tolerance: float = TOLERANCE) -> set[Kernel]:
    """Kernels of which one is nearly the fastest at every point.

    First those without which a point has none, then greedily the one that is enough for
    most points that have none yet, and among those the one that loses least there.
    """
    enough = {point: point.enough(tolerance) for point in points}
    chosen = {kernel for one in enough.values() if len(one) == 1 for kernel in one}
    enough = {p: kernels for p, kernels in enough.items() if not kernels & chosen}
    while enough:
        served: dict[Kernel, list[float]] = {}
        for point, kernels in enough.items():
            for kernel in kernels:
                own = point.fastest({kernel})
                served.setdefault(kernel, []).append(point.loss(own))
        kernel = min(
            served,
            key=lambda k: (-len(served[k]), sum(served[k]), k[0].name, k[1]),
        )
        chosen.add(kernel)
        enough = {p: kernels for p, kernels in enough.items() if kernel not in kernels}
    return chosen


def document(
    points: Sequence[Served],
    provenance: Mapping[str, Any],
    tolerance: float = TOLERANCE,
) -> str:
    """The text of ``choices.json`` (:mod:`verify_kernels.skinny_gemm.choice`).

    Raises:
        ValueError: no points, or a point at which nothing could be timed.
    """
    if not points:
        raise ValueError("points: nothing was timed, so there is nothing to choose")
    for point in points:
        if not point.times:
            raise ValueError(
                f"n={point.n}, k={point.k}, M={point.rows}: no kernel could be timed"
            )
    chosen = few_kernels(points, tolerance)
    rows = []
    cuts: dict[Cut, int] = {}
    order = sorted(points, key=lambda p: (p.k, p.n, p.outputs, not p.pdl, p.rows))
    for p in order:
        best = p.fastest(chosen)
        number = cuts.setdefault(best.cut, len(cuts))
        rows.append(
            [p.k, p.n, "+".join(p.outputs), int(p.pdl), p.rows, number, best.run]
        )
    body = [
        '{"measured": ' + json.dumps(dict(provenance), sort_keys=True) + ",",
        '"cuts": [',
        ",\n".join(json.dumps(spell(cut)) for cut in cuts),
        "],",
        '"choices": [',
        ",\n".join(json.dumps(row) for row in rows),
        "]}",
    ]
    return "\n".join(body) + "\n"


def points_of(lines: Iterable[Line]) -> tuple[list[Served], list[str]]:
    """What was measured, from the lines of one or more searches.

    Of one choice at one point the last line counts, so that a last round and a later
    file replace what came before. Rounds that the time cut short do not count.

    Returns:
        the points, and what was left out and why.

    Raises:
        ValueError: the lines are of several kinds of GPU.
    """
    times: dict[Served, dict[Choice, float]] = {}
    left_out: dict[str, int] = {}
    gpus: set[str] = set()
    for line in lines:
        if line.get("op") != OP or line["shape"]["stage"] == "partial":
            continue
        shape = line["shape"]
        try:
            choice = Choice(cut_of(shape["cut"]), shape["run"])
        except ValueError as error:
            why = str(error)
            left_out[why] = left_out.get(why, 0) + 1
            continue
        outputs = tuple(shape["out"].split("+"))
        pdl = line["variant"] == "pdl"
        point = Served(shape["k"], shape["n"], outputs, shape["m"], pdl, {})
        times.setdefault(point, {})[choice] = line["us"]
        gpus.add(line["gpu"])
    if len(gpus) > 1:
        raise ValueError(
            f"gpu={', '.join(sorted(gpus))}: times of different devices do not compare;"
            " give the lines of one"
        )
    said = [f"{count} lines: {why}" for why, count in left_out.items()]
    return [replace(p, times=found) for p, found in times.items()], said


def kept(entries: Iterable[Entry], points: Iterable[Served]) -> list[Served]:
    """Entries of an earlier table at which nothing was measured now."""
    measured = set(points)
    earlier = (
        Served(e.k, e.n, e.outputs, e.rows, e.pdl, {e.choice: 1.0}) for e in entries
    )
    return [point for point in earlier if point not in measured]


def _remarks(points: Sequence[Served], entries: Iterable[Entry]) -> Iterator[str]:
    """What somebody who ships the table should know."""
    found: dict[Served, Choice] = {}
    most: dict[str, int] = {}
    for e in entries:
        found[Served(e.k, e.n, e.outputs, e.rows, e.pdl, {})] = e.choice
        mode = "pdl" if e.pdl else "plain"
        shape = f"n={e.n}, k={e.k}, {'+'.join(e.outputs)}, {mode}"
        most[shape] = max(most.get(shape, 0), e.rows)
    losses = [point.loss(found[point]) for point in points]
    kernels = {(choice.cut, point.outputs) for point, choice in found.items()}
    yield (
        f"{len(points)} points measured, {len(found)} entries, {len(kernels)} kernels; "
        f"an entry loses {sum(losses) / len(losses):.2%} to the fastest that was "
        f"tried, at most {max(losses):.1%}"
    )
    for shape, rows in most.items():
        if rows < MAX_ROWS:
            yield f"{shape}: more than {rows} rows are cut into launches"


def rebuilt(
    lines: Sequence[Line],
    earlier: Sequence[Entry],
    tolerance: float = TOLERANCE,
    refuse: Refuse = lambda kernels: {},
) -> tuple[str, list[str]]:
    """A table from lines, with the entries of an earlier one where they say nothing.

    Args:
        lines: of one or more searches.
        earlier: entries to keep.
        tolerance: of :func:`few_kernels`.
        refuse: says which kernels must not be shipped, and why; then others are
            chosen, and it is asked again.

    Returns:
        the text of ``choices.json``, and what should be said.

    Raises:
        ValueError: nothing was measured; lines of several GPUs; a tolerance beyond
            what the lines hold.
    """
    check_tolerance(tolerance)
    points, said = points_of(lines)
    known: set[Kernel] = set()
    while points:
        old = kept(earlier, points)
        kernels = few_kernels(points + old, tolerance)
        chosen = {(p.fastest(kernels).cut, p.outputs) for p in points}
        refused = refuse(chosen - known)
        if not refused:
            break
        known |= chosen - refused.keys()
        said += [f"{cut.name} {'+'.join(o)}: {refused[cut, o]}" for cut, o in refused]
        points = [one for p in points if (one := p.without(refused)).times]
    if not points:
        raise ValueError("lines: none has a time that counts; there is nothing to ship")
    last = max((line for line in lines if line.get("op") == OP), key=_date)
    measured = {name: last[name] for name in ("gpu", "commit", "date")}
    text = document(points + old, {**measured, "kept": len(old)}, tolerance)
    return text, [*said, *_remarks(points, entries_of(text))]


def _date(line: Line) -> str:
    return str(line["date"])
