# SPDX-License-Identifier: Apache-2.0
"""The suite's engines: tiny-k3 with and without speculation, in every way it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dspark_k3 import settings
from experiments.corpora import KINDS, held_out_bytes, held_out_prompts
from experiments.gpu_engine import tiny_k3
from experiments.gpu_engine.fleet import EngineSpec
from experiments.gpu_engine.tiny_k3 import MAX_BATCH, MAX_LEN
from tests.dspark_k3.suite import jobs

TARGET, DRAFTER = tiny_k3.TARGET, tiny_k3.DRAFTER
DRAFTS = range(1, 8)
#: New tokens of the batch groups: more than a cache block, so that every request
#: crosses an edge while it speculates.
LONG, SHORT = 200, 48
LENGTHS = (2, 7, 33, 64, 100, 127, 128, 129, 143, 160, 255, 300)
CHUNK = 96
#: Requests that fit the cache of a preemption case when they begin.
ADMITTED = 4
ACCEPTANCE_PROMPTS, ACCEPTANCE_TOKENS = 48, 96

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN": "512",
}


@dataclass(frozen=True)
class Case:
    """An engine and what it does.

    Attributes:
        name: of the case; "plain-..." cases are what the others are held against.
        k: drafts; 0 is plain decoding.
        plain: the case whose tokens this one must give, "" for a plain one.
        adaptive: draft lengths are trimmed by confidence.
        eager: without CUDA graphs.
        stock: every op of the executor is vLLM's, and so are the slots.
        layout: of KDA's states.
        ops: of our target, beside its defaults; all are named, so that what has no
            kernel is an error and not recorded as ours.
        drafter: what draws the drafts, and what attends in the drafter's layers.
        asked: our target is asked for at all.
        engine: further arguments of vLLM's LLM.
        options: of `jobs.job`.
        env: environment variables.
    """

    name: str
    k: int = 0
    plain: str = ""
    adaptive: bool = False
    eager: bool = False
    stock: bool = False
    layout: settings.Layout = "snapshot"
    ops: Mapping[str, str] = field(default_factory=dict)
    drafter: settings.Side = "stock"
    asked: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def all_ours(self) -> bool:
        """Whether every op is ours: then a row's bits are its own request's only."""
        sides = settings.every_op(self.ops).values()
        return self.asked and not self.stock and "stock" not in sides

    def as_stock(self) -> Case:
        """The same case with every op stock, held against the stock plain case."""
        plain = f"{self.plain}-stock" if self.plain else ""
        return replace(self, name=f"{self.name}-stock", plain=plain, stock=True)


def spec(case: Case) -> EngineSpec:
    """The engine of a case."""
    engine = tiny_k3.engine() | {"enforce_eager": case.eager, "max_logprobs": -1}
    if case.asked:
        ours: dict[str, Any] = {"target": True}
        if case.stock:
            ours["ops"] = dict.fromkeys(settings.OPS, "stock")
        else:
            if case.layout != "snapshot":
                ours["kda_layout"] = case.layout
            ours["ops"] = settings.every_op(case.ops)
        if case.drafter != "stock":
            ours |= {"draft_sampler": case.drafter, "draft_attention": case.drafter}
        engine["additional_config"] = {settings.KEY: ours}
    if case.k:
        engine["speculative_config"] = tiny_k3.speculation(case.k, case.adaptive)
    return EngineSpec(
        case.name,
        engine | case.engine,
        jobs.JOB,
        case.options,
        {**ENVIRONMENT, **case.env},
    )


def prompts(count: int, start: int) -> list[list[int]]:
    """``count`` held-out prompts of different lengths, bytes as tokens."""
    text = held_out_bytes("stdlib")
    return [
        list(text[start + 2000 * i :][: LENGTHS[i % len(LENGTHS)]])
        for i in range(count)
    ]


def groups(logprobs: bool = False, values: bool = False) -> dict[str, Any]:
    """Batch 1 (one after the other), 3 and 8, and more requests than fit at once.

    With ``values`` the groups in which no prompt comes beside a decode return logprobs
    to compare: steps with prompts are vLLM's, and so are the bits of all their rows.
    """
    extra = {"logprobs": 2} if logprobs else {}
    own = {"logprobs": 2, "values": True} if values else extra
    return {
        "batch1": {
            "prompts": prompts(6, 1000),
            "max_tokens": SHORT,
            "at_once": False,
            **own,
        },
        "batch3": {"prompts": prompts(3, 30000)[::-1], "max_tokens": LONG, **own},
        "batch8": {"prompts": prompts(8, 50000), "max_tokens": LONG, **own},
        # More than run at once; the last is one token, which vLLM pads with drafts.
        "queue": {
            "prompts": [*prompts(12, 80000), prompts(1, 110000)[0][:1]],
            "max_tokens": SHORT,
            **extra,
        },
    }


def sampled_groups() -> dict[str, Any]:
    """Held-out prompts by kind of text, for acceptance at temperature 1."""
    return {
        kind: {
            "prompts": held_out_prompts(kind, ACCEPTANCE_PROMPTS),
            "max_tokens": ACCEPTANCE_TOKENS,
            "seed": 1000,
        }
        for kind in KINDS
    }


def first_cases() -> list[Case]:
    """Everything whose prompts do not depend on the cache's layout."""
    plain_options = {"groups": groups(logprobs=True, values=True), "abort": ""}
    vectors = {"prompts": prompts(4, 120000)[1:], "max_tokens": 24}
    spoken = {"groups": groups(values=True)}
    last = DRAFTS[-1]
    more: dict[str, Any] = {
        "abort": "batch8",
        "sampled": sampled_groups(),
        "geometry": True,
    }
    cases = [
        Case("plain-graph", options={**plain_options, "vectors": vectors}),
        Case("plain-eager", eager=True, options=plain_options),
    ]
    for k in DRAFTS:
        options = {**spoken, **(more if k == last else {})}
        cases += [
            Case(f"fixed-graph-k{k}", k, "plain-graph", options=options),
            Case(
                f"adaptive-graph-k{k}", k, "plain-graph", adaptive=True, options=options
            ),
            Case(f"fixed-eager-k{k}", k, "plain-eager", eager=True, options=spoken),
        ]
    cases += [
        Case(
            f"{kind}-drafter-k{last}",
            last,
            "plain-graph",
            adaptive=kind == "adaptive",
            drafter="ours",
            options={**spoken, **more},
        )
        for kind in ("fixed", "adaptive")
    ]
    # Chunks of prompts come beside decodes in every group.
    chunked = {"max_num_batched_tokens": CHUNK}
    spoken = {"groups": groups()}
    cases += [
        Case(
            "plain-chunked",
            engine=chunked,
            options={"groups": groups(logprobs=True), "abort": ""},
        ),
        Case("chunked-k7", 7, "plain-chunked", engine=chunked, options=spoken),
        Case(
            "chunked-adaptive-k7",
            7,
            "plain-chunked",
            adaptive=True,
            engine=chunked,
            options=spoken,
        ),
    ]
    return cases


def preemption_cases(geometry: dict[str, Any], k: int = 7) -> list[Case]:
    """Cases whose cache admits a few requests and cannot let them all grow.

    Args:
        geometry: `jobs.geometry` of an engine with ``k`` drafts.
    """
    block = max(geometry["attention"])
    length = max(1, min(block - 12, MAX_LEN - LONG - 16))
    text = held_out_bytes("stdlib")
    group = {
        "prompts": [list(text[3000 * i :][:length]) for i in range(MAX_BATCH)],
        "max_tokens": LONG,
    }
    start = geometry["states"] + sum(-(-length // b) for b in geometry["attention"])
    grown = geometry["states"] + sum(
        -(-(length + LONG + k) // b) for b in geometry["attention"]
    )
    # Block 0 is vLLM's null block.
    engine = {
        "num_gpu_blocks_override": 1 + ADMITTED * start + (grown - start),
        "max_model_len": length + LONG + 16,
    }
    options = {"groups": {"preempted": group}}
    logged = {"groups": {"preempted": {**group, "logprobs": 2}}}
    roomy = {"max_model_len": engine["max_model_len"]}
    return [
        Case("plain-preempted", engine=roomy, options=logged),
        Case(f"preempted-k{k}", k, "plain-preempted", engine=engine, options=options),
        Case(
            f"preempted-adaptive-k{k}",
            k,
            "plain-preempted",
            adaptive=True,
            engine=engine,
            options=options,
        ),
    ]


def unasked_cases() -> list[Case]:
    """Stock vLLM with our plug-in loaded and not asked for, and without it."""
    timed = {"groups": groups(), "timed": "batch8", "repeats": 5}
    return [
        Case(
            f"{name}-k{k}",
            k,
            asked=False,
            options=timed,
            env={} if name == "installed" else {"VLLM_PLUGINS": ""},
        )
        for k in (0, 7)
        for name in ("installed", "absent")
    ]
