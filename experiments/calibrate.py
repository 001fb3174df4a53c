# SPDX-License-Identifier: Apache-2.0
"""Calibration of a drafter's confidence head, and how much it is worth.

Rounds of speculation at full length, engine-free (`drafters.loop`): the head's logits
and how many drafts the target accepted. A scaling of the logits is fitted to the
rounds of every other prompt and judged on the rest, which it has not seen. What is
judged is survival, the product of the confidences up to a position, against the event
that at least so many drafts were accepted: it is what a scheduler multiplies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafters.backbone import DSparkDrafter
from drafters.calibration import (
    SequentialTemperatureScaling,
    expected_calibration_error,
    roc_auc,
    survival_from_confidence,
)
from drafters.loop import traces
from drafters.target import Target
from experiments.rounds import RecordedRounds


@dataclass(frozen=True)
class Rounds:
    """Rounds that verified all their drafts.

    Attributes:
        logits: fp64 [N, k], the confidence head's.
        accepted: int64 [N], drafts accepted.
    """

    logits: Tensor
    accepted: Tensor


@dataclass(frozen=True)
class Position:
    """One draft position over the judged rounds, before and after scaling.

    Attributes:
        position: from 1 on.
        observed: share of rounds that accepted at least so many drafts.
        predicted: mean of the predicted survival.
        error: expected calibration error of it, 20 bins.
        auc: area under the ROC curve; NaN where all rounds ended alike.
    """

    position: int
    observed: float
    predicted: tuple[float, float]
    error: tuple[float, float]
    auc: tuple[float, float]


@dataclass(frozen=True)
class Calibration:
    """What was fitted and what it does to rounds it has not seen."""

    scaling: SequentialTemperatureScaling
    positions: list[Position]
    fitted: int
    judged: int

    @property
    def errors(self) -> tuple[float, float]:
        """Mean calibration error over the positions, before and after."""
        before, after = zip(*(each.error for each in self.positions), strict=True)
        return sum(before) / len(before), sum(after) / len(after)


def record(
    target: Target,
    drafter: DSparkDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Rounds]:
    """The rounds after each prompt, prompt i drawn with seed i.

    Raises ValueError for a drafter without a confidence head, or an empty prompt.
    """
    found = []
    spoken = traces(
        target,
        drafter,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
    )
    for done, trace in enumerate(spoken, 1):
        if trace.accepted and not trace.confidence_logits:
            raise ValueError(
                "the drafter has no confidence head (enable_confidence_head in its "
                "config.json): there is nothing to calibrate"
            )
        logits = torch.tensor(trace.confidence_logits, dtype=torch.float64)
        found.append(
            Rounds(
                logits.view(len(trace.accepted), drafter.config.block_size),
                torch.tensor(trace.accepted, dtype=torch.int64),
            )
        )
        progress(done)
    return found


def joined(rounds: Sequence[Rounds]) -> Rounds:
    """All of them as one."""
    return Rounds(
        torch.cat([each.logits for each in rounds]),
        torch.cat([each.accepted for each in rounds]),
    )


def recorded(rounds: Sequence[Rounds]) -> RecordedRounds:
    """The rounds of prompts 0, 1, ... as a file has them."""
    whole = joined(rounds)
    prompts = [n for n, each in enumerate(rounds) for _ in range(len(each.accepted))]
    return RecordedRounds(
        np.array(prompts, dtype=np.int64), whole.logits.numpy(), whole.accepted.numpy()
    )


def by_prompt(given: RecordedRounds) -> list[Rounds]:
    """A file's rounds, those of each prompt together, prompts by their number."""
    return [
        Rounds(
            torch.from_numpy(given.logits[given.prompt == prompt]),
            torch.from_numpy(given.accepted[given.prompt == prompt]),
        )
        for prompt in np.unique(given.prompt)
    ]


def calibrate(rounds: Sequence[Rounds], *, shifted: bool = True) -> Calibration:
    """Fit on every other prompt's rounds, from the first on; judge on the rest's.

    Args:
        rounds: of each prompt.
        shifted: fit a shift beside each temperature.

    Raises:
        ValueError: fewer than two prompts, or no rounds on a side.
    """
    fit, judge = list(rounds[::2]), list(rounds[1::2])
    sizes = [sum(len(each.accepted) for each in side) for side in (fit, judge)]
    if not all(sizes):
        raise ValueError(
            f"{len(rounds)} prompts gave {sizes[0]} rounds to fit and {sizes[1]} to "
            "judge; both are needed: give more prompts, or longer answers"
        )
    given, unseen = joined(fit), joined(judge)
    kind = SequentialTemperatureScaling
    if shifted:
        scaling = kind.fit_shifted(given.logits, given.accepted)
    else:
        scaling = kind.fit(given.logits, given.accepted)
    before, after = (
        survival_from_confidence(confidence)
        for confidence in (torch.sigmoid(unseen.logits), scaling.apply(unseen.logits))
    )
    positions = []
    for i in range(unseen.logits.shape[1]):
        outcome = unseen.accepted > i
        pair = before[:, i], after[:, i]
        positions.append(
            Position(
                i + 1,
                float(outcome.double().mean()),
                (float(pair[0].mean()), float(pair[1].mean())),
                (
                    expected_calibration_error(pair[0], outcome),
                    expected_calibration_error(pair[1], outcome),
                ),
                (roc_auc(pair[0], outcome), roc_auc(pair[1], outcome)),
            )
        )
    return Calibration(scaling, positions, *sizes)


def document(found: Calibration, provenance: dict[str, Any]) -> dict[str, Any]:
    """What `drafters.calibration.read_calibration` reads, with what it was fitted on
    and what it did; JSON has no NaN, so an area that there is none of is null."""

    def number(value: float) -> float | None:
        return None if value != value else round(value, 6)

    return {
        **found.scaling.to_dict(),
        "rounds": {"fitted": found.fitted, "judged": found.judged},
        "positions": [
            {
                "position": each.position,
                "observed_survival": number(each.observed),
                **{
                    name: {"before": number(pair[0]), "after": number(pair[1])}
                    for name, pair in (
                        ("predicted_survival", each.predicted),
                        ("expected_calibration_error", each.error),
                        ("roc_auc", each.auc),
                    )
                },
            }
            for each in found.positions
        ],
        "provenance": provenance,
    }


def read_prompts(path: Path, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Prompts of a JSON-lines file: ``{"prompt": text}`` or ``{"prompt": [ids]}`` a
    line, as OpenAI's completions take them; blank lines are passed over.

    Args:
        path: the file.
        encode: text to token ids.

    Raises:
        ValueError: for another line, with its number, or a file without prompts.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            given = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON: {error}") from error
        prompt = given.get("prompt") if isinstance(given, dict) else None
        if isinstance(prompt, str) and prompt:
            found.append(encode(prompt))
        elif prompt and isinstance(prompt, list) and all(_is_id(t) for t in prompt):
            found.append(prompt)
        else:
            raise ValueError(
                f'{where}: needs a "prompt" that is text or token ids, such as '
                '{"prompt": "def f("}; of chats give the text that their template makes'
            )
    if not found:
        raise ValueError(f"{path} has no prompts: give one JSON object a line")
    return found


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def load_pair(target: Path, draft: Path) -> tuple[Target, DSparkDrafter]:
    """Target and drafter, engine-free, in fp32: Qwen3's or Kimi K3's architecture.

    Raises ValueError or drafters.config.CheckpointError, a kind of it, for files that
    are missing or do not fit.
    """
    from drafters.checkpoint import load_drafter
    from drafters.checkpoint import load_target as load_qwen3
    from experiments.tiny_k3.target import load_target as load_k3

    try:
        architectures = json.loads((target / "config.json").read_text())[
            "architectures"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{target}/config.json does not say what the target is: {error}"
        ) from error
    kimi = "KimiLinearForCausalLM" in architectures
    model: Target = load_k3(target) if kimi else load_qwen3(target)
    return model, load_drafter(draft, model)
