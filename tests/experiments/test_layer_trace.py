# SPDX-License-Identifier: Apache-2.0
"""Traces cut into steps and layers, against traces whose times are known."""

import lzma
from pathlib import Path

import pytest

from experiments import k3_shapes, layer_trace, results
from experiments.gpu_engine import segment
from experiments.gpu_engine.lines import layer_kinds
from experiments.gpu_engine.segment import Kernel
from tests.experiments import fake_gpu

KINDS = layer_kinds(8)
DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("mix", [fake_gpu.STOCK_MIX, fake_gpu.OUR_MIX])
def test_spans_busy_time_and_kernels_by_kind(tmp_path: Path, mix: str) -> None:
    path = tmp_path / "t.json"
    fake_gpu.write_trace(path, KINDS, mix, steps=3)
    steps = [
        segment.split_layers(step, 8)
        for step in segment.split_steps(segment.read_trace(path))
    ]
    assert len(steps) == 3
    assert [k.name for k in steps[0].before] == ["embedding"]
    assert [k.name for k in steps[0].after] == [mix, "head"]
    times = segment.layer_times(steps, KINDS)
    assert {kind: t.layers for kind, t in times.items()} == {
        "dense": 1,
        "kda": 5,
        "mla": 2,
    }
    for kind, time in times.items():
        mixing, attention, mlp = fake_gpu.LAYER[kind]
        assert time.span_us == pytest.approx(fake_gpu.SPANS[kind])
        assert time.mlp_us == pytest.approx(sum(mlp))
        assert time.busy_us == pytest.approx(fake_gpu.SPANS[kind])
        assert time.kernels == 2 + len(attention) + len(mlp)
        assert time.copies == 0
        assert time.names[mix] == (2, *[pytest.approx(2 * mixing)] * 2)
    assert next(iter(times["kda"].names)) == "kda_attention_0"
    spans = sum(fake_gpu.SPANS[kind] for kind in KINDS)
    assert steps[0].forward_span == pytest.approx(spans + 2)


def test_overlapping_kernels_are_busy_once() -> None:
    """Side streams and early starts: the union, not the sum."""
    kernels = [Kernel("a", 0, 10), Kernel("b", 2, 6, stream=9), Kernel("c", 8, 15)]
    assert segment.busy_us(kernels) == 15
    assert segment.busy_us([*kernels, Kernel("d", 20, 21)]) == 16
    assert segment.busy_us([]) == 0


def test_a_kernel_that_starts_early_keeps_spans_exact() -> None:
    mix = fake_gpu.OUR_MIX
    names = [mix, "a", mix, "b", mix, "head"]
    starts = [0.0, 3.0, 7.0, 9.0, 11.5, 14.0]
    ends = [2.0, 8.0, 9.0, 13.0, 15.0, 20.0]
    kernels = [Kernel(n, s, e) for n, s, e in zip(names, starts, ends, strict=True)]
    step = segment.split_layers(kernels, 1)
    assert step.layer_span(0) == 11.5
    time = segment.layer_times([step], ["dense"])["dense"]
    assert time.busy_us == 2 + (13 - 3)
    assert time.mlp_us == 13 - 9
    assert time.names == {"a": (1, 5, 6), mix: (2, 4, 3), "b": (1, 4, 4)}
    assert list(time.names) == ["a", "b", mix]


def test_what_runs_beside_something_longer_adds_nothing() -> None:
    kernels = [Kernel("a", 0, 10), Kernel("b", 2, 6, stream=9), Kernel("c", 8, 15)]
    shares = segment.by_name([kernels, kernels])
    assert shares == {"a": (1, 10, 10), "c": (1, 7, 5), "b": (1, 4, 0)}
    assert sum(share.added_us for share in shares.values()) == 15


def test_copies_are_counted_apart(tmp_path: Path) -> None:
    mix = fake_gpu.STOCK_MIX
    kernels = [
        Kernel(mix, 0, 1),
        Kernel("Memcpy DtoD", 1, 2, copy=True),
        Kernel(mix, 2, 3),
        Kernel(mix, 3, 4),
    ]
    time = segment.layer_times([segment.split_layers(kernels, 1)], ["dense"])["dense"]
    assert (time.kernels, time.copies) == (2, 1)


@pytest.mark.parametrize("layers", [7, 9])
def test_another_number_of_mixes_is_refused(tmp_path: Path, layers: int) -> None:
    path = tmp_path / "t.json"
    fake_gpu.write_trace(path, KINDS, fake_gpu.STOCK_MIX)
    step = segment.split_steps(segment.read_trace(path))[0]
    with pytest.raises(ValueError, match=f"17 AttnRes mixes.* {layers} layers"):
        segment.split_layers(step, layers)


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(ValueError, match="not a chrome trace"):
        segment.read_trace(path)
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="no GPU kernels"):
        segment.read_trace(path)


def test_the_command_prints_and_records_both_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lines.jsonl"
    code = layer_trace.main(
        [
            *("--layers", "8", "--tp", "16", "--k", "7", "--batch", "1,8"),
            *("--out", str(out), "--work", str(tmp_path / "w"), "--commit", "abc"),
        ],
        fake_gpu.measured,
    )
    text = capsys.readouterr().out
    assert code == 0
    assert "kda layer (5 of them): 17.00 µs span, 7.00 µs of it the MLP's" in text
    assert "17.00 µs busy, 6.0 kernels" in text
    assert "{'ours': 3}" in text
    found = [
        line
        for line in results.read(out)
        if line["metric"] == "layer_gpu_us" and line["shape"]["batch"] == 8
    ]
    spans = {(line["variant"], line["shape"]["kind"]): line["value"] for line in found}
    assert spans == {
        (target, kind): pytest.approx(us)
        for target in ("stock", "ours")
        for kind, us in fake_gpu.SPANS.items()
    }
    named = [line for line in results.read(out) if line["metric"] == "layer_kernels"]
    assert all(line["kernels"] and line["commit"] == "abc" for line in named)


def test_a_trace_of_another_model_fails_the_command_but_shows_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(spec, out):  # type: ignore[no-untyped-def]
        process = fake_gpu.measured(spec, out)
        for path in out.glob("*.trace.json"):
            fake_gpu.write_trace(path, layer_kinds(4), fake_gpu.STOCK_MIX)
        return process

    code = layer_trace.main(
        ["--layers", "8", "--target", "stock", "--work", str(tmp_path / "w")], start
    )
    text = capsys.readouterr().out
    assert code == 1
    assert "9 AttnRes mixes" in text and "mla_attention_0" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "3"], "layers=3: must be 4"),
        (["--layers", "8", "--tp", "3"], "tp=3: must be one of"),
        (["--layers", "8", "--k", "8"], "k=8: must be 0 to 7"),
        (["--layers", "8", "--k", "x"], "must be whole numbers"),
        (["--layers", "8", "--batch", "9"], "sizes must be 1 to 8"),
        (["--layers", "8", "--target", "theirs"], "target='theirs'"),
        (["--layers", "8", "--steps", "900"], "ask for fewer steps"),
    ],
)
def test_arguments_that_cannot_run_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        layer_trace.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_shapes_are_those_of_the_whole_model() -> None:
    """Layer counts and bytes of the published checkpoint: 69 KDA, 24 MLA, 1.56 TB."""
    counts = k3_shapes.layer_counts(93)
    assert (counts.dense + counts.kda, counts.mla) == (69, 24)
    assert k3_shapes.weight_bytes(93, 1, False) == pytest.approx(1559.9e9, rel=1e-3)
    config = k3_shapes.target_config(93)
    attention = config["linear_attn_config"]
    assert attention["full_attn_layers"][-2:] == [92, 93]
    assert len(attention["kda_layers"]) == 69
    share = k3_shapes.target_config(8, 16)
    assert share["num_attention_heads"] == 6
    assert share["vocab_size"] * 16 == 163840
    assert k3_shapes.drafter_config(4)["target_layer_ids"] == [0, 1, 2]
    assert max(k3_shapes.drafter_config(8)["target_layer_ids"]) < 8


def test_a_recorded_trace_is_cut_into_its_layers(tmp_path: Path) -> None:
    """Two plain decode steps of stock vLLM 0.33, K3 cut to 8 layers, a TP 16 share,
    batch 1, on an H200 (2026-11-30): the activities alone, times from the first."""
    recorded = DATA / "stock_k3_8_layers_tp16.trace.json.xz"
    path = tmp_path / "trace.json"
    path.write_bytes(lzma.decompress(recorded.read_bytes()))
    steps = [
        segment.split_layers(step, 8)
        for step in segment.split_steps(segment.read_trace(path))
    ]
    assert len(steps) == 2
    times = segment.layer_times(steps, KINDS)
    counted = {kind: (time.kernels, time.layers) for kind, time in times.items()}
    assert counted == {"dense": (14, 1), "kda": (26, 5), "mla": (30, 2)}
    spans = {kind: time.span_us for kind, time in times.items()}
    assert spans == pytest.approx({"dense": 80, "kda": 129, "mla": 142.5}, rel=0.02)
    assert any("fused_recurrent_kda" in name for name in times["kda"].names)
    assert any("FlashAttn" in name for name in times["mla"].names)
