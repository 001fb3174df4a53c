# SPDX-License-Identifier: Apache-2.0
"""Peers of the bench: what is asked of vLLM, and what is said when it cannot answer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.bench import peers, shapes
from experiments.bench.candidate import MODES, Candidate, Key

SHAPE = shapes.Projection("in_proj", 8, 40, 64)


def test_a_module_that_is_not_there_gives_the_reason() -> None:
    found = peers.load("verify_kernels.nothing_here")
    assert found == (
        "ModuleNotFoundError: No module named 'verify_kernels.nothing_here'"
    )


def test_every_vllm_peer_is_reported_when_vllm_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "load", lambda name: "no vllm here")
    offer = peers.gemm(SHAPE, 1)
    assert [c.key for c in offer.candidates] == [("cublas", "plain")]
    assert offer.missing == dict.fromkeys(("vllm", "vllm_skinny"), "no vllm here")
    router = shapes.Projection("router", 8, 112, 7168, fp32_out=True)
    assert peers.gemm(router, 1).missing == {"vllm_ll_bf16": "no vllm here"}
    assert peers.attn_res(4).missing == {"vllm": "no vllm here"}


class _Skinny:
    """Stands for vLLM's ShapeDynamicSkinnyGemm."""

    @staticmethod
    def _config(m: int, n: int, k: int) -> SimpleNamespace:
        return SimpleNamespace(outputs_per_block=4, block_size=8, vector_width=8)

    @staticmethod
    def _use_pdl() -> bool:
        return True

    def __call__(self, x: Tensor, w: Tensor, config: object = "heuristic") -> Any:
        return self._use_pdl(), config


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    plans = {(40, 64): {1: ("cute", "table"), 2: ("dsv3_fused_a", None)}}
    module = SimpleNamespace(
        _low_latency_table=lambda: plans,
        _build_plan=lambda spec: spec,
        ShapeDynamicSkinnyGemm=_Skinny,
        ops=SimpleNamespace(calls=[]),
    )
    module.ops.dsv3_fused_a_gemm = lambda out, x, wt, enable_pdl: (
        module.ops.calls.append(enable_pdl)
    )
    monkeypatch.setattr(peers, "load", lambda name: module)
    monkeypatch.setattr(torch.ops._C, "dsv3_fused_a_gemm", print, raising=False)
    peers._skinny.cache_clear()
    yield module
    peers._skinny.cache_clear()


def test_vllm_is_asked_for_its_own_choice(fake_vllm: SimpleNamespace) -> None:
    x, w, out = torch.zeros(8, 64), torch.zeros(40, 64), torch.zeros(8, 40)

    def by_key(rows: int, shape: shapes.Projection = SHAPE) -> dict[Key, Candidate]:
        return {c.key: c for c in peers.gemm(shape, rows).candidates}

    table = by_key(1)
    assert set(table) == {("cublas", "plain"), ("vllm", "plain"), ("vllm", "pdl")}
    assert table["vllm", "plain"].run((x[:1], w), out[:1]) == (False, "table")
    assert table["vllm", "pdl"].run((x[:1], w), out[:1]) == (True, "table")

    fused = by_key(2)
    assert fused["vllm", "pdl"].note == "dsv3_fused_a"
    for mode in MODES:
        fused["vllm", mode].run((x[:2], w), out[:2])
        assert fused["vllm_skinny", mode].run((x[:2], w), out[:2]) == (
            mode == "pdl",
            "heuristic",
        )
    assert fake_vllm.ops.calls == [False, True]

    for shape, rows in ((SHAPE, 4), (shapes.Projection("q_b", 1, 44, 64), 1)):
        assert set(by_key(rows, shape)) == {
            ("cublas", "plain"),
            ("vllm_skinny", "plain"),
            ("vllm_skinny", "pdl"),
        }
        missing = peers.gemm(shape, rows).missing
        assert missing == {
            "vllm": f"its own choice for this shape at M={rows} is cuBLAS"
        }
    assert "vllm_skinny" in peers.gemm(SHAPE, 8).missing
    odd = shapes.Projection("q_b", 1, 42, 64)
    assert "does not divide" in peers.gemm(odd, 1).missing["vllm_skinny"]
