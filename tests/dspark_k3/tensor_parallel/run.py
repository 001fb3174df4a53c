# SPDX-License-Identifier: Apache-2.0
"""Everything at one TP: engines side by side, verdicts and lines as they come."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments import results
from experiments.gpu_engine import fleet, lines, measure, ranks
from experiments.gpu_engine.fleet import Outcome, Turns, Wave
from experiments.layer_trace import describe
from tests.dspark_k3.suite.cases import Case
from tests.dspark_k3.suite.run import selected
from tests.dspark_k3.tensor_parallel import cases, verdict
from tests.dspark_k3.tensor_parallel.cases import Models

PARTS = ("small", "wide")
START_LIMIT_S, SMALL_LIMIT_S, WIDE_LIMIT_S = 240.0, 240.0, 150.0
GPU = "NVIDIA H200"

Say = Callable[[str], None]


class Report:
    """What came out so far: ``verdicts.json`` and ``results.jsonl`` of a folder."""

    def __init__(
        self,
        out: Path,
        tp: int,
        small: Sequence[Case],
        models: Models,
        *,
        commit: str | None = None,
        say: Say = lines.say,
        steps: int = cases.STEPS,
    ) -> None:
        self.verdicts: dict[str, Any] = {"tp": tp, "cases": {}, "failed": {}}
        self._out = out
        self._commit = commit
        self._say = say
        self._steps = steps
        self._trained = models.trained
        self._tp = tp
        self._cases = {case.name: case for case in small}
        self._answers: dict[str, dict[str, Any]] = {}
        self._open = [case.name for case in small]
        self._gpu = GPU

    @property
    def ok(self) -> bool:
        """Whether something was judged and every gate holds."""
        judged = self.verdicts["cases"].values()
        gates = [all(each["gates"].values()) for each in judged]
        return bool(gates) and all(gates) and not self.verdicts["failed"]

    def small(self, outcome: Outcome) -> None:
        """An engine of the small part has ended."""
        name = outcome.name
        self._open.remove(name)
        if outcome.ok:
            self._answers[name] = outcome.result
            self._gpu = outcome.result["gpu"][0]
        else:
            self._failed(name, outcome.error)
        recorder = self._recorder()
        written = verdict.Lines(recorder, self._tp, self._trained)
        if outcome.ok:
            self._beyond_texts(name, written)
        else:
            written.failed(name, outcome.error, self._gpu)
        self._compare_texts(written)
        self._save(recorder)

    def _beyond_texts(self, name: str, written: verdict.Lines) -> None:
        answer = self._answers[name]
        if found := answer.get("lengths"):
            judged = verdict.lengths(found, self._steps)
            for phase, one in judged.items():
                if "gates" in one:
                    self._judged(f"{name} lengths {phase}", one)
                else:
                    self.verdicts["control"] = one
                    self._say(f"{name} lengths control: {json.dumps(one)}")
            written.lengths(judged, self._gpu)
        if found := answer.get("fault"):
            one = verdict.fault(found)
            self._judged(f"{name} {found['kind']}", one)
            written.fault(self._cases[name], one, self._gpu)

    def _compare_texts(self, written: verdict.Lines) -> None:
        """Judge the cases of which both sides are there by now."""
        for name, case in self._cases.items():
            ready = case.plain in self._answers and name in self._answers
            if not ready or name in self.verdicts["cases"]:
                continue
            found, base = self._answers[name], self._answers[case.plain]
            if name == "tp1-plain":
                judged = verdict.reduction(found, base)
                against = f"TP {self._tp} plain"
            else:
                judged = verdict.speculation(case, base, found, trained=self._trained)
                against = case.plain
            self._judged(name, judged)
            written.texts(case, judged, self._gpu, against)

    def wide(self, outcome: Outcome) -> None:
        """An engine of K3's widths has ended."""
        if not outcome.ok:
            self._failed(outcome.name, outcome.error)
            self._save(self._recorder())
            return
        recorder = self._recorder(outcome.result["versions"])
        plan = outcome.result["plan"]
        self._say(lines.step_table({outcome.name: outcome}))
        gates = {
            "ranks_count_the_same": bool(outcome.result["counters_agree"]),
            "executor_ran": plan["target"] == "stock"
            or outcome.result["counters"].get("ours", 0) > 0,
        }
        for point in outcome.result["points"]:
            lines.add_point(recorder, plan, point, outcome.result["gpu"])
            try:
                if point["trace"] is None:
                    raise ValueError("no step was traced")
                steps = lines.traced_steps(Path(point["trace"]), plan["layers"])
                times = lines.times_of(plan, steps)
            except ValueError as error:
                self._say(f"{outcome.name} batch {point['batch']}: no layers: {error}")
                gates[f"traced_{point['batch']}"] = False
                continue
            lines.add_layers(recorder, plan, point, outcome.result["gpu"], times)
            self._say(describe(outcome.name, point, steps, times, 24))
        self._judged(outcome.name, {"gates": gates})
        self._save(recorder)

    def _recorder(self, versions: dict[str, str] | None = None) -> results.Recorder:
        known = next((a["versions"] for a in self._answers.values()), {})
        return results.Recorder(versions=versions or known, commit=self._commit)

    def _judged(self, name: str, judged: dict[str, Any]) -> None:
        self.verdicts["cases"][name] = judged
        red = [gate for gate, holds in judged["gates"].items() if not holds]
        shown = {k: v for k, v in judged.items() if k not in ("gates", "digests")}
        word = f"RED: {', '.join(red)}" if red else "holds"
        self._say(f"{name}: {word}; {json.dumps(shown)[:600]}")

    def _failed(self, name: str, error: str) -> None:
        self.verdicts["failed"][name] = error

    def _save(self, recorder: results.Recorder) -> None:
        if recorder.lines:
            results.append(self._out / "results.jsonl", recorder.lines)
        path = self._out / "verdicts.json"
        path.write_text(json.dumps(self.verdicts, indent=1) + "\n")


def run(
    out: Path,
    tp: int,
    *,
    parts: Sequence[str] = PARTS,
    only: str = "",
    layers: int = 4,
    steps: int = cases.STEPS,
    minutes: float = 9.0,
    nccl: bool = False,
    commit: str | None = None,
    start: fleet.Launch = fleet.launch,
    say: Say = lines.say,
) -> Report:
    """Run the parts and report; what is not done after ``minutes`` is stopped.

    Args:
        out: folder for everything, made if it is missing.
        tp: ranks.
        parts: of `PARTS`.
        only: cases of the small part whose names contain this, with the plain ones they
            need.
        layers: of K3, for the wide part.
        steps: compared across ranks.
        nccl: every all-reduce is NCCL's, none vLLM's over peer memory.
        commit: to record where git cannot tell.
        start: starts an engine's process.
        say: gets lines of progress.
    """
    out.mkdir(parents=True, exist_ok=True)
    models = cases.models(tp, out)
    small: list[Case] = []
    if "small" in parts:
        small = selected(cases.small_cases(models.trained, steps), only)
    plans: list[measure.Plan] = []
    if "wide" in parts:
        plans = cases.wide_plans(tp, layers, out)
    specs = ranks.with_ports(
        [
            *(cases.spec(case, tp, models) for case in small),
            *(measure.spec(plan, out / "models") for plan in plans),
        ]
    )
    if nccl:
        specs = [ranks.by_nccl(spec) for spec in specs]
    of_small, of_wide = specs[: len(small)], specs[len(small) :]
    report = Report(out, tp, small, models, commit=commit, say=say, steps=steps)
    turns = Turns()
    wave = functools.partial(
        Wave,
        exclusive=True,
        start_limit_s=START_LIMIT_S,
        progress=say,
        start=start,
        turns=turns,
    )
    waiting: list[list[Wave]] = []
    if of_wide:
        at_once = measure.engines_at_once(plans)
        # A wave of its own for each handful that fits, as fits the GPUs' memory.
        waiting.append(
            [
                wave(
                    of_wide[first : first + at_once],
                    out,
                    parallel=at_once,
                    job_limit_s=WIDE_LIMIT_S,
                    quiet=True,
                    ended=report.wide,
                )
                for first in range(0, len(of_wide), at_once)
            ]
        )
    if of_small:
        waiting.append(
            [
                wave(
                    of_small,
                    out,
                    parallel=len(of_small),
                    job_limit_s=SMALL_LIMIT_S,
                    ended=report.small,
                )
            ]
        )
    if not fleet.run_waves(waiting, deadline_s=60 * minutes):
        say(f"stopped after {minutes:.1f} minutes")
        report.verdicts["failed"]["the run"] = f"not done after {minutes:.1f} minutes"
    return report
