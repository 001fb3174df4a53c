# SPDX-License-Identifier: Apache-2.0
"""The confidence of a drafter with a calibration beside its checkpoint, and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from drafters.calibration import FILE_NAME
from dspark_k3.draft.calibrated import CalibratedConfidence

DRAFTS, REQUESTS, WIDTH = 3, 4, 8


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.linspace(-1, 1, 2 * WIDTH), requires_grad=False)

    def forward(self, hidden: Tensor, embed: Tensor) -> Tensor:
        return torch.cat((hidden, embed), -1) @ self.row


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.confidence_head = Head()


class Stock(nn.Module):
    """Stands for vLLM's class."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Backbone()

    def compute_confidence(self, head_hidden: Tensor, markov_embed: Tensor) -> Tensor:
        return torch.sigmoid(self.model.confidence_head(head_hidden, markov_embed))


class Drafter(CalibratedConfidence, Stock):
    """As `dspark_k3.draft.qwen3.CheckedQwen3DSpark` is made."""


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = REQUESTS * DRAFTS, WIDTH
    return (
        torch.randn(shape, generator=generator),
        torch.randn(shape, generator=generator),
    )


def write(
    directory: Path, temperatures: list[float], shifts: list[float] | None = None
) -> str:
    kind: dict[str, object] = {
        "kind": "sequential_temperature_scaling",
        "temperatures": temperatures,
    }
    if shifts is not None:
        kind["shifts"] = shifts
    (directory / FILE_NAME).write_text(json.dumps(kind))
    return str(directory)


def test_each_draft_has_its_temperature(tmp_path: Path) -> None:
    """A request's drafts lie side by side; what is fitted past them is not used."""
    drafter, given = Drafter(), rows()
    drafter.calibrate(write(tmp_path, [2.0, 0.5, 4.0, 9.0]), DRAFTS)
    found = drafter.compute_confidence(*given)
    logits = drafter.model.confidence_head(*given)
    for i in range(REQUESTS * DRAFTS):
        wanted = torch.sigmoid(logits[i] / (2.0, 0.5, 4.0)[i % DRAFTS])
        torch.testing.assert_close(found[i], wanted)
    assert found.shape == logits.shape
    # vLLM's loader goes by parameters, and a checkpoint has no temperatures.
    assert "draft_temperatures" not in drafter.state_dict()
    assert dict(drafter.named_parameters()).keys() == {"model.confidence_head.row"}


def test_each_draft_has_its_shift(tmp_path: Path) -> None:
    drafter, given = Drafter(), rows()
    shifts = [0.5, -1.0, 2.0, 9.0]
    drafter.calibrate(write(tmp_path, [2.0, 0.5, 4.0, 9.0], shifts), DRAFTS)
    found = drafter.compute_confidence(*given)
    logits = drafter.model.confidence_head(*given)
    for i in range(REQUESTS * DRAFTS):
        at = i % DRAFTS
        wanted = torch.sigmoid(logits[i] / (2.0, 0.5, 4.0)[at] + shifts[at])
        torch.testing.assert_close(found[i], wanted)
    assert not drafter.state_dict().keys() & {"draft_temperatures", "draft_shifts"}


def test_without_a_file_it_is_vllms(tmp_path: Path) -> None:
    drafter, given = Drafter(), rows()
    drafter.calibrate(str(tmp_path), DRAFTS)
    assert torch.equal(
        drafter.compute_confidence(*given), Stock.compute_confidence(drafter, *given)
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", f"{FILE_NAME}: .*; write it anew with `dspark-k3 calibrate`"),
        ("[]", "must hold one JSON object"),
        ('{"kind": "other"}', "kind is 'other'"),
        (
            '{"kind": "sequential_temperature_scaling", "temperatures": [1.0, 2.0]}',
            "has 2 temperatures for num_speculative_tokens=3",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ValueError, match=words):
        Drafter().calibrate(str(tmp_path), DRAFTS)


def test_ours_goes_before_vllms() -> None:
    """In both drafters."""
    pytest.importorskip("vllm")
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
    from vllm.models.kimi_k3.nvidia.dspark_mla import K3DSparkForCausalLM

    from dspark_k3.draft.k3 import K3DSpark
    from dspark_k3.draft.qwen3 import CheckedQwen3DSpark

    for ours, theirs in (
        (CheckedQwen3DSpark, Qwen3DSparkForCausalLM),
        (K3DSpark, K3DSparkForCausalLM),
    ):
        order = ours.__mro__
        assert order.index(CalibratedConfidence) < order.index(theirs)
        assert ours.compute_confidence is not theirs.compute_confidence
