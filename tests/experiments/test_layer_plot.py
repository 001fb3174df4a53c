# SPDX-License-Identifier: Apache-2.0
"""The layer figure: pairs of stock and ours, nothing for half a pair."""

from pathlib import Path
from typing import Any

import pytest

from experiments import layer_plot, results


def lines(*points: tuple[str, str, int, int, float]) -> list[dict[str, Any]]:
    recorder = results.Recorder()
    for variant, kind, k, batch, value in points:
        recorder.add(
            "layer_gpu_us",
            value,
            label="measured",
            variant=variant,
            shape={"kind": kind, "layers": 8, "tp": 16, "k": k, "batch": batch},
            gpu="NVIDIA H200",
            unit="us",
            gates={"graph": True},
        )
    return recorder.lines


BOTH = [
    (side, kind, k, batch, 100.0 + k + batch - 20 * (side == "ours"))
    for side in ("stock", "ours")
    for kind in ("kda", "mla")
    for k, batch in ((7, 1), (0, 8), (0, 1))
]


def test_bars_pair_the_sides_and_are_sorted() -> None:
    found = layer_plot.bars(lines(*BOTH), "kda")
    assert list(found) == [(0, 1), (0, 8), (7, 1)]
    assert found[7, 1] == {"stock": 108.0, "ours": 88.0}


def test_half_a_pair_is_no_bar() -> None:
    half = [*BOTH, ("ours", "kda", 3, 1, 50.0)]
    assert (3, 1) not in layer_plot.bars(lines(*half), "kda")
    with pytest.raises(ValueError, match="for both stock and ours"):
        layer_plot.bars(lines(*(p for p in BOTH if p[0] == "ours")), "kda")


def test_the_figure_is_written_and_a_bad_source_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "r.jsonl", tmp_path / "layers.png"
    results.append(source, lines(*BOTH))
    assert layer_plot.main([str(source), str(out)]) == 0
    assert out.stat().st_size > 10_000
    with pytest.raises(SystemExit):
        layer_plot.main([str(tmp_path / "missing.jsonl"), str(out)])
    assert "missing.jsonl" in capsys.readouterr().err
