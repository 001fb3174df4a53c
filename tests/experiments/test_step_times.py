# SPDX-License-Identifier: Apache-2.0
"""Step times: what is recorded of a step, how engines take turns, what is written."""

import argparse
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_k3 import settings
from experiments import k3_shapes, results, step_times
from experiments.gpu_engine import child, fleet, lines, measure, spread
from experiments.gpu_engine.lines import layer_kinds
from experiments.step_time import load_profile, read_profile
from tests.experiments import fake_gpu

# Weights that route like a model.


def test_spread_weights_route_rows_apart() -> None:
    """About as many experts as independent rows choose: 120 of 896 at M = 8."""
    router = torch.full((896, 512), 1e-3, dtype=torch.bfloat16)
    table = torch.zeros(300, 512, dtype=torch.bfloat16)
    bias = torch.rand(896)
    norm = torch.zeros(512)
    other = torch.full((4, 512), 1e-3)
    found = spread.fill(
        {
            "model.embed_tokens.weight": table,
            "model.layers.1.block_sparse_moe.gate.weight": router,
            "model.layers.1.block_sparse_moe.gate.e_score_correction_bias": bias,
            "model.layers.1.input_layernorm.weight": norm,
            "model.layers.1.self_attn.o_proj.weight": other,
            "model.layers.1.mlp.gate_up_proj.weight": other,
        }.items()
    )
    assert found == {"one": 1, "unit": 1, "fan_in": 1, "zero": 1}
    assert (norm == 1).all() and (bias == 0).all() and (other == 1e-3).all()
    counts = []
    for first in range(0, 296, 8):
        logits = table[first : first + 8].float() @ router.float().T
        counts.append(spread.distinct(logits.sigmoid().topk(16).indices))
    uniform = 896 * (1 - (1 - 16 / 896) ** 8)
    assert sum(counts) / len(counts) == pytest.approx(uniform, rel=0.05)


def test_spread_draws_differ_by_layer_and_not_by_run() -> None:
    names = [f"model.layers.{i}.block_sparse_moe.gate.weight" for i in (1, 2)]
    runs = [{name: torch.zeros(8, 16) for name in names} for _ in range(2)]
    for run in runs:
        spread.fill(run.items())
    assert torch.equal(runs[0][names[0]], runs[1][names[0]])
    assert not torch.equal(runs[0][names[0]], runs[0][names[1]])


# Engines in turn.


def fleet_specs(*names: str) -> list[fleet.EngineSpec]:
    return [fleet.EngineSpec(name, {}, "m:f", {"answer": name}) for name in names]


def answer(spec: fleet.EngineSpec, out: Path) -> Any:
    return fake_gpu.answer_with(spec, out, {"result": spec.options["answer"]})


def test_engines_start_together_and_take_turns(tmp_path: Path) -> None:
    said: list[str] = []
    found = fleet.run(
        fleet_specs("a", "b", "c"),
        tmp_path,
        parallel=2,
        exclusive=True,
        progress=said.append,
        start=answer,
    )
    results_by_name = {name: one.result for name, one in found.items()}
    assert results_by_name == {"a": "a", "b": "b", "c": "c"}
    order = [line.split(" in ")[0] for line in said]
    assert order == [
        "a: starting",
        "b: starting",
        "a: started",
        "a: done",
        "b: started",
        "b: done",
        "c: starting",
        "c: started",
        "c: done",
    ]


def test_a_failed_engine_stops_no_other(tmp_path: Path) -> None:
    def start(spec: fleet.EngineSpec, out: Path) -> Any:
        if spec.name == "bad":
            return fake_gpu.answer_with(spec, out, {"error": "ValueError: no"})
        return answer(spec, out)

    for exclusive in (True, False):
        found = fleet.run(
            fleet_specs("bad", "good"),
            tmp_path / str(exclusive),
            parallel=2,
            exclusive=exclusive,
            progress=lambda line: None,
            start=start,
        )
        assert found["bad"].error == "ValueError: no"
        assert found["good"].ok


def test_a_child_that_dies_or_hangs_is_reported(tmp_path: Path) -> None:
    """The real child process: its job does not exist, so it fails before an engine."""
    found = fleet.run(
        [fleet.EngineSpec("real", {}, "experiments.nowhere:job")],
        tmp_path,
        parallel=1,
        exclusive=True,
        progress=lambda line: None,
    )
    assert "No module named 'experiments.nowhere'" in found["real"].error

    def sleep(spec: fleet.EngineSpec, out: Path) -> Any:
        (out / f"{spec.name}.ready").touch()
        return fake_gpu.idle()

    found = fleet.run(
        fleet_specs("slow"),
        tmp_path,
        parallel=1,
        exclusive=True,
        job_limit_s=0.3,
        progress=lambda line: None,
        start=sleep,
    )
    assert "its job took more than" in found["slow"].error


def report_environment(engine: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A job that says what a forked child sees."""
    return {"engine": engine, "mark": os.environ["MARK"], "pid": os.getpid(), **options}


def test_forked_engines_have_their_own_environment_log_and_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(spec: fleet.EngineSpec) -> str:
        os.write(1, f"making {spec.name}\n".encode())
        if spec.name == "bad":
            raise RuntimeError("no room")
        return f"engine of {spec.name}"

    monkeypatch.setattr(fleet, "PRELOADED", ())
    monkeypatch.setattr(child, "make_engine", make)
    job = f"{__name__}:report_environment"
    found = fleet.run(
        [
            fleet.EngineSpec("a", {}, job, {"x": 1}, {"MARK": "1"}),
            fleet.EngineSpec("b", {}, job, {"x": 2}, {"MARK": "2"}),
            fleet.EngineSpec("bad", {}, job),
        ],
        tmp_path,
        parallel=3,
        exclusive=False,
        progress=lambda line: None,
        start=fleet.fork,
    )
    results = [found[name].result for name in ("a", "b")]
    assert [(r["engine"], r["mark"], r["x"]) for r in results] == [
        ("engine of a", "1", 1),
        ("engine of b", "2", 2),
    ]
    assert len({os.getpid(), *(r["pid"] for r in results)}) == 3
    assert "MARK" not in os.environ
    assert (tmp_path / "a.log").read_text() == "making a\n"
    assert found["bad"].error == "RuntimeError: no room"


def test_a_forked_engine_that_hangs_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "PRELOADED", ())
    monkeypatch.setattr(child, "make_engine", lambda spec: time.sleep(60))
    found = fleet.run(
        [fleet.EngineSpec("slow", {}, f"{__name__}:report_environment")],
        tmp_path,
        parallel=1,
        exclusive=True,
        start_limit_s=0.5,
        progress=lambda line: None,
        start=fleet.fork,
    )
    assert "its start took more than" in found["slow"].error


def test_fleet_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parallel=0"):
        fleet.run(fleet_specs("a"), tmp_path, parallel=0, exclusive=True)
    with pytest.raises(ValueError, match="not unique"):
        fleet.run(fleet_specs("a", "a"), tmp_path, parallel=1, exclusive=True)


# Plans and points.

PLAN = measure.Plan("ours", 8, 16, 7, (1, 8), "/tmp/x")


def test_the_engine_of_a_plan(tmp_path: Path) -> None:
    spec = measure.spec(PLAN, tmp_path)
    config = json.loads(Path(spec.engine["model"], "config.json").read_text())
    assert config == k3_shapes.target_config(8, 16)
    draft = spec.engine["speculative_config"]
    assert draft["num_speculative_tokens"] == 7
    assert draft["synthetic_acceptance_length"] == pytest.approx(5.9)
    assert Path(draft["model"], "config.json").is_file()
    every = dict.fromkeys(settings.OPS, "ours")
    ours = spec.engine["additional_config"]["dspark_k3"]
    assert ours == {"target": True, "ops": every}
    json.dumps(spec.engine)
    drafter = measure.spec(replace(PLAN, target="drafter"), tmp_path)
    sides = {"draft_sampler": "ours", "draft_attention": "ours"}
    assert drafter.engine["additional_config"]["dspark_k3"] == ours | sides
    assert drafter.name != spec.name
    stock = measure.spec(replace(PLAN, target="stock", k=0), tmp_path)
    assert "additional_config" not in stock.engine
    assert "speculative_config" not in stock.engine
    assert stock.name != spec.name
    asked = replace(PLAN, ops={"moe_experts": "stock"})
    with_ops = measure.spec(asked, tmp_path).engine["additional_config"]
    every["moe_experts"] = "stock"
    assert with_ops["dspark_k3"] == {"target": True, "ops": every}
    assert lines.note(asdict(asked)) == f"{lines.NOTE}; moe_experts stock"


def test_ops_are_read_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Only our target has them."""
    parser = argparse.ArgumentParser()
    lines.common_arguments(parser)
    given = parser.parse_args(
        ["--layers", "8", "--ops", '{"moe_experts": "stock"}', "--work", "/tmp/x"]
    )
    found = {p.target: p.ops for p in lines.plans(given, [0], [1])}
    assert found == {"stock": {}, "ours": {"moe_experts": "stock"}}
    for text, words in (("moe", "moe"), ('{"mow": "stock"}', "unknown key 'mow'")):
        with pytest.raises(SystemExit):
            parser.parse_args(["--layers", "8", "--ops", text])
        assert words in capsys.readouterr().err


def test_engines_at_once_fit_the_memory() -> None:
    plans = [replace(PLAN, target=t, k=k) for t in ("stock", "ours") for k in (0, 7)]
    assert measure.engines_at_once(plans) == 4
    assert measure.engines_at_once([replace(plan, layers=24) for plan in plans]) == 2
    assert measure.engines_at_once([replace(PLAN, layers=4, tp=1)] * 2) == 1


def recorded(us: float, queued: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "step_us": us,
        "forward_us": us - 10,
        "draft_us": None,
        "queued": queued,
        "executed_rows": 8,
        "graph": True,
        **more,
    }


def test_a_point_is_the_median_of_steps_that_were_enqueued_ahead() -> None:
    timed = [recorded(us) for us in (100.0, 101, 102, 103, 500)]
    timed.append(recorded(9.0, queued=False))
    wall = [{"host_s": s} for s in (0.0, 1e-3, 2e-3, 4e-3)]
    counted = [{"distinct": [100, 120]}, {"distinct": [110, 130]}]
    found = measure.summary(1, 8, timed, wall, counted)
    assert (found["step_us"], found["forward_us"], found["draft_us"]) == (102, 92, None)
    assert found["queued"] == pytest.approx(5 / 6)
    assert found["wall_us"] == pytest.approx(1000)
    assert found["distinct_experts"] == 115
    assert found["distinct_by_layer"] == [105, 125]
    with pytest.raises(ValueError, match="none of 1 steps of 8 rows was enqueued"):
        measure.summary(1, 8, [recorded(9.0, queued=False)], [], [])


# Profiles.


def test_the_command_writes_profiles_that_advise_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p" / "k3.json"
    code = step_times.main(
        [
            *("--layers", "8", "--tp", "16", "--k", "0,3,7", "--batch", "1,2,4,8"),
            *("--out", str(out), "--work", str(tmp_path / "w"), "--commit", "abc"),
        ],
        fake_gpu.measured,
    )
    assert code == 0, capsys.readouterr().out
    for target in ("stock", "ours"):
        profile = load_profile(str(out.with_name(f"k3-{target}.json")), "H200")
        assert profile.label == "recorded"
        assert profile.plain_ms(4) == pytest.approx((200 + 4 + 50) / 1e3)
        assert profile.draft_ms(7, 2) == pytest.approx(0.720)
        assert profile.verify_ms(32, 4) == pytest.approx((200 + 32 + 50) / 1e3)
        deep = read_profile(out.with_name(f"k3-{target}-93.json"))
        assert deep.label == "modelled" and "scaled from 8 of 93" in deep.source
        assert deep.draft_ms(7, 2) == profile.draft_ms(7, 2)
        traced = sum(fake_gpu.SPANS[kind] for kind in layer_kinds(8))
        spans = fake_gpu.SPANS
        whole = spans["dense"] + 68 * spans["kda"] + 24 * spans["mla"]
        added = (200 + 32) / (traced + 2) * (whole - traced)
        assert deep.verify_ms(32, 4) == pytest.approx((200 + 32 + 50 + added) / 1e3)
    document = json.loads(out.with_name("k3-ours.json").read_text())
    assert document["provenance"]["commit"] == "abc"
    assert document["verify"][0]["distinct_experts"] > 16
    lines = results.read(out.with_suffix(".jsonl"))
    (experts,) = [
        line
        for line in lines
        if line["metric"] == "distinct_experts"
        and line["variant"] == "ours"
        and line["shape"]["rows"] == 16
        and line["shape"]["k"] == 3
    ]
    assert experts["value"] == 241 and "by MoE layer 240, 242" in experts["note"]
    assert {line["metric"] for line in lines} == {
        "step_gpu_us",
        "forward_gpu_us",
        "draft_gpu_us",
        "step_wall_us",
        "distinct_experts",
        "layer_gpu_us",
        "layer_mlp_gpu_us",
        "layer_busy_us",
        "layer_kernels",
    }


def points(**changes: Any) -> dict[int, list[dict[str, Any]]]:
    return {
        k: [
            fake_gpu.point(replace(PLAN, k=k), batch, None) | changes
            for batch in (1, 2, 4, 8)
        ]
        for k in (0, 1, 3)
    }


def document(found: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    return step_times.document(
        found, name="n", gpu="G", source="s", label="recorded", provenance={}
    )


def test_equal_rows_take_the_longest_time() -> None:
    found = points()
    found[1][3]["step_us"] += 40  # 16 rows as 8 requests with one draft
    entries = {e["rows"]: e for e in document(found)["verify"]}
    assert (entries[16]["k"], entries[16]["batch"]) == (1, 8)
    assert entries[16]["ms"] == pytest.approx((200 + 16 + 50 + 40) / 1e3)
    assert entries[8]["k"] in (1, 3)


def test_noise_is_padded_up_and_a_real_fall_is_refused(tmp_path: Path) -> None:
    found = points()
    found[0][1]["step_us"] = found[0][0]["step_us"] - 1
    made = document(found)
    assert made["plain"][1]["ms"] == made["plain"][0]["ms"]
    assert made["plain"][1]["measured_ms"] == pytest.approx(0.250)
    assert step_times.write_profile(tmp_path / "a.json", made) == ""
    found[0][1]["step_us"] = found[0][0]["step_us"] / 2
    refused = step_times.write_profile(tmp_path / "b.json", document(found))
    assert "plain falls from" in refused
    assert (tmp_path / "b.json").is_file()


def test_padded_steps_and_like_routing_make_no_profile(tmp_path: Path) -> None:
    found = points()
    for point in found[1]:
        point["executed_rows"] = 64
    rows = [entry["rows"] for entry in document(found)["verify"]]
    assert rows == [4, 8, 16, 32]
    alike = document(points(distinct_experts=16.0))
    refused = step_times.write_profile(tmp_path / "a.json", alike)
    assert "every row was routed alike" in refused
    with pytest.raises(ValueError, match="needs plain steps"):
        document({0: points()[0]})


def test_a_step_without_a_graph_is_not_scaled() -> None:
    (point, *_) = points(forward_us=None)[0]
    with pytest.raises(ValueError, match="ran without a graph"):
        step_times.scale(point, [], 8)


def test_out_must_be_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step_times.main(["--layers", "8", "--out", "x.txt"])
    assert "must end in .json" in capsys.readouterr().err
