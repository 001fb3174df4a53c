# SPDX-License-Identifier: Apache-2.0
"""The driver and its verdicts, over engines that are made up: no GPU."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark_k3 import settings
from experiments import corpora
from experiments.gpu_engine.fleet import EngineSpec, Outcome
from tests.dspark_k3.suite import cases, jobs, run, verdict
from tests.dspark_k3.suite.cases import Case

VOCAB = 16
TEXT = functools.cache(corpora.held_out_bytes)


@pytest.fixture(autouse=True)
def text_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases read the held-out text anew for every list of prompts."""
    monkeypatch.setattr(corpora, "held_out_bytes", TEXT)
    monkeypatch.setattr(cases, "held_out_bytes", TEXT)


def tokens_of(prompt: list[int], count: int) -> list[int]:
    """What the made-up target says after a prompt."""
    return [(sum(prompt) + 7 * i) % VOCAB for i in range(count)]


def reference(ids: list[int]) -> torch.Tensor:
    """Logits of a model that is sure of ``tokens_of`` and near no tie."""
    logits = torch.zeros(len(ids), VOCAB)
    for at in range(len(ids)):
        logits[at, (len(ids) * 3 + at) % VOCAB] = 8.0
    return logits


class Engines:
    """Stands in for `fleet.run`. ``change`` may alter a result by its spec.

    Attributes:
        started: names in order.
        alone: names of those that started and ran with no other on the GPU.
    """

    def __init__(
        self, change: Callable[[EngineSpec, dict[str, Any]], None] | None = None
    ) -> None:
        self.change = change
        self.started: list[str] = []
        self.alone: list[str] = []

    def __call__(
        self,
        specs: Sequence[EngineSpec],
        out: Path,
        *,
        parallel: int,
        exclusive: bool,
        **_: Any,
    ) -> dict[str, Outcome]:
        found = {}
        for spec in specs:
            self.started.append(spec.name)
            if exclusive and parallel == 1:
                self.alone.append(spec.name)
            if "broken" in spec.engine:
                found[spec.name] = Outcome(spec.name, error="ValueError: broken")
                continue
            result = self.result(spec)
            if self.change is not None:
                self.change(spec, result)
            found[spec.name] = Outcome(spec.name, json.loads(json.dumps(result)))
        return found

    def result(self, spec: EngineSpec) -> dict[str, Any]:
        options = spec.options
        speculative = spec.engine.get("speculative_config", {})
        k = speculative.get("num_speculative_tokens", 0)
        adaptive = "enable_adaptive_verification" in speculative
        counts = {
            "verify_steps": 100 if k else 0,
            "draft_tokens": (90 if adaptive else 100) * k,
            "accepted_tokens": (196 if adaptive else 200) if k else 0,
        }
        groups: dict[str, Any] = {}
        for name, group in options["groups"].items():
            said = [tokens_of(p, group["max_tokens"]) for p in group["prompts"]]
            groups[name] = {"tokens": said, "speculation": counts}
            if group.get("logprobs"):
                groups[name]["tops"] = [[[t, 0, 0.03] for t in row] for row in said]
            if group.get("values"):
                groups[name]["values"] = [[[t / -9, -4.0] for t in r] for r in said]
        asked = "additional_config" in spec.engine
        result: dict[str, Any] = {
            "groups": groups,
            "block_size": 128,
            "sampled": dict.fromkeys(options.get("sampled", {}), counts),
            "preemptions": 3 if "num_gpu_blocks_override" in spec.engine else 0,
            "counters": {"ours": 40} if asked else {},
            "target_modules": ["dspark_k3.target.model"],
        }
        if name := options.get("abort"):
            said = groups[name]["tokens"]
            result["abort"] = {
                "aborted": {"abort-0": 5},
                "survivors": {str(i): list(said[i]) for i in (1, 2, 4)},
                "afterwards": said,
            }
        if options.get("geometry"):
            result["geometry"] = {"attention": [128, 128], "states": 24, "blocks": 900}
        if options.get("repeats"):
            result["seconds"] = [1.0, 1.02, 1.01]
        if vectors := options.get("vectors"):
            result["vectors"] = [
                self.vector(prompt, vectors["max_tokens"])
                for prompt in vectors["prompts"]
            ]
        return result

    @staticmethod
    def vector(prompt: list[int], count: int) -> dict[str, Any]:
        said = tokens_of(prompt, count)
        logits = reference([*prompt, *said]).log_softmax(-1)
        return {
            "prompt": prompt,
            "tokens": said,
            "logprobs": logits[len(prompt) - 1 : -1].tolist(),
        }


def suite(
    out: Path, engines: Engines, only: str = "", add: bool = False
) -> dict[str, Any]:
    return run.suite(
        out, parallel=3, only=only, add=add, run=engines, reference=reference
    )


def test_all_cases_run_and_hold(tmp_path: Path) -> None:
    engines = Engines()
    found = suite(tmp_path, engines)
    assert found["ok"]
    assert json.loads((tmp_path / "verdicts.json").read_text()) == found
    names = set(found["cases"])
    assert {f"fixed-graph-k{k}" for k in range(1, 8)} <= names
    assert {f"fixed-eager-k{k}" for k in range(1, 8)} <= names
    assert {f"adaptive-graph-k{k}" for k in range(1, 8)} <= names
    assert {"chunked-k7", "preempted-k7", "preempted-adaptive-k7"} <= names
    assert all(case["edges_crossed"] > 0 for case in found["cases"].values())
    compared = {name: case["logits"] for name, case in found["cases"].items()}
    assert all(case["exact_wanted"] for case in found["cases"].values())
    for name, logits in compared.items():
        # Batch 1, 3 and 8; chunks of prompts come beside decodes, and so do resumed.
        prompts = 0 if name.startswith(("chunked", "preempted")) else 6 + 3 + 8
        assert logits == {"prompts": prompts, "apart": 0, "differ": []}, name
    assert found["acceptance"]["means"]["fixed"] == pytest.approx(3.0)
    assert found["acceptance"]["loss"] == pytest.approx(1 - 2.96 / 3)
    assert found["logits"]["mean_kl"] == pytest.approx(0, abs=1e-6)
    assert engines.alone == [
        "adaptive-graph-k7",
        "installed-k0",
        "absent-k0",
        "installed-k7",
        "absent-k7",
    ]
    assert not any(name.endswith("-stock") for name in engines.started)
    assert len(engines.started) == len(set(engines.started))
    wave = [case.name for case in cases.first_cases()]
    assert engines.started[len(wave) - 1] == "adaptive-graph-k7"
    assert set(engines.started[: len(wave)]) == set(wave)


def test_the_case_that_prices_alone_keeps_its_other_verdicts(tmp_path: Path) -> None:
    """Equal text, an abort in flight, and once more with stock ops if it differs."""
    engines = Engines(lambda s, r: flip(s, r, ["adaptive-graph-k7"]))
    found = suite(tmp_path, engines, "adaptive-graph-k7")
    assert engines.alone == ["adaptive-graph-k7"]
    assert engines.started[:2] == ["plain-graph", "adaptive-graph-k7"]
    case = found["cases"]["adaptive-graph-k7"]
    assert case["abort_in_flight"] and case["executor_ran"] and case["speculated"]
    (difference,) = case["differences"]
    assert difference["group"] == "batch3"
    assert "adaptive-graph-k7-stock" in engines.started and case["stock"]["equal"]
    assert not found["ok"]


def flip(spec: EngineSpec, result: dict[str, Any], names: Sequence[str]) -> None:
    if spec.name in names:
        result["groups"]["batch3"]["tokens"][1][9] += 1


def test_a_difference_of_ours_alone_fails(tmp_path: Path) -> None:
    """The stock ops give equal tokens there, so the fault is ours, however near."""
    engines = Engines(lambda s, r: flip(s, r, ["fixed-graph-k3"]))
    found = suite(tmp_path, engines, "graph-k3")
    assert "fixed-graph-k3-stock" in engines.started
    assert "plain-graph-stock" in engines.started
    case = found["cases"]["fixed-graph-k3"]
    (difference,) = case["differences"]
    assert difference["group"] == "batch3"
    assert (difference["prompt"], difference["position"]) == (1, 9)
    assert difference["fast"] == difference["plain"] + 1
    assert difference["gap"] == pytest.approx(0.03)
    assert case["stock"]["equal"]
    assert not verdict.passes(case) and not found["ok"]


def test_a_near_tie_that_stock_breaks_too_is_excused(tmp_path: Path) -> None:
    names = ["fixed-graph-k3", "fixed-graph-k3-stock"]
    found = suite(tmp_path, Engines(lambda s, r: flip(s, r, names)), "graph-k3")
    case = found["cases"]["fixed-graph-k3"]
    assert case["stock"]["ops"] == "stock" and not case["stock"]["equal"]
    assert verdict.passes(case)
    case["differences"][0]["gap"] = 1.0
    assert not verdict.passes(case)


def test_what_is_not_exercised_does_not_pass(tmp_path: Path) -> None:
    def idle(spec: EngineSpec, result: dict[str, Any]) -> None:
        result["counters"] = {"ours": 0, "stock_rows": 9}

    found = suite(tmp_path, Engines(idle), "fixed-graph-k2")
    assert found["cases"]["fixed-graph-k2"]["equal"]
    assert not found["ok"]

    def silent(spec: EngineSpec, result: dict[str, Any]) -> None:
        result["groups"]["batch1"]["speculation"] = {
            "verify_steps": 0,
            "draft_tokens": 0,
            "accepted_tokens": 0,
        }

    engines = Engines(silent)
    found = suite(tmp_path, engines, "fixed-graph-k2")
    assert not found["cases"]["fixed-graph-k2"]["speculated"] and not found["ok"]
    assert not engines.alone
    # An adaptive engine is asked again, and if it is silent alone, too, it fails.
    engines = Engines(silent)
    found = suite(tmp_path, engines, "adaptive-graph-k2")
    assert not found["cases"]["adaptive-graph-k2"]["speculated"] and not found["ok"]
    assert engines.alone == ["adaptive-graph-k2"]


@pytest.mark.parametrize("fault", ["", "tokens", "values"])
def test_an_adaptive_engine_that_others_keep_silent_runs_again_alone(
    tmp_path: Path, fault: str
) -> None:
    """What differed the first time is not forgotten."""
    times: list[str] = []

    def silent_once(spec: EngineSpec, result: dict[str, Any]) -> None:
        if spec.name != "adaptive-graph-k2":
            return
        times.append(spec.name)
        if len(times) == 1:
            none = dict.fromkeys(("verify_steps", "draft_tokens", "accepted_tokens"), 0)
            result["groups"]["batch3"]["speculation"] = none
            if fault == "tokens":
                flip(spec, result, [spec.name])
            elif fault == "values":
                result["groups"]["batch8"]["values"][2][7][0] += 1e-7

    engines = Engines(silent_once)
    found = suite(tmp_path, engines, "graph-k2")
    assert engines.alone == ["adaptive-graph-k2"] and len(times) == 2
    case = found["cases"]["adaptive-graph-k2"]
    assert case["speculated"] and case["acceptance_length"]["batch3"] > 1
    assert case["equal"] is (fault != "tokens")
    assert len(case["logits"]["differ"]) == (fault == "values")
    assert found["ok"] is not bool(fault)


@pytest.mark.parametrize("ops", [{}, {"mla_core": "stock"}])
@pytest.mark.parametrize("at", [0, 30])
def test_logits_are_compared_to_the_bit_where_every_op_is_ours(
    tmp_path: Path, ops: dict[str, str], at: int
) -> None:
    """Not where the prefill, which is vLLM's, gave other numbers already."""

    def nudge(spec: EngineSpec, result: dict[str, Any]) -> None:
        if spec.name == "fixed-graph-k3":
            for position in range(at, 48):
                result["groups"]["batch1"]["values"][4][position][1] += 2**-22

    found = run.suite(
        tmp_path,
        parallel=3,
        only="graph-k3",
        ops=ops,
        run=Engines(nudge),
        reference=reference,
    )
    case = found["cases"]["fixed-graph-k3"]
    assert case["equal"] and case["exact_wanted"] is not bool(ops)
    differ = {"group": "batch1", "prompt": 4, "position": at, "by": 2**-22}
    assert case["logits"] == {
        "prompts": 17 - (at == 0),
        "apart": int(at == 0),
        "differ": [] if at == 0 else [differ],
    }
    assert found["ok"] is (at == 0 or bool(ops))
    assert verdict.passes(case) is found["ok"]


def test_logits_of_which_none_was_compared_do_not_hold(tmp_path: Path) -> None:
    def apart(spec: EngineSpec, result: dict[str, Any]) -> None:
        if spec.engine.get("speculative_config"):
            for group in result["groups"].values():
                for prompt in group.get("values", ()):
                    prompt[0][0] -= 1e-6

    found = suite(tmp_path, Engines(apart), "fixed-graph-k2")
    assert verdict.passes(found["cases"]["fixed-graph-k2"]) and not found["ok"]
    assert found["cases"]["fixed-graph-k2"]["logits"]["apart"] == 17


def test_an_abort_that_changes_others_is_a_difference(tmp_path: Path) -> None:
    def disturb(spec: EngineSpec, result: dict[str, Any]) -> None:
        if "abort" in result:
            result["abort"]["survivors"]["4"][3] = -1

    found = suite(tmp_path, Engines(disturb), "fixed-graph-k7")
    case = found["cases"]["fixed-graph-k7"]
    (difference,) = case["differences"]
    assert difference["group"] == "survivors of the abort"
    assert (difference["prompt"], difference["position"]) == (2, 3)
    assert difference["gap"] == pytest.approx(0.03)


def test_a_failed_engine_is_named_and_the_others_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spec(case: Case) -> EngineSpec:
        made = original(case)
        if case.name == "adaptive-graph-k3":
            made.engine["broken"] = True
        return made

    original = cases.spec
    monkeypatch.setattr(cases, "spec", spec)
    found = suite(tmp_path, Engines(), "graph-k3")
    assert found["failed"] == {"adaptive-graph-k3": "ValueError: broken"}
    assert found["cases"]["fixed-graph-k3"]["equal"]
    assert not found["ok"]


def test_verdicts_add_up_over_runs(tmp_path: Path) -> None:
    suite(tmp_path, Engines(), "graph-k1")
    found = suite(tmp_path, Engines(), "eager-k1", add=True)
    assert set(found["cases"]) == {
        "fixed-graph-k1",
        "adaptive-graph-k1",
        "fixed-eager-k1",
    }
    assert set(suite(tmp_path, Engines(), "eager-k2")["cases"]) == {"fixed-eager-k2"}


def test_slower_or_other_text_with_the_plugin_installed_fails(tmp_path: Path) -> None:
    def slow(spec: EngineSpec, result: dict[str, Any]) -> None:
        if spec.name == "installed-k7":
            result["seconds"] = [1.2, 1.22, 1.21]

    found = suite(tmp_path, Engines(slow), "k7")
    assert not found["unasked"]["k7"]["as_fast"] and not found["ok"]

    def loaded(spec: EngineSpec, result: dict[str, Any]) -> None:
        if spec.name == "installed-k0":
            result["target_modules"].append("dspark_k3.target.executor")

    found = suite(tmp_path, Engines(loaded), "installed")
    assert not found["ok"]


def test_logits_away_from_the_reference_are_seen() -> None:
    right = Engines.vector([1, 2, 3], 6)
    assert verdict.logits([right], reference)["close"]
    wrong = json.loads(json.dumps(right))
    wrong["logprobs"][2] = torch.zeros(VOCAB).log_softmax(-1).tolist()
    found = verdict.logits([right, wrong], reference)
    assert not found["close"]
    assert found["max_kl"] > 1


def test_acceptance_gates() -> None:
    def sampled(accepted: int) -> dict[str, Any]:
        counts = {
            "verify_steps": 100,
            "draft_tokens": 700,
            "accepted_tokens": accepted,
        }
        return {"sampled": {"a": counts}}

    fine = verdict.acceptance(sampled(200), sampled(190))
    assert fine["long_enough"] and fine["little_lost"]
    assert fine["loss"] == pytest.approx(0.1 / 3)
    assert not verdict.acceptance(sampled(200), sampled(180))["little_lost"]
    assert not verdict.acceptance(sampled(150), sampled(150))["long_enough"]


def test_specs_say_what_the_cases_say() -> None:
    by_name = {case.name: case for case in cases.first_cases()}
    spec = cases.spec(by_name["adaptive-graph-k5"])
    speculative = spec.engine["speculative_config"]
    assert speculative["num_speculative_tokens"] == 5
    assert speculative["enable_adaptive_verification"] is True
    every = dict.fromkeys(settings.OPS, "ours")
    ours = spec.engine["additional_config"]["dspark_k3"]
    assert ours == {"target": True, "ops": every}
    assert cases.spec(by_name["fixed-eager-k5"]).engine["enforce_eager"] is True
    stock = cases.spec(by_name["fixed-graph-k5"].as_stock())
    asked = settings.read(stock.engine["additional_config"])
    assert asked.target and not any(asked.ours(op) for op in settings.OPS)
    folded = replace(by_name["fixed-graph-k5"], layout="fold")
    asked = settings.read(cases.spec(folded).engine["additional_config"])
    assert asked.kda_layout == "fold" and asked.named == set(settings.OPS)
    asked = settings.read(cases.spec(folded.as_stock()).engine["additional_config"])
    assert asked.kda_layout == "snapshot"
    drawn = settings.read(
        cases.spec(by_name["adaptive-drafter-k7"]).engine["additional_config"]
    )
    assert drawn.draft_sampler == drawn.draft_attention == "ours"
    assert drawn.named == set(settings.OPS)
    given = replace(by_name["fixed-graph-k5"], ops={"moe_experts": "stock"})
    asked = settings.read(cases.spec(given).engine["additional_config"])
    assert [op for op in settings.OPS if not asked.ours(op)] == ["moe_experts"]
    asked = settings.read(cases.spec(given.as_stock()).engine["additional_config"])
    assert not any(asked.ours(op) for op in settings.OPS)
    absent = [cases.spec(case) for case in cases.unasked_cases()]
    assert [spec.env.get("VLLM_PLUGINS") for spec in absent] == [None, "", None, ""]
    assert all("additional_config" not in spec.engine for spec in absent)
    for case in cases.first_cases():
        for group in case.options["groups"].values():
            for prompt in group["prompts"]:
                assert 0 < len(prompt) <= cases.MAX_LEN - group["max_tokens"] - 8


def test_a_preemption_case_admits_some_and_lets_one_grow() -> None:
    plain, fixed, adaptive = cases.preemption_cases(
        {"attention": [128, 64], "states": 24}
    )
    group = fixed.options["groups"]["preempted"]
    length = len(group["prompts"][0])
    assert length == 116
    start = 24 + 1 + 2
    assert fixed.engine["num_gpu_blocks_override"] == 1 + 4 * start + (
        -(-(116 + 200 + 7) // 128) - 1 + -(-(116 + 200 + 7) // 64) - 2
    )
    assert adaptive.adaptive and "num_gpu_blocks_override" not in plain.engine
    assert plain.options["groups"]["preempted"]["prompts"] == group["prompts"]


def test_top_two_and_geometry_read_vllm_objects() -> None:
    entry = {5: -0.5, 9: -0.4, 2: -3.0}
    position = {t: SimpleNamespace(logprob=value) for t, value in entry.items()}
    assert jobs.top_two(position) == [9, 5, pytest.approx(0.1)]
    assert jobs.largest(position, 2) == [-0.4, -0.5]
    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=128)),
        SimpleNamespace(
            kv_cache_spec=SimpleNamespace(block_size=128, num_speculative_blocks=7)
        ),
    ]
    config = SimpleNamespace(kv_cache_groups=groups, num_blocks=50)
    core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_config=config))
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
    found = jobs.geometry(SimpleNamespace(llm_engine=engine))
    assert found == {"attention": [128], "states": 8, "blocks": 50}


def test_the_command_asks_for_the_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cases, "TARGET", tmp_path / "nowhere")
    with pytest.raises(SystemExit):
        run.main(["--out", str(tmp_path)])
    assert "make train-tiny-k3" in capsys.readouterr().err
