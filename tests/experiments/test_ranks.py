# SPDX-License-Identifier: Apache-2.0
"""Engines of several GPUs: how ranks are measured together, on made-up ones."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import k3_shapes, layer_trace, results
from experiments.gpu_engine import lines, measure, ranks, recorder, segment
from experiments.gpu_engine.fleet import EngineSpec
from tests.experiments import fake_gpu
from tests.experiments.fake_runner import FakeDevice, FakeRunner

PLAN = measure.Plan("ours", 4, 2, 7, (1,), "/tmp", ranks=True)


def test_a_group_runs_the_whole_model_and_a_share_its_part(tmp_path: Path) -> None:
    group = measure.spec(PLAN, tmp_path)
    share = measure.spec(replace(PLAN, ranks=False), tmp_path)
    assert group.name == "ours-L4-ranks2-k7" and share.name == "ours-L4-tp2-k7"
    assert group.engine["tensor_parallel_size"] == 2
    assert "tensor_parallel_size" not in share.engine and not share.env
    heads = [
        json.loads(Path(spec.engine["model"], "config.json").read_text())[
            "num_attention_heads"
        ]
        for spec in (group, share)
    ]
    assert heads == [k3_shapes.HEADS, k3_shapes.HEADS // 2]
    drafter = group.engine["speculative_config"]["model"]
    text = json.loads(Path(drafter, "config.json").read_text())
    assert text["num_attention_heads"] == k3_shapes.DRAFT_HEADS
    # What a GPU holds is the same.
    for name in ("kv_cache_memory_bytes", "max_num_seqs"):
        assert group.engine[name] == share.engine[name]


def test_a_step_was_ahead_if_it_was_on_every_rank() -> None:
    mine = [{"rows": 8, "queued": True}, {"rows": 8, "queued": True}, {"rows": 8}]
    other = [{"rows": 8, "queued": True}, {"rows": 8, "queued": False}, {"rows": 8}]
    found = measure.of_ranks([mine, other])
    assert [step.get("queued") for step in found] == [True, False, None]
    with pytest.raises(ValueError, match="do not run in step"):
        measure.of_ranks([mine, other[:2]])


def test_ranks_wait_for_each_other_after_the_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("spin"))
    device = recorder.Cuda(lambda: log.append("align"))
    device._cycles_per_us = 1.0
    device.spin(5.0)
    alone = recorder.Cuda()
    alone._cycles_per_us = 1.0
    alone.spin(5.0)
    assert log == ["spin", "align", "spin"]


def worker(rank: int) -> Any:
    made: Any = recorder.StepRecorder()
    device = FakeDevice()
    made.rank = rank
    made.model_runner = FakeRunner(device)
    made.k3_recorder = recorder.Recorder(made.model_runner, device)
    return made


@pytest.mark.parametrize(("rank", "end"), [(0, "x.trace"), (1, "x.trace.rank1")])
def test_each_rank_has_a_trace_of_its_own(rank: int, end: str) -> None:
    made = worker(rank)
    given = {"mode": "trace", "rows": 8, "trace_steps": 1, "trace_path": "/tmp/x.trace"}
    made.k3_start(json.dumps(given))
    assert made.k3_recorder._trace_path.name == end


def test_workers_of_a_group_make_no_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(ranks, "forbid_multicast", lambda: called.append(1))
    monkeypatch.setattr(recorder.spread, "register_loader", lambda: None)
    for size in (1, 2):
        made = worker(0)
        made.parallel_config = SimpleNamespace(tensor_parallel_size=size)
        made.init_worker_extension()
    assert called == [1]


def test_flashinfers_workspace_counts_as_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workspaces = SimpleNamespace(
        __name__="flashinfer_all_reduce",
        _fi_ar_workspace_failed=False,
        _fi_ar_quant_workspace_failed=False,
    )
    driver = SimpleNamespace(cuMulticastCreate=lambda *_: None)
    base = "vllm.distributed.device_communicators"
    package = SimpleNamespace(flashinfer_all_reduce=workspaces)
    monkeypatch.setitem(sys.modules, base, package)
    monkeypatch.setitem(sys.modules, f"{base}.flashinfer_all_reduce", workspaces)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    ranks.forbid_multicast()
    assert workspaces._fi_ar_workspace_failed
    assert workspaces._fi_ar_quant_workspace_failed
    with pytest.raises(RuntimeError, match="multicast is off"):
        driver.cuMulticastCreate(None)
    del workspaces._fi_ar_quant_workspace_failed
    with pytest.raises(RuntimeError, match="has no _fi_ar_quant_workspace_failed"):
        ranks.forbid_multicast()


def test_ranks_do_not_begin_together_without_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = SimpleNamespace(world_size=1, device_communicator=None)
    state = SimpleNamespace(get_tp_group=lambda: group)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    assert ranks.aligner() is None
    group.world_size = 2
    off = SimpleNamespace(pynccl_comm=SimpleNamespace(disabled=True))
    for group.device_communicator in (None, off):
        with pytest.raises(RuntimeError, match="communicator of 2 GPUs is off"):
            ranks.aligner()


def test_engines_have_ports_of_their_own() -> None:
    specs = [EngineSpec(name, {}, "m:f", env={"A": "1"}) for name in "abc"]
    found = ranks.with_ports(specs)
    assert len({spec.env["VLLM_PORT"] for spec in found}) == 3
    assert all(spec.env["A"] == "1" for spec in found)
    assert specs[0].env == {"A": "1"}


def test_what_aligns_ranks_is_no_part_of_a_step_and_collectives_are_told() -> None:
    kernel = segment.Kernel
    trace = [
        kernel("spin_kernel", 0, 10),
        kernel("ncclDevKernel_AllReduce_Sum_f64_RING_LL", 10, 30),
        kernel("_attn_res_kernel", 30, 32),
        kernel("gemm", 32, 40),
        kernel("void vllm::cross_device_reduce_1stage<bf16, 2>", 40, 45),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 45, 49),
        kernel("_attn_res_kernel", 49, 50),
        kernel("_attn_res_kernel", 50, 51),
    ]
    (step,) = segment.split_steps(trace)
    assert step[0].name == "_attn_res_kernel"
    times = segment.layer_times([segment.split_layers(step, 1)], ["dense"])
    assert times["dense"].collective_us == pytest.approx(9.0)
    assert times["dense"].span_us == pytest.approx(20.0)


def test_layer_trace_of_a_group_records_its_collectives(tmp_path: Path) -> None:
    def measured(spec: EngineSpec, out: Path) -> Any:
        assert spec.env["VLLM_PORT"]
        return fake_gpu.measured(spec, out)

    out = tmp_path / "lines.jsonl"
    command = ["--layers", "4", "--tp", "2", "--ranks", "--work", str(tmp_path)]
    assert layer_trace.main([*command, "--out", str(out)], start=measured) == 0
    written = results.read(out)
    assert all(line["shape"]["ranks"] == 2 for line in written)
    assert all("on 2 GPUs" in line["note"] for line in written)
    assert any(line["metric"] == "layer_collective_us" for line in written)
    assert lines.note({"tp": 2}) == lines.NOTE
