# SPDX-License-Identifier: Apache-2.0
"""What an engine of the small part does; runs in the front end's process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.dspark_k3.suite import jobs
from tests.dspark_k3.tensor_parallel import watch

#: Bounds of a part of the job, in seconds.
COUNT_LIMIT_S, CONTROL_LIMIT_S, GONE_LIMIT_S = 60.0, 30.0, 30.0
CONTROL_STEPS = 500
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}


def job(llm: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Generate for every group, then what else ``options`` asks for.

    Keys of ``options``: groups, as of the suite's jobs; lengths {group, steps, drift};
    fault {kind, group, limit_s}, after which the engine is dead.
    """
    from experiments.bench.record import versions

    found: dict[str, Any] = {
        "groups": {
            name: jobs.greedy(llm, **group)
            for name, group in options.get("groups", {}).items()
        },
        "gpu": llm.collective_rpc("k3_gpu"),
        "versions": versions(),
    }
    counters = llm.collective_rpc("k3_counters")
    found["counters"] = counters[0]
    found["counters_agree"] = all(of_rank == counters[0] for of_rank in counters)
    if lengths := options.get("lengths"):
        found["lengths"] = count_lengths(llm, **lengths)
    if fault := options.get("fault"):
        found["fault"] = break_a_rank(llm, **fault)
    return found


def count_lengths(
    llm: Any, group: dict[str, Any], steps: int, drift: float
) -> dict[str, Any]:
    """`watch.compare` of at least ``steps`` steps as they are ("same"), with drift in
    the last rank's confidences ("drift"), and with drift where ranks do not share them
    ("control"), which may stop the engine: then {"error", "seconds"}."""
    found = {"same": _counted(llm, group, steps)}
    last = len(llm.collective_rpc("tp_process")) - 1
    llm.collective_rpc("tp_drift", args=(drift, last))
    found["drift"] = _counted(llm, group, steps)
    found["drift"]["disturbed"] = llm.collective_rpc("tp_disturbed")[last]
    if all(llm.collective_rpc("tp_agree", args=(False,))):
        fewer = min(steps, CONTROL_STEPS)
        ended = bounded(lambda: _counted(llm, group, fewer), CONTROL_LIMIT_S)
        found["control"] = ended["result"] or {
            "error": ended["error"] or f"no end after {CONTROL_LIMIT_S:.0f} s",
            "seconds": ended["seconds"],
        }
    return found


def _counted(llm: Any, group: dict[str, Any], steps: int) -> dict[str, Any]:
    ranks: list[list[Any]] = []
    until = time.monotonic() + COUNT_LIMIT_S
    seed = 0
    while time.monotonic() < until:
        llm.collective_rpc("tp_watch_start")
        _sampled(llm, group, seed)
        taken = [json.loads(text) for text in llm.collective_rpc("tp_watch_take")]
        ranks = [
            [*before, *now]
            for before, now in zip(ranks or [[] for _ in taken], taken, strict=True)
        ]
        seed += len(group["prompts"])
        if min(len(of_rank) for of_rank in ranks) >= steps:
            break
    return watch.compare(ranks)


def _sampled(llm: Any, group: dict[str, Any], seed: int) -> None:
    """Texts at temperature 1, of different lengths so that the batch changes."""
    from vllm import SamplingParams, TokensPrompt

    prompts = group["prompts"]
    parameters = [
        SamplingParams(
            temperature=1.0,
            max_tokens=group["max_tokens"] - 16 * index,
            ignore_eos=True,
            detokenize=False,
            seed=seed + index,
        )
        for index in range(len(prompts))
    ]
    llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
        parameters,
        use_tqdm=False,
    )


def break_a_rank(
    llm: Any, kind: str, group: dict[str, Any], limit_s: float
) -> dict[str, Any]:
    """Stop or kill the last rank's process while it works.

    Returns:
        kind; error and seconds, when and with what the client's call ended, error ""
        if it did not within ``limit_s``; gone and gone_s, whether and when every
        worker's process had ended. What is left is killed.
    """
    processes = llm.collective_rpc("tp_process")

    def serve() -> None:
        while True:
            jobs.greedy(llm, **group)

    def hit() -> None:
        time.sleep(1.0)
        os.kill(processes[-1], SIGNALS[kind])

    threading.Thread(target=hit, daemon=True).start()
    since = time.monotonic() + 1.0
    try:
        ended = bounded(serve, limit_s)
        gone = wait_for(lambda: not any(map(alive, processes)), GONE_LIMIT_S)
        return {
            "kind": kind,
            "error": ended["error"],
            "seconds": ended["seconds"] - 1.0,
            "gone": gone,
            "gone_s": time.monotonic() - since,
        }
    finally:
        end(processes)


def bounded(action: Callable[[], Any], limit_s: float) -> dict[str, Any]:
    """Run ``action`` in a thread: {result, error, seconds}, both empty if it has not
    ended after ``limit_s`` seconds and is left behind."""
    found: dict[str, Any] = {"result": None, "error": ""}

    def run() -> None:
        try:
            found["result"] = action()
        # Whatever ends an engine is the answer here.
        except BaseException as error:
            found["error"] = f"{type(error).__name__}: {error}".split("\n")[0]

    since = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return {**found, "seconds": time.monotonic() - since}


def wait_for(done: Callable[[], bool], limit_s: float) -> bool:
    """Whether ``done`` became true within ``limit_s`` seconds."""
    until = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def alive(process: int) -> bool:
    """Whether a process still runs; one that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def end(processes: Sequence[int]) -> None:
    """Kill what is left of the processes."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
