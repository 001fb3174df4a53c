# SPDX-License-Identifier: Apache-2.0
"""Made-up GPU measurements: traces with known times, answers of engine processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.gpu_engine import fleet, measure

STOCK_MIX, OUR_MIX = "_attn_res_kernel", "kernel_cutlass_AttnResKernel_object_at"
SPIN = "void at::cuda::spin_kernel(long)"

#: µs: a mix, the kernels between the first and the second mix and after the second.
LAYER = {"dense": (2.0, [5.0], [20.0]), "kda": (2.0, [5.0, 1.0], [4.0, 3.0])}
LAYER["mla"] = (2.0, [7.0], [4.0, 3.0])
SPANS = {
    kind: 2 * mix + sum(attention) + sum(mlp)
    for kind, (mix, attention, mlp) in LAYER.items()
}


def step_events(start: float, kinds: list[str], mix: str) -> tuple[list[Any], float]:
    """(name, start, duration) of one step's kernels without gaps, and its end."""
    found: list[tuple[str, float, float]] = []
    now = start

    def run(name: str, duration: float) -> None:
        nonlocal now
        found.append((name, now, duration))
        now += duration

    run(SPIN, 100.0)
    run("embedding", 1.0)
    for kind in kinds:
        cost, attention, mlp = LAYER[kind]
        run(mix, cost)
        for i, us in enumerate(attention):
            run(f"{kind}_attention_{i}", us)
        run(mix, cost)
        for i, us in enumerate(mlp):
            run(f"mlp_{i}", us)
    run(mix, 2.0)
    run("head", 30.0)
    return found, now


def write_trace(path: Path, kinds: list[str], mix: str, steps: int = 3) -> None:
    """A chrome trace of ``steps`` steps, with the noise a real one has."""
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunch", "ts": 0, "dur": 9},
        {"ph": "i", "cat": "kernel", "name": "no duration", "ts": 0},
        {"ph": "X", "cat": "kernel", "name": mix, "ts": 0.0, "dur": 1.0},
    ]
    now = 10.0
    for _ in range(steps):
        found, now = step_events(now, kinds, mix)
        for name, start, duration in found:
            events.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": name,
                    "ts": start,
                    "dur": duration,
                    "args": {"stream": 7},
                }
            )
        now += 50.0
    path.write_text(json.dumps({"traceEvents": events[::-1]}))


def point(plan: measure.Plan, batch: int, trace: str | None) -> dict[str, Any]:
    """A point whose times follow from its rows; forward as long as the trace's."""
    rows = batch * (plan.k + 1)
    draft = 100.0 * plan.k + 10 * batch if plan.k else None
    forward = 200.0 + rows
    return {
        "batch": batch,
        "rows": rows,
        "executed_rows": rows,
        "graph": True,
        "steps": 40,
        "queued": 1.0,
        "distinct_experts": 15.0 * rows + 1,
        "distinct_by_layer": [15.0 * rows, 15.0 * rows + 2],
        "step_us": forward + 50 + (draft or 0.0),
        "step_spread": 2.0,
        "forward_us": forward,
        "forward_spread": 1.0,
        "draft_us": draft,
        "draft_spread": 1.0 if draft else None,
        "wall_us": 2 * forward,
        "wall_spread": 30.0,
        "spin_us": 6000.0,
        "trace": trace,
    }


_CHILD = (
    "import json, pathlib, sys, time\n"
    "out, name, answer = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]\n"
    "(out / f'{name}.ready').touch()\n"
    "while not (out / f'{name}.go').exists(): time.sleep(0.01)\n"
    "(out / f'{name}.json').write_text(answer)\n"
)


def answer_with(
    spec: fleet.EngineSpec, out: Path, answer: Any
) -> subprocess.Popen[bytes]:
    """A process that starts, waits for its turn and gives ``answer``."""
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(out), spec.name, json.dumps(answer)],
        start_new_session=True,
    )


def measured(spec: fleet.EngineSpec, out: Path) -> subprocess.Popen[bytes]:
    """Stands in for ``fleet.launch``: measures what the plan asks for, made up."""
    from experiments.gpu_engine.lines import layer_kinds

    options = spec.options
    plan = measure.Plan(**{**options, "batches": tuple(options["batches"])})
    mix = OUR_MIX if plan.target == "ours" else STOCK_MIX
    points = []
    for batch in plan.batches:
        trace = out / f"{plan.name}-b{batch}.trace.json"
        write_trace(trace, layer_kinds(plan.layers), mix)
        points.append(point(plan, batch, str(trace)))
    result = {
        "plan": options,
        "versions": {"vllm": "0.33.0"},
        "gpu": "NVIDIA H200",
        "counters": {"ours": 3} if plan.target == "ours" else {},
        "points": points,
    }
    return answer_with(spec, out, {"result": result})


def idle() -> subprocess.Popen[bytes]:
    """A process that does nothing until it is stopped."""
    return subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
