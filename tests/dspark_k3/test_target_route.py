# SPDX-License-Identifier: Apache-2.0
"""Our routing in place of vLLM's router, on the CPU with the kernel's reference."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verify_kernels.moe.reference import route as reference_route

pytest.importorskip("vllm.models.kimi_k3")

from dspark_k3.target import route, sublayers
from tests.dspark_k3.test_target_executor import (
    HIDDEN,
    kernels,
    product,
    weight,
)
from tests.dspark_k3.test_target_moe import latent_moe, routed_and_shared

#: Every test here runs with it.
kernels = kernels


def router(**changes: Any) -> SimpleNamespace:
    """vLLM's for a small K3, with attributes changed."""
    attributes = {
        "global_num_experts": 16,
        "top_k": 4,
        "scoring_func": "sigmoid",
        "renormalize": True,
        "routed_scaling_factor": 1.0,
        "e_score_correction_bias": nn.Parameter(torch.arange(16) / 64),
        "num_expert_group": 1,
        "eplb_state": None,
        "num_fused_shared_experts": 0,
        "capture_fn": None,
    }
    return SimpleNamespace(**attributes | changes)


def test_moe_takes_the_experts_that_our_routing_chooses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And whoever listens to vLLM's router hears of them."""
    heard: list[Tensor] = []

    def moe_route(
        logits: Tensor,
        bias: Tensor,
        top_k: int,
        plan: Any,
        weights: Tensor,
        ids: Tensor,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor]:
        assert keywords == {"routed_scale": 1.0, "pdl": True}
        assert plan.experts.shape == (16,)
        chosen, shares = reference_route(logits, bias, top_k, compute=torch.float32)
        return weights.copy_(shares), ids.copy_(chosen)

    monkeypatch.setattr(route, "moe_route", moe_route)
    module, hidden = latent_moe(), torch.randn(3, HIDDEN).bfloat16()
    module.gate = weight(16, HIDDEN)
    module.experts.router = router(capture_fn=heard.append)
    ours = sublayers.Moe(module, pdl=True, route=True)(hidden, torch.arange(3))
    logits = product(hidden, module.gate.weight)
    bias = module.experts.router.e_score_correction_bias.data
    ids, top = reference_route(logits, bias, 4, compute=torch.float32)
    latent = product(hidden, module.routed_expert_down_proj.weight).bfloat16()
    routed = (latent.float() * (top * ids).sum(-1, keepdim=True)).bfloat16()
    _, shared = routed_and_shared(module, hidden)
    up = product(2 * routed, module.routed_expert_up_proj.weight).bfloat16()
    assert torch.equal(sublayers.whole(ours), up + shared)
    assert torch.equal(heard[0].long(), ids)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 8}, "8 of 16 experts"),
        ({"scoring_func": "softmax"}, "scores by softmax"),
        ({"renormalize": False}, "not renormalised"),
        ({"e_score_correction_bias": None}, "no fp32 bias"),
        ({"num_expert_group": 4}, "in groups"),
        ({"eplb_state": object()}, "balances experts by load"),
        ({"num_fused_shared_experts": 1}, "adds shared experts"),
        ({"_hash_indices_table": torch.zeros(1)}, "from a table"),
        ({"bias_vl": torch.zeros(16)}, "a bias for images"),
    ],
)
def test_another_router_is_refused(change: dict[str, Any], words: str) -> None:
    assert route.differences(router(), None) == []
    assert route.differences(router(), torch.int32) == []
    with pytest.raises(ValueError, match=rf'{words}; set "ops": {{"moe_route": "sto'):
        route.Route(router(**change), None, pdl=True)
    with pytest.raises(ValueError, match=r"its ids are torch\.int64"):
        route.Route(router(), torch.int64, pdl=True)


def test_experts_that_choose_themselves_leave_nothing_to_route() -> None:
    """As FlashInfer's do, which take the logits."""
    method = SimpleNamespace(is_monolithic=False, topk_indices_dtype=torch.int64)
    runner = SimpleNamespace(
        router=router(), routed_experts=SimpleNamespace(quant_method=method)
    )
    assert route.of_runner(runner) == ["its ids are torch.int64"]
    method.topk_indices_dtype = None
    assert route.of_runner(runner) == []
    method.is_monolithic = True
    assert route.of_runner(runner) == ["SimpleNamespace chooses the experts itself"]


def test_vllms_router_for_k3_is_one_that_ours_stands_for() -> None:
    """The attributes that are read are those of vLLM's classes."""
    from vllm.model_executor.layers.fused_moe.router import (
        fused_topk_bias_router,
        grouped_topk_router,
    )

    bias = nn.Parameter(torch.zeros(896))
    grouped = grouped_topk_router.GroupedTopKRouter(
        16, 896, 1, 1, scoring_func="sigmoid", e_score_correction_bias=bias
    )
    flat = fused_topk_bias_router.FusedTopKBiasRouter(16, 896, bias)
    for found in (grouped, flat):
        assert route.differences(found, torch.int32) == []
        found.set_capture_fn(print)
        assert found.capture_fn is print
