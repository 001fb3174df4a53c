# SPDX-License-Identifier: Apache-2.0
"""Our experts in place of vLLM's, on the CPU with what the kernels would compute."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.verify_kernels.test_moe_experts import (
    Weights,
    by_torch,
    experts_of,
    filled,
)
from verify_kernels.common.checks import check_all
from verify_kernels.moe import ExpertBank, ExpertWorkspace
from verify_kernels.moe.reference import expert_plan
from verify_kernels.moe.reference import route as reference_route

pytest.importorskip("vllm.models.kimi_k3")

from dspark_k3.target import experts, route, sublayers
from tests.dspark_k3.test_target_executor import (
    HIDDEN,
    kernels,
    product,
    weight,
)
from tests.dspark_k3.test_target_moe import latent_moe, routed_and_shared
from tests.dspark_k3.test_target_route import router

#: Every test here runs with it.
kernels = kernels

LATENT, INNER, EXPERTS, TOP_K = SHAPE = (128, 64, 16, 4)


class HummingExperts:
    """Stands for vLLM's class of that kind."""


def moe_config(**changes: Any) -> SimpleNamespace:
    values = {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "intermediate_size_per_partition_unpadded": INNER,
    }
    return SimpleNamespace(**values | changes)


def form(**changes: Any) -> SimpleNamespace:
    """Humming's configuration of a half."""
    values = {
        "b_dtype": "float4e2m1",
        "a_dtype": "bfloat16",
        "bs_dtype": "float8e8m0",
        "has_zero_point": False,
    }
    return SimpleNamespace(**values | changes)


def layer(
    weights: Weights, bank: ExpertBank | None = None, **changes: Any
) -> SimpleNamespace:
    """vLLM's layer of a small K3 after Humming has repacked its weights."""
    bank = bank or weights.bank()
    attributes = {
        "w13_weight": nn.Parameter(bank.up.words.flatten(2), requires_grad=False),
        "w13_weight_scale": nn.Parameter(bank.up.scales, requires_grad=False),
        "w2_weight": nn.Parameter(bank.down.words.flatten(2), requires_grad=False),
        "w2_weight_scale": nn.Parameter(bank.down.scales, requires_grad=False),
        "hidden_size": LATENT,
        "intermediate_size_per_partition": INNER,
        "global_num_experts": EXPERTS,
        "local_num_experts": EXPERTS,
        "top_k": TOP_K,
        "activation": SimpleNamespace(value="situ"),
        "apply_router_weight_on_input": False,
        "moe_config": moe_config(),
        "humming_configs": {"w13": form(), "w2": form()},
        "weight_schemas": {
            half: SimpleNamespace(hadamard_block_size=0) for half in ("w13", "w2")
        },
        "quant_method": SimpleNamespace(
            is_monolithic=False, topk_indices_dtype=None, experts_cls=HummingExperts
        ),
    }
    return SimpleNamespace(**attributes | changes)


class Norm:
    """Stands for vLLM's RMSNorm."""

    variance_epsilon = 1e-6

    def __init__(self, dtype: torch.dtype) -> None:
        ones = torch.ones(LATENT, dtype=dtype)
        self.weight = nn.Parameter(ones, requires_grad=False)

    def __call__(self, rows: Tensor) -> Tensor:
        return 2 * rows


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (1, torch.float32)]
)
def test_moe_runs_the_experts_that_our_routing_chose(
    ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And norms their sum with them where it is the whole one and the norm ours."""
    norm = Norm(dtype)
    ours_norms = ranks == 1 and dtype == torch.bfloat16
    weights = experts_of(SHAPE, 3)
    given = layer(weights)
    chosen: list[Tensor] = []

    def moe_route(
        logits: Tensor,
        bias: Tensor,
        top_k: int,
        plan: Any,
        shares: Tensor,
        ids: Tensor,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        found, own = reference_route(logits, bias, top_k, compute=torch.float32)
        made = expert_plan(found, EXPERTS, 64)
        for tensor, value in zip(vars(plan).values(), made, strict=True):
            tensor.copy_(value)
        chosen.append(found)
        return shares.copy_(own), ids.copy_(found)

    def moe_experts(
        latent: Tensor, shares: Tensor, plan: Any, bank: ExpertBank,
        space: ExpertWorkspace, *, norm_weight: Tensor | None = None,
        norm_eps: float = 0.0, **keywords: Any,
    ) -> Tensor:  # fmt: skip
        assert keywords == {"pdl": True, "beta": 4.0, "linear_beta": 25.0}
        assert (norm_weight is None) != ours_norms
        check_all(space.arguments(bank, TOP_K), latent.device, "latent")
        # Nothing was copied.
        assert bank.up.words.data_ptr() == given.w13_weight.data_ptr()
        assert bank.down.scales.data_ptr() == given.w2_weight_scale.data_ptr()
        made = expert_plan(chosen[-1], EXPERTS, 64)
        for tensor, value in zip(vars(plan).values(), made, strict=True):
            assert torch.equal(tensor, value)
        out = by_torch(latent, chosen[-1], shares, weights, torch.float32).bfloat16()
        if norm_weight is None:
            return out
        assert norm_weight.data_ptr() == norm.weight.data_ptr() and norm_eps == 1e-6
        return 2 * out

    monkeypatch.setattr(route, "moe_route", moe_route)
    monkeypatch.setattr(experts, "moe_experts", moe_experts)
    world = "get_tensor_model_parallel_world_size"
    monkeypatch.setattr(sublayers, world, lambda: ranks)
    # The sum over the ranks is something else than a rank's part.
    monkeypatch.setattr(
        sublayers, "tensor_model_parallel_all_reduce", lambda rows: 3 * rows
    )
    module, hidden = latent_moe(), torch.randn(3, HIDDEN).bfloat16()
    module.gate = weight(EXPERTS, HIDDEN)
    module.routed_expert_down_proj = weight(LATENT, HIDDEN)
    module.routed_expert_norm = norm
    module.routed_expert_up_proj = weight(HIDDEN, LATENT)
    module.experts.router = router()
    module.experts.routed_experts = given
    ours = sublayers.Moe(module, pdl=True, route=True, experts=True)
    found = ours(hidden, torch.arange(3))
    logits = product(hidden, module.gate.weight)
    bias = module.experts.router.e_score_correction_bias.data
    ids, shares = reference_route(logits, bias, TOP_K, compute=torch.float32)
    latent = product(hidden, module.routed_expert_down_proj.weight).bfloat16()
    routed = by_torch(latent, ids, shares, weights, torch.float32).bfloat16()
    _, shared = routed_and_shared(module, hidden)
    summed = 1 if ranks == 1 else 3
    normed = 2 * (summed * routed)
    up = product(normed, module.routed_expert_up_proj.weight).bfloat16()
    assert torch.equal(sublayers.whole(found), up + summed * shared)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"quant_method": SimpleNamespace(experts_cls=SimpleNamespace)},
            "its weights are those of SimpleNamespace",
        ),
        ({"local_num_experts": 8}, "it has 8 of 16 experts"),
        ({"activation": SimpleNamespace(value="silu")}, "its activation is silu"),
        ({"moe_config": moe_config(activation_situ_beta=None)}, "has no bounds"),
        ({"moe_config": moe_config(activation_situ_linear_beta=0)}, "has no bounds"),
        (
            {"humming_configs": {"w2": form(b_dtype="uint4")}},
            "w2 is uint4 bfloat16 float8e8m0",
        ),
        ({"humming_configs": {"w2": form(has_zero_point=True)}}, "w2 has a zero point"),
        (
            {
                "weight_schemas": {
                    half: SimpleNamespace(hadamard_block_size=32)
                    for half in ("w13", "w2")
                }
            },
            "w13 is rotated in blocks of 32, w2 is rotated",
        ),
        ({"apply_router_weight_on_input": True}, "weighs its input"),
        ({"w13_bias": torch.zeros(1)}, "it has w13_bias"),
        ({"w2_zero_point": torch.zeros(1)}, "it has w2_zero_point"),
        ({"top_k": 3}, "are 128 x 64 of 16, 3"),
        (
            {"intermediate_size_per_partition": 128},
            "are 128 x 64 of 16, 4, with 128 rows of gate",
        ),
        (
            {"w13_weight": torch.zeros(16, 4, 1024, dtype=torch.int32)},
            r"words are torch.int32 \(16, 4, 8, 128\) and scales",
        ),
        (
            {"w2_weight_scale": torch.full((16, 4, 256), 129, dtype=torch.uint8)},
            "a scale byte is 129",
        ),
    ],
)
def test_another_layer_is_refused(change: dict[str, Any], words: str) -> None:
    weights = experts_of(SHAPE, 3)
    assert experts.differences(layer(weights)) == []
    found = experts.differences(layer(weights, **change))
    assert re.search(words, ", ".join(found))
    with pytest.raises(ValueError, match=rf'{words}.*; set "ops": {{"moe_experts": "s'):
        experts.Experts(layer(weights, **change), pdl=True)


def test_the_share_of_tiny_k3_at_tp_2_has_a_kernel() -> None:
    """64 rows of gate, which vLLM fills up to 256."""
    weights = experts_of(SHAPE, 3)
    held = {"intermediate_size_per_partition": 256}
    given = layer(weights, filled(weights, 256), **held)
    assert experts.differences(given) == []
    bank = experts.Experts(given, pdl=True)._bank
    assert (bank.inner, bank.held) == (INNER, 256) and bank.takes(SHAPE)
    # The rows past those are not zeros on this rank.
    (found,) = experts.differences(layer(weights, filled(weights, 256, 1), **held))
    assert "of 256 rows of gate those from 64 on are not all 0" in found


def test_vllms_layer_has_what_is_read() -> None:
    from vllm.model_executor.layers.fused_moe import config, routed_experts

    source = inspect.getsource(routed_experts.RoutedExperts)
    for name in (
        "hidden_size",
        "intermediate_size_per_partition",
        "global_num_experts",
        "local_num_experts",
        "top_k",
        "activation",
        "apply_router_weight_on_input",
        "moe_config",
        "quant_method",
    ):
        assert f"self.{name} = " in source or f"self.{name}, " in source, name
    fields = config.FusedMoEConfig.__dataclass_fields__
    assert set(vars(moe_config())) <= set(fields)
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    assert MoEActivation.SITU.value == "situ"
