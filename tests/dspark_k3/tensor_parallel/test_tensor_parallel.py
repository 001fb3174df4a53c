# SPDX-License-Identifier: Apache-2.0
"""The command over engines that are made up, and its parts: no GPU."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark_k3 import settings
from dspark_k3.target import scope
from experiments import corpora, results
from experiments.gpu_engine import fleet, measure, ranks
from experiments.gpu_engine.fleet import EngineSpec
from tests.dspark_k3.suite import cases as suite_cases
from tests.dspark_k3.tensor_parallel import __main__ as command
from tests.dspark_k3.tensor_parallel import cases, jobs, run, verdict, watch
from tests.dspark_k3.test_target_scope import at_degree
from tests.experiments import fake_gpu

TEXT = functools.cache(corpora.held_out_bytes)
GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def text_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases read the held-out text anew for every list of prompts."""
    monkeypatch.setattr(corpora, "held_out_bytes", TEXT)
    monkeypatch.setattr(suite_cases, "held_out_bytes", TEXT)


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(("tp", "serves"), [(1, True), (2, True), (3, False)])
def test_tiny_k3_at_the_degrees_its_heads_allow(tp: int, serves: bool) -> None:
    assert cases.served(config(suite_cases.TARGET), tp) is serves
    assert cases.divides(config(suite_cases.DRAFTER), tp) is serves


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_every_even_degree_has_a_small_model(tp: int, tmp_path: Path) -> None:
    found = cases.models(tp, tmp_path)
    assert found.trained is (tp == 2)
    assert cases.served(config(found.target), tp)
    assert cases.divides(config(found.drafter), tp)
    if not found.trained:
        assert not cases.served(config(found.target), 2 * tp)
        # Taps and widths that the two share.
        target, drafter = config(found.target), config(found.drafter)
        assert drafter["target_hidden_size"] == target["hidden_size"]


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_every_engine_of_ours_runs_every_op(tp: int, tmp_path: Path) -> None:
    """Where an op has no kernel they do not start: all are named. vLLM fills a rank's
    64 rows of gate up to 256."""
    models = cases.models(tp, tmp_path)
    target = config(models.target)
    assert target["moe_intermediate_size"] // tp == 64
    for case in cases.small_cases(models.trained):
        asked = settings.read(cases.spec(case, tp, models).engine["additional_config"])
        assert asked.named == set(settings.OPS)
        degree = 1 if case.name == "tp1-plain" else tp
        assert scope.failures(at_degree(target, degree, **asked.ops)) == []


def test_an_odd_degree_is_refused() -> None:
    with pytest.raises(ValueError, match="tp=3"):
        cases.grown({}, 3)
    with pytest.raises(SystemExit):
        command.main(["--tp", "3", "--out", "x"])


@pytest.mark.parametrize("tp", [2, 8])
def test_engines_are_groups_without_multicast(tp: int, tmp_path: Path) -> None:
    models = cases.models(tp, tmp_path)
    small = cases.small_cases(models.trained)
    specs = [cases.spec(case, tp, models) for case in small]
    specs += [measure.spec(p, tmp_path) for p in cases.wide_plans(tp, 4, tmp_path)]
    named = {spec.name: spec for spec in ranks.with_ports(specs)}
    assert len(named) == len(specs)
    assert len({spec.env["VLLM_PORT"] for spec in named.values()}) == len(specs)
    for name, spec in named.items():
        one = name == "tp1-plain"
        assert spec.engine.get("tensor_parallel_size", 1) == (1 if one else tp)
        assert ("distributed_executor_backend" in spec.engine) is not one
        assert ranks.MULTICAST_OFF.items() <= spec.env.items()
        assert spec.env["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"
        assert spec.engine["worker_extension_cls"]
        json.dumps(dataclasses.asdict(spec))
    # Requests that come while the engine runs meet in another order each time.
    own = {
        n
        for n, s in named.items()
        if s.env.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "1"
    }
    assert own & {case.name for case in small} == {"killed-k4", "stopped-k7"}
    assert ("tp1-plain" in named) is models.trained
    for name in ("stopped-k7", "killed-k4"):
        limit = int(named[name].env["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"])
        assert limit + 20 < named[name].options["fault"]["limit_s"] < 60
    assert named[f"ours-L4-ranks{tp}-k7"].engine["model"].endswith("L4-tp1-b12")


def test_multicast_that_is_on_is_refused() -> None:
    ranks.check_environment({})
    ranks.check_environment(ranks.MULTICAST_OFF)
    with pytest.raises(ValueError, match="NCCL_NVLS_ENABLE=1"):
        ranks.check_environment({"NCCL_NVLS_ENABLE": "1"})


class FakeRunner:
    """Decides as told: graph, and rows by request."""

    def __init__(self, adaptive: bool = True) -> None:
        self.cudagraph_manager = SimpleNamespace(dispatch=self.dispatch)
        self.adaptive_verification = (
            SimpleNamespace(reallocate_drafts=self.reallocate) if adaptive else None
        )
        self.widths = [1]

    def dispatch(self, *arguments: Any) -> Any:
        mode = SimpleNamespace(name="FULL")
        return SimpleNamespace(
            cg_mode=mode,
            num_tokens=sum(self.widths),
            num_reqs=len(self.widths),
            uniform_token_count=None,
            max_query_len=8,
        )

    def reallocate(self, req_ids: Any, idx_mapping: Any) -> Any:
        starts = torch.tensor([0, *self.widths, 0]).cumsum(0)
        return None, starts, 0, None

    def execute_model(self, scheduled: Any, dummy_run: bool = False) -> None:
        self.cudagraph_manager.dispatch(len(self.widths), sum(self.widths))
        if self.adaptive_verification is not None:
            names = list(scheduled.num_scheduled_tokens)
            self.adaptive_verification.reallocate_drafts(names, None)


def scheduled(rows: int, requests: int) -> Any:
    return SimpleNamespace(
        total_num_scheduled_tokens=rows,
        num_scheduled_tokens={str(i): 1 for i in range(requests)},
    )


def test_a_rank_records_rows_and_graph_of_each_step() -> None:
    runner = FakeRunner()
    seen = watch.Watch(runner)
    runner.execute_model(scheduled(16, 2))
    seen.start()
    runner.widths = [3, 8]
    runner.execute_model(scheduled(16, 2))
    runner.execute_model(scheduled(16, 2), dummy_run=True)
    runner.execute_model(scheduled(0, 0))
    runner.widths = [5]
    runner.execute_model(scheduled(8, 1))
    found = seen.take()
    assert [(r, rows, widths) for r, rows, _, widths in found] == [
        (2, 16, [3, 8]),
        (1, 8, [5]),
    ]
    assert found[0][2].startswith("FULL 11 rows, 2 requests")
    runner.execute_model(scheduled(8, 1))
    assert seen.take() == []
    plain = FakeRunner(adaptive=False)
    seen = watch.Watch(plain)
    seen.start()
    plain.execute_model(scheduled(1, 1))
    assert seen.take()[0][3] == []


def test_ranks_are_compared_step_by_step() -> None:
    steps = [(2, 16, "a", [3, 8]), (2, 16, "b", [8, 8]), (1, 8, "c", [])]
    found = watch.compare([steps, [list(step) for step in steps]])
    assert found["agree"] and found["first"] is None and found["steps"] == 3
    assert (found["trimmed"], found["uneven"], found["graphs"]) == (1, 1, 3)
    # The same sum, other requests: what only the lengths show.
    other = [steps[0], (2, 16, "b", [7, 9]), steps[2]]
    found = watch.compare([steps, other])
    assert not found["agree"] and found["first"]["step"] == 1
    assert len(set(found["digests"])) == 2
    assert not watch.compare([steps, steps[:2]])["agree"]


def test_drift_moves_the_rows_of_live_requests_of_one_rank() -> None:
    taken: list[torch.Tensor] = []
    manager = SimpleNamespace(record_confidences=lambda c, b: taken.append(c.clone()))
    worker: Any = watch.RankWatch()
    worker.rank = 1
    worker.model_runner = SimpleNamespace(adaptive_verification=manager)
    worker.tp_drift(1e-2, 0)
    assert worker.tp_disturbed() == 0
    worker.tp_drift(1e-2, 1)
    before = torch.full((4, 7), 0.5)
    manager.record_confidences(before.clone(), SimpleNamespace(num_reqs=2))
    assert worker.tp_disturbed() == 14
    assert torch.equal(taken[0][2:], before[2:])
    moved = (taken[0][:2] - 0.5).abs()
    assert 0 < moved.max() <= 0.5 * 1e-2 + 1e-6
    assert worker.tp_agree(False) is False
    manager.agree = True
    assert worker.tp_agree(False) is True and manager.agree is False


class FakeLlm:
    """Answers of two ranks; the control run ends as ``control`` says."""

    def __init__(self, control: str = "") -> None:
        self.control = control
        self.agreeing = True

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if name == "tp_agree":
            self.agreeing = args[0]
            return [True, True]
        steps = [[8, 64, "g", [1] * 8]] * 30
        mine = [*steps[:-1], [8, 64, "h", [1] * 8]] if not self.agreeing else steps
        return {
            "k3_gpu": [GPU, GPU],
            "k3_counters": [{"ours": 9}, {"ours": 9}],
            "tp_process": [1, 2],
            "tp_disturbed": [0, 50],
            "tp_watch_take": [json.dumps(steps), json.dumps(mine)],
        }.get(name, [None, None])


@pytest.mark.parametrize("control", ["", "EngineDeadError: gone"])
def test_lengths_are_counted_as_they_are_and_with_drift(
    monkeypatch: pytest.MonkeyPatch, control: str
) -> None:
    llm = FakeLlm()
    seeds: list[int] = []

    def sampled(llm: FakeLlm, group: Any, seed: int) -> None:
        seeds.append(seed)
        if control and not llm.agreeing:
            raise RuntimeError(control)

    monkeypatch.setattr(jobs, "_sampled", sampled)
    group = {"prompts": [[1]] * 5, "max_tokens": 9}
    found = jobs.count_lengths(llm, group, 100, 1e-2)
    assert seeds[:4] == [0, 5, 10, 15] and found["same"]["steps"] == 120
    assert found["drift"]["agree"] and found["drift"]["disturbed"] == 50
    if control:
        assert "EngineDeadError" in found["control"]["error"]
    else:
        assert not found["control"]["agree"]
    judged = verdict.lengths(found, 100)
    assert all(judged["same"]["gates"].values())
    assert all(judged["drift"]["gates"].values())
    assert "gates" not in judged["control"]
    assert not verdict.lengths(found, 2000)["same"]["gates"]["enough_steps"]


@pytest.mark.parametrize("kind", ["stop", "kill"])
def test_a_rank_is_broken_and_what_is_left_is_killed(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    code = "import time; time.sleep(60)"
    workers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    llm = SimpleNamespace(collective_rpc=lambda name: [w.pid for w in workers])

    def greedy(llm: Any, **group: Any) -> None:
        last = workers[-1].pid
        state = Path(f"/proc/{last}/stat").read_text().rpartition(")")[2].split()[0]
        if state in ("T", "Z"):
            if kind == "kill":
                workers[0].kill()
            raise RuntimeError("EngineDeadError: a worker has gone")
        time.sleep(0.05)

    monkeypatch.setattr(jobs.jobs, "greedy", greedy)
    monkeypatch.setattr(jobs, "GONE_LIMIT_S", 1.0)
    try:
        found = jobs.break_a_rank(llm, kind, {}, 10.0)
        assert "EngineDeadError" in found["error"] and 0 <= found["seconds"] < 5
        # Nobody ended the two in the first case, so they are killed and it is said.
        assert found["gone"] is (kind == "kill")
        assert all(jobs.wait_for(lambda w=w: not jobs.alive(w.pid), 5) for w in workers)
        gates = verdict.fault(found)["gates"]
        assert gates["no_process_left"] is (kind == "kill")
        assert gates["stopped_with_an_error"] and gates["in_bounded_time"]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_an_engine_that_hangs_is_said_to() -> None:
    found = jobs.bounded(lambda: time.sleep(5), 0.2)
    assert found["error"] == "" and found["result"] is None
    fault = {"kind": "stop", **found, "gone": True, "gone_s": 1.0}
    gates = verdict.fault(fault)["gates"]
    assert not gates["stopped_with_an_error"] and not gates["in_bounded_time"]


def tokens(prompt: list[int], count: int) -> list[int]:
    return [(sum(prompt) + 7 * i) % 16 for i in range(count)]


class Engines:
    """Starts processes that have their answer already.

    ``far`` is the gap where the group's first text leaves the single GPU's;
    ``wrong`` names a case whose text is not its plain one's.
    """

    def __init__(self, far: float = 0.03, wrong: str = "", dead: str = "") -> None:
        self.far, self.wrong, self.dead = far, wrong, dead
        self.turns: list[str] = []

    def __call__(self, spec: EngineSpec, out: Path) -> Any:
        fleet.write_spec(spec, out)
        if spec.name == self.dead:
            return fake_gpu.answer_with(spec, out, {"error": "RuntimeError: dead"})
        wide = spec.job == measure.JOB
        found = self.wide(spec, out) if wide else self.small(spec)
        return fake_gpu.answer_with(spec, out, {"result": found})

    def small(self, spec: EngineSpec) -> dict[str, Any]:
        groups: dict[str, Any] = {}
        k = spec.engine.get("speculative_config", {}).get("num_speculative_tokens", 0)
        for name, group in spec.options["groups"].items():
            said = [tokens(p, group["max_tokens"]) for p in group["prompts"]]
            groups[name] = {
                "tokens": said,
                "speculation": {"accepted_tokens": 5 if k else 0, "verify_steps": 3},
            }
            if group.get("logprobs"):
                groups[name]["tops"] = [[[t, 0, self.far] for t in r] for r in said]
        if spec.name == self.wrong or (self.far and spec.name == "tp1-plain"):
            said = groups["batch3"]["tokens"]
            said[0] = [*said[0][:5], 99, *said[0][6:]]
        found: dict[str, Any] = {
            "groups": groups,
            "gpu": [GPU, GPU],
            "versions": {"vllm": "0.33.0"},
            "counters": {"ours": 9},
            "counters_agree": True,
        }
        steps = [[8, 64, "g", [1] * 8]] * 2000
        if "lengths" in spec.options:
            same = watch.compare([steps, steps])
            found["lengths"] = {
                "same": same,
                "drift": {**same, "disturbed": 7},
                "control": {"error": "EngineDeadError", "seconds": 16.0},
            }
        if fault := spec.options.get("fault"):
            found["fault"] = {
                "kind": fault["kind"],
                "error": "EngineDeadError: x",
                "seconds": 16.0,
                "gone": True,
                "gone_s": 25.0,
            }
        return found

    def wide(self, spec: EngineSpec, out: Path) -> dict[str, Any]:
        options = spec.options
        plan = measure.Plan(**{**options, "batches": tuple(options["batches"])})
        kinds = ["dense", "kda", "kda", "mla"]
        mix = fake_gpu.STOCK_MIX if plan.target == "stock" else fake_gpu.OUR_MIX
        points = []
        for batch in plan.batches:
            path = out / f"{spec.name}-{batch}.trace"
            fake_gpu.write_trace(path, kinds, mix)
            points.append(fake_gpu.point(plan, batch, str(path)))
        return {
            "plan": options,
            "versions": {"vllm": "0.33.0"},
            "gpu": GPU,
            "counters": {} if plan.target == "stock" else {"ours": 9},
            "counters_agree": True,
            "points": points,
        }


def report(out: Path, engines: Engines, **options: Any) -> run.Report:
    return run.run(out, 2, start=engines, say=lambda line: None, **options)


def test_the_whole_run_holds_and_leaves_lines(tmp_path: Path) -> None:
    found = report(tmp_path, Engines())
    assert found.ok, found.verdicts
    judged = found.verdicts["cases"]
    assert set(judged) == set(cases.JUDGED)
    assert judged["tp1-plain"]["largest_gap"] == 0.03
    assert len(judged["tp1-plain"]["differences"]) == 1
    assert judged["fixed-k1"]["gates"] == {
        "text_equal": True,
        "executor_ran": True,
        "ranks_count_the_same": True,
        "speculated": True,
    }
    assert found.verdicts["control"]["error"] == "EngineDeadError"
    written = results.read(tmp_path)
    metrics = {line["metric"] for line in written}
    assert {
        "texts_that_differ",
        "largest_gap_where_texts_differ",
        "steps_compared_across_ranks",
        "seconds_to_error",
        "seconds_to_last_process",
        "step_gpu_us",
        "layer_gpu_us",
        "layer_collective_us",
    } <= metrics
    assert all(line["versions"]["vllm"] == "0.33.0" for line in written)
    assert all(line["shape"].get("ranks", 2) == 2 for line in written)
    assert json.loads((tmp_path / "verdicts.json").read_text()) == found.verdicts


def test_nccl_alone_is_asked_of_every_engine(tmp_path: Path) -> None:
    engines = Engines()
    found = report(tmp_path, engines, parts=("small",), only="fixed-k1", nccl=True)
    assert found.ok and set(found.verdicts["cases"]) == {"fixed-k1"}
    for name in ("plain", "fixed-k1"):
        spec = fleet.read_spec(name, tmp_path)
        assert spec.engine["disable_custom_all_reduce"]


def test_what_does_not_hold_is_red(tmp_path: Path) -> None:
    found = report(tmp_path / "far", Engines(far=0.5), parts=("small",))
    assert not found.ok
    assert not found.verdicts["cases"]["tp1-plain"]["gates"]["only_near_ties"]
    found = report(tmp_path / "text", Engines(wrong="fixed-k4"), parts=("small",))
    assert not found.ok
    assert not found.verdicts["cases"]["fixed-k4"]["gates"]["text_equal"]
    engines = Engines(dead="plain-eager")
    found = report(tmp_path / "dead", engines, parts=("small",), only="eager")
    assert not found.ok and found.verdicts["failed"] == {
        "plain-eager": "RuntimeError: dead"
    }
    assert results.read(tmp_path / "dead")[0]["metric"] == "failed_engine"


def test_a_run_that_takes_too_long_is_stopped_and_keeps_its_lines(
    tmp_path: Path,
) -> None:
    engines = Engines()
    idle: list[Any] = []

    def start(spec: EngineSpec, out: Path) -> Any:
        if spec.name != "fixed-k7":
            return engines(spec, out)
        (out / f"{spec.name}.ready").touch()
        idle.append(fake_gpu.idle())
        return idle[-1]

    found = run.run(
        tmp_path,
        2,
        parts=("small",),
        minutes=0.1,
        start=start,
        say=lambda line: None,
    )
    assert not found.ok and "the run" in found.verdicts["failed"]
    assert found.verdicts["cases"]["fixed-k1"]["gates"]["text_equal"]
    assert results.read(tmp_path)
    assert idle[0].wait(5) is not None


def test_waves_share_the_gpus_one_turn_at_a_time(tmp_path: Path) -> None:
    turns = fleet.Turns()
    held: list[str] = []
    order: list[str] = []

    def start(spec: EngineSpec, out: Path) -> Any:
        return fake_gpu.answer_with(spec, out, {"result": spec.name})

    def said(line: str) -> None:
        name, _, rest = line.partition(":")
        if "its turn" in rest:
            held.append(name)
            assert len(held) == 1, held
            order.append(name)
        elif "done" in rest:
            held.remove(name)

    def wave(*names: str, quiet: bool) -> fleet.Wave:
        return fleet.Wave(
            [EngineSpec(name, {}, "m:f") for name in names],
            tmp_path,
            parallel=2,
            exclusive=True,
            progress=said,
            start=start,
            turns=turns,
            quiet=quiet,
        )

    first, second, other = (
        wave("a", "b", quiet=True),
        wave("c", quiet=True),
        wave("x", "y", quiet=False),
    )
    assert fleet.run_waves([[first, second], [other]])
    assert sorted(order) == ["a", "b", "c", "x", "y"]
    assert order.index("c") > order.index("b")
    assert list(first.outcomes()) == ["a", "b"] and turns.starting == 0


def test_a_quiet_turn_waits_for_engines_that_start() -> None:
    turns = fleet.Turns()
    turns.starting = 1
    assert not turns.take("wide", quiet=True)
    assert turns.take("small", quiet=False)
    turns.starting = 0
    assert not turns.take("wide", quiet=True)
    turns.leave("another")
    turns.leave("small")
    assert turns.take("wide", quiet=True)


def test_a_quiet_engine_that_waits_is_next() -> None:
    """Else a wave that never runs out of engines would keep the turn to itself."""
    turns = fleet.Turns()
    assert turns.take("small", quiet=False)
    assert not turns.take("wide", quiet=True)
    turns.leave("small")
    assert not turns.take("other small", quiet=False)
    assert turns.take("wide", quiet=True)
    assert not turns.take("wider", quiet=True)
    turns.leave("wide")
    turns.leave("wider")
    assert turns.take("other small", quiet=False)
