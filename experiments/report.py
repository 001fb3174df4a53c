# SPDX-License-Identifier: Apache-2.0
"""Tables for people, with the label of every figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from experiments import speedup
from experiments.acceptance import AcceptanceCurve
from experiments.advice import Advice
from experiments.replay import Replayed
from experiments.step_time import StepTimeProfile
from experiments.sweep import Measurement, combined_label

if TYPE_CHECKING:  # It needs torch, and advice does not.
    from experiments.calibrate import Calibration


def acceptance_table(measured: Sequence[Measurement], version: str) -> Table:
    """Measured acceptance length by draft length, and whether the text held."""
    table = Table(
        title=f"Acceptance of the drafter through vLLM {version} \\[measured]",
        caption=(
            "Cells: acceptance length = tokens committed per verify step, the bonus "
            "token included (1 = drafts bring nothing, k + 1 = all accepted)."
        ),
        title_justify="left",
        caption_justify="left",
    )
    lengths = sorted(measured[0].runs)
    table.add_column("text, temperature")
    for k in lengths:
        if k > 0:
            table.add_column(f"k={k}", justify="right")
    table.add_column("text unchanged?")
    for item in measured:
        good = sum(item.lossless.values())
        verdict = "yes" if good == len(item.lossless) else "NO"
        if item.check.startswith("not tested"):
            verdict = item.check
        elif item.temperature == 0:
            verdict += f" ({good} of {len(item.lossless)} runs: {item.check})"
        else:
            verdict += f" ({item.check})"
        cells = [f"{item.runs[k].acceptance_length:.2f}" for k in lengths if k > 0]
        table.add_row(item.name, *cells, verdict)
    return table


def speed_table(
    curves: Sequence[AcceptanceCurve],
    profile: StepTimeProfile,
    draft_lengths: Sequence[int],
    batch: int,
) -> Table:
    """Tokens/s/user by draft length; the best of each row is bold."""
    table = Table(
        title=(
            f"Tokens/s for each user on {profile.gpu}, batch {batch} "
            f"\\[step times {profile.label}: {profile.name}]"
        ),
        caption=f"k = 0 is no speculation. {profile.note}.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("acceptance")
    for k in draft_lengths:
        table.add_column(f"k={k}", justify="right")
    table.add_column("best k", justify="right")
    table.add_column("speed-up", justify="right")
    for curve in curves:
        rates = [
            speedup.tokens_per_second_per_user(curve, profile, k, batch)
            for k in draft_lengths
            if k <= curve.max_draft_length
        ]
        top = rates.index(max(rates))
        cells = [
            f"[bold]{rate:.0f}[/bold]" if i == top else f"{rate:.0f}"
            for i, rate in enumerate(rates)
        ]
        cells += ["-"] * (len(draft_lengths) - len(rates))
        k = draft_lengths[top]
        gain = speedup.speedup(curve, profile, k, batch)
        name = f"{curve.name} \\[{curve.label}]"
        label = combined_label(curve, profile)
        table.add_row(name, *cells, str(k), f"{gain:.2f}x \\[{label}]")
    return table


def advice_table(
    curve: AcceptanceCurve, profile: StepTimeProfile, advice: Sequence[Advice]
) -> Table:
    """Best fixed and scheduled verification by batch size."""
    label = combined_label(curve, profile)
    longest = advice[0].longest
    table = Table(
        title=(f"{curve.name} \\[{curve.label}] on {profile.name} \\[{profile.label}]"),
        caption=(
            f"Speed-ups over no speculation \\[{label}]; by confidence \\[modelled]: a "
            f"block of {longest} is drafted and as much verified as pays. "
            f"{profile.note}."
        ),
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("batch", "best k", "tok/s/user", "vs none", f"vs k={longest}"):
        table.add_column(heading, justify="right")
    for heading in ("by confidence", "drafts verified"):
        table.add_column(heading, justify="right")
    for row in advice:
        table.add_row(
            str(row.batch),
            str(row.best.k),
            f"{row.best.tokens_per_second:.0f}",
            f"{row.best.speedup:.2f}x",
            f"{row.best.speedup / row.longest_speedup - 1:+.0%}",
            f"{row.scheduled.speedup:.2f}x",
            f"{row.scheduled.mean_drafts:.1f}",
        )
    return table


def advice_words(row: Advice) -> str:
    """One sentence of advice for a batch size."""
    if row.best.k == 0:
        head = "no fixed draft length pays"
    else:
        head = f"draft k = {row.best.k}, {row.best.speedup:.2f}x"
    gain = row.scheduled.speedup / max(row.best.speedup, 1.0) - 1
    if gain > 0.005:
        tail = f"confidence scheduling adds {gain:.0%}"
    elif row.scheduled.speedup <= 1.0:
        tail = "confidence scheduling does not pay either"
    else:
        tail = f"confidence scheduling brings nothing more ({gain:+.0%})"
    return f"batch {row.batch}: {head} ({row.reason}); {tail}."


def replay_table(
    name: str, rounds: int, profile: StepTimeProfile, found: Sequence[Replayed]
) -> Table:
    """Fixed against adaptive verification of recorded rounds, by batch size."""
    table = Table(
        title=f"{rounds} rounds of {name} on {profile.name} \\[{profile.label}]",
        caption=(
            "Speed-ups over no speculation. Accepted tokens are the recorded rounds' "
            f"own, times the profile's \\[{profile.label}]. By confidence: the whole "
            "block is drafted and as much verified as pays, by the head's confidence "
            f"as it is or calibrated. {profile.note}."
        ),
        title_justify="left",
        caption_justify="left",
    )
    headings = ["batch", "best k", "tok/s/user", "vs none", "by confidence", "drafts"]
    calibrated = found[0].calibrated is not None
    for heading in headings + ["calibrated", "drafts"] * calibrated:
        table.add_column(heading, justify="right")
    for row in found:
        plans = [row.recorded, *([row.calibrated] if row.calibrated else [])]
        table.add_row(
            str(row.batch),
            str(row.best.k),
            f"{row.best.tokens_per_second:.0f}",
            f"{row.best.speedup:.2f}x",
            *(
                cell
                for plan in plans
                for cell in (f"{plan.speedup:.2f}x", f"{plan.mean_drafts:.1f}")
            ),
        )
    return table


def replay_words(row: Replayed) -> str:
    """One sentence for a batch size: what adaptive verification would gain."""
    plan, how = row.recorded, "by the confidence as it is"
    if row.calibrated is not None:
        plan, how = row.calibrated, "by the calibrated confidence"
    best = max(row.best.speedup, 1.0)
    rival = f"k = {row.best.k}" if row.best.k else "no drafts"
    return (
        f"Batch {row.batch}: adaptive verification {how} commits "
        f"{plan.acceptance_length:.2f} tokens a step, {plan.speedup / best - 1:+.1%} "
        f"in speed against {rival}."
    )


def calibration_table(found: Calibration) -> Table:
    """Survival by draft position on rounds that the fit has not seen."""
    table = Table(
        title=f"Confidence on {found.judged} rounds it was not fitted on \\[measured]",
        caption=(
            "Survival: at least so many drafts were accepted. Before and after "
            f"scaling the head's logits, fitted on {found.fitted} other rounds. "
            "Error: expected calibration error, 20 bins. AUC: how well the rounds that "
            "survive are told from the others, 0.5 is chance."
        ),
        title_justify="left",
        caption_justify="left",
    )
    for name in (
        "position",
        "temperature",
        "shift",
        "observed",
        "predicted",
        "after",
        "error",
        "after",
        "AUC",
        "after",
    ):
        table.add_column(name, justify="right")
    scaling = found.scaling
    shifts = scaling.shifts or (0.0,) * len(scaling.temperatures)
    for each, temperature, shift in zip(
        found.positions, scaling.temperatures, shifts, strict=True
    ):
        table.add_row(
            str(each.position),
            f"{temperature:.2f}",
            f"{shift:+.2f}",
            f"{each.observed:.1%}",
            *(f"{value:.1%}" for value in (*each.predicted, *each.error)),
            *(f"{value:.3f}" for value in each.auc),
        )
    return table
