# SPDX-License-Identifier: Apache-2.0
"""The job behind step times and layer traces: what a step of one engine costs.

For each batch size: GPU time of decode or verify steps with everything enqueued ahead
(``recorder``), wall time of the same steps in the engine as it is (its own process,
asynchronous scheduling, no spin), a kernel trace, and distinct experts.

Prompts are random tokens, sampling is at temperature 1, and drafts are accepted by
vLLM's synthetic rejection at a mean length of 1 + 0.7 k, so a step does what a step of
a real run does.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark_k3 import settings
from experiments import k3_shapes
from experiments.gpu_engine import ranks
from experiments.gpu_engine.fleet import EngineSpec

JOB = "experiments.gpu_engine.measure:job"
WORKER = "experiments.gpu_engine.recorder.StepRecorder"
#: vLLM's; our target with vLLM's drafting; our target, and our kernels in its drafter.
TARGETS = ("stock", "ours", "drafter")

#: The GPU spins this long before a step, in microseconds; doubled while the host cannot
#: enqueue a step in that time, up to the limit.
SPIN_US, SPIN_LIMIT_US = 6_000.0, 48_000.0
#: Share of steps that must have been enqueued ahead.
QUEUED = 0.8
MAX_BATCH = 8
CONTEXT = 4096


@dataclass(frozen=True)
class Plan:
    """What to measure in one engine; see :func:`spec`.

    ``layers``, ``tp``, ``block_size``: `experiments.k3_shapes`. ``k``: drafts. ``gpu``,
    ``wall``, ``trace``, ``experts``: steps of each kind. ``trace_dir``: for the traces.
    ``ranks``: the whole model on ``tp`` GPUs, not one rank's share on one. ``ops``: of
    our target, beside its defaults (`dspark_k3.settings`); all are named, so that what
    has no kernel is an error and not measured as ours. ``length``: tokens a step, 1 to
    k + 1; None for 1 + 0.7 k.
    """

    target: str
    layers: int
    tp: int
    k: int
    batches: tuple[int, ...]
    trace_dir: str
    block_size: int = k3_shapes.BLOCK_SIZE
    prompt: int = 1024
    gpu: int = 40
    wall: int = 120
    trace: int = 6
    experts: int = 4
    ranks: bool = False
    ops: Mapping[str, str] = field(default_factory=dict)
    length: float | None = None

    @property
    def name(self) -> str:
        """Names files: target, depth, share or group, and draft length."""
        how = "ranks" if self.ranks else "tp"
        return f"{self.target}-L{self.layers}-{how}{self.tp}-k{self.k}"

    @property
    def share(self) -> int:
        """What the model's configuration is divided by."""
        return 1 if self.ranks else self.tp

    @property
    def acceptance_length(self) -> float:
        """Tokens a step, by synthetic rejection."""
        return 1 + 0.7 * self.k if self.length is None else self.length


def check(plan: Plan) -> None:
    """Raises ValueError for a plan that cannot run."""
    k3_shapes.check(plan.layers, plan.tp)
    if plan.target not in TARGETS:
        raise ValueError(f"target={plan.target!r}: must be one of {', '.join(TARGETS)}")
    if not 0 <= plan.k <= k3_shapes.MAX_DRAFTS:
        raise ValueError(f"k={plan.k}: must be 0 to {k3_shapes.MAX_DRAFTS}")
    if not plan.batches or not all(1 <= b <= MAX_BATCH for b in plan.batches):
        raise ValueError(f"batch={list(plan.batches)}: sizes must be 1 to {MAX_BATCH}")
    if not 1 <= plan.acceptance_length <= plan.k + 1:
        raise ValueError(
            f"length={plan.length}: {plan.k} drafts give 1 to {plan.k + 1} tokens a "
            "step"
        )
    longest = max(plan.gpu, plan.wall, plan.trace + 8, plan.experts)
    tokens = plan.prompt + new_tokens(plan, longest) + 2 * k3_shapes.MAX_DRAFTS
    if plan.prompt < 1 or tokens > CONTEXT:
        raise ValueError(
            f"prompt={plan.prompt} with {longest} steps needs {tokens} tokens; the "
            f"context is {CONTEXT}: ask for fewer steps or a shorter prompt"
        )


def new_tokens(plan: Plan, steps: int) -> int:
    """Tokens that take about ``steps`` steps."""
    return math.ceil(steps * plan.acceptance_length)


def spec(plan: Plan, models: Path) -> EngineSpec:
    """The engine of a plan; its model directories are written under ``models``.

    Raises ValueError as :func:`check` does.
    """
    check(plan)
    drafted = plan.k > 0
    stem = f"L{plan.layers}-tp{plan.share}"
    target = k3_shapes.write(
        k3_shapes.target_config(plan.layers, plan.share, plan.block_size),
        models / f"k3-{stem}-b{plan.block_size}",
    )
    engine: dict[str, Any] = {
        "model": str(target),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": CONTEXT,
        "max_num_seqs": MAX_BATCH,
        # Also the rows of the start-up run, which sets the memory that is needed.
        "max_num_batched_tokens": CONTEXT,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": k3_shapes.cache_bytes(plan.layers, plan.tp),
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "worker_extension_cls": WORKER,
        "seed": 0,
    }
    if plan.target != "stock":
        ours = {"target": True, "ops": settings.every_op(plan.ops)}
        if plan.target == "drafter":
            ours |= {"draft_sampler": "ours", "draft_attention": "ours"}
        engine["additional_config"] = {settings.KEY: ours}
    if drafted:
        drafter = k3_shapes.write(
            k3_shapes.drafter_config(plan.layers, plan.share), models / f"draft-{stem}"
        )
        engine["speculative_config"] = {
            "method": "dspark",
            "model": str(drafter),
            "num_speculative_tokens": plan.k,
            "draft_sample_method": "probabilistic",
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": plan.acceptance_length,
        }
    environment: dict[str, str] = {}
    if plan.ranks:
        engine |= ranks.engine_arguments(plan.tp)
        environment = ranks.ENVIRONMENT
    options = {**asdict(plan), "batches": list(plan.batches)}
    return EngineSpec(plan.name, engine, JOB, options, environment)


def engines_at_once(plans: Sequence[Plan], memory: float = 125e9) -> int:
    """How many of the plans' engines fit on a GPU with ``memory`` bytes together; a
    rank holds as much as a share."""
    largest = max(
        k3_shapes.weight_bytes(plan.layers, plan.tp, plan.k > 0)
        + k3_shapes.cache_bytes(plan.layers, plan.tp)
        # Context, graphs, activations, and a layer of experts while it is repacked.
        + 3e9
        + 16e9 / plan.tp
        for plan in plans
    )
    return max(1, min(len(plans), int(memory // largest)))


def job(llm: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Measure every batch size of a :class:`Plan`; runs in the engine's process."""
    plan = Plan(**{**options, "batches": tuple(options["batches"])})
    vocabulary = k3_shapes.VOCAB // plan.share
    generate(llm, plan, 1, 16, vocabulary)
    points = [point(llm, plan, batch, vocabulary) for batch in plan.batches]
    return answer(llm, options, points)


def answer(
    llm: Any, options: dict[str, Any], points: list[dict[str, Any]]
) -> dict[str, Any]:
    """What a job gives: its points, and on what they were measured."""
    counters = llm.collective_rpc("k3_counters")
    return {
        "plan": options,
        "versions": _versions(),
        "gpu": llm.collective_rpc("k3_gpu")[0],
        "counters": counters[0],
        "counters_agree": all(of_rank == counters[0] for of_rank in counters),
        "points": points,
    }


def generate(llm: Any, plan: Plan, batch: int, steps: int, vocabulary: int) -> None:
    """Run ``batch`` requests for about ``steps`` steps each."""
    from vllm import SamplingParams, TokensPrompt

    rng = random.Random(batch)
    prompts = [
        TokensPrompt(
            prompt_token_ids=[rng.randrange(5, vocabulary) for _ in range(plan.prompt)]
        )
        for _ in range(batch)
    ]
    parameters = SamplingParams(
        temperature=1.0,
        max_tokens=new_tokens(plan, steps),
        ignore_eos=True,
        detokenize=False,
    )
    llm.generate(prompts, parameters, use_tqdm=False)


def recorded(
    llm: Any,
    plan: Plan,
    batch: int,
    vocabulary: int,
    mode: str,
    steps: int,
    **arguments: Any,
) -> list[dict[str, Any]]:
    """The steps of about ``steps`` that verify all rows of all ``batch`` requests.

    Arguments are those of `recorder.Recorder.start`.
    """
    given = json.dumps({"mode": mode, **arguments})
    llm.collective_rpc("k3_start", args=(given,))
    generate(llm, plan, batch, steps, vocabulary)
    taken = of_ranks([json.loads(s) for s in llm.collective_rpc("k3_take")])
    rows = batch * (plan.k + 1)
    return [s for s in taken if s["rows"] == rows and s["batch"] == batch]


def point(llm: Any, plan: Plan, batch: int, vocabulary: int) -> dict[str, Any]:
    """`summary` of one batch size, with the spin and the trace's path."""
    rows = batch * (plan.k + 1)
    record = functools.partial(recorded, llm, plan, batch, vocabulary)

    spin = SPIN_US
    while True:
        timed = record("gpu", plan.gpu, spin_us=spin)
        queued = statistics.mean(bool(s["queued"]) for s in timed) if timed else 0.0
        if queued >= QUEUED or spin >= SPIN_LIMIT_US:
            break
        spin *= 2
    trace = Path(plan.trace_dir) / f"{plan.name}-b{batch}.trace.json"
    traced = []
    if plan.trace:
        traced = record(
            "trace",
            plan.trace + 8,
            spin_us=2 * spin,
            rows=rows,
            trace_steps=plan.trace,
            trace_path=str(trace),
        )
    wall = record("wall", plan.wall) if plan.wall else []
    counted = record("experts", plan.experts) if plan.experts else []
    return summary(batch, rows, timed, wall, counted) | {
        "spin_us": spin,
        "trace": str(trace) if any(s["traced"] for s in traced) else None,
    }


def of_ranks(taken: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rank 0's steps; one was enqueued ahead if it was on every rank.

    Raises ValueError when the ranks did not run the same number of steps.
    """
    counts = [len(steps) for steps in taken]
    if len(set(counts)) > 1:
        raise ValueError(f"ranks recorded {counts} steps: they do not run in step")
    found = taken[0]
    for index, step in enumerate(found):
        if "queued" in step:
            step["queued"] = all(steps[index]["queued"] for steps in taken)
    return found


def summary(
    batch: int,
    rows: int,
    timed: Sequence[dict[str, Any]],
    wall: Sequence[dict[str, Any]],
    counted: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """One batch size in figures: medians, and spreads as interquartile ranges, in µs.

    ``queued`` is the share of steps that were enqueued ahead; only those are timed. The
    wall time of a step is from its beginning to the next step's. Distinct experts are
    means over the counted steps, by MoE layer and over all.

    Raises ValueError when no step was enqueued ahead.
    """
    used = [step for step in timed if step["queued"]]
    if not used:
        raise ValueError(
            f"none of {len(timed)} steps of {rows} rows was enqueued ahead of the GPU: "
            "the step waits for the GPU inside, or the spin limit is too short"
        )
    starts = [step["host_s"] for step in wall]
    gaps = [(b - a) * 1e6 for a, b in itertools.pairwise(starts)]
    heard = [step["distinct"] for step in counted if step.get("distinct")]
    by_layer = [statistics.mean(layer) for layer in zip(*heard, strict=True)]
    found: dict[str, Any] = {
        "batch": batch,
        "rows": rows,
        "executed_rows": max(step["executed_rows"] for step in used),
        "graph": all(step["graph"] for step in used),
        "steps": len(used),
        "queued": len(used) / len(timed),
        "distinct_experts": statistics.mean(by_layer) if by_layer else None,
        "distinct_by_layer": by_layer,
        "wall_us": statistics.median(gaps) if gaps else None,
        "wall_spread": _spread(gaps),
    }
    for name in ("step", "forward", "draft"):
        values = [s[f"{name}_us"] for s in used if s[f"{name}_us"] is not None]
        found[f"{name}_us"] = statistics.median(values) if values else None
        found[f"{name}_spread"] = _spread(values)
    return found


def _spread(values: Sequence[float]) -> float | None:
    if len(values) < 4:
        return None
    quarters = statistics.quantiles(values, n=4)
    return quarters[2] - quarters[0]


def _versions() -> dict[str, str]:
    from experiments.bench.record import versions

    return versions()
