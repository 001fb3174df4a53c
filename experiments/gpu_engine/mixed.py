# SPDX-License-Identifier: Apache-2.0
"""The job behind `experiments.adaptive_times`: the same requests again, timed."""

from __future__ import annotations

import time
from typing import Any

from experiments.engine import spec_counters

JOB = "experiments.gpu_engine.mixed:job"


def job(llm: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Greedy text of ``prompts``, all at once, ``repeats`` + 1 times.

    Keys of ``options``: prompts, lists of ids; max_tokens; repeats.

    Returns:
        ``tokens`` of each prompt; ``seconds`` of each run but the first; of all runs
        ``verify_steps`` of a request, ``draft_tokens`` and ``accepted_tokens``;
        ``same`` if every run gave the same tokens.
    """
    import torch
    from vllm import SamplingParams, TokensPrompt

    asked = [TokensPrompt(prompt_token_ids=ids) for ids in options["prompts"]]
    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=options["max_tokens"],
        ignore_eos=True,
        detokenize=False,
    )
    texts, seconds = [], []
    for _ in range(options["repeats"] + 1):
        begin = time.perf_counter()
        found = llm.generate(asked, parameters, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
        texts.append([list(one.outputs[0].token_ids) for one in found])
    counted = spec_counters(llm.get_metrics())
    return {
        "tokens": texts[0],
        "same": all(text == texts[0] for text in texts),
        "seconds": seconds[1:],
        "gpu": torch.cuda.get_device_name(),
        **{
            name: counted[name][0]
            for name in ("verify_steps", "draft_tokens", "accepted_tokens")
        },
    }
