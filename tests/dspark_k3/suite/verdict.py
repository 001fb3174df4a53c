# SPDX-License-Identifier: Apache-2.0
"""Verdicts: equal tokens, or where they differ first and how near the tie was; equal
logprobs, to the bit, where every op is ours."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.dspark_k3.suite.cases import Case

#: A tie that bf16 logits can break: two bf16 steps of a logit between 8 and 16.
TIE = 0.125
#: Bounds on the distance to the reference, whose products round to bf16 elsewhere.
MAX_MEAN_KL, MAX_TOP_DIFFERENCE = 5e-3, 0.25
MIN_LENGTH, MAX_LOSS = 2.5, 0.05
MAX_SLOWER = 0.05


def compare(name: str, plain: Mapping[str, Any], fast: Mapping[str, Any]) -> list[Any]:
    """First differences of a group, one a prompt that differs.

    Each is {group, prompt, position, plain, fast, gap}; the gap is that between the
    plain run's two likeliest tokens there, None if it was not recorded.
    """
    found = []
    pairs = zip(plain["tokens"], fast["tokens"], strict=True)
    for index, (slow, quick) in enumerate(pairs):
        if slow == quick:
            continue
        at = next(
            (i for i, (a, b) in enumerate(zip(slow, quick, strict=False)) if a != b),
            min(len(slow), len(quick)),
        )
        tops = plain.get("tops")
        found.append(
            {
                "group": name,
                "prompt": index,
                "position": at,
                "plain": slow[at] if at < len(slow) else None,
                "fast": quick[at] if at < len(quick) else None,
                "gap": tops[index][at][2] if tops and at < len(slow) else None,
            }
        )
    return found


def exact(plain: Mapping[str, Any], fast: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the logprobs of two runs' groups are the same floats (`jobs.largest`).

    The first position of a prompt is its prefill's, which is vLLM's: where it differs,
    the texts begin from different numbers and are not compared.

    Returns:
        prompts that are compared, prompts ``apart`` from the first position on, and
        {group, prompt, position, by} of those that differ first there, by so much.
    """
    prompts, apart, differ = 0, 0, []
    for name, group in fast.items():
        if "values" not in group:
            continue
        pairs = zip(plain[name]["values"], group["values"], strict=True)
        for index, (slow, quick) in enumerate(pairs):
            if slow[0] != quick[0]:
                apart += 1
                continue
            prompts += 1
            steps = enumerate(zip(slow, quick, strict=True))
            at = next((i for i, (a, b) in steps if a != b), None)
            if at is not None:
                by = max(abs(a - b) for a, b in zip(slow[at], quick[at], strict=True))
                differ.append(
                    {"group": name, "prompt": index, "position": at, "by": by}
                )
    return {"prompts": prompts, "apart": apart, "differ": differ}


def judge(
    case: Case, plain: Mapping[str, Any], result: Mapping[str, Any]
) -> dict[str, Any]:
    """The verdict of one speculating case against its plain one."""
    differences = []
    lengths = {}
    for name, group in result["groups"].items():
        differences += compare(name, plain["groups"][name], group)
        counts = group["speculation"]
        steps = counts["verify_steps"]
        lengths[name] = 1 + counts["accepted_tokens"] / steps if steps else 1.0
    if "abort" in result:
        differences += compare_abort(plain, result["abort"])
    counters = result["counters"]
    verdict: dict[str, Any] = {
        "case": case.name,
        "ops": "stock" if case.stock else "ours",
        "equal": not differences,
        "differences": differences,
        "acceptance_length": lengths,
        "logits": exact(plain["groups"], result["groups"]),
        # Stock ops promise no bits.
        "exact_wanted": case.all_ours,
        "speculated": all(length > 1 for length in lengths.values()),
        "counters": counters,
        "executor_ran": counters.get("ours", 0) > 0,
        "edges_crossed": edges(case, result["block_size"]),
        "preemptions": result["preemptions"],
    }
    if "abort" in result:
        aborted = result["abort"]["aborted"].values()
        longest = len(plain["groups"]["batch8"]["tokens"][0])
        verdict["abort_in_flight"] = all(0 < n < longest for n in aborted)
    return verdict


def joined(beside: Mapping[str, Any], alone: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict of a case that ran beside others and then alone: what the second run
    says, and no difference of the first is forgotten."""
    differences = [*beside["differences"], *alone["differences"]]
    differ = [*beside["logits"]["differ"], *alone["logits"]["differ"]]
    return {
        **alone,
        "differences": differences,
        "equal": not differences,
        "logits": {**alone["logits"], "differ": differ},
    }


def edges(case: Case, block: int) -> int:
    """Requests of the case whose generated tokens cross a cache-block edge."""
    return sum(
        len(prompt) // block != (len(prompt) + group["max_tokens"] - 1) // block
        for group in case.options["groups"].values()
        for prompt in group["prompts"]
    )


def compare_abort(plain: Mapping[str, Any], found: Mapping[str, Any]) -> list[Any]:
    """Differences of those that were not aborted, and of a run afterwards."""
    kept = sorted(int(index) for index in found["survivors"])
    wanted = {
        key: [plain["groups"]["batch8"][key][index] for index in kept]
        for key in ("tokens", "tops")
    }
    survivors = {"tokens": [found["survivors"][str(index)] for index in kept]}
    afterwards = {"tokens": found["afterwards"]}
    return [
        *compare("survivors of the abort", wanted, survivors),
        *compare("after the abort", plain["groups"]["batch8"], afterwards),
    ]


def acceptance(fixed: Mapping[str, Any], adaptive: Mapping[str, Any]) -> dict[str, Any]:
    """Mean acceptance lengths at temperature 1, and what trimming loses of them."""
    lengths = {
        name: {
            kind: 1 + counts["accepted_tokens"] / max(counts["verify_steps"], 1)
            for kind, counts in run["sampled"].items()
        }
        for name, run in (("fixed", fixed), ("adaptive", adaptive))
    }
    drafted = {
        name: {
            kind: counts["draft_tokens"] / max(counts["verify_steps"], 1)
            for kind, counts in run["sampled"].items()
        }
        for name, run in (("fixed", fixed), ("adaptive", adaptive))
    }
    means = {name: statistics.mean(of.values()) for name, of in lengths.items()}
    loss = 1 - means["adaptive"] / means["fixed"]
    return {
        "lengths": lengths,
        "drafts_a_step": drafted,
        "means": means,
        "loss": loss,
        "long_enough": means["fixed"] > MIN_LENGTH,
        "little_lost": loss < MAX_LOSS,
    }


def logits(found: Sequence[Mapping[str, Any]], reference: Any) -> dict[str, Any]:
    """The engine's logprobs against the reference's over the same tokens.

    Args:
        found: `jobs.logprob_vectors`.
        reference: logits [T, vocab] of a token list, as a torch tensor.
    """
    import torch

    divergence, top, agree, near = [], 0.0, 0, 0
    positions = 0
    for item in found:
        ids = [*item["prompt"], *item["tokens"]]
        first = len(item["prompt"]) - 1
        engine = torch.tensor(item["logprobs"], dtype=torch.float64)
        wanted = reference(ids)[first : first + len(item["tokens"])]
        wanted = wanted.double()[:, : engine.shape[1]].log_softmax(-1)
        divergence += (wanted.exp() * (wanted - engine)).sum(-1).tolist()
        best = wanted.argmax(-1, keepdim=True)
        top = max(top, float((wanted - engine).gather(1, best).abs().max()))
        same = engine.argmax(-1) == best[:, 0]
        two = wanted.topk(2).values
        agree += int(same.sum())
        near += int((~same & (two[:, 0] - two[:, 1] < TIE)).sum())
        positions += len(same)
    mean = statistics.mean(divergence)
    return {
        "positions": positions,
        "mean_kl": mean,
        "max_kl": max(divergence),
        "max_difference_at_the_top": top,
        "same_token": agree,
        "near_ties": near,
        "close": mean < MAX_MEAN_KL
        and top < MAX_TOP_DIFFERENCE
        and agree + near == positions,
    }


def unasked(installed: Mapping[str, Any], absent: Mapping[str, Any]) -> dict[str, Any]:
    """Whether an engine with our plug-in loaded is the one without it."""
    seconds = {
        name: run["seconds"]
        for name, run in (("installed", installed), ("absent", absent))
    }
    best = {name: min(values) for name, values in seconds.items()}
    spread = max(max(values) - min(values) for values in seconds.values())
    slower = best["installed"] - best["absent"]
    groups = installed["groups"]
    return {
        "equal": all(
            groups[name]["tokens"] == other["tokens"]
            for name, other in absent["groups"].items()
        ),
        "seconds": seconds,
        "as_fast": slower <= max(spread, MAX_SLOWER * best["absent"]),
        "modules": installed["target_modules"],
        "untouched": set(installed["target_modules"]) <= {"dspark_k3.target.model"},
    }


def passes(verdict: Mapping[str, Any]) -> bool:
    """Whether a case holds: equal tokens, or ties that stock ops break as well; with
    every op ours equal logprobs.

    A difference of tokens is excused when every one of them is a near tie and the same
    case with all ops stock differs from its own plain run too.
    """
    fine = verdict["speculated"] and verdict["executor_ran"]
    fine = fine and verdict.get("abort_in_flight", True) and same_logits(verdict)
    if verdict["equal"]:
        return bool(fine)
    stock = verdict.get("stock")
    ties = all(d["gap"] is not None and d["gap"] < TIE for d in verdict["differences"])
    return bool(fine and ties and stock is not None and not stock["equal"])


def same_logits(verdict: Mapping[str, Any]) -> bool:
    """Whether no logprob differs that must not."""
    return not (verdict["exact_wanted"] and verdict["logits"]["differ"])


def compared(verdicts: Iterable[Mapping[str, Any]]) -> bool:
    """Whether logprobs of some prompt were compared, if any should have been."""
    wanted = [one["logits"] for one in verdicts if one["exact_wanted"]]
    return any(one["prompts"] for one in wanted) or not any(
        one["apart"] for one in wanted
    )
