# SPDX-License-Identifier: Apache-2.0
"""The job behind the sweep of acceptance lengths: one engine, every length in turn.

For each batch size first the GPU's time of a step, as `experiments.gpu_engine.measure`
takes it; then, for each length, that time again and decoding as the engine does it by
itself: its own process, asynchronous scheduling, no spin. vLLM's synthetic rejection is
given its rates by position while the engine runs, so that a length costs no start.

A length L is that of the geometric curve with AL(7) = L: every draft is accepted with
the same probability if those before it were. With fewer drafts the first rates of the
same curve hold, so an engine with k = 3 sees the same drafter as one with 7.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import k3_shapes
from experiments.acceptance import AcceptanceCurve
from experiments.engine import spec_counters
from experiments.gpu_engine import measure
from experiments.gpu_engine.fleet import EngineSpec
from experiments.gpu_engine.measure import Plan

JOB = "experiments.gpu_engine.lengths:job"


def curve(length: float) -> AcceptanceCurve:
    """Of the drafter with AL(7) = ``length``, 1 to 8.

    Raises ValueError for any other length.
    """
    return AcceptanceCurve.geometric(length, k3_shapes.MAX_DRAFTS)


def at_length(plan: Plan, length: float) -> Plan:
    """The plan with tokens as many as its drafts give at a length of `curve`."""
    return replace(plan, length=curve(length).length(plan.k))


def spec(plan: Plan, models: Path, lengths: Sequence[float]) -> EngineSpec:
    """The engine of a plan that goes through ``lengths``.

    Raises ValueError as `measure.check` does, also for a length that needs more tokens
    than the context has, and as `curve`.
    """
    for length in lengths:
        measure.check(at_length(plan, length))
    found = measure.spec(plan, models)
    return replace(found, job=JOB, options={**found.options, "lengths": [*lengths]})


def job(llm: Any, options: dict[str, Any]) -> dict[str, Any]:
    """`measure.answer` whose points have ``lengths`` too; in the engine's process."""
    given = {**options, "batches": tuple(options["batches"])}
    lengths = given.pop("lengths")
    plan = Plan(**given)
    vocabulary = k3_shapes.VOCAB // plan.share
    timing = replace(plan, wall=0, trace=0)
    # vLLM's own rates at the plan's length, with which the engine has started.
    own = AcceptanceCurve.minimum_variance(plan.acceptance_length, max(plan.k, 1))
    measure.generate(llm, plan, 1, 16, vocabulary)
    points = []
    for batch in plan.batches:
        accept(llm, plan, own)
        point = measure.point(llm, timing, batch, vocabulary)
        # Without drafts all lengths are one.
        at = [
            decode(
                llm,
                at_length(plan, length),
                batch,
                vocabulary,
                length,
                point["spin_us"],
            )
            for length in (lengths if plan.k else lengths[:1])
        ]
        points.append(point | {"lengths": at})
    return measure.answer(llm, options, points)


def accept(llm: Any, plan: Plan, given: AcceptanceCurve) -> None:
    """Have the engine accept the plan's drafts at a curve's first rates."""
    if plan.k:
        rates = json.dumps(given.conditional[: plan.k])
        llm.collective_rpc("k3_accept", args=(rates,))


def decode(
    llm: Any, plan: Plan, batch: int, vocabulary: int, length: float, spin_us: float
) -> dict[str, Any]:
    """Steps and tokens of ``batch`` requests at one length.

    Returns:
        ``length``; ``gpu_us``, the mean GPU time of a step that was enqueued ahead;
        ``steps`` and ``wall_us``, of the engine by itself the mean time from the
        beginning of one to that of the next, and its ``spread``, the interquartile
        range; ``acceptance_length`` there as vLLM counted it, tokens a step and
        request; ``drafts``, proposed a step.

    Raises:
        ValueError: fewer than three steps were of all requests, or none was enqueued
            ahead.
    """
    accept(llm, plan, curve(length))
    record = functools.partial(measure.recorded, llm, plan, batch, vocabulary)
    timed = [s for s in record("gpu", plan.gpu, spin_us=spin_us) if s["queued"]]
    before = spec_counters(llm.get_metrics())
    steps = record("wall", plan.wall)
    after = spec_counters(llm.get_metrics())
    verified, proposed, accepted = (
        after[name][0] - before[name][0]
        for name in ("verify_steps", "draft_tokens", "accepted_tokens")
    )
    starts = [step["host_s"] for step in steps]
    gaps = [(b - a) * 1e6 for a, b in itertools.pairwise(starts)]
    if len(gaps) < 2 or not timed:
        raise ValueError(
            f"{len(steps)} steps of {batch} requests at length {length:g}, "
            f"{len(timed)} enqueued ahead: too few to time; ask for more"
        )
    quarters = statistics.quantiles(gaps, n=4)
    return {
        "length": length,
        "gpu_us": statistics.fmean(step["step_us"] for step in timed),
        "steps": len(steps),
        "wall_us": statistics.fmean(gaps),
        "spread": quarters[2] - quarters[0],
        "acceptance_length": 1 + accepted / verified if verified else 1.0,
        "drafts": proposed / verified if verified else 0.0,
    }
