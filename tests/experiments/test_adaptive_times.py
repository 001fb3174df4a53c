# SPDX-License-Identifier: Apache-2.0
"""Adaptive verification against fixed draft lengths: over made-up engines."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import adaptive_times, results
from experiments.corpora import held_out_prompts
from experiments.gpu_engine import fleet, mixed
from tests.experiments import fake_gpu

#: Seconds of a run by engine: 5 drafts are the best fixed ones.
SECONDS = dict.fromkeys(adaptive_times.names(), 4.0) | {
    "fixed-k5": 2.0,
    "adaptive": 2.5,
    "adaptive-calibrated": 1.6,
}


def answered(spec: fleet.EngineSpec, out: Path, **changes: Any) -> Any:
    drafts = adaptive_times.drafts_of(spec.name)
    seconds = SECONDS[spec.name]
    result = {
        "tokens": [[1, 2, 3, 4]] * len(spec.options["prompts"]),
        "same": True,
        "seconds": [seconds, seconds * 1.1, seconds * 0.9],
        "gpu": "NVIDIA H200",
        "verify_steps": 10 if drafts else 0,
        "draft_tokens": 10 * drafts,
        "accepted_tokens": 5 * drafts,
        **changes,
    }
    return fake_gpu.answer_with(spec, out, {"result": result})


def run(tmp_path: Path, start: fleet.Launch = answered) -> tuple[int, Path]:
    out = tmp_path / "adaptive.jsonl"
    command = ["--out", str(out), "--work", str(tmp_path / "work"), "--commit", "abc"]
    return adaptive_times.main(command, start), out


def test_adaptive_is_held_against_the_best_fixed_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(tmp_path)
    said = capsys.readouterr().out
    assert code == 0, said
    assert "adaptive: 0.800 of fixed-k5" in said
    assert "adaptive-calibrated: 1.250 of fixed-k5" in said
    assert "3.500 tokens and 5.000 drafts a step" in said
    found = {line["variant"]: line for line in results.read(out)}
    assert list(found) == adaptive_times.names()
    assert found["fixed-k5"]["value"] == pytest.approx(4 / 2)
    assert found["plain"]["shape"]["k"] == 0


def test_the_calibrated_engine_has_a_calibration_and_no_other(tmp_path: Path) -> None:
    seen: dict[str, Path] = {}

    def start(spec: fleet.EngineSpec, out: Path) -> Any:
        if asked := spec.engine.get("speculative_config"):
            seen[spec.name] = Path(asked["model"])
            adaptive = asked.get("enable_adaptive_verification", False)
            assert adaptive == spec.name.startswith("adaptive")
        return answered(spec, out)

    assert run(tmp_path, start)[0] == 0
    own = seen.pop(adaptive_times.CALIBRATED)
    found = json.loads((own / "calibration.json").read_text())
    assert len(found["temperatures"]) == 7
    assert (own / "model.safetensors").is_file()
    assert not any((path / "calibration.json").exists() for path in seen.values())


def test_changed_text_has_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(spec: fleet.EngineSpec, out: Path) -> Any:
        if spec.name == "adaptive":
            return answered(spec, out, tokens=[[1, 2, 3, 5]] * 8)
        if spec.name == "fixed-k2":
            return answered(spec, out, same=False)
        return answered(spec, out)

    code, out = run(tmp_path, start)
    assert code == 1
    said = capsys.readouterr().out
    assert "WRONG: adaptive: key 'gates': 'lossless' is red" in said
    assert "WRONG: fixed-k2: key 'gates': 'lossless' is red" in said
    variants = {line["variant"] for line in results.read(out)}
    assert variants == set(adaptive_times.names()) - {"adaptive", "fixed-k2"}


def test_prompts_are_of_every_kind_in_turn() -> None:
    found = adaptive_times.mixed_prompts(8)
    assert found[0] == list(held_out_prompts("stdlib", 4)[0])
    assert found[3] == list(held_out_prompts("generated", 4)[1])
    with pytest.raises(ValueError, match="batch=3"):
        adaptive_times.mixed_prompts(3)


def test_the_job_counts_all_runs_and_times_all_but_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = SimpleNamespace(SamplingParams=SimpleNamespace, TokensPrompt=SimpleNamespace)
    monkeypatch.setitem(__import__("sys").modules, "vllm", fake)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")

    class Llm:
        runs = 0

        def generate(self, asked: list[Any], parameters: Any, use_tqdm: bool) -> Any:
            self.runs += 1
            ids = [[p.prompt_token_ids[0], parameters.max_tokens] for p in asked]
            if self.runs == 3:
                ids[0] = [0, 0]
            return [
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(i))])
                for i in ids
            ]

        def get_metrics(self) -> list[Any]:
            name = "vllm:spec_decode_num_drafts"
            return [SimpleNamespace(name=name, labels={}, value=7 * self.runs)]

    options = {"prompts": [[5], [6]], "max_tokens": 9, "repeats": 2}
    found = mixed.job(Llm(), options)
    assert found["tokens"] == [[5, 9], [6, 9]] and len(found["seconds"]) == 2
    assert found["verify_steps"] == 21 and not found["same"]
