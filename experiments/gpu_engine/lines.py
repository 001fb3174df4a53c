# SPDX-License-Identifier: Apache-2.0
"""Engine measurements as result lines (``experiments.results``) and as text."""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_k3 import settings
from experiments import k3_shapes, results
from experiments.gpu_engine import fleet, measure, ranks
from experiments.gpu_engine.segment import (
    LayerTime,
    Step,
    layer_times,
    read_trace,
    split_layers,
    split_steps,
)

Log = Callable[[str], None]
say: Log = functools.partial(print, flush=True)

NOTE = (
    "one rank's share without its collectives, dummy weights with spread routing "
    "(experiments/gpu_engine/spread.py), temperature 1, synthetic acceptance"
)
NOTE_OF_RANKS = (
    "the whole width on {tp} GPUs of one host, rank 0's times, ranks aligned before "
    "each step, all-reduce by vLLM over peer memory or NCCL, no NVLink multicast and "
    "no FlashInfer; dummy weights with spread routing "
    "(experiments/gpu_engine/spread.py), temperature 1, synthetic acceptance"
)


def common_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that step times and layer traces share."""
    add = parser.add_argument
    add("--layers", type=int, required=True, help="depth of the model, 4 to 93")
    add("--tp", type=int, default=16, help="tensor-parallel share (default 16)")
    add("--ranks", action="store_true", help="run on --tp GPUs, not one rank's share")
    known = ",".join(measure.TARGETS)
    default = measure.TARGETS[:2]
    add("--target", type=names, default=default, help=f"of {known} (default: two)")
    add("--block-size", type=int, default=k3_shapes.BLOCK_SIZE, help="of AttnRes")
    add("--prompt", type=int, default=1024, help="prompt tokens (default 1024)")
    add("--steps", type=int, default=40, help="timed steps (default 40)")
    add("--parallel", type=int, help="engines that start together (default: memory)")
    add("--work", type=Path, default=Path("/tmp/k3-engines"), help="logs and traces")
    add("--fork", action="store_true", help="fork engines off a process with vLLM")
    add("--commit", help="commit to record where git cannot tell")
    add("--ops", type=ops, default={}, help="JSON, of our target; see docs/settings.md")


def ops(text: str) -> dict[str, str]:
    """Ops of our target as JSON, such as '{"moe_experts": "stock"}'.

    Raises argparse.ArgumentTypeError for anything else.
    """
    try:
        given = json.loads(text)
        settings.read({settings.KEY: {"target": True, "ops": given}})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return {str(name): str(side) for name, side in given.items()}


def names(text: str) -> tuple[str, ...]:
    """A comma-separated list of names."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[int, ...]:
    """A comma-separated list of whole numbers.

    Raises argparse.ArgumentTypeError for anything else.
    """
    try:
        found = tuple(int(part) for part in names(text))
    except ValueError:
        found = ()
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be whole numbers with commas, such as 0,1,3,7"
        )
    return found


def plans(
    options: argparse.Namespace,
    drafts: Sequence[int],
    batches: Sequence[int],
    **further: Any,
) -> list[measure.Plan]:
    """A plan for each draft length and target, targets side by side; ``further`` are
    fields of a plan.

    Raises ValueError as ``measure.check`` does.
    """
    found = [
        measure.Plan(
            target=target,
            layers=options.layers,
            tp=options.tp,
            k=k,
            batches=tuple(batches),
            trace_dir=str(options.work),
            block_size=options.block_size,
            prompt=options.prompt,
            gpu=options.steps,
            ranks=options.ranks,
            ops=options.ops if target != "stock" else {},
            **further,
        )
        for k in drafts
        for target in options.target
    ]
    for plan in found:
        measure.check(plan)
    return found


def run(
    options: argparse.Namespace,
    wanted: Sequence[measure.Plan],
    specs: Sequence[fleet.EngineSpec],
    start: fleet.Launch,
) -> dict[str, fleet.Outcome]:
    """Run the plans' engines; outcomes by plan name."""
    parallel = options.parallel or measure.engines_at_once(wanted)
    say(f"{len(wanted)} engines, {parallel} at a time; logs in {options.work}")
    if options.ranks:
        ranks.check_environment(os.environ)
        specs = ranks.with_ports(specs)
    return fleet.run(
        specs,
        options.work,
        parallel=parallel,
        exclusive=True,
        progress=say,
        start=start,
    )


def measured(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    start: fleet.Launch | None,
    spec: Callable[[measure.Plan, Path], fleet.EngineSpec] = measure.spec,
    **further: Any,
) -> tuple[dict[str, fleet.Outcome], results.Recorder]:
    """Measure what ``options`` asks for and print the table of steps.

    Args:
        parser: ends the command with a message when the options do not fit.
        options: of `common_arguments`, and ``k`` and ``batch``.
        start: starts an engine's process; None as ``options.fork`` says.
        spec: the engine of a plan, given the folder for its models; may raise
            ValueError.
        further: fields of the plans.

    Returns:
        Outcomes by plan name, and an empty recorder with the run's provenance.
    """
    try:
        wanted = plans(options, options.k, options.batch, **further)
        specs = [spec(plan, options.work / "models") for plan in wanted]
    except ValueError as error:
        parser.error(str(error))
    outcomes = run(options, wanted, specs, start or fleet.launcher(options.fork))
    say(step_table(outcomes))
    return outcomes, results.Recorder(
        versions=versions(outcomes), commit=options.commit
    )


def traced_steps(path: Path, layers: int) -> list[Step]:
    """The steps of a trace file.

    Raises ValueError as ``read_trace`` and ``split_layers`` do.
    """
    kernels = read_trace(path)
    return [split_layers(step, layers) for step in split_steps(kernels)]


def layer_kinds(layers: int) -> list[str]:
    """The kind of every layer."""
    return [k3_shapes.layer_kind(index, layers) for index in range(layers)]


def add_point(
    recorder: results.Recorder, plan: Mapping[str, Any], point: Any, gpu: str
) -> None:
    """Lines for the times of one batch size of an engine."""
    shape = {key: plan[key] for key in ("layers", "tp", "k", "block_size", "prompt")}
    shape |= {"batch": point["batch"], "rows": point["rows"], **_group(plan)}
    gates = {
        "graph": point["graph"],
        "rows_as_asked": point["executed_rows"] == point["rows"],
        "enqueued_ahead": point["queued"] >= measure.QUEUED,
    }
    metrics = {
        "step_gpu_us": ("step_us", "step_spread", "us"),
        "forward_gpu_us": ("forward_us", "forward_spread", "us"),
        "draft_gpu_us": ("draft_us", "draft_spread", "us"),
        "step_wall_us": ("wall_us", "wall_spread", "us"),
        "distinct_experts": ("distinct_experts", "", "experts"),
    }
    for metric, (key, spread, unit) in metrics.items():
        if point[key] is None:
            continue
        recorder.add(
            metric,
            point[key],
            label="measured",
            variant=plan["target"],
            shape=shape,
            gpu=gpu,
            unit=unit,
            gates=gates,
            spread=point.get(spread),
            note=note(plan)
            + (_by_layer(point) if metric == "distinct_experts" else ""),
        )


def note(plan: Mapping[str, Any]) -> str:
    """What a figure of a plan's engine is of."""
    said = NOTE_OF_RANKS.format(tp=plan["tp"]) if plan.get("ranks") else NOTE
    if not plan.get("ops"):
        return said
    changed = ", ".join(f"{name} {side}" for name, side in plan["ops"].items())
    return f"{said}; {changed}"


def _group(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {"ranks": plan["tp"]} if plan.get("ranks") else {}


def _by_layer(point: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count:.0f}" for count in point["distinct_by_layer"])
    return f"; by MoE layer {counts}"


def add_layers(
    recorder: results.Recorder,
    plan: Mapping[str, Any],
    point: Any,
    gpu: str,
    times: Mapping[str, LayerTime],
) -> None:
    """Lines for the layers of one batch size: span, MLP, busy time and kernels by
    kind."""
    for kind, time in times.items():
        values = {
            "layer_gpu_us": (time.span_us, "us"),
            "layer_mlp_gpu_us": (time.mlp_us, "us"),
            "layer_busy_us": (time.busy_us, "us"),
            "layer_kernels": (time.kernels, "kernels"),
        }
        if plan.get("ranks"):
            values["layer_collective_us"] = (time.collective_us, "us")
        for metric, (value, unit) in values.items():
            recorder.add(
                metric,
                value,
                label="measured",
                variant=plan["target"],
                shape={
                    "kind": kind,
                    **{key: plan[key] for key in ("layers", "tp", "k", "block_size")},
                    "batch": point["batch"],
                    "rows": point["rows"],
                    **_group(plan),
                },
                gpu=gpu,
                unit=unit,
                gates={"graph": point["graph"]},
                note=f"{note(plan)}; under the profiler, median of {time.layers} "
                "layers",
            )
            if metric == "layer_kernels":
                recorder.lines[-1]["kernels"] = list(time.names)


def times_of(plan: Mapping[str, Any], steps: Sequence[Step]) -> dict[str, LayerTime]:
    """Layer times by kind of a plan's traced steps."""
    return layer_times(steps, layer_kinds(plan["layers"]))


def step_table(outcomes: Mapping[str, fleet.Outcome]) -> str:
    """A line for each engine and batch size: GPU times, wall time, experts."""
    head = (
        f"{'engine':28} {'B':>2} {'rows':>4} {'step µs':>9} {'forward':>9} "
        f"{'draft':>8} {'wall µs':>9} {'experts':>7} {'ahead':>5} graph"
    )
    rows = [head]
    for name, outcome in outcomes.items():
        if outcome.error:
            rows.append(f"{name:28} FAILED: {outcome.error}")
            continue
        for point in outcome.result["points"]:
            rows.append(
                f"{name:28} {point['batch']:2} {point['rows']:4} "
                f"{_number(point['step_us'], 9)} {_number(point['forward_us'], 9)} "
                f"{_number(point['draft_us'], 8)} {_number(point['wall_us'], 9)} "
                f"{_number(point['distinct_experts'], 7)} {point['queued']:5.0%} "
                f"{'yes' if point['graph'] else 'NO'}"
            )
    return "\n".join(rows)


def _number(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.1f}"


def versions(outcomes: Mapping[str, fleet.Outcome]) -> dict[str, str]:
    """Package versions as the first engine that ran saw them."""
    for outcome in outcomes.values():
        if outcome.ok:
            return dict(outcome.result["versions"])
    return {}


def save(recorder: results.Recorder, path: Path | None) -> None:
    """Append the recorder's lines to ``path``, if there is one and there are any."""
    if path is not None and recorder.lines:
        count = results.append(path, recorder.lines)
        say(f"{count} lines in {path}")
