# SPDX-License-Identifier: Apache-2.0
"""The sweep of acceptance lengths: its job over a made-up engine, lines and report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments import engine_sweep, results
from experiments.acceptance import AcceptanceCurve
from experiments.gpu_engine import fleet, lengths, measure, recorder
from experiments.gpu_engine.measure import Plan
from tests.experiments import fake_gpu
from tests.experiments.fake_runner import FakeDevice, FakeRunner, scheduled

PLAN = Plan("ours", 8, 16, 7, (1, 8), "/tmp/x", wall=12, gpu=6, experts=0)


class FakeLlm(recorder.StepRecorder):
    """Engine and worker in one. A request is taken to accept what its rates expect."""

    def __init__(self, k: int) -> None:
        self.device = FakeDevice()
        self.k = k
        self.model_runner: Any = FakeRunner(self.device, drafts=k > 0)
        rates = torch.zeros(k) if k else None
        self.model_runner.rejection_sampler = SimpleNamespace(
            synthetic_conditional_rates=rates
        )
        self.k3_recorder = recorder.Recorder(
            self.model_runner, self.device, lambda: self.device.now / 1e6
        )
        self.rank = 0
        self.asked: list[tuple[int, float]] = []
        self.verified = self.accepted = 0.0

    def k3_gpu(self) -> str:
        return "NVIDIA H200"

    def collective_rpc(self, name: str, args: tuple[str, ...] = ()) -> list[Any]:
        return [getattr(self, name)(*args)]

    def get_metrics(self) -> list[Any]:
        values = {
            "drafts": self.verified,
            "draft_tokens": self.k * self.verified,
            "accepted_tokens": self.accepted,
        }
        return [
            SimpleNamespace(name=f"vllm:spec_decode_num_{name}", labels={}, value=value)
            for name, value in values.items()
        ]

    def generate(self, plan: Plan, batch: int, steps: int) -> None:
        self.asked.append((batch, plan.acceptance_length))
        rates = self.model_runner.rejection_sampler.synthetic_conditional_rates
        # As many tokens are asked for as the rates give in the steps that are wanted.
        if rates is not None and len(self.asked) > 1:
            expected = 1 + float(rates.cumprod(0).sum())
            assert plan.acceptance_length == pytest.approx(expected, rel=1e-6)
        self.model_runner.execute_model(scheduled(1024 * batch, batch, new=batch))
        self.model_runner.sample_tokens(None)
        for _ in range(steps):
            self.model_runner.execute_model(scheduled((self.k + 1) * batch, batch))
            self.model_runner.sample_tokens(None)
            if rates is not None:
                self.verified += batch
                self.accepted += batch * float(rates.cumprod(0).sum())


def run_job(monkeypatch: pytest.MonkeyPatch, k: int) -> tuple[FakeLlm, Any]:
    monkeypatch.setattr(
        measure,
        "generate",
        lambda llm, plan, batch, steps, _: llm.generate(plan, batch, steps),
    )
    llm = FakeLlm(k)
    options = lengths.spec(replace(PLAN, k=k), Path("/tmp/x"), (1, 4, 8)).options
    return llm, lengths.job(llm, json.loads(json.dumps(options)))


@pytest.mark.parametrize("k", [3, 7])
def test_each_length_has_its_rates_and_as_many_tokens(
    monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    llm, found = run_job(monkeypatch, k)
    for point, batch in zip(found["points"], PLAN.batches, strict=True):
        assert (point["batch"], point["rows"]) == (batch, batch * (k + 1))
        assert point["step_us"] == pytest.approx(63)
        for at, length in zip(point["lengths"], (1, 4, 8), strict=True):
            curve = AcceptanceCurve.geometric(length, 7)
            assert at["length"] == length and at["steps"] == PLAN.wall
            assert at["acceptance_length"] == pytest.approx(curve.length(k), rel=1e-6)
            assert at["wall_us"] == pytest.approx(63) and at["drafts"] == k
            assert at["gpu_us"] == pytest.approx(63)
            assert (batch, pytest.approx(curve.length(k))) in llm.asked
    rates = llm.model_runner.rejection_sampler.synthetic_conditional_rates
    assert torch.equal(rates, torch.ones(k))


def test_plain_decoding_has_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = run_job(monkeypatch, 0)
    for point in found["points"]:
        (at,) = point["lengths"]
        assert at["acceptance_length"] == 1 and at["drafts"] == 0
        assert at["wall_us"] == pytest.approx(43)


def test_rates_need_synthetic_rejection_of_as_many_drafts() -> None:
    llm = FakeLlm(7)
    with pytest.raises(ValueError, match=r"3 acceptance rates .* with 7 drafts"):
        llm.k3_accept("[1, 1, 1]")
    llm.model_runner.rejection_sampler = None
    with pytest.raises(ValueError, match="no synthetic rejection"):
        llm.k3_accept("[1]")


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="acceptance length is 9"):
        lengths.spec(PLAN, tmp_path, (9,))
    with pytest.raises(ValueError, match="the context is 4096"):
        lengths.spec(replace(PLAN, wall=390), tmp_path, (2, 8))
    lengths.spec(replace(PLAN, wall=390), tmp_path, (2, 4))
    with pytest.raises(ValueError, match="length=9: 7 drafts give 1 to 8"):
        measure.check(replace(PLAN, length=9))


def answered(spec: fleet.EngineSpec, out: Path) -> Any:
    """An engine whose step takes 2 % longer than its GPU time."""
    given = {**spec.options, "batches": tuple(spec.options["batches"])}
    asked = given.pop("lengths")
    plan = Plan(**given)
    points = []
    for batch in plan.batches:
        point = fake_gpu.point(plan, batch, None) | {"wall_us": None}
        if plan.target == "ours":
            point["step_us"] /= 2
        point["lengths"] = [
            {
                "length": length,
                "steps": 100,
                "wall_us": point["step_us"] * 1.02,
                "gpu_us": point["step_us"] * 1.01,
                "spread": 1.0,
                "acceptance_length": lengths.curve(length).length(plan.k),
                "drafts": plan.k,
            }
            for length in (asked if plan.k else asked[:1])
        ]
        points.append(point)
    result = {
        "plan": spec.options,
        "gpu": "NVIDIA H200",
        "versions": {"vllm": "0.33.0"},
        "points": points,
    }
    return fake_gpu.answer_with(spec, out, {"result": result})


def run(tmp_path: Path, *further: str) -> tuple[int, Path]:
    out = tmp_path / "sweep.jsonl"
    command = ["measure", "--layers", "8", "--batch", "1,8", "--out", str(out)]
    command += ["--work", str(tmp_path / "work"), "--commit", "abc", *further]
    return engine_sweep.main(command, answered), out


def test_report_compares_the_engine_with_the_model(tmp_path: Path) -> None:
    code, out = run(tmp_path, "--k", "0,7", "--lengths", "1,6")
    assert code == 0
    found = engine_sweep.points(results.read(out))
    assert len(found) == 2 * 2 * 3
    plain = engine_sweep.plain_of(found)
    (six,) = [
        p for p in found if (p.target, p.k, p.batch, p.length) == ("ours", 7, 1, 6)
    ]
    # fake_gpu.point: 200 + rows + 50, and 100 k + 10 B of drafting.
    model = 6 * 251 / (258 + 710)
    assert six.over(plain["ours", 1]) == tuple(pytest.approx(model) for _ in range(3))
    assert six.host == pytest.approx(1.02 / 1.01 - 1)
    slower = replace(six, wall_us=2 * six.wall_us, gpu_us=4 * six.gpu_us)
    measured = slower.over(plain["ours", 1])
    assert measured == tuple(pytest.approx(model / n) for n in (2, 4, 1))
    said: list[str] = []
    figure = tmp_path / "sweep.png"
    report = ["report", str(out), "--plot", str(figure)]
    assert engine_sweep.main(report, say=said.append) == 0
    (line,) = [
        row for row in said[0].splitlines() if row.startswith("ours      7  1     6")
    ]
    assert f"{2 * model:.2f}x" in line and "2.00x" in line and "0.0%" in line
    assert "0 of 12 points took over 5% longer by the wall" in said[0]
    assert figure.stat().st_size > 10_000


def test_later_runs_add_drafts_and_replace_points(tmp_path: Path) -> None:
    run(tmp_path, "--k", "0,7", "--lengths", "6")
    _, out = run(tmp_path, "--k", "3,7", "--lengths", "6")
    found = engine_sweep.points(results.read(out))
    assert sorted({p.k for p in found}) == [0, 3, 7] and len(found) == 2 * 2 * 3


def test_our_drafter_is_held_against_our_plain_decoding(tmp_path: Path) -> None:
    run(tmp_path, "--k", "0", "--target", "stock,ours")
    _, out = run(tmp_path, "--k", "7", "--lengths", "6", "--target", "stock,drafter")
    found = engine_sweep.points(results.read(out))
    plain = engine_sweep.plain_of(found)
    assert plain["drafter", 8] is plain["ours", 8] is not plain["stock", 8]
    rows = engine_sweep.table(found).splitlines()
    assert sum(row.startswith("drafter   7") for row in rows) == 2


def test_half_a_run_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = run(tmp_path, "--k", "7", "--lengths", "6")
    with pytest.raises(SystemExit):
        engine_sweep.main(["report", str(out)])
    assert "no plain decoding to compare with: measure --k 0" in capsys.readouterr().err
    lines = results.read(out)
    with pytest.raises(ValueError, match="no step_gpu_us of"):
        engine_sweep.points([x for x in lines if x["metric"] != "step_gpu_us"])
    lines[-1]["gates"]["drafts_proposed"] = False
    with pytest.raises(ValueError, match="drafts_proposed is red"):
        engine_sweep.points(lines)


def test_a_failed_engine_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(spec: fleet.EngineSpec, out: Path) -> Any:
        if "k7" in spec.name and "ours" in spec.name:
            return fake_gpu.answer_with(spec, out, {"error": "ValueError: no"})
        return answered(spec, out)

    out = tmp_path / "sweep.jsonl"
    command = ["measure", "--layers", "8", "--out", str(out)]
    command += ["--work", str(tmp_path / "work"), "--commit", "abc"]
    assert engine_sweep.main(command, start) == 1
    assert "WRONG: ours-L8-tp16-k7: ValueError: no" in capsys.readouterr().out
    targets = {(x["variant"], x["shape"]["k"]) for x in results.read(out)}
    assert targets == {("stock", 0), ("stock", 7), ("ours", 0)}
