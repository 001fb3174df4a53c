# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a step, and the job that records it, over a made-up runner."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu_engine import measure, recorder
from tests.experiments.fake_runner import (
    Descriptor,
    FakeDevice,
    FakeRunner,
    made,
    scheduled,
    steps,
)

PLAN = measure.Plan("ours", 8, 16, 7, (1, 8), "/tmp/x")


def test_a_step_is_timed_by_part_without_the_spin() -> None:
    _, runner, found = made()
    found.start("gpu", spin_us=1000.0)
    steps(runner, 8)
    (step,) = found.take()
    assert step["step_us"] == pytest.approx(5 + 30 + 1 + 7 + 20)
    assert step["forward_us"] == pytest.approx(30)
    assert step["draft_us"] == pytest.approx(20)
    assert (step["rows"], step["executed_rows"]) == (8, 11)
    assert step["graph"] and step["queued"]
    steps(runner, 8)
    assert found.take() == []


def test_plain_decoding_has_no_draft_and_a_late_host_is_seen() -> None:
    device, runner, found = made(drafts=False)
    found.start("gpu", spin_us=10.0)
    device.late = True
    steps(runner, 1)
    (step,) = found.take()
    assert step["draft_us"] is None
    assert step["queued"] is False


def test_dummy_and_empty_steps_are_not_recorded() -> None:
    _, runner, found = made()
    found.start("gpu", spin_us=10.0)
    runner.execute_model(scheduled(8), dummy_run=True)
    runner.sample_tokens(None)
    assert found.take() == []


def test_wall_mode_adds_nothing_to_the_gpu() -> None:
    device, runner, found = made()
    found.start("wall")
    steps(runner, 8, 8)
    taken = found.take()
    assert device.now == 2 * 63
    assert [step["host_s"] for step in taken] == [0.0, 63.0]
    assert all("step_us" not in step for step in taken)


def test_experts_are_counted_eagerly_and_by_layer() -> None:
    _, runner, found = made()
    found.start("experts")
    steps(runner, 2, 4)
    taken = found.take()
    assert [step["distinct"] for step in taken] == [[2, 2], [4, 4]]
    assert not any(step["graph"] for step in taken)
    assert runner.dispatched[0] == Descriptor("none", 2, 1, None, None)
    assert all(router.hear is None for router in runner.routers)
    steps(runner, 2)
    assert runner.dispatched[-1].num_tokens == 5


def test_experts_cannot_be_counted_without_routers() -> None:
    _, runner, found = made()
    runner.routers.clear()
    with pytest.raises(ValueError, match="no router of the model"):
        found.start("experts")


def test_a_trace_covers_as_many_decode_steps_as_asked() -> None:
    device, runner, found = made()
    found.start("trace", rows=8, trace_steps=2, trace_path="/x/t.json", spin_us=1.0)
    steps(runner, *([100] + [8] * 10))
    traced = [step["traced"] for step in found.take()]
    skipped = 1 + recorder.TRACE_SKIP
    assert traced == [False] * skipped + [True] * 2 + [False] * (11 - skipped - 2)
    assert [line for line in device.log if line != "synchronize"] == [
        "start",
        "stop /x/t.json",
    ]


def test_a_trace_that_runs_out_of_steps_is_ended() -> None:
    device, runner, found = made()
    found.start("trace", rows=8, trace_steps=9, trace_path="/x/t.json")
    steps(runner, *[8] * (recorder.TRACE_SKIP + 1))
    found.take()
    assert device.log[-1] == "stop /x/t.json"


def test_modes_are_checked() -> None:
    _, _, found = made()
    with pytest.raises(ValueError, match="mode='fast'"):
        found.start("fast")
    with pytest.raises(ValueError, match="needs rows"):
        found.start("trace", rows=8)


# The job in the engine's process, over the recorder and the made-up runner.


class FakeLlm(recorder.StepRecorder):
    """Engine and worker in one; the host is behind in the first ``late`` runs."""

    def __init__(self, late: int) -> None:
        self.device = FakeDevice()
        self.model_runner = FakeRunner(self.device)
        self.k3_recorder = recorder.Recorder(self.model_runner, self.device)
        self.rank = 0
        self.late = late
        self.spins: list[float] = []

    def k3_gpu(self) -> str:
        return "NVIDIA H200"

    def k3_start(self, arguments: str) -> None:
        given = json.loads(arguments)
        if given["mode"] == "gpu":
            self.spins.append(given["spin_us"])
            self.device.late = len(self.spins) <= self.late
        super().k3_start(arguments)

    def collective_rpc(self, name: str, args: tuple[str, ...] = ()) -> list[Any]:
        return [getattr(self, name)(*args)]


def run_job(
    monkeypatch: pytest.MonkeyPatch, folder: Path, late: int
) -> tuple[FakeLlm, dict[str, Any]]:
    def generate(llm: FakeLlm, plan: Any, batch: int, count: int, _: int) -> None:
        runner = llm.model_runner
        runner.execute_model(scheduled(1024 * batch, batch, new=batch))
        runner.sample_tokens(None)
        for _ in range(count):
            runner.execute_model(scheduled(8 * batch, batch))
            runner.sample_tokens(None)
        # The first request to end leaves smaller steps behind.
        if batch > 1:
            runner.execute_model(scheduled(8 * (batch - 1), batch - 1))
            runner.sample_tokens(None)

    monkeypatch.setattr(measure, "generate", generate)
    llm = FakeLlm(late)
    plan = replace(PLAN, trace_dir=str(folder))
    options = measure.spec(plan, folder).options
    return llm, measure.job(llm, json.loads(json.dumps(options)))


def test_the_job_measures_each_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm, found = run_job(monkeypatch, tmp_path, late=0)
    assert found["gpu"] == "NVIDIA H200" and found["counters"] == {}
    first, last = found["points"]
    assert (first["rows"], last["rows"], last["batch"]) == (8, 64, 8)
    assert first["steps"] == PLAN.gpu and first["queued"] == 1
    assert first["step_us"] == pytest.approx(63) and first["draft_us"] == 20
    assert first["distinct_by_layer"] == [4, 4]
    assert last["trace"] == str(tmp_path / "ours-L8-tp16-k7-b8.trace.json")
    assert llm.device.log.count("start") == 2
    assert llm.spins == [measure.SPIN_US] * 2


def test_the_job_spins_longer_for_a_slow_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm, found = run_job(monkeypatch, tmp_path, late=2)
    assert llm.spins[:3] == [measure.SPIN_US * n for n in (1, 2, 4)]
    assert found["points"][0]["spin_us"] == 4 * measure.SPIN_US
    with pytest.raises(ValueError, match="none of 40 steps of 8 rows was enqueued"):
        run_job(monkeypatch, tmp_path, late=99)
