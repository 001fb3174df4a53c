# SPDX-License-Identifier: Apache-2.0
"""The engines of the small part: tiny-k3, or its shape with more heads, at TP N."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dspark_k3 import settings
from dspark_k3.target.projections import without_kernel
from experiments import k3_shapes
from experiments.gpu_engine import measure, ranks
from experiments.gpu_engine.fleet import EngineSpec
from tests.dspark_k3.suite import cases
from tests.dspark_k3.suite.cases import Case
from tests.dspark_k3.tensor_parallel.watch import WATCH

JOB = "tests.dspark_k3.tensor_parallel.jobs:job"

#: Seconds after which vLLM gives a step up; its default is 300.
STEP_LIMIT_S, FAULT_STEP_LIMIT_S = 60, 15
#: A step's bound, then vLLM's grace and two signals for its workers.
FAULT_LIMIT_S = 55.0
STEPS = 2000
#: What is judged at TP 2.
JUDGED = (
    "tp1-plain",
    "fixed-k1",
    "fixed-k4",
    "fixed-k7",
    "fixed-eager-k7",
    "adaptive-k7",
    "adaptive-k7 lengths same",
    "adaptive-k7 lengths drift",
    "killed-k4 kill",
    "stopped-k7 stop",
    *(f"{of}-L4-ranks2-k{k}" for of in measure.TARGETS for k in (0, 7)),
)
DRIFT = 1e-2
#: Of a group of one width, what grows with the number of ranks.
_GROWING = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_GROWING_MOE = ("moe_intermediate_size",)


@dataclass(frozen=True)
class Models:
    """Target and drafter folders.

    Attributes:
        trained: they have weights; else vLLM makes dummy ones.
    """

    target: Path
    drafter: Path
    trained: bool


def divides(config: dict[str, Any], tp: int) -> bool:
    """Whether ``tp`` divides the heads of a target's or drafter's configuration."""
    heads = [config["num_attention_heads"]]
    if "linear_attn_config" in config:
        heads.append(config["linear_attn_config"]["num_heads"])
    return all(count % tp == 0 for count in heads)


def served(config: dict[str, Any], tp: int) -> bool:
    """Whether the executor has whole heads and a kernel for every projection."""
    text = SimpleNamespace(**config)
    return divides(config, tp) and not without_kernel(text, tp, settings.OPS)


def grown(config: dict[str, Any], tp: int) -> dict[str, Any]:
    """``config`` with a rank's share at ``tp`` that of the original at TP 2."""
    if tp % 2:
        raise ValueError(f"tp={tp}: must be even")
    names = [n for n in (*_GROWING, *_GROWING_MOE) if n in config]
    found = config | {name: config[name] * tp // 2 for name in names}
    if linear := config.get("linear_attn_config"):
        heads = linear["num_heads"] * tp // 2
        found["linear_attn_config"] = linear | {"num_heads": heads}
    return found


def models(tp: int, out: Path) -> Models:
    """tiny-k3 where its heads allow ``tp``, else its shape with as many as needed.

    The second is written under ``out``.
    """
    target, drafter = (
        json.loads((folder / "config.json").read_text())
        for folder in (cases.TARGET, cases.DRAFTER)
    )
    if served(target, tp) and divides(drafter, tp):
        return Models(cases.TARGET, cases.DRAFTER, trained=True)
    return Models(
        k3_shapes.write(grown(target, tp), out / "models" / f"small-tp{tp}"),
        k3_shapes.write(grown(drafter, tp), out / "models" / f"small-draft-tp{tp}"),
        trained=False,
    )


def small_cases(trained: bool, steps: int = STEPS) -> list[Case]:
    """In the order of their turns; "tp1-" cases run on one GPU."""
    spoken = {"groups": cases.groups()}
    plain = {"groups": cases.groups(logprobs=True)}
    few = {name: cases.groups()[name] for name in ("batch3", "queue")}
    few_plain = {name: plain["groups"][name] for name in few}
    load = {"prompts": cases.prompts(8, 50000), "max_tokens": 600}
    lengths = {
        "group": {"prompts": cases.prompts(13, 150000), "max_tokens": 400},
        "steps": steps,
        "drift": DRIFT,
    }
    found = [Case("tp1-plain", plain="plain", options=plain)] if trained else []
    return [
        *found,
        Case("plain", options=plain),
        Case("fixed-k1", 1, "plain", options=spoken),
        Case("plain-eager", eager=True, options={"groups": few_plain}),
        Case("fixed-eager-k7", 7, "plain-eager", eager=True, options={"groups": few}),
        Case(
            "adaptive-k7",
            7,
            "plain",
            adaptive=True,
            options={**spoken, "lengths": lengths},
            env={"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(FAULT_STEP_LIMIT_S)},
        ),
        Case("fixed-k4", 4, "plain", options=spoken),
        Case("fixed-k7", 7, "plain", options=spoken),
        _faulty("killed-k4", 4, "kill", load),
        _faulty("stopped-k7", 7, "stop", load),
    ]


def _faulty(name: str, k: int, kind: str, load: dict[str, Any]) -> Case:
    """Its engine has a process of its own, as served."""
    fault = {"kind": kind, "group": load, "limit_s": FAULT_LIMIT_S}
    return Case(
        name,
        k,
        options={"groups": {}, "fault": fault},
        env={
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(FAULT_STEP_LIMIT_S),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        },
    )


def spec(case: Case, tp: int, of: Models) -> EngineSpec:
    """The engine of a case; every rank is a process of its own, as served.

    The scheduler of an engine whose texts are compared is in this process: requests
    that come one by one to an engine that runs already are prefilled in other company
    each time, and vLLM's prompt path is not the same for every company (H200, TP 2: up
    to 2 of 30 texts left plain decoding's at a logit gap of 0).
    """
    made = cases.spec(case)
    group = 1 if case.name.startswith("tp1-") else tp
    engine = made.engine | {
        "model": str(of.target),
        "worker_extension_cls": WATCH,
        **ranks.engine_arguments(group),
    }
    if case.k:
        speculative = {**engine["speculative_config"], "model": str(of.drafter)}
        engine["speculative_config"] = speculative
    if not of.trained:
        engine |= {"load_format": "dummy", "skip_tokenizer_init": True}
    env = {
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_LIMIT_S),
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "3",
        **ranks.ENVIRONMENT,
        **made.env,
    }
    return replace(made, engine=engine, job=JOB, env=env)


def wide_plans(tp: int, layers: int, work: Path, steps: int = 24) -> list[measure.Plan]:
    """K3's widths on ``tp`` GPUs: k = 7 first, the targets side by side."""
    found = [
        measure.Plan(
            target=target,
            layers=layers,
            tp=tp,
            k=k,
            batches=(1, 8),
            trace_dir=str(work),
            gpu=steps,
            wall=60,
            trace=4,
            experts=0,
            ranks=True,
        )
        for k in (7, 0)
        for target in measure.TARGETS
    ]
    for plan in found:
        measure.check(plan)
    return found
