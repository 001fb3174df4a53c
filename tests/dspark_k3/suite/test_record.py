# SPDX-License-Identifier: Apache-2.0
"""Result lines of a suite, from a folder that is made up: no GPU."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspark_k3 import settings
from experiments import results
from experiments.gpu_engine import fleet
from tests.dspark_k3.suite import cases, record, verdict
from tests.dspark_k3.suite.cases import Case

RECORDED = Path(results.__file__).parent / "results" / "h200" / "tiny_k3.jsonl"
GROUPS = {
    "batch1": {"prompts": [[1, 2], [3]], "max_tokens": 4},
    "batch8": {"prompts": [[4], [5], [6]], "max_tokens": 4},
}
SAMPLED = {
    kind: {"prompts": [[1], [2], [3]], "max_tokens": 16, "seed": 1}
    for kind in ("stdlib", "generated")
}
COMMIT = "a" * 40
SECONDS = {"installed": [3.0, 1.0, 2.5], "absent": [2.0, 4.0, 1.5]}


def gates(ran: bool) -> dict[str, bool]:
    """Of a line of a case whose texts and logprobs are equal."""
    return {"text_equal": True, "executor_ran": ran, "logits_equal": True}


def counts(steps: int, accepted: int) -> dict[str, int]:
    return {"verify_steps": steps, "draft_tokens": 0, "accepted_tokens": accepted}


def answer(k: int, accepted: int = 15) -> dict[str, Any]:
    """What `jobs.job` returns; every text is 0, 1, 2, 3."""
    groups: dict[str, Any] = {}
    for name, group in GROUPS.items():
        said = [[0, 1, 2, 3] for _ in group["prompts"]]  # type: ignore[attr-defined]
        speculation = counts(10, accepted) if k else counts(0, 0)
        groups[name] = {"tokens": said, "speculation": speculation}
        groups[name]["values"] = [[[-t / 9, -4.0] for t in text] for text in said]
        if not k:
            groups[name]["tops"] = [[[t, 9, t / 32] for t in text] for text in said]
    return {
        "groups": groups,
        "block_size": 128,
        "counters": {"ours": 5},
        "preemptions": 0,
    }


class Suite:
    """Writes what a suite leaves in ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {"cases": {}, "failed": {}}

    def add(self, case: Case, result: dict[str, Any]) -> dict[str, Any]:
        """The answer and spec of an engine, and its verdict against plain decoding."""
        options = {"groups": GROUPS, "sampled": SAMPLED, "timed": "batch8"}
        if case.name.startswith("chunked"):
            # Prompts come beside decodes: no logprobs are compared.
            for group in result["groups"].values():
                del group["values"]
        fleet.write_spec(cases.spec(replace(case, options=options)), self.path)
        self.leave(f"{case.name}.json", {"result": result})
        judged = verdict.judge(Case("", options=options), answer(0), result)
        return {**judged, "case": case.name}

    def leave(self, name: str, content: Any) -> None:
        (self.path / name).write_text(json.dumps(content))

    def fail(self, name: str, error: str) -> None:
        fleet.write_spec(cases.spec(Case(name, 5, adaptive=True)), self.path)
        self.leave(f"{name}.json", {"error": error})
        self.found["failed"][name] = error
        self.save()

    def save(self) -> None:
        self.leave("verdicts.json", self.found)


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """Equal cases, one that differs with ours and with stock ops, and all the rest."""
    made = Suite(tmp_path)
    judged = made.found["cases"]
    fixed, adaptive = answer(7, 31), answer(7, 27)
    fixed["sampled"] = {"stdlib": counts(100, 210), "generated": counts(50, 300)}
    adaptive["sampled"] = {"stdlib": counts(100, 190), "generated": counts(50, 295)}
    said = fixed["groups"]["batch8"]["tokens"]
    fixed["abort"] = {
        "aborted": {"abort-0": 2},
        "survivors": {"1": said[1], "2": said[2]},
        "afterwards": said,
    }
    for case, result in (
        (Case("fixed-graph-k7", 7), fixed),
        (Case("adaptive-graph-k7", 7, adaptive=True), adaptive),
        (Case("fixed-eager-k2", 2, eager=True), answer(2)),
    ):
        judged[case.name] = made.add(case, result)
    chunked = Case("chunked-k7", 7)
    ours, stock = answer(7), answer(7)
    ours["groups"]["batch8"]["tokens"][2][3] = 8
    stock["groups"]["batch8"]["tokens"][0][1] = 8
    stock["groups"]["batch1"]["tokens"][1][2] = 8
    judged["chunked-k7"] = made.add(chunked, ours)
    judged["chunked-k7"]["stock"] = made.add(chunked.as_stock(), stock)
    made.found["acceptance"] = verdict.acceptance(fixed, adaptive)
    made.found["logits"] = {
        "positions": 72,
        "mean_kl": 1e-4,
        "max_kl": 2e-3,
        "max_difference_at_the_top": 0.0417,
        "same_token": 71,
        "near_ties": 1,
        "close": True,
    }
    for kind in SECONDS:
        made.add(Case(f"{kind}-k0", asked=False), answer(0))
    made.found["unasked"] = {
        "k0": {"equal": True, "as_fast": False, "untouched": True, "seconds": SECONDS}
    }
    made.save()
    return made


def lines(
    suite: Suite, metric: str = "acceptance_length", **options: Any
) -> dict[str, results.Line]:
    """The lines of a metric by what follows "tiny-k3" in their variant."""
    found = record.lines(suite.path, commit=COMMIT, **options)
    chosen = [line for line in found if line["metric"] == metric]
    by_name = {line["variant"].removeprefix("tiny-k3 "): line for line in chosen}
    assert len(by_name) == len(chosen)
    return by_name


def test_lines_have_the_form_of_the_recorded_ones(suite: Suite) -> None:
    """All but what a run decides is what the shipped file has for the same figure."""
    recorded = {
        (line["metric"], line["variant"]): line for line in results.read(RECORDED)
    }
    made = {
        (line["metric"], line["variant"]): line
        for line in record.lines(suite.path, commit=COMMIT)
    }
    both = [name for name in made if name in recorded]
    expected = {
        *(
            ("acceptance_length", f"tiny-k3 {case} greedy {group}")
            for case in ("fixed-graph-k7", "fixed-eager-k2")
            for group in GROUPS
        ),
        *(
            ("acceptance_length", f"tiny-k3 fixed-graph-k7 T=1 {kind}")
            for kind in SAMPLED
        ),
    }
    assert expected <= set(both)
    assert any(metric == "logits_mean_kl" for metric, _ in both)
    decided = {"value", "spread", "gates", "note", "shape"}
    decided |= {"commit", "versions", "command", "date"}
    for name in both:
        line, wanted = made[name], recorded[name]
        assert list(line) == list(wanted)
        for key in ("gates", "shape"):
            assert list(line[key]) == list(wanted[key]), (name, key)
        compared = set(wanted) - decided
        if line["metric"] == "acceptance_length":
            compared.add("shape")
        for key in compared:
            assert line[key] == wanted[key], (name, key)


def test_greedy_acceptance_and_its_gates(suite: Suite) -> None:
    found = lines(suite)
    line = found["fixed-graph-k7 greedy batch8"]
    assert line["value"] == pytest.approx(4.1)
    assert line["gates"] == gates(True)
    assert line["note"] == ""
    assert found["adaptive-graph-k7 greedy batch1"]["shape"] == {
        "k": 7,
        "group": "batch1",
        "temperature": 0.0,
        "mode": "graph",
        "adaptive": True,
    }
    shape = found["fixed-eager-k2 greedy batch1"]["shape"]
    assert (shape["k"], shape["mode"], shape["adaptive"]) == (2, "eager", False)
    line = found["chunked-k7 greedy batch1"]
    assert line["gates"] == {"text_equal": False, "executor_ran": True}
    assert line["note"] == (
        "differs at [('batch8', 2, 3, 0.09375)]; all ops stock: 2 requests differ from "
        "stock's own plain run, gaps [0.0625, 0.03125]"
    )
    assert not any("stock greedy" in name for name in found)


def test_an_executor_that_did_not_run_is_a_red_gate(suite: Suite) -> None:
    suite.found["cases"]["fixed-eager-k2"]["executor_ran"] = False
    suite.save()
    line = lines(suite)["fixed-eager-k2 greedy batch8"]
    assert line["gates"] == gates(False)


def test_acceptance_at_temperature_1_and_what_trimming_loses(suite: Suite) -> None:
    found = lines(suite)
    values = {name: line["value"] for name, line in found.items() if "T=1" in name}
    assert values == {
        "fixed-graph-k7 T=1 stdlib": pytest.approx(3.1),
        "fixed-graph-k7 T=1 generated": pytest.approx(7.0),
        "adaptive-graph-k7 T=1 stdlib": pytest.approx(2.9),
        "adaptive-graph-k7 T=1 generated": pytest.approx(6.9),
    }
    line = found["adaptive-graph-k7 T=1 generated"]
    assert line["shape"]["adaptive"] and line["shape"]["temperature"] == 1.0
    assert line["note"] == "3 held-out prompts, 16 tokens each; 50 verify steps"
    (lost,) = lines(suite, "acceptance_length_lost").values()
    assert lost["value"] == pytest.approx(1 - 4.9 / 5.05)
    assert lost["gates"] == {"little_lost": True, "long_enough": True}
    suite.found["acceptance"]["little_lost"] = False
    suite.save()
    (lost,) = lines(suite, "acceptance_length_lost").values()
    assert lost["gates"]["little_lost"] is False


def test_logits(suite: Suite) -> None:
    for metric, value in (("logits_mean_kl", 1e-4), ("logits_max_kl", 2e-3)):
        (line,) = lines(suite, metric).values()
        assert line["value"] == value and line["unit"] == "nats"
        assert line["gates"] == {"close": True, "same_token": False}
        assert line["note"] == (
            "largest difference of a top logprob 0.042; same token at 71 positions"
        )


def test_differing_texts_and_the_same_with_stock_ops(suite: Suite) -> None:
    """Gaps are those of plain decoding, t / 32 at token t."""
    found = lines(suite, "texts_that_differ")
    gaps = lines(suite, "largest_gap_where_texts_differ")
    names = {"chunked-k7 greedy": "ours", "chunked-k7 greedy all ops stock": "stock"}
    assert set(found) == set(gaps) == set(names)
    for name, ops in names.items():
        for line in (found[name], gaps[name]):
            shape = line["shape"]
            assert (shape["ops"], shape["texts"], shape["k"]) == (ops, 5, 7)
    assert [found[name]["value"] for name in names] == [1, 2]
    assert [gaps[name]["value"] for name in names] == [3 / 32, 2 / 32]
    assert found["chunked-k7 greedy"]["gates"] == {"excused": True}


def test_a_difference_that_stock_ops_were_not_asked_about(suite: Suite) -> None:
    case = suite.found["cases"]["chunked-k7"]
    del case["stock"]
    case["differences"][0]["gap"] = None
    suite.save()
    (line,) = lines(suite, "texts_that_differ").values()
    assert line["gates"] == {"excused": False}
    assert line["note"] == "1 without a recorded gap"
    assert not lines(suite, "largest_gap_where_texts_differ")
    note = lines(suite)["chunked-k7 greedy batch8"]["note"]
    assert note.endswith("; not run with all ops stock")


def test_texts_of_an_abort_are_counted(suite: Suite) -> None:
    result = json.loads((suite.path / "fixed-graph-k7.json").read_text())["result"]
    assert record.texts(result) == 5 + 2 + 3


def test_times_of_engines_that_do_not_ask_for_us(suite: Suite) -> None:
    found = lines(suite, "unasked_seconds")
    line = found["installed-k0 stock vLLM, plug-in installed"]
    assert (line["value"], line["spread"], line["unit"]) == (2.5, 2.0, "s")
    assert line["gates"] == {"text_equal": True, "as_fast": False, "untouched": True}
    assert (line["shape"]["k"], line["shape"]["group"]) == (0, "batch8")
    line = found["absent-k0 stock vLLM, plug-in absent"]
    assert (line["value"], line["spread"], line["gates"]) == (2.0, 2.5, {})


def test_failed_engines_are_refused_or_lines(suite: Suite) -> None:
    suite.fail("adaptive-graph-k5", "ValueError: no\nmore of it")
    with pytest.raises(
        ValueError, match=r"engines failed: adaptive-graph-k5; .*--failed"
    ):
        lines(suite)
    (line,) = lines(suite, "failed_engine", failed=True).values()
    assert line["variant"] == "tiny-k3 adaptive-graph-k5"
    assert line["shape"] == {"k": 5, "mode": "graph", "adaptive": True}
    assert line["gates"] == {"ran": False}
    assert line["note"] == "ValueError: no"


LAYOUTS: list[tuple[settings.Layout, dict[str, str]]] = [
    ("fold", {"kda_layout": "fold"}),
    ("snapshot", {}),
]


def test_a_line_names_the_layout_and_ops_that_are_not_the_defaults(
    tmp_path: Path,
) -> None:
    made = Suite(tmp_path)
    made.save()
    for layout, shown in LAYOUTS:
        made.add(Case("fixed-graph-k7", 7, layout=layout), answer(7))
        shape = record.Folder(tmp_path).shape("fixed-graph-k7")
        assert shape == {"k": 7, "mode": "graph", "adaptive": False, **shown}
    given = Case("fixed-graph-k7", 7, ops={"moe_experts": "stock", "mla": "ours"})
    made.add(given, answer(7))
    shape = record.Folder(tmp_path).shape("fixed-graph-k7")
    assert shape["stock"] == "moe_experts"
    made.add(Case("fixed-drafter-k7", 7, drafter="ours"), answer(7))
    shape = record.Folder(tmp_path).shape("fixed-drafter-k7")
    assert shape["draft_sampler"] == shape["draft_attention"] == "ours"
    made.add(given.as_stock(), answer(7))
    assert "stock" not in record.Folder(tmp_path).shape("fixed-graph-k7-stock")


def test_older_verdicts_of_what_failed_are_left_out(suite: Suite) -> None:
    """As ``--add`` leaves them."""
    for name in ("adaptive-graph-k7", "plain-graph", "absent-k0"):
        suite.fail(name, "ValueError: no")
    found = record.lines(suite.path, commit=COMMIT, failed=True)
    figures = [line for line in found if line["metric"] != "failed_engine"]
    assert len(found) - len(figures) == 3
    assert not any("adaptive" in line["variant"] for line in figures)
    assert {line["metric"] for line in figures} == {
        "acceptance_length",
        "texts_that_differ",
        "largest_gap_where_texts_differ",
    }


def test_bad_folders_are_refused(suite: Suite, tmp_path: Path) -> None:
    result = json.loads((tmp_path / "fixed-eager-k2.json").read_text())
    result["result"]["groups"]["batch1"]["speculation"]["accepted_tokens"] += 1
    suite.leave("fixed-eager-k2.json", result)
    with pytest.raises(
        ValueError, match=r"fixed-eager-k2, batch1: .*of different runs"
    ):
        lines(suite)
    suite.leave("fixed-eager-k2.json", {"error": "ValueError: no"})
    with pytest.raises(ValueError, match=r"fixed-eager-k2\.json holds no result"):
        lines(suite)
    (tmp_path / "fixed-eager-k2.json").unlink()
    with pytest.raises(ValueError, match=r"fixed-eager-k2\.json does not exist"):
        lines(suite)
    (tmp_path / "verdicts.json").write_text('{"cases": ')
    with pytest.raises(ValueError, match=r"verdicts\.json is not JSON"):
        lines(suite)
    suite.leave("verdicts.json", {"cases": {}, "failed": {}})
    with pytest.raises(ValueError, match="has no verdict"):
        lines(suite)


def test_the_command_replaces_the_file(
    suite: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(tmp_path / "verdicts.json", (86400, 86400))
    out = tmp_path / "new" / "lines.jsonl"
    asked = [str(tmp_path), "--commit", COMMIT, "--out", str(out)]
    assert record.main(asked) == 0
    plain = results.read(out)
    assert all(line["versions"] == {} for line in plain)
    assert {line["gpu"] for line in plain} == {"NVIDIA H200"}
    more = ["--gpu", "NVIDIA H100", "--versions", "vllm=0.33.0, torch=2.11.0+cu130"]
    more += ["--note", "run 7", "--command", "typed"]
    assert record.main([*asked, *more]) == 0
    found = results.read(out)
    assert len(found) == len(plain)
    for line, before in zip(found, plain, strict=True):
        assert line["commit"] == COMMIT and line["command"] == "typed"
        assert line["versions"] == {"vllm": "0.33.0", "torch": "2.11.0+cu130"}
        assert (line["gpu"], line["label"]) == ("NVIDIA H100", "measured")
        assert line["date"] == "1970-01-02T00:00:00+00:00"
        assert line["note"] == "; ".join(filter(None, (before["note"], "run 7")))
        assert line["value"] == before["value"]
    text = out.read_text()
    suite.fail("adaptive-graph-k5", "ValueError: no")
    for arguments, message in (
        (asked, "engines failed"),
        ([*asked, "--failed", "--commit", ""], "'commit' must be a non-empty string"),
        ([*asked, "--failed", "--versions", "vllm"], "give NAME=VERSION"),
    ):
        with pytest.raises(SystemExit):
            record.main(arguments)
        assert message in capsys.readouterr().err
        assert out.read_text() == text
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("differ", [[], [{"group": "batch1", "prompt": 0}]])
def test_logits_are_a_gate_where_some_were_compared(differ: list[object]) -> None:
    case = {"equal": True, "executor_ran": True, "exact_wanted": True}
    compared = {"prompts": 3, "apart": 0, "differ": differ}
    found = record.gates_of({**case, "logits": compared})
    assert found["logits_equal"] is (not differ)
    for other in ({**compared, "prompts": 0}, compared):
        wanted = other is not compared
        silent = {**case, "exact_wanted": wanted, "logits": other}
        assert "logits_equal" not in record.gates_of(silent)
