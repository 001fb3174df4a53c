# SPDX-License-Identifier: Apache-2.0
"""The main job: measured acceptance through vLLM, then what it would buy.

Part 1 (:func:`measure`) runs the same prompts with k = 0..7 drafts and checks that
the text did not change. Part 2 (:func:`project`) joins acceptance curves with a
step-time profile. Both add checked lines to a :class:`experiments.results.Recorder`.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from experiments import speedup
from experiments.acceptance import AcceptanceCurve, Label
from experiments.results import Line, Recorder
from experiments.step_time import StepTimeProfile

#: False-alarm rate of the law test over all draft lengths of one setting.
LAW_TEST_LEVEL = 0.01
PERMUTATIONS = 1999
#: Lengths of the modelled "which k pays" curve.
LENGTH_GRID = tuple(1.25 + 0.125 * i for i in range(53))

Tokens = list[list[int]]


class Run(Protocol):
    """What this module reads of ``experiments.engine.EngineRun``."""

    draft_length: int
    temperature: float
    token_ids: Tokens
    verify_steps: int
    draft_tokens: int
    accepted_tokens: int
    vllm_version: str

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / verify steps."""

    @property
    def survival_rates(self) -> list[float]:
        """Survival by position."""


Runner = Callable[[int, Sequence[Any]], Sequence[Run]]


def parse_draft_lengths(text: str, limit: int = speedup.MAX_DRAFTS) -> list[int]:
    """Draft lengths from "0-7" or "0,3,7"; 0 (the baseline) is always included.

    Raises:
        ValueError: not whole numbers, or outside 0..limit.
    """
    chosen: set[int] = {0}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(
                f"draft lengths {text!r} are not understood; write 0-{limit} or 1,3"
            )
        chosen.update(range(int(first), int(last if dash else first) + 1))
    too_long = [k for k in chosen if k > limit]
    if too_long:
        raise ValueError(
            f"draft length k is {max(too_long)}; use 0..{limit} (a verify step takes "
            f"at most {limit + 1} rows a request)"
        )
    if chosen == {0}:
        raise ValueError(
            f"draft lengths {text!r} hold no k of 1 or more; write 0-{limit} to compare"
        )
    return sorted(chosen)


def parse_list(text: str, what: str, low: float, whole: bool = False) -> list[float]:
    """Numbers of at least ``low`` from "1,8,32"; ValueError names ``what``."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{what} is {text!r}; write numbers like 0,1") from None
    for value in values:
        if not low <= value < float("inf") or (whole and value != int(value)):
            kind = "whole numbers" if whole else "numbers"
            raise ValueError(f"{what} has {value:g}; use {kind} from {low:g}")
    return values


def law_test(plain: Tokens, speculative: Tokens, pairs: int, seed: int = 0) -> float:
    """P-value of a paired permutation test on pooled token and bigram counts.

    Tokens of one continuation depend on each other, so a plain chi-square would
    reject too often. Under the null the two continuations of a prompt are
    exchangeable: the statistic (chi-square distance of the pooled histograms) is
    compared with its value after swapping the two at random within each prompt.

    Args:
        plain: continuations without speculation, one a prompt.
        speculative: continuations of the same prompts with speculation, drawn with
            other seeds.
        pairs: how many prompts to use.
        seed: of the swaps.
    """

    def grams(tokens: list[int]) -> list[tuple[int, ...]]:
        bigrams = itertools.pairwise(tokens)
        return [(t,) for t in tokens] + list(bigrams)

    both = [
        (grams(a), grams(b)) for a, b in zip(plain[:pairs], speculative, strict=False)
    ]
    index: dict[tuple[int, ...], int] = {}
    for sides in both:
        for side in sides:
            for gram in side:
                index.setdefault(gram, len(index))
    difference = np.zeros((len(both), len(index)))
    total = np.zeros(len(index))
    for row, (a, b) in enumerate(both):
        for sign, side in ((1.0, a), (-1.0, b)):
            for gram in side:
                difference[row, index[gram]] += sign
                total[index[gram]] += 1
    signs = np.random.default_rng(seed).choice(
        np.array([-1.0, 1.0]), size=(PERMUTATIONS, len(both))
    )

    def statistic(rows: np.ndarray) -> np.ndarray:
        return ((rows @ difference) ** 2 / total).sum(axis=-1)

    observed = statistic(np.ones((1, len(both))))[0]
    as_large = int((statistic(signs) >= observed - 1e-9).sum())
    return (1 + as_large) / (1 + PERMUTATIONS)


def prompts_needed(tests: int) -> int:
    """Fewest prompts with which :func:`law_test` can reject in one of ``tests``.

    n pairs have 2^n swaps, and swapping all changes nothing: the smallest p-value is
    2^(1-n), which must lie below the level of a single test.
    """
    prompts = 2
    while 2.0 ** (1 - prompts) >= LAW_TEST_LEVEL / tests:
        prompts += 1
    return prompts


@dataclass(frozen=True)
class Measurement:
    """Runs of one text kind at one temperature, by draft length.

    ``lossless[k]`` is whether the check passed; ``check`` says what it was.
    """

    name: str
    kind: str
    temperature: float
    runs: Mapping[int, Run]
    lossless: Mapping[int, bool]
    check: str

    @property
    def gates(self) -> dict[str, bool]:
        """Gates that every speed figure from this measurement carries."""
        proposed = [run.draft_tokens for k, run in self.runs.items() if k > 0]
        return {
            "lossless": all(self.lossless.values()),
            "drafts_proposed": all(count > 0 for count in proposed),
        }

    def curve(self) -> AcceptanceCurve | None:
        """Survival of the longest draft length, and each run's own acceptance length.

        None when nothing was verified.
        """
        longest = self.runs[max(self.runs)]
        if not longest.survival_rates:
            return None
        return AcceptanceCurve(
            self.name,
            tuple(longest.survival_rates),
            "measured",
            "through vLLM",
            {k: run.acceptance_length for k, run in self.runs.items() if k > 0},
        )


@dataclass(frozen=True)
class Plan:
    """What to run in part 1.

    ``prompts`` maps a text kind to its prompts; ``seed`` is the first request seed;
    ``engines`` is how many draft lengths run at once, each in an engine of its own;
    ``model`` names the pair in tables and results.
    """

    prompts: Mapping[str, Tokens]
    temperatures: Sequence[float]
    draft_lengths: Sequence[int]
    max_tokens: int
    seed: int = 20260705
    engines: int = 1
    model: str = "tiny"


def measure(plan: Plan, run: Runner, job: Callable[..., Any]) -> list[Measurement]:
    """Run the plan and check the text of every draft length against k = 0.

    At temperature 0 the tokens must be equal. Above it :func:`law_test` compares the
    laws; with fewer than :func:`prompts_needed` prompts it could never reject, so it
    is reported as not tested, and the gate stays red.

    Args:
        plan: what to run.
        run: (draft length, jobs) -> one run a job.
        job: constructor of a job, ``experiments.engine.Job``.
    """
    settings = [(t, kind) for t in plan.temperatures for kind in plan.prompts]
    found: list[dict[int, Run]] = [{} for _ in settings]

    def run_one(k: int) -> Sequence[Run]:
        jobs = [
            job(
                temperature=temperature,
                prompts=plan.prompts[kind],
                max_tokens=plan.max_tokens,
                # Other seeds for each k: the law test needs independent samples.
                seed=plan.seed + 10_000 * k,
                extra={},
            )
            for temperature, kind in settings
        ]
        return run(k, jobs)

    with ThreadPoolExecutor(max_workers=plan.engines) as pool:
        results = pool.map(run_one, plan.draft_lengths)
        for k, result in zip(plan.draft_lengths, results, strict=True):
            for runs, one in zip(found, result, strict=True):
                runs[k] = one
    measured = []
    for (temperature, kind), runs in zip(settings, found, strict=True):
        lossless, check = _compare(runs, temperature)
        name = f"{plan.model} {kind} T={temperature:g}"
        measured.append(Measurement(name, kind, temperature, runs, lossless, check))
    return measured


def _compare(
    runs: Mapping[int, Run], temperature: float
) -> tuple[dict[int, bool], str]:
    plain = runs[0].token_ids
    drafted = [k for k in runs if k > 0]
    if temperature == 0:
        return {k: runs[k].token_ids == plain for k in drafted}, "tokens equal k = 0's"
    level = LAW_TEST_LEVEL / len(drafted)
    needed = prompts_needed(len(drafted))
    if len(plain) < needed:
        return dict.fromkeys(drafted, False), f"not tested: needs {needed} prompts"
    p_values = {k: law_test(plain, runs[k].token_ids, len(plain)) for k in drafted}
    smallest = min(p_values.values())
    check = (
        f"paired permutation test on token and bigram counts, smallest p "
        f"{smallest:.3f} of {len(drafted)} (level {level:.4f} each)"
    )
    return {k: p >= level for k, p in p_values.items()}, check


def record_measurements(measured: Sequence[Measurement], recorder: Recorder) -> None:
    """Add acceptance lengths and survival rates to the recorder."""
    for item in measured:
        base = {"temperature": item.temperature, "text": item.kind}
        for k, run in item.runs.items():
            gates = {} if k == 0 else {"drafts_proposed": run.draft_tokens > 0}
            if k > 0:
                gates["lossless"] = item.lossless[k]
            recorder.add(
                "acceptance_length",
                run.acceptance_length,
                label="measured",
                variant=item.name,
                shape={"k": k, "prompts": len(run.token_ids), **base},
                gpu="none",
                unit="tokens per verify step",
                gates=gates,
                note=f"{item.check}; {run.verify_steps} verify steps, "
                f"{run.draft_tokens} drafts verified, {run.accepted_tokens} accepted",
            )
        curve = item.curve()
        if curve is not None:
            _record_curve(curve, recorder, item.gates)


def _record_curve(
    curve: AcceptanceCurve, recorder: Recorder, gates: Mapping[str, bool]
) -> None:
    for position, value in enumerate(curve.survival, start=1):
        recorder.add(
            "survival",
            value,
            label=curve.label,
            variant=curve.name,
            shape={"position": position},
            gpu="none",
            unit="probability",
            gates=gates,
            note=curve.provenance,
        )


@dataclass(frozen=True)
class Source:
    """An acceptance curve with the gates of the run it came from."""

    curve: AcceptanceCurve
    gates: Mapping[str, bool] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether speed figures may be derived from it."""
        return all(self.gates.values())


def combined_label(curve: AcceptanceCurve, profile: StepTimeProfile) -> Label:
    """Label of a figure made of both: the weaker of the two."""
    labels = {curve.label, profile.label}
    if "modelled" in labels:
        return "modelled"
    return "recorded" if "recorded" in labels else "measured"


def project(
    sources: Sequence[Source],
    profile: StepTimeProfile,
    draft_lengths: Sequence[int],
    batches: Sequence[int],
    recorder: Recorder,
) -> list[str]:
    """Add speed-ups, tokens/s/user, break-even lengths and best k to the recorder.

    Returns:
        One sentence for each source that was refused because a gate is red.
    """
    shape = {"profile": profile.name}
    top = max(draft_lengths)
    for batch in batches:
        for k in draft_lengths:
            if k > 0:
                recorder.add(
                    "break_even_length",
                    speedup.break_even_length(profile, k, batch),
                    label=profile.label,
                    variant=profile.name,
                    shape={"k": k, "batch": batch, **shape},
                    gpu=profile.gpu,
                    unit="tokens per verify step",
                    note=profile.note,
                )
        for length in LENGTH_GRID:
            if length <= top + 1:
                curve = AcceptanceCurve.geometric(length, top)
                best = speedup.best_draft_length(curve, profile, batch, top)
                recorder.add(
                    "best_draft_length",
                    best.k,
                    label="modelled",
                    variant="geometric",
                    shape={
                        "acceptance_length": length,
                        "drafts": top,
                        "batch": batch,
                        **shape,
                    },
                    gpu=profile.gpu,
                    unit="drafts",
                    note=f"speed-up {best.speedup:.3f}; {profile.note}",
                )
    refused = []
    for source in sources:
        if not source.usable:
            red = ", ".join(name for name, ok in source.gates.items() if not ok)
            refused.append(
                f"{source.curve.name}: no speed-up is printed because the run failed "
                f"its check ({red})"
            )
            continue
        _project_curve(source, profile, draft_lengths, batches, recorder)
    return refused


def _project_curve(
    source: Source,
    profile: StepTimeProfile,
    draft_lengths: Sequence[int],
    batches: Sequence[int],
    recorder: Recorder,
) -> None:
    curve = source.curve
    label = combined_label(curve, profile)
    if curve.label != "measured":
        _record_curve(curve, recorder, source.gates)
        for k in draft_lengths:
            if k <= curve.max_draft_length:
                recorder.add(
                    "acceptance_length",
                    curve.length(k),
                    label=curve.label,
                    variant=curve.name,
                    shape={"k": k},
                    gpu="none",
                    unit="tokens per verify step",
                    note=curve.provenance,
                )
    figures = (
        ("speedup", "x", speedup.speedup),
        ("tokens_per_second_per_user", "tok/s", speedup.tokens_per_second_per_user),
    )
    for batch in batches:
        for k in draft_lengths:
            if k > curve.max_draft_length:
                continue
            for metric, unit, figure in figures:
                recorder.add(
                    metric,
                    figure(curve, profile, k, batch),
                    label=label,
                    variant=curve.name,
                    shape={"k": k, "batch": batch, "profile": profile.name},
                    gpu=profile.gpu,
                    unit=unit,
                    gates=source.gates,
                    note=f"acceptance {curve.label}, step times {profile.label}",
                )


def write_csv(lines: Sequence[Line], folder: Path) -> list[Path]:
    """One CSV a metric; columns are the shape's keys, value, unit, label, GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for metric in dict.fromkeys(line["metric"] for line in lines):
        chosen = [line for line in lines if line["metric"] == metric]
        keys = list(dict.fromkeys(key for line in chosen for key in line["shape"]))
        path = folder / f"{metric}.csv"
        with path.open("w", newline="") as out:
            writer = csv.writer(out)
            writer.writerow(["variant", *keys, "value", "unit", "label", "gpu"])
            for line in chosen:
                cells = [line["shape"].get(key, "") for key in keys]
                tail = [line["value"], line["unit"], line["label"], line["gpu"]]
                writer.writerow([line["variant"], *cells, *tail])
        written.append(path)
    return written
