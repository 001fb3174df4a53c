# SPDX-License-Identifier: Apache-2.0
"""Run real vLLM on the CPU and count what its speculation did.

`run_engine` runs each engine in a process of its own (environment variables must be set
before vLLM is imported there, and an engine's memory is only given back when its
process ends), a fork of one that has imported vLLM, sends it the jobs as JSON and reads
back one `EngineRun` a job. Everything counted comes from
vLLM's own counters, none of it from the configured draft length.
"""

from __future__ import annotations

import atexit
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafters.config import load_config
from experiments.forking import Forker

_RECORDER = "dspark_k3.draft.recorder.RoundsRecorder"
PROGRESS = "dspark-k3 progress: "
"""Prefix of the child's progress lines."""

ENVIRONMENT = {
    "DSPARK_K3_CPU": "1",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What a CPU engine process needs. Plain decoding uses the same runner, so that a
comparison shows speculation and nothing else."""


@dataclass(frozen=True)
class Job:
    """Prompts (token ids) to continue with one set of sampling parameters.

    ``seed`` is the request seed of the first prompt; prompt i gets ``seed + i``, so
    that equal prompts are independent samples. ``extra`` goes to vLLM's
    SamplingParams (``ignore_eos`` is true unless given there).
    """

    temperature: float
    prompts: list[list[int]]
    max_tokens: int
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineRun:
    """What one job produced, and the engine's own counts while it ran.

    ``token_ids[i]`` continues prompt i. ``verify_steps`` counts request-steps that
    verified at least one draft, ``draft_tokens`` the drafts verified in them,
    ``accepted_tokens`` those accepted, ``accepted_per_position[j]`` the steps whose
    draft j (0-based) was accepted. ``seconds`` is generation only, without start-up.
    ``rounds`` are those of `dspark_k3.draft.recorder`, if they were asked for.
    """

    draft_length: int
    temperature: float
    token_ids: list[list[int]]
    verify_steps: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]
    seconds: float
    vllm_version: str
    device: str
    rounds: list[Any] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a verify step, bonus included; 1.0 when nothing was verified."""
        if self.verify_steps == 0:
            return 1.0
        return 1.0 + self.accepted_tokens / self.verify_steps

    @property
    def survival_rates(self) -> list[float]:
        """P(first j+1 drafts accepted) for each draft position; [] without drafts."""
        if self.verify_steps == 0:
            return []
        return [count / self.verify_steps for count in self.accepted_per_position]


def run_engine(
    target: Path,
    draft: Path | None,
    draft_length: int,
    jobs: Sequence[Job],
    *,
    batch_size: int = 4,
    progress: Callable[[str], None] | None = None,
    speculative: dict[str, Any] | None = None,
    additional_config: dict[str, Any] | None = None,
    max_model_len: int = 1024,
    record_rounds: bool = False,
) -> list[EngineRun]:
    """Run ``jobs`` on one vLLM engine and return one result a job, in order.

    ``draft_length`` 0 means no speculation (``draft`` is then ignored). At most
    ``batch_size`` requests run at a time. ``speculative`` adds to or overrides vLLM's
    speculative_config; ``additional_config`` is vLLM's; ``progress`` gets short lines;
    ``record_rounds`` keeps what the confidence head said of every round.

    Raises ValueError for arguments that cannot work, and RuntimeError with the
    child's last error line when the engine fails.
    """
    _check_arguments(target, draft, draft_length, jobs, batch_size, max_model_len)
    with tempfile.TemporaryDirectory(prefix="dspark-k3-") as folder:
        job_file, out_file = Path(folder, "jobs.json"), Path(folder, "out.json")
        job_file.write_text(
            json.dumps(
                {
                    "target": str(target),
                    "draft": None if draft_length == 0 else str(draft),
                    "draft_length": draft_length,
                    "batch_size": batch_size,
                    "max_model_len": max_model_len,
                    "speculative": speculative or {},
                    "additional_config": additional_config or {},
                    "record_rounds": record_rounds,
                    "jobs": [asdict(job) for job in jobs],
                }
            )
        )
        log, code = _run_child([str(job_file), str(out_file)], progress)
        if code != 0 or not out_file.is_file():
            raise RuntimeError(
                f"the vLLM engine stopped (exit code {code}): {error_line(log)}\n"
                "Run `dspark-k3 doctor` to check the installation."
            )
        return [EngineRun(**item) for item in json.loads(out_file.read_text())]


def error_line(log: Sequence[str]) -> str:
    """The most telling line of a failed engine's output: the root exception.

    The innermost of chained exceptions is printed first; vLLM's outer ones only say
    that initialisation failed.
    """
    raised = [
        line.split("] ")[-1].strip()
        for line in log
        if _looks_like_exception(line.split("] ")[-1].strip())
    ]
    useful = [
        line for line in raised if "Engine core initialization failed" not in line
    ]
    if useful:
        return useful[-1]
    lines = [line.strip() for line in log if line.strip()]
    return lines[-1] if lines else "no output"


def _looks_like_exception(line: str) -> bool:
    name, colon, _ = line.partition(":")
    last = name.rpartition(".")[2]
    return (
        bool(colon)
        and last.isidentifier()
        and last.endswith(("Error", "Exception", "Engine"))
    )


def _check_arguments(
    target: Path,
    draft: Path | None,
    draft_length: int,
    jobs: Sequence[Job],
    batch_size: int,
    max_model_len: int,
) -> None:
    if not (target / "config.json").is_file():
        raise ValueError(f"target={target}: not a model directory (no config.json)")
    if draft_length < 0:
        raise ValueError(f"draft_length={draft_length}: must be 0 or more")
    if draft_length > 0:
        if draft is None:
            raise ValueError(
                f"draft_length={draft_length} needs a drafter directory, or use 0"
            )
        load_config(draft).check_draft_length(draft_length)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be 1 or more")
    for job in jobs:
        if job.max_tokens < 1:
            raise ValueError(f"max_tokens={job.max_tokens}: must be 1 or more")
        for index, prompt in enumerate(job.prompts):
            if not prompt or len(prompt) + job.max_tokens > max_model_len:
                raise ValueError(
                    f"prompts[{index}] has {len(prompt)} tokens: needs 1 to "
                    f"{max_model_len - job.max_tokens} (max_model_len="
                    f"{max_model_len} less max_tokens={job.max_tokens})"
                )


def _run_child(
    arguments: list[str], progress: Callable[[str], None] | None
) -> tuple[list[str], int]:
    """Run this module as a program; return its output lines and exit code."""

    def told(line: str) -> None:
        if progress is not None and line.startswith(PROGRESS):
            progress(line.removeprefix(PROGRESS).strip())

    # One import of vLLM serves all engines of this process that follow each other, and
    # engines at the same time have one each.
    forker = _idle.pop() if _idle else _started()
    try:
        return forker.run("experiments.engine", arguments, progress=told)
    finally:
        _idle.append(forker)


_idle: list[Forker] = []


def _started() -> Forker:
    forker = Forker(ENVIRONMENT)
    atexit.register(forker.close)
    return forker


def _serve_jobs(request: dict[str, Any]) -> list[dict[str, Any]]:
    """In the child: build the engine, run every job, return EngineRun fields."""
    import time

    import torch
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    torch.set_num_threads(1)
    _say("starting the engine")
    length = request["draft_length"]
    speculative_config = None
    if length:
        speculative_config = {
            "method": "dspark",
            "model": request["draft"],
            "num_speculative_tokens": length,
            "draft_sample_method": "probabilistic",
            **request["speculative"],
        }
    longest = request["max_model_len"]
    llm = LLM(
        model=request["target"],
        speculative_config=speculative_config,
        additional_config=request["additional_config"],
        dtype="float32",
        max_model_len=longest,
        max_num_seqs=request["batch_size"],
        max_num_batched_tokens=max(longest, 8 * request["batch_size"]),
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        worker_extension_cls=_RECORDER if request["record_rounds"] else "",
    )
    if request["record_rounds"]:
        llm.collective_rpc("record_rounds")
    results = []
    for number, job in enumerate(request["jobs"], start=1):
        _say(f"job {number} of {len(request['jobs'])}: {len(job['prompts'])} prompts")
        parameters = [
            SamplingParams(
                temperature=job["temperature"],
                max_tokens=job["max_tokens"],
                seed=None if job["seed"] is None else job["seed"] + index,
                **{"ignore_eos": True, "detokenize": False, **job["extra"]},
            )
            for index in range(len(job["prompts"]))
        ]
        before = spec_counters(llm.get_metrics())
        started = time.perf_counter()
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]],
            parameters,
            use_tqdm=False,
        )
        seconds = time.perf_counter() - started
        after = spec_counters(llm.get_metrics())
        rounds = []
        if request["record_rounds"]:
            (rounds,) = llm.collective_rpc("recorded_rounds")
        results.append(
            asdict(
                EngineRun(
                    draft_length=length,
                    temperature=job["temperature"],
                    token_ids=[list(item.outputs[0].token_ids) for item in outputs],
                    seconds=seconds,
                    vllm_version=vllm.__version__,
                    device=str(llm.llm_engine.vllm_config.device_config.device_type),
                    rounds=rounds,
                    **_difference(after, before),
                )
            )
        )
    return results


def spec_counters(metrics: Sequence[Any]) -> dict[str, list[int]]:
    """vLLM's speculation counters from ``LLM.get_metrics()``.

    Some entries are listed more than once with the same labels; each (name, labels)
    pair counts once. Missing counters (no speculation) are zero.
    """
    names = {
        "vllm:spec_decode_num_drafts": "verify_steps",
        "vllm:spec_decode_num_draft_tokens": "draft_tokens",
        "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
    }
    seen: dict[tuple[str, str], list[int]] = {}
    for metric in metrics:
        if metric.name in names:
            values = getattr(metric, "values", None)
            seen[names[metric.name], json.dumps(metric.labels, sort_keys=True)] = (
                [metric.value] if values is None else list(values)
            )
    totals = {name: [0] for name in names.values()}
    totals["accepted_per_position"] = []
    for (name, _), values in seen.items():
        have = totals[name] + [0] * (len(values) - len(totals[name]))
        totals[name] = [
            a + (values[i] if i < len(values) else 0) for i, a in enumerate(have)
        ]
    return totals


def _difference(
    after: dict[str, list[int]], before: dict[str, list[int]]
) -> dict[str, Any]:
    def minus(name: str) -> list[int]:
        old = before[name] + [0] * (len(after[name]) - len(before[name]))
        return [int(a - b) for a, b in zip(after[name], old, strict=True)]

    return {
        "verify_steps": minus("verify_steps")[0],
        "draft_tokens": minus("draft_tokens")[0],
        "accepted_tokens": minus("accepted_tokens")[0],
        "accepted_per_position": minus("accepted_per_position"),
    }


def _say(text: str) -> None:
    print(f"{PROGRESS}{text}", flush=True)


def _main(job_file: str, out_file: str) -> None:
    results = _serve_jobs(json.loads(Path(job_file).read_text()))
    Path(out_file).write_text(json.dumps(results))


if __name__ == "__main__":
    _main(*sys.argv[1:])
