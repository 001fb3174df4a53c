# SPDX-License-Identifier: Apache-2.0
"""Verdicts on the small part's answers, and their result lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments import results
from tests.dspark_k3.suite import verdict
from tests.dspark_k3.suite.cases import Case
from tests.dspark_k3.tensor_parallel.cases import FAULT_LIMIT_S, STEPS

#: A reduction over ranks rounds elsewhere: a text may leave where two logits are this
#: near, which is what bf16 moves them by (`verdict.TIE`).
TIE = verdict.TIE
LINE_NOTE = (
    "vLLM's multiprocess executor, all-reduce by vLLM over peer memory or NCCL, no "
    "NVLink multicast and no FlashInfer"
)


def texts(plain: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """How many texts of ``found`` differ from those of ``plain``, and where.

    Returns:
        texts, differences (`suite.verdict.compare`), largest_gap (None if none differs
        or one has no gap).
    """
    differences: list[dict[str, Any]] = []
    count = 0
    for name, group in found["groups"].items():
        count += len(group["tokens"])
        differences += verdict.compare(name, plain["groups"][name], group)
    gaps = [d["gap"] for d in differences]
    known = bool(gaps) and None not in gaps
    return {
        "texts": count,
        "differences": differences,
        "largest_gap": max(gaps) if known else None,
    }


def speculation(
    case: Case, plain: Mapping[str, Any], found: Mapping[str, Any], *, trained: bool
) -> dict[str, Any]:
    """Speculation on against off at the same TP: equal texts, by our executor, with the
    same counts on every rank. Dummy weights accept nothing, so they need not."""
    judged = texts(plain, found)
    accepted = sum(
        group["speculation"]["accepted_tokens"] for group in found["groups"].values()
    )
    gates = {
        "text_equal": not judged["differences"],
        "executor_ran": found["counters"].get("ours", 0) > 0,
        "ranks_count_the_same": bool(found["counters_agree"]),
    }
    if trained:
        gates["speculated"] = accepted > 0
    return {"case": case.name, **judged, "accepted": accepted, "gates": gates}


def reduction(one: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """TP N against TP 1 of the same path, both plain: near ties may fall elsewhere."""
    judged = texts(one, group)
    near = [d["gap"] is not None and d["gap"] <= TIE for d in judged["differences"]]
    return {"case": "tp1-plain", **judged, "gates": {"only_near_ties": all(near)}}


def lengths(found: Mapping[str, Any], steps: int = STEPS) -> dict[str, dict[str, Any]]:
    """`jobs.count_lengths` with gates; the control is reported and judged by none."""
    judged: dict[str, dict[str, Any]] = {}
    for name, phase in found.items():
        judged[name] = dict(phase)
        if name == "control":
            continue
        gates = {
            "ranks_agree": bool(phase["agree"]),
            "enough_steps": phase["steps"] >= steps,
            "drafts_were_trimmed": phase["trimmed"] > 0,
        }
        if name == "drift":
            gates["disturbed"] = phase["disturbed"] > 0
        judged[name]["gates"] = gates
    return judged


def fault(found: Mapping[str, Any]) -> dict[str, Any]:
    """`jobs.break_a_rank` with gates: an error in bounded time, and no process left."""
    gates = {
        "stopped_with_an_error": bool(found["error"]),
        "in_bounded_time": bool(found["error"]) and found["seconds"] < FAULT_LIMIT_S,
        "no_process_left": bool(found["gone"]),
    }
    return {**found, "gates": gates}


class Lines:
    """Result lines of the small part.

    Args:
        recorder: gets them.
        tp: ranks.
        trained: as of `cases.Models`.
    """

    def __init__(self, recorder: results.Recorder, tp: int, trained: bool) -> None:
        self._recorder = recorder
        self._tp = tp
        self._model = "tiny-k3" if trained else "tiny-k3's shape, dummy weights,"

    def _add(self, metric: str, value: float, what: str, gpu: str, **rest: Any) -> None:
        given = rest.pop("note", "")
        self._recorder.add(
            metric,
            value,
            label="measured",
            variant=f"{self._model} {what}",
            gpu=gpu,
            note="; ".join(filter(None, (given, LINE_NOTE))),
            **rest,
        )

    def texts(
        self, case: Case, judged: Mapping[str, Any], gpu: str, against: str
    ) -> None:
        """Texts that differ, and the largest gap where they do."""
        shape = {
            "tp": self._tp,
            "k": case.k,
            "mode": "eager" if case.eager else "graph",
            "adaptive": case.adaptive,
            "texts": judged["texts"],
            "against": against,
        }
        what = f"{case.name} greedy"
        first = [
            (d["group"], d["prompt"], d["position"], d["gap"])
            for d in judged["differences"]
        ]
        self._add(
            "texts_that_differ",
            len(judged["differences"]),
            what,
            gpu,
            shape=shape,
            unit="texts",
            gates=judged["gates"],
            note=f"(group, prompt, position, gap): {first}" if first else "",
        )
        if judged["largest_gap"] is not None:
            self._add(
                "largest_gap_where_texts_differ",
                judged["largest_gap"],
                what,
                gpu,
                shape=shape,
                unit="logits",
            )

    def lengths(self, judged: Mapping[str, Mapping[str, Any]], gpu: str) -> None:
        """Steps in which ranks were compared, with what came out."""
        for name, phase in judged.items():
            first = phase.get("first")
            notes = {
                "same": "as it is",
                "drift": f"{phase.get('disturbed')} confidences of the last rank moved",
                "control": "the same drift, ranks do not share confidences (stock)",
            }
            ended = phase.get("error")
            outcome = f"; engine stopped: {ended}" if ended else ""
            differ = f"; ranks differ first: {first}" if first else ""
            self._add(
                "steps_compared_across_ranks",
                phase.get("steps", 0),
                f"adaptive-k7 lengths and graphs, {name}",
                gpu,
                shape={
                    "tp": self._tp,
                    "k": 7,
                    "adaptive": True,
                    **{
                        key: phase[key]
                        for key in ("trimmed", "uneven", "graphs")
                        if key in phase
                    },
                },
                unit="steps",
                gates=phase.get("gates"),
                note=f"{notes[name]}{differ}{outcome}",
            )

    def fault(self, case: Case, judged: Mapping[str, Any], gpu: str) -> None:
        """Seconds from the signal to the client's error, and to the last process."""
        for metric, key in (
            ("seconds_to_error", "seconds"),
            ("seconds_to_last_process", "gone_s"),
        ):
            self._add(
                metric,
                judged[key],
                f"{case.name}, last rank {judged['kind']}",
                gpu,
                shape={"tp": self._tp, "k": case.k, "fault": judged["kind"]},
                unit="s",
                gates=judged["gates"],
                note=f"error: {judged['error']}; "
                f"step limit {case.env.get('VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS')} s",
            )

    def failed(self, name: str, error: str, gpu: str) -> None:
        """An engine that failed."""
        self._add(
            "failed_engine",
            1,
            name,
            gpu,
            shape={"tp": self._tp},
            unit="engines",
            gates={"ran": False},
            note=error.strip().split("\n")[0],
        )
