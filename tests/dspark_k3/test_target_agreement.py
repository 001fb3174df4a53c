# SPDX-License-Identifier: Apache-2.0
"""Ranks trim the same drafts although one rank's confidences drift: gloo, no GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from dspark_k3.seams import UnsupportedEngine
from tests.dspark_k3 import gloo_ranks
from tests.dspark_k3.tensor_parallel import watch


def decisions(folder: Path, agree: bool) -> list[Any]:
    """What each rank decided, as `agreeing_ranks` says."""
    return gloo_ranks.run(
        "tests.dspark_k3.agreeing_ranks", folder / f"store-{agree}", str(int(agree))
    )


def test_ranks_decide_the_same_from_rank_0s_confidences(tmp_path: Path) -> None:
    found = watch.compare(decisions(tmp_path, agree=True))
    assert found["agree"], found["first"]
    assert found["trimmed"] > 20 and found["uneven"] > 10


def test_without_it_ranks_diverge(tmp_path: Path) -> None:
    """vLLM's own way: what the broadcast is for."""
    found = watch.compare(decisions(tmp_path, agree=False))
    assert not found["agree"]


class Group:
    """A tensor-parallel group that notes what was sent."""

    def __init__(self, world_size: int, communicator: Any) -> None:
        self.world_size = world_size
        self.device_communicator = communicator
        self.sent: list[tuple[str, list[int]]] = []

    def broadcast(self, rows: torch.Tensor, src: int) -> None:
        self.sent.append(("group", list(rows.shape)))


class Nccl:
    def __init__(self, group: list[Any], disabled: bool) -> None:
        self.disabled = disabled
        self.sent = group

    def broadcast(self, rows: torch.Tensor, src: int) -> None:
        self.sent.append(("nccl", list(rows.shape)))


@pytest.mark.parametrize(
    ("world", "disabled", "way"),
    [(1, False, None), (2, False, "nccl"), (2, True, "group"), (2, None, "group")],
)
def test_the_rows_of_live_requests_go_by_the_communicator_there_is(
    monkeypatch: pytest.MonkeyPatch, world: int, disabled: bool | None, way: str | None
) -> None:
    from dspark_k3.target import agreement

    group = Group(world, None)
    if disabled is not None:
        group.device_communicator = SimpleNamespace(
            pynccl_comm=Nccl(group.sent, disabled)
        )
    monkeypatch.setattr(agreement, "get_tp_group", lambda: group)
    base = agreement.AgreedVerificationManager.__base__
    passed: list[Any] = []
    monkeypatch.setattr(
        base, "record_confidences", lambda self, probs, batch: passed.append(probs)
    )
    manager = object.__new__(agreement.AgreedVerificationManager)
    probs = torch.rand(8, 7)
    manager.record_confidences(probs, SimpleNamespace(num_reqs=3))
    assert group.sent == ([] if way is None else [(way, [3, 7])])
    assert passed[0] is probs


def test_another_manager_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    from dspark_k3.target import agreement

    stock = adaptive_verification.AdaptiveVerificationManager

    class Other(stock):  # type: ignore[misc,valid-type]
        pass

    name = "AdaptiveVerificationManager"
    monkeypatch.setattr(adaptive_verification, name, Other)
    with pytest.raises(UnsupportedEngine, match="agree on draft lengths"):
        agreement.agree_on_lengths()
    assert getattr(adaptive_verification, name) is Other
    monkeypatch.setattr(adaptive_verification, name, stock)
    for _ in range(2):
        agreement.agree_on_lengths()
        now = getattr(adaptive_verification, name)
        assert now is agreement.AgreedVerificationManager
