# SPDX-License-Identifier: Apache-2.0
"""Adaptive verification against every fixed draft length, on mixed prompts.

``python -m experiments.adaptive_times --out adaptive.jsonl`` runs tiny-k3 with our
target: plain decoding, 1 to 7 fixed drafts, and adaptive verification of 7 with the
drafter's confidence as it was trained and as `dspark-k3 calibrate` corrects it. Half of
the requests are easy for the drafter and half hard (`experiments.corpora`), all at
once; the text of every engine must be plain decoding's. Times are the wall's, medians
over repeats in engines that have the GPU for themselves in turn. tiny-k3's steps are
short, so the host sets the pace and a row more costs next to nothing: what this shows
is that adaptive verification does not cost more than it saves.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_k3 import settings
from experiments import results
from experiments.bench.record import versions
from experiments.corpora import KINDS, held_out_prompts
from experiments.gpu_engine import fleet, lines, mixed, tiny_k3

ROUNDS = Path(__file__).resolve().parent / "results/cpu/tiny_k3_rounds.jsonl.xz"
DRAFTS = 7
PLAIN, ADAPTIVE, CALIBRATED = "plain", "adaptive", "adaptive-calibrated"
METRIC = "tokens_per_second_per_user"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.adaptive_times",
        description="Adaptive verification against fixed draft lengths on a GPU.",
    )
    add = parser.add_argument
    add("--batch", type=int, default=8, help="requests at once (default 8)")
    add("--tokens", type=int, default=400, help="new tokens each (default 400)")
    add("--repeats", type=int, default=9, help="timed runs (default 9)")
    add("--parallel", type=int, default=10, help="engines that start together")
    add("--work", type=Path, default=Path("/tmp/k3-adaptive"), help="logs, drafters")
    add("--fork", action="store_true", help="fork engines off a process with vLLM")
    add("--commit", help="commit to record where git cannot tell")
    add("--out", type=Path, required=True, help="result lines, added to")
    return parser


def names() -> list[str]:
    """The engines, in the order of their turns."""
    fixed = [f"fixed-k{k}" for k in range(1, DRAFTS + 1)]
    return [PLAIN, *fixed, ADAPTIVE, CALIBRATED]


def drafts_of(name: str) -> int:
    """Drafts that an engine proposes a step."""
    if name == PLAIN:
        return 0
    return int(name[-1]) if name.startswith("fixed") else DRAFTS


def mixed_prompts(batch: int) -> list[list[int]]:
    """Prompts of every kind of text in turn.

    Raises ValueError if they cannot be as many of each.
    """
    if batch < 1 or batch % len(KINDS):
        raise ValueError(f"batch={batch}: must be a multiple of {len(KINDS)}")
    by_kind = [held_out_prompts(kind, batch // len(KINDS)) for kind in KINDS]
    return [list(prompt) for group in zip(*by_kind, strict=True) for prompt in group]


def spec(name: str, drafter: Path, options: Mapping[str, Any]) -> fleet.EngineSpec:
    """An engine of tiny-k3 with every op ours and the drafter in ``drafter``."""
    ours = {
        "target": True,
        "ops": settings.every_op({}),
        "draft_sampler": "ours",
        "draft_attention": "ours",
    }
    engine = tiny_k3.engine() | {"additional_config": {settings.KEY: ours}}
    if drafts := drafts_of(name):
        adaptive = name in (ADAPTIVE, CALIBRATED)
        engine["speculative_config"] = tiny_k3.speculation(drafts, adaptive, drafter)
    return fleet.EngineSpec(name, engine, mixed.JOB, dict(options))


def calibrated_drafter(folder: Path) -> Path:
    """tiny-k3's drafter with the calibration that its recorded rounds give beside it.

    Raises ValueError if the fit does not help, so that none is written.
    """
    from dspark_k3.cli import app

    shutil.copytree(tiny_k3.DRAFTER, folder, dirs_exist_ok=True)
    found = folder / "calibration.json"
    found.unlink(missing_ok=True)
    command = ["calibrate", "--draft", str(folder), "--recorded", str(ROUNDS)]
    app([*command, "--out", str(found)], standalone_mode=False)
    if not found.is_file():
        raise ValueError(f"{ROUNDS} gave no calibration; see what calibrate printed")
    return folder


def add_lines(
    recorder: results.Recorder, found: Mapping[str, Any], batch: int, note: str
) -> list[str]:
    """Lines of all engines that ran, tokens a second of a request; returns why some
    have none."""
    if PLAIN not in found:
        return ["plain decoding did not run: no text to compare with"]
    text, refused = found[PLAIN]["tokens"], []
    for name, answer in found.items():
        drafts = drafts_of(name)
        length = len(answer["tokens"][0])
        rates = [length / seconds for seconds in answer["seconds"]]
        steps = answer["verify_steps"]
        said = ""
        if steps:
            taken = 1 + answer["accepted_tokens"] / steps
            proposed = answer["draft_tokens"] / steps
            said = f"; {taken:.3f} tokens and {proposed:.3f} drafts a step"
        try:
            recorder.add(
                METRIC,
                statistics.median(rates),
                label="measured",
                variant=name,
                shape={"k": drafts, "batch": batch, "tokens": length},
                gpu=answer["gpu"],
                unit="tokens/s",
                spread=max(rates) - min(rates),
                gates={
                    "lossless": answer["same"] and answer["tokens"] == text,
                    "drafts_proposed": drafts == 0 or answer["draft_tokens"] > 0,
                },
                note=f"{note}{said}; spread is from slowest to fastest",
            )
        except ValueError as error:
            refused.append(f"{name}: {error}")
    return refused


def verdict(lines_found: Sequence[results.Line]) -> str:
    """A line an engine, and how adaptive verification stands to the best fixed one."""
    rates = {line["variant"]: line["value"] for line in lines_found}
    rows = [
        f"{line['variant']:20} {line['value']:8.1f} tokens/s and user "
        f"(spread {line['spread']:.1f}){line['note'].partition(';')[2]}"
        for line in lines_found
    ]
    fixed = {name: rate for name, rate in rates.items() if name.startswith("fixed")}
    if fixed:
        best = max(fixed, key=fixed.__getitem__)
        for name in (ADAPTIVE, CALIBRATED):
            if name in rates:
                rows.append(f"{name}: {rates[name] / fixed[best]:.3f} of {best}")
    return "\n".join(rows)


def main(
    arguments: Sequence[str] | None = None, start: fleet.Launch | None = None
) -> int:
    """Run the command; ``start`` starts an engine's process."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        asked = {
            "prompts": mixed_prompts(options.batch),
            "max_tokens": options.tokens,
            "repeats": options.repeats,
        }
        own = calibrated_drafter(options.work / "k3-dspark-calibrated")
    except ValueError as error:
        parser.error(str(error))
    specs = [
        spec(name, own if name == CALIBRATED else tiny_k3.DRAFTER, asked)
        for name in names()
    ]
    outcomes = fleet.run(
        specs,
        options.work,
        parallel=options.parallel,
        exclusive=True,
        progress=lines.say,
        start=start or fleet.launcher(options.fork),
    )
    failed = [f"{one.name}: {one.error}" for one in outcomes.values() if one.error]
    found = {name: one.result for name, one in outcomes.items() if one.ok}
    recorder = results.Recorder(versions=versions(), commit=options.commit)
    note = "tiny-k3, every op and the drafter ours, greedy, mixed held-out text"
    failed += add_lines(recorder, found, options.batch, note)
    lines.say(verdict(recorder.lines))
    lines.save(recorder, options.out)
    for line in failed:
        lines.say(f"WRONG: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
