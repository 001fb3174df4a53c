# SPDX-License-Identifier: Apache-2.0
"""The sweep on a stand-in engine: gates, projection, plots."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import plots, published, results, sweep
from experiments.advice import advise, closing
from experiments.byte_model import parse_floor
from experiments.step_time import RecordedProfile
from tests.experiments.fake_engine import FakeEngine, FakeJob

FLOOR = parse_floor("floor:k3-tp16-h200")


def measured(fault: str = "", prompts: int = 12) -> list[sweep.Measurement]:
    engine = FakeEngine(fault)

    def run(k: int, jobs: Sequence[Any]) -> Sequence[Any]:
        return engine.run_engine(Path(), None, k, jobs)

    texts = [[n, n + 1] for n in range(prompts)]
    plan = sweep.Plan({"stdlib": texts}, (0.0, 1.0), (0, 1, 3, 7), max_tokens=40)
    return sweep.measure(plan, run, FakeJob)


def test_good_run_has_green_gates() -> None:
    greedy, sampled = measured()
    assert greedy.gates == sampled.gates == {"lossless": True, "drafts_proposed": True}
    curve = greedy.curve()
    assert curve is not None and curve.label == "measured"
    assert curve.survival == pytest.approx((0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2))
    assert "equal" in greedy.check and "permutation" in sampled.check


@pytest.mark.parametrize(
    ("fault", "bad", "gate"),
    [
        ("state", 0, "lossless"),
        ("law", 1, "lossless"),
        ("silent", 0, "drafts_proposed"),
    ],
)
def test_injected_fault_turns_the_gate_red(fault: str, bad: int, gate: str) -> None:
    """Field case F25: broken state, biased law and a silent drafter are caught."""
    item = measured(fault)[bad]
    assert item.gates[gate] is False
    if fault == "state":
        assert item.lossless == {1: True, 3: False, 7: False}
    recorder = results.Recorder(command="test")
    curve = item.curve() or published.curve("k3-golden")
    refused = sweep.project(
        [sweep.Source(curve, item.gates)], FLOOR, (0, 3, 7), (1,), recorder
    )
    assert gate in refused[0]
    claims = {"speedup", "tokens_per_second_per_user"}
    assert not claims & {line["metric"] for line in recorder.lines}


def test_too_few_prompts_is_not_tested_and_not_green() -> None:
    """Field case F25: an untested law is no passed check."""
    sampled = measured(prompts=4)[1]
    assert sampled.check == "not tested: needs 10 prompts"
    assert sampled.gates["lossless"] is False
    assert [sweep.prompts_needed(tests) for tests in (1, 3, 7)] == [8, 10, 11]


def test_law_test_holds_its_level() -> None:
    """P-values under the null are not too small: at most 5 % below 0.05, roughly."""
    engine = FakeEngine()
    p_values = []
    for trial in range(60):
        prompts = [[trial, n] for n in range(10)]
        rows = [
            engine.run(k, FakeJob(1.0, prompts, 20, seed=1000 * k)).token_ids
            for k in (0, 1)
        ]
        p_values.append(sweep.law_test(rows[0], rows[1], 10, seed=trial))
    # Binomial(60, 0.05) exceeds 9 with probability 0.2 %.
    assert sum(p < 0.05 for p in p_values) <= 9
    assert max(p_values) > 0.5


def test_counts_come_from_the_engine_not_from_k() -> None:
    """Field case F23: recorded length is the engine's, the note has its counts."""
    recorder = results.Recorder(command="test")
    sweep.record_measurements(measured(), recorder)
    line = next(
        line
        for line in recorder.lines
        if line["metric"] == "acceptance_length" and line["shape"]["k"] == 3
    )
    assert line["value"] == pytest.approx(1 + 0.8 + 0.7 + 0.6)
    assert "100 verify steps, 300 drafts verified, 210 accepted" in line["note"]
    assert line["shape"]["prompts"] == 12


def test_labels_are_the_weaker_of_the_two() -> None:
    """Field case F25: measured points stay apart from modelled ones."""
    recorded = RecordedProfile(
        name="toy",
        gpu="toy",
        source="hand-made",
        interpolation="linear",
        plain={1: 1.0},
        draft={1: {1: 0.1}},
        verify={1: 1.0, 8: 1.5},
    )
    curve = measured()[0].curve()
    assert curve is not None
    assert sweep.combined_label(curve, recorded) == "recorded"
    assert sweep.combined_label(curve, FLOOR) == "modelled"
    assert sweep.combined_label(published.curve("dspark-qwen3-4b-lcb"), recorded) == (
        "modelled"
    )


def test_results_csv_and_plots(tmp_path: Path) -> None:
    """Field case F25: the plots carry GPU, label and the break-even line."""
    recorder = results.Recorder(command="test")
    items = measured()
    sweep.record_measurements(items, recorder)
    sources = [sweep.Source(c, m.gates) for m in items if (c := m.curve())]
    sources.append(sweep.Source(published.curve("k3-golden")))
    assert sweep.project(sources, FLOOR, range(8), (1, 8), recorder) == []
    results.append(tmp_path / results.FILE_NAME, recorder.lines)
    tables = sweep.write_csv(recorder.lines, tmp_path)
    with next(t for t in tables if t.name == "speedup.csv").open() as table:
        rows = list(csv.DictReader(table))
    golden = next(
        r for r in rows if (r["variant"], r["k"], r["batch"]) == ("k3-golden", "4", "1")
    )
    assert float(golden["value"]) == pytest.approx(1.711, abs=0.001)
    assert golden["label"] == "modelled"
    written = plots.render(tmp_path)
    assert sorted(p.name for p in written) == sorted(
        f"{name}.{suffix}" for name in plots.FIGURES for suffix in ("png", "svg")
    )
    drawing = (tmp_path / "speedup_by_acceptance.svg").read_text()
    for words in (
        "break-even",
        "NVIDIA H200",
        "modelled",
        "k=7",
        "acceptance measured",
    ):
        assert words in drawing
    positions = (tmp_path / "acceptance_by_position.svg").read_text()
    assert "tiny stdlib T=1 (measured)" in positions
    assert "k3-golden (recorded)" in positions


def test_advice_says_why() -> None:
    golden = published.curve("k3-golden")
    row = advise(golden, FLOOR, 1)
    assert row.best.k == 4
    assert "draft 5 adds 7.7% tokens" in row.reason
    assert row.scheduled.speedup > row.best.speedup > row.longest_speedup
    assert "exceed 64" in advise(golden, FLOOR, 32).reason
    assert "k = 4" in closing(golden, FLOOR, 1)
    poor = published.curve("k3-golden").power(8)
    assert "do not draft" in advise(poor, FLOOR, 8).reason
    assert "does not pay" in closing(poor, FLOOR, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [("0-9", "k is 9"), ("0", "no k of 1"), ("a", "not understood"), ("3-", "not und")],
)
def test_bad_draft_lengths(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sweep.parse_draft_lengths(text)


def test_draft_lengths_always_hold_the_baseline() -> None:
    """Field case F25: the baseline is a real plain run."""
    assert sweep.parse_draft_lengths("1,5-7") == [0, 1, 5, 6, 7]
