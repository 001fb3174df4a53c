# SPDX-License-Identifier: Apache-2.0
"""What an engine of the suite does; runs in the engine's own process.

Every answer is JSON. Groups are lists of prompts that are submitted together.
"""

from __future__ import annotations

import sys
import time
from typing import Any

JOB = "tests.dspark_k3.suite.jobs:job"


def job(llm: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Generate for every group, then what else ``options`` asks for.

    Keys of ``options``: groups {name: arguments of `greedy`}; abort, the name of a
    group; sampled {name: {prompts, max_tokens, seed}}; vectors {prompts,
    max_tokens}; geometry (true); repeats, timed runs of the group ``timed``.
    """
    groups = options.get("groups", {})
    found: dict[str, Any] = {
        "groups": {name: greedy(llm, **group) for name, group in groups.items()},
        "block_size": int(llm.llm_engine.vllm_config.cache_config.block_size),
        "sampled": {},
    }
    found["preemptions"] = metric(llm, "vllm:num_preemptions")
    if name := options.get("abort"):
        found["abort"] = abort(llm, groups[name])
    for name, group in options.get("sampled", {}).items():
        found["sampled"][name] = sampled(llm, **group)
    if vectors := options.get("vectors"):
        found["vectors"] = logprob_vectors(llm, **vectors)
    if repeats := options.get("repeats"):
        found["seconds"] = timed(llm, groups[options["timed"]], repeats)
    if options.get("geometry"):
        found["geometry"] = geometry(llm)
    found["counters"] = counters(llm)
    found["target_modules"] = sorted(
        name for name in sys.modules if name.startswith("dspark_k3.target.")
    )
    return found


def counters(llm: Any) -> dict[str, int]:
    """Steps by who ran them; empty where our target is not asked for."""
    return dict(llm.apply_model(_counters)[0])


def _counters(model: Any) -> dict[str, int]:
    read = getattr(model, "dspark_k3_counters", None)
    return dict(read()) if read is not None else {}


def metric(llm: Any, name: str) -> int:
    """The value of one of vLLM's counters."""
    return int(sum(m.value for m in llm.get_metrics() if m.name == name))


def spec_counts(llm: Any) -> dict[str, Any]:
    """Verify steps, drafted and accepted tokens so far."""
    from experiments.engine import spec_counters

    return spec_counters(llm.get_metrics())


def greedy(
    llm: Any,
    prompts: list[list[int]],
    max_tokens: int,
    logprobs: int | None = None,
    at_once: bool = True,
    values: bool = False,
) -> dict[str, Any]:
    """Greedy tokens by prompt; with logprobs also [first, second, gap] a position, and
    with ``values`` the ``logprobs`` largest logprobs there as they are.

    ``at_once`` false submits the prompts one after the other.
    """
    from vllm import SamplingParams, TokensPrompt

    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
    )
    asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    before = spec_counts(llm)
    if at_once:
        outputs = llm.generate(asked, parameters, use_tqdm=False)
    else:
        outputs = [llm.generate([one], parameters, use_tqdm=False)[0] for one in asked]
    found: dict[str, Any] = {
        "tokens": [list(item.outputs[0].token_ids) for item in outputs],
        "speculation": difference(spec_counts(llm), before),
    }
    if logprobs:
        found["tops"] = [
            [top_two(position) for position in item.outputs[0].logprobs]
            for item in outputs
        ]
    if values:
        assert logprobs, "values of no logprobs"
        found["values"] = [
            [largest(position, logprobs) for position in item.outputs[0].logprobs]
            for item in outputs
        ]
    return found


def largest(position: Any, count: int) -> list[float]:
    """The ``count`` largest logprobs of a position. Tokens that tie have one value, so
    which of them vLLM lists does not show; a float32 is the same in JSON."""
    ranked = sorted((float(of.logprob) for of in position.values()), reverse=True)
    return ranked[:count]


def top_two(position: Any) -> list[float]:
    """[token, token, gap]: the two likeliest and the difference of their logprobs."""
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    (first, a), (second, b) = ranked[:2]
    return [int(first), int(second), float(a.logprob - b.logprob)]


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Counts of what ran between two readings."""
    from experiments.engine import _difference

    return dict(_difference(after, before))


def sampled(
    llm: Any, prompts: list[list[int]], max_tokens: int, seed: int
) -> dict[str, Any]:
    """Speculation's counts at temperature 1; prompt i has the seed ``seed`` + i."""
    from vllm import SamplingParams, TokensPrompt

    parameters = [
        SamplingParams(
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            seed=seed + index,
        )
        for index in range(len(prompts))
    ]
    before = spec_counts(llm)
    llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
        parameters,
        use_tqdm=False,
    )
    return difference(spec_counts(llm), before)


def logprob_vectors(
    llm: Any, prompts: list[list[int]], max_tokens: int
) -> list[dict[str, Any]]:
    """Greedy tokens and the whole vocabulary's logprobs at each position."""
    from vllm import SamplingParams, TokensPrompt

    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
    )
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
        parameters,
        use_tqdm=False,
    )
    return [
        {
            "prompt": prompt,
            "tokens": list(item.outputs[0].token_ids),
            "logprobs": [
                [position[token].logprob for token in sorted(position)]
                for position in item.outputs[0].logprobs
            ],
        }
        for prompt, item in zip(prompts, outputs, strict=True)
    ]


def abort(llm: Any, group: dict[str, Any]) -> dict[str, Any]:
    """Abort every third request of a group in flight.

    Returns the tokens of the others by index, how many tokens the aborted ones had, and
    a fresh run of the whole group afterwards.
    """
    from vllm import SamplingParams, TokensPrompt

    engine = llm.llm_engine
    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=group["max_tokens"],
        ignore_eos=True,
        detokenize=False,
    )
    ids = [f"abort-{index}" for index in range(len(group["prompts"]))]
    for name, prompt in zip(ids, group["prompts"], strict=True):
        engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), parameters)
    doomed = ids[::3]
    tokens: dict[str, list[int]] = {name: [] for name in ids}
    aborted = False
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        if not aborted and all(len(tokens[name]) >= 5 for name in doomed):
            engine.abort_request(doomed)
            aborted = True
    return {
        "aborted": {name: len(tokens[name]) for name in doomed},
        "survivors": {
            str(index): tokens[name]
            for index, name in enumerate(ids)
            if name not in doomed
        },
        "afterwards": greedy(llm, group["prompts"], group["max_tokens"])["tokens"],
    }


def timed(llm: Any, group: dict[str, Any], repeats: int) -> list[float]:
    """Seconds of each of ``repeats`` runs of a group."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        greedy(llm, group["prompts"], group["max_tokens"])
        seconds.append(time.perf_counter() - started)
    return seconds


def geometry(llm: Any) -> dict[str, Any]:
    """Cache blocks a request takes: block sizes of attention, state blocks in all."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    attention, states = [], 0
    for group in scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if hasattr(spec, "num_speculative_blocks"):
            states += 1 + spec.num_speculative_blocks
        else:
            attention.append(spec.block_size)
    return {
        "attention": attention,
        "states": states,
        "blocks": scheduler.kv_cache_config.num_blocks,
    }
