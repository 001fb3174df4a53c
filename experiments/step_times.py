# SPDX-License-Identifier: Apache-2.0
"""Step-time profiles from the running engine, for stock vLLM and for ours.

``python -m experiments.step_times --layers 8 --tp 16 --k 0,1,3,7 --batch 1,2,4,8
--target stock,ours --out experiments/profiles/k3-tp16.json`` writes

* ``k3-tp16-stock.json`` and ``k3-tp16-ours.json``: profiles (``experiments.step_time``)
  of the model as deep as it was measured;
* ``k3-tp16-stock-93.json`` and ``k3-tp16-ours-93.json``: the same scaled to the 93
  layers of K3, labelled "modelled";
* ``k3-tp16.jsonl``: every figure as a result line, layer times too.

A third target, ``drafter``, is ours with our kernels in the drafter too.

Figures are GPU times of steps that were enqueued ahead of the GPU, so no host is in
them; the wall time of the engine is recorded beside them (``wall_ms``), not used.

    T_plain(B)     the whole step without speculation: input, forward, head, sampling
    T_draft(k, B)  the drafter's part of a step with k drafts
    T_verify(r)    the rest of that step; where several (k, B) make r rows, the longest

Scaling to 93 layers. With s the median spans of a dense, a KDA and an MLA layer in a
trace of the same step, S their sum over the traced layers, F the traced forward and G
the forward as timed without the profiler,

    T' = T + (G / F) (1 s_dense + 68 s_kda + 24 s_mla - S)

Drafting is not scaled: the drafter is whole. What this leaves out: collectives, unless
``--ranks`` runs a group of ``--tp`` GPUs, and the saved blocks that AttnRes mixes in a
deep model (``experiments.k3_shapes``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments import k3_shapes, results
from experiments.gpu_engine import fleet, lines
from experiments.gpu_engine.segment import Step, depth_us
from experiments.layer_trace import describe
from experiments.step_time import read_profile

#: A larger step that is cheaper by up to this share is noise and padded up.
NOISE = 0.03

Point = dict[str, Any]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.step_times",
        description="Record step times of stock vLLM and of ours on this GPU.",
    )
    lines.common_arguments(parser)
    add = parser.add_argument
    add("--k", type=lines.numbers, default=(0, 1, 3, 7), help="draft lengths")
    add("--batch", type=lines.numbers, default=(1, 2, 4, 8), help="requests")
    add("--out", type=Path, required=True, help="NAME.json; see the module docstring")
    add("--names", type=int, default=0, help="kernel names printed a kind of layer")
    return parser


def scale(point: Point, steps: Sequence[Step], layers: int) -> Point:
    """The point as if the model had K3's 93 layers; see the module docstring.

    Args:
        point: of ``gpu_engine.measure``, times in microseconds.
        steps: its trace.
        layers: the model's.

    Raises:
        ValueError: the trace lacks a kind of layer, or the step had no graph.
    """
    if point["forward_us"] is None:
        raise ValueError(
            f"the step of {point['rows']} rows ran without a graph, so its forward "
            "was not timed and cannot be scaled"
        )
    wanted = asdict(k3_shapes.layer_counts(k3_shapes.K3_LAYERS))
    traced, whole = depth_us(steps, lines.layer_kinds(layers), wanted)
    spans = sorted(step.forward_span for step in steps)
    profiled = spans[len(spans) // 2]
    added = point["forward_us"] / profiled * (whole - traced)
    return {
        **point,
        "step_us": point["step_us"] + added,
        "forward_us": point["forward_us"] + added,
    }


def document(
    points: Mapping[int, Sequence[Point]],
    *,
    name: str,
    gpu: str,
    source: str,
    label: str,
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """A profile as JSON data, from the points of each draft length.

    Raises:
        ValueError: no plain steps, no drafted steps, or none at the rows asked for.
    """
    plain = [
        _entry(point, point["step_us"], batch=point["batch"])
        for point in points.get(0, ())
        if point["executed_rows"] == point["rows"]
    ]
    drafted = [
        (k, point)
        for k, of_k in points.items()
        for point in of_k
        if k and point["draft_us"] is not None
    ]
    draft = [
        {"k": k, "batch": point["batch"], "ms": point["draft_us"] / 1e3}
        for k, point in drafted
    ]
    by_rows: dict[int, dict[str, Any]] = {}
    for k, point in drafted:
        rows = point["rows"]
        if point["executed_rows"] != rows:
            continue  # Padded by the engine: it is the time of another row count.
        entry = _entry(
            point,
            point["step_us"] - point["draft_us"],
            rows=rows,
            executed_rows=rows,
            k=k,
            batch=point["batch"],
        )
        if rows not in by_rows or entry["ms"] > by_rows[rows]["ms"]:
            by_rows[rows] = entry
    if not plain or not by_rows:
        raise ValueError(
            f"{name}: a profile needs plain steps (k = 0) and verify steps; have "
            f"{len(plain)} and {len(by_rows)}: measure k 0 and at least one other"
        )
    for k in sorted({k for k, _ in drafted}):
        smooth([entry for entry in draft if entry["k"] == k], "batch")
    return {
        "schema": 1,
        "name": name,
        "gpu": gpu,
        "source": source,
        "interpolation": "staircase",
        "label": label,
        "plain": smooth(plain, "batch"),
        "draft": sorted(draft, key=lambda entry: (entry["k"], entry["batch"])),
        "verify": smooth(list(by_rows.values()), "rows"),
        "provenance": dict(provenance),
    }


def _entry(point: Point, microseconds: float, **sizes: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        **sizes,
        "ms": microseconds / 1e3,
        "graph": point["graph"],
        "spread_ms": None
        if point["step_spread"] is None
        else point["step_spread"] / 1e3,
        "wall_ms": None if point["wall_us"] is None else point["wall_us"] / 1e3,
    }
    if point["distinct_experts"] is not None:
        entry["distinct_experts"] = point["distinct_experts"]
    return entry


def smooth(entries: list[dict[str, Any]], size: str) -> list[dict[str, Any]]:
    """The entries in order of ``size``, a time that falls by noise padded up.

    Larger falls stay as they were measured and are refused by ``step_time``.
    """
    ordered = sorted(entries, key=lambda entry: entry[size])
    for before, after in itertools.pairwise(ordered):
        if before["ms"] * (1 - NOISE) <= after["ms"] < before["ms"]:
            after["measured_ms"], after["ms"] = after["ms"], before["ms"]
    return ordered


def write_profile(path: Path, found: Mapping[str, Any]) -> str:
    """Write the profile and say "", or why ``sweep`` and ``advise`` would refuse it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    try:
        read_profile(path)
    except ValueError as error:
        return str(error)
    return ""


def _file(
    into: dict[str, dict[int, list[Point]]], plan: Mapping[str, Any], point: Point
) -> None:
    into.setdefault(plan["target"], {}).setdefault(plan["k"], []).append(point)


def _profiles(
    options: argparse.Namespace,
    outcomes: Iterable[fleet.Outcome],
    recorder: results.Recorder,
) -> list[str]:
    """Write all profiles and lines; returns what went wrong."""
    wrong = []
    points: dict[str, dict[int, list[Point]]] = {}
    scaled: dict[str, dict[int, list[Point]]] = {}
    gpu = ""
    for outcome in outcomes:
        if outcome.error:
            wrong.append(f"{outcome.name}: {outcome.error}")
            continue
        plan, gpu = outcome.result["plan"], outcome.result["gpu"]
        for point in outcome.result["points"]:
            _file(points, plan, point)
            lines.add_point(recorder, plan, point, gpu)
            try:
                if point["trace"] is None:
                    raise ValueError("no step was traced")
                steps = lines.traced_steps(Path(point["trace"]), plan["layers"])
                times = lines.times_of(plan, steps)
                lines.add_layers(recorder, plan, point, gpu, times)
                lines.say(describe(outcome.name, point, steps, times, options.names))
                whole = scale(point, steps, plan["layers"])
            except ValueError as error:
                wrong.append(f"{outcome.name} batch {point['batch']}: {error}")
                continue
            _file(scaled, plan, whole)
    common = recorder.provenance | {"layers": options.layers, "tp": options.tp}
    of = "on as many GPUs" if options.ranks else "share without collectives"
    how = f"TP {options.tp} {of}, dummy weights, spread routing"
    for target, found in points.items():
        stem = f"{options.out.stem}-{target}"
        depth = f"{options.layers} of {k3_shapes.K3_LAYERS} layers"
        documents = [(stem, found, f"{target} vLLM, {depth}, {how}", "recorded")]
        if scaled.get(target):
            source = f"{target} vLLM, scaled from {depth} by layer traces, {how}"
            deep = f"{stem}-{k3_shapes.K3_LAYERS}"
            documents.append((deep, scaled[target], source, "modelled"))
        for name, of_k, source, label in documents:
            try:
                made = document(
                    of_k,
                    name=name,
                    gpu=gpu,
                    source=source,
                    label=label,
                    provenance=common,
                )
            except ValueError as error:
                wrong.append(str(error))
                continue
            path = options.out.with_name(f"{name}.json")
            refused = write_profile(path, made)
            lines.say(f"{path} written")
            if refused:
                wrong.append(refused)
    return wrong


def main(
    arguments: Sequence[str] | None = None, start: fleet.Launch | None = None
) -> int:
    """Run the command; ``start`` starts an engine's process."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.out.suffix != ".json":
        parser.error(f"--out {options.out}: must end in .json")
    outcomes, recorder = lines.measured(parser, options, start)
    wrong = _profiles(options, outcomes.values(), recorder)
    lines.save(recorder, options.out.with_suffix(".jsonl"))
    for line in wrong:
        lines.say(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
