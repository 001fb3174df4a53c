# SPDX-License-Identifier: Apache-2.0
"""The context projection of a K3 drafter, cut over ranks that are processes here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.models.kimi_k3")

from dspark_k3 import settings
from dspark_k3.draft import k3
from tests.dspark_k3 import gloo_ranks
from tests.dspark_k3.context_ranks import OUT


def test_each_rank_holds_its_outputs_and_has_all_of_the_result(tmp_path: Path) -> None:
    found = gloo_ranks.run("tests.dspark_k3.context_ranks", tmp_path / "store")
    assert len(found) == 2
    for cut, refused in found:
        assert cut["held"] == OUT // 2
        assert cut["gap"] < 1e-4
        assert cut["prefix"] == "model.context_proj"
        # What a checkpoint calls it.
        assert cut["names"] == ["context_proj.weight"]
        assert f"2 ranks do not divide the {OUT + 1} outputs" in refused["refused"]


def test_one_rank_keeps_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k3, "get_tensor_model_parallel_world_size", lambda: 1)
    whole = SimpleNamespace(output_size=7)
    model = SimpleNamespace(context_proj=whole)
    k3.shard_context(model)  # type: ignore[arg-type]
    assert model.context_proj is whole


def test_it_is_asked_for_by_name() -> None:
    assert settings.read({}).draft_context == "replicated"
    given = {"dspark_k3": {"draft_context": "sharded"}}
    assert settings.read(given).draft_context == "sharded"
    with pytest.raises(ValueError, match="must be 'replicated' or 'sharded'"):
        settings.read({"dspark_k3": {"draft_context": "cut"}})
