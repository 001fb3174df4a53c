# SPDX-License-Identifier: Apache-2.0
"""The layer chain: what it takes, and on a GPU that both orders agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments import layer_chain, results


@pytest.mark.parametrize(
    ("rows", "step"), [(1, (1, 1)), (8, (1, 8)), (16, (2, 8)), (64, (8, 8))]
)
def test_rows_are_a_step(rows: int, step: tuple[int, int]) -> None:
    assert layer_chain.step_of(rows) == step


@pytest.mark.parametrize("rows", ["0", "9", "12", "72"])
def test_rows_that_are_no_step_are_refused(
    rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        layer_chain.main(["--rows", rows])
    assert stopped.value.code == 2
    assert f"rows={rows}: use 1 to 8, or a multiple of 8" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        layer_chain.main([])
    assert "there is no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_both_orders_give_the_same_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every M where one may end and the other begin, and the widest."""
    out = tmp_path / "chain.jsonl"
    arguments = ["--tp", "16", "--rows", "1,2,3,8,64", "--timeline", "--rounds", "3"]
    assert layer_chain.main([*arguments, "--out", str(out)]) == 0
    lines = results.read(out)
    assert len(lines) == 10
    assert all(line["gates"] == {"orders_agree": True} for line in lines)
    # Two mixes, three projections and KDA at least between a layer's start and end.
    text = capsys.readouterr().out
    assert text.count("AttnRes") == 30 and "KdaKernel" in text
