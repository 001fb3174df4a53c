# SPDX-License-Identifier: Apache-2.0
"""What the settings add to a drafter: nothing that is not asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dspark_k3 import seams, settings
from dspark_k3.draft import additions, sequential
from tests.dspark_k3.test_calibrated import DRAFTS, Backbone, Stock, write
from verify_kernels.markov import MarkovSpace

GPU = torch.device("cuda", 0)


class Drafter(additions.Additions, Stock):
    """As our classes are made."""


def config(directory: Path, asked: dict[str, Any], device: torch.device = GPU) -> Any:
    drafter = SimpleNamespace(model=str(directory))
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            draft_model_config=drafter, num_speculative_tokens=DRAFTS
        ),
        device_config=SimpleNamespace(device=device),
        additional_config={"dspark_k3": asked},
    )


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that has the hook, and a device."""
    monkeypatch.setattr(seams, "has", lambda name: "sample_sequential" in name)
    monkeypatch.setattr(MarkovSpace, "allocate", lambda device: None)


def made(directory: Path, device: torch.device = GPU, **asked: Any) -> Drafter:
    drafter, given = Drafter(), config(directory, asked, device)
    drafter.add(given, settings.read(given.additional_config))
    return drafter


def test_nothing_is_added_unasked(tmp_path: Path) -> None:
    drafter = made(tmp_path)
    assert not hasattr(drafter, "sample_sequential")
    assert not dict(drafter.named_buffers())


def test_a_calibration_is_taken_unless_it_is_turned_off(tmp_path: Path) -> None:
    write(tmp_path, [2.0, 0.5, 4.0])
    assert "draft_temperatures" in dict(made(tmp_path).named_buffers())
    assert not dict(made(tmp_path, calibration=False).named_buffers())


def test_a_sampler_of_ours_is_no_part_of_the_model(tmp_path: Path) -> None:
    """vLLM's loader walks through modules and parameters."""
    drafter = made(tmp_path, draft_sampler="ours")
    assert isinstance(drafter.sample_sequential, sequential.SequentialHead)
    assert [name for name, _ in drafter.named_modules()] == [
        "",
        "model",
        "model.confidence_head",
    ]


def test_a_vllm_that_does_not_ask_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "has", lambda name: False)
    with pytest.raises(ValueError, match="this vLLM does not ask drafters to sample"):
        made(tmp_path, draft_sampler="ours")


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draft_sampler is 'ours' on cpu"):
        made(tmp_path, torch.device("cpu"), draft_sampler="ours")


def test_k3s_drafter_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from vllm.models.kimi_k3.nvidia.dspark_mla import K3DSparkForCausalLM

    from dspark_k3.draft import attention
    from dspark_k3.draft.k3 import K3DSpark
    from tests.dspark_k3.test_block_attention import layer, stock

    layers = [SimpleNamespace(self_attn=layer()) for _ in range(2)]

    def build(self: Any, *, vllm_config: Any, prefix: str) -> None:
        nn.Module.__init__(self)
        self.model = Backbone()
        self.model.layers = layers
        self.built = prefix

    monkeypatch.setattr(K3DSparkForCausalLM, "__init__", build)
    monkeypatch.setattr(attention, "_shared", lambda heads, device: (None, None))
    K3DSpark(vllm_config=config(tmp_path, {}))
    assert all(each.self_attn.impl.forward_mqa is stock for each in layers)
    write(tmp_path, [2.0, 0.5, 4.0])
    given = config(tmp_path, {"draft_sampler": "ours", "draft_attention": "ours"})
    drafter = K3DSpark(vllm_config=given, prefix="draft")
    assert drafter.built == "draft"
    assert "draft_temperatures" in dict(drafter.named_buffers())
    assert isinstance(drafter.sample_sequential, sequential.SequentialHead)
    # What a step asks the model is what vLLM's class has.
    assert drafter.draft_id_to_target_id is None
    for each in layers:
        found = each.self_attn.impl.forward_mqa
        assert isinstance(found, attention.BlockAttention) and found._stock is stock
