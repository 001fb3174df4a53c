# SPDX-License-Identifier: Apache-2.0
"""The chosen experts by our two launches, from the weights of vLLM's Humming layer.

Prompts stay with Humming, so its repacked weights are the only copy.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from dspark_k3.target.scope import STOCK_EXPERTS
from verify_kernels.batch import MAX_ROWS
from verify_kernels.moe import ExpertPlan, HummingBank, moe_experts


class Experts:
    """A rank's routed experts.

    Args:
        layer: vLLM's ``RoutedExperts``, its weights loaded and repacked.
        pdl: launch as programmatic dependents.

    Raises:
        ValueError: the layer computes something else, or holds its weights in another
            way.
    """

    def __init__(self, layer: Any, *, pdl: bool) -> None:
        found = differences(layer)
        if found:
            raise ValueError(
                f"our experts' kernels do not stand for {type(layer).__name__}: "
                f"{', '.join(found)}; {STOCK_EXPERTS}"
            )
        try:
            self._bank = HummingBank.of_layer(
                layer.w13_weight.data,
                layer.w13_weight_scale.data,
                layer.w2_weight.data,
                layer.w2_weight_scale.data,
                layer.hidden_size,
                layer.intermediate_size_per_partition,
            )
        except ValueError as error:
            raise ValueError(f"{error}; {STOCK_EXPERTS}") from None
        config = layer.moe_config
        self._betas = {
            "beta": config.activation_situ_beta,
            "linear_beta": config.activation_situ_linear_beta,
        }
        self._inner = _workspace(
            layer.w13_weight.device, MAX_ROWS * layer.top_k, self._bank.inner
        )
        self._pdl = pdl

    def __call__(self, latent: Tensor, shares: Tensor, plan: ExpertPlan) -> Tensor:
        """The weighted sum bf16 [M, L] of latent rows bf16 [M, L], given our routing's
        shares fp32 [M, K] and plan."""
        return moe_experts(
            latent, shares, plan, self._bank, self._inner, pdl=self._pdl, **self._betas
        )


@functools.cache
def _workspace(device: torch.device, pairs: int, inner: int) -> Tensor:
    """Of all layers: they run one after the other."""
    return torch.empty(pairs, inner, dtype=torch.bfloat16, device=device)


def differences(layer: Any) -> list[str]:
    """What vLLM's layer does that our kernels do not; empty if nothing."""
    kernels = getattr(layer.quant_method, "experts_cls", None)
    name = getattr(kernels, "__name__", str(kernels))
    activation = getattr(layer.activation, "value", layer.activation)
    betas = (
        layer.moe_config.activation_situ_beta,
        layer.moe_config.activation_situ_linear_beta,
    )
    shape = (
        layer.hidden_size,
        layer.intermediate_size_per_partition,
        layer.global_num_experts,
        layer.top_k,
    )
    extra = [
        name
        for name in ("w13_bias", "w2_bias", "w13_weight_scale_2", "w2_weight_scale_2")
        if getattr(layer, name, None) is not None
    ]
    checks = (
        ("Humming" in name, f"its weights are those of {name}"),
        (
            layer.local_num_experts == layer.global_num_experts,
            f"it has {layer.local_num_experts} of {layer.global_num_experts} experts",
        ),
        (activation == "situ", f"its activation is {activation}"),
        (None not in betas, "its activation has no bounds"),
        (not layer.apply_router_weight_on_input, "it weighs its input"),
        (not extra, f"it has {', '.join(extra)}"),
        (
            shape in HummingBank.SHAPES,
            "L x I of E experts, K of them a row, are {} x {} of {}, {}".format(*shape),
        ),
    )
    return [words for right, words in checks if not right]
