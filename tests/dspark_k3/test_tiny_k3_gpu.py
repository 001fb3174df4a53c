# SPDX-License-Identifier: Apache-2.0
"""tiny-k3 through vLLM on a GPU: speculation changes the speed, not the text.

The cases run once, several engines at a time (`tests.dspark_k3.suite.run`);
``K3_SUITE_OUT`` names a folder where they have run already.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.dspark_k3.suite import cases, run, verdict

pytestmark = [pytest.mark.engine, pytest.mark.gpu, pytest.mark.timeout(1800)]

NAMES = [case.name for case in cases.first_cases() if case.plain]
PREEMPTED = [
    case.name
    for case in cases.preemption_cases({"attention": [128], "states": 24})
    if case.plain
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if folder := os.environ.get("K3_SUITE_OUT"):
        found: dict[str, Any] = json.loads(Path(folder, "verdicts.json").read_text())
        return found
    if not (cases.TARGET / "config.json").is_file():
        pytest.skip(f"{cases.TARGET} is not there: make train-tiny-k3 writes it")
    return run.suite(tmp_path_factory.mktemp("suite"), parallel=6)


def case_of(verdicts: dict[str, Any], name: str) -> dict[str, Any]:
    if name in verdicts["failed"]:
        pytest.fail(f"{name}: {verdicts['failed'][name]}")
    if name not in verdicts["cases"]:
        pytest.fail(f"{name} did not run; failed: {verdicts['failed']}")
    found: dict[str, Any] = verdicts["cases"][name]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_plain_ones(verdicts: dict[str, Any], name: str) -> None:
    """Field cases F13, F25: k = 1..7, batch 1, 3, 8 and a queue, fixed and adaptive."""
    found = case_of(verdicts, name)
    assert verdict.passes(found), json.dumps(found["differences"][:5])
    assert found["edges_crossed"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_plain_ones_to_the_bit(
    verdicts: dict[str, Any], name: str
) -> None:
    """Where no prompt comes beside a decode, and its prefill gave the same numbers."""
    found = case_of(verdicts, name)
    assert verdict.same_logits(found), json.dumps(found["logits"])


def test_some_logits_were_compared(verdicts: dict[str, Any]) -> None:
    assert verdict.compared(verdicts["cases"].values())


@pytest.mark.parametrize("name", PREEMPTED)
def test_preempted_requests_resume(verdicts: dict[str, Any], name: str) -> None:
    found = case_of(verdicts, name)
    assert found["preemptions"] > 0
    assert verdict.passes(found), json.dumps(found["differences"][:5])


@pytest.mark.parametrize("name", ["fixed-graph-k7", "adaptive-graph-k7"])
def test_aborted_requests_disturb_no_other(verdicts: dict[str, Any], name: str) -> None:
    """Those not aborted, and a run afterwards, are among the compared groups."""
    found = case_of(verdicts, name)
    assert found["abort_in_flight"]
    assert verdict.passes(found), json.dumps(found["differences"][:5])


def test_drafts_are_worth_it_and_trimming_loses_little(
    verdicts: dict[str, Any],
) -> None:
    """Mean acceptance length at temperature 1 on held-out text, k = 7."""
    found = verdicts["acceptance"]
    assert found["long_enough"], found["means"]
    assert found["little_lost"], found


def test_logprobs_are_those_of_the_engine_free_model(verdicts: dict[str, Any]) -> None:
    assert verdicts["logits"]["close"], verdicts["logits"]


@pytest.mark.parametrize("k", [0, 7])
def test_installed_and_not_asked_for_is_stock(verdicts: dict[str, Any], k: int) -> None:
    found = verdicts["unasked"][f"k{k}"]
    assert found["equal"]
    assert found["untouched"], found["modules"]
    assert found["as_fast"], found["seconds"]
