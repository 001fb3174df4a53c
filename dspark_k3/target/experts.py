# SPDX-License-Identifier: Apache-2.0
"""The chosen experts by our launches, from the weights of vLLM's Humming layer.

Prompts stay with Humming, so its repacked weights are the only copy.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from dspark_k3.target.scope import STOCK_EXPERTS
from verify_kernels.moe import (
    ExpertBank,
    ExpertPlan,
    ExpertWorkspace,
    moe_experts,
)
from verify_kernels.moe.experts import FORMS
from verify_kernels.moe.layout import whole_blocks

#: What a layer's half may have beside its weights.
EXTRA = ("bias", "weight_scale_2", "zero_point")
#: Of Humming's configuration, weights, activations and scales.
FORMATS = {"b_dtype": "float4e2m1", "a_dtype": "bfloat16", "bs_dtype": "float8e8m0"}


class Experts:
    """A rank's routed experts.

    Args:
        layer: vLLM's ``RoutedExperts``, its weights loaded and repacked.
        norm: vLLM's RMSNorm of the sum, where the rank's sum is the whole one; or None.
        pdl: launch as programmatic dependents.

    Raises:
        ValueError: the layer computes something else, or holds its weights in another
            way.
    """

    def __init__(self, layer: Any, norm: Any = None, *, pdl: bool) -> None:
        bank = _bank(layer)
        if not isinstance(bank, ExpertBank):
            raise ValueError(
                f"our experts' kernels do not stand for {type(layer).__name__}: "
                f"{', '.join(bank)}; {STOCK_EXPERTS}"
            )
        self._bank = bank
        config = layer.moe_config
        self._keywords: dict[str, Any] = {
            "beta": config.activation_situ_beta,
            "linear_beta": config.activation_situ_linear_beta,
            "pdl": pdl,
        }
        if norm is not None:
            self._keywords |= {
                "norm_weight": norm.weight.data,
                "norm_eps": norm.variance_epsilon,
            }
        self._space = _workspace(
            bank.latent, bank.inner, layer.top_k, layer.w13_weight.device
        )

    def __call__(self, latent: Tensor, shares: Tensor, plan: ExpertPlan) -> Tensor:
        """The weighted sum bf16 [M, L] of latent rows bf16 [M, L], given our routing's
        shares fp32 [M, K] and plan; with its norm, if there is one."""
        return moe_experts(
            latent, shares, plan, self._bank, self._space, **self._keywords
        )


def normed_by_us(norm: Any) -> bool:
    """Whether vLLM's norm of the experts' sum, if there is one, is what we compute."""
    return norm is not None and norm.weight.dtype == torch.bfloat16


@functools.cache
def _workspace(
    latent: int, inner: int, top_k: int, device: torch.device
) -> ExpertWorkspace:
    """Of all layers: they run one after the other."""
    return ExpertWorkspace.allocate(latent, inner, top_k, device)


def _rows(layer: Any) -> int:
    """Rows of gate and of up that are not filled up: at TP 16 vLLM gives a rank 192 of
    K3's and 64 of zeros."""
    rows = layer.moe_config.intermediate_size_per_partition_unpadded
    held: int = layer.intermediate_size_per_partition
    return held if rows is None else min(whole_blocks(rows), held)


def differences(layer: Any) -> list[str]:
    """What vLLM's layer does that our kernels do not, and what keeps them from its
    weights; empty if nothing.

    Scales, and what rows are filled up with, are read from this rank's share: the one
    thing here that ranks may find different (`dspark_k3.target.left`).
    """
    bank = _bank(layer)
    return [] if isinstance(bank, ExpertBank) else bank


def _bank(layer: Any) -> ExpertBank | list[str]:
    """The layer's weights where they are, or `differences`: all of them are read for
    it."""
    if found := _configured(layer):
        return found
    try:
        return ExpertBank.of_layer(
            layer.w13_weight.data,
            layer.w13_weight_scale.data,
            layer.w2_weight.data,
            layer.w2_weight_scale.data,
            layer.hidden_size,
            _rows(layer),
            layer.intermediate_size_per_partition,
        )
    except ValueError as error:
        return [str(error)]


def _configured(layer: Any) -> list[str]:
    """What can be told from how the layer is configured."""
    kernels = getattr(layer.quant_method, "experts_cls", None)
    name = getattr(kernels, "__name__", str(kernels))
    activation = getattr(layer.activation, "value", layer.activation)
    betas = (
        layer.moe_config.activation_situ_beta,
        layer.moe_config.activation_situ_linear_beta,
    )
    shape = (
        layer.hidden_size,
        _rows(layer),
        layer.global_num_experts,
        layer.top_k,
    )
    held = layer.intermediate_size_per_partition
    extra = [
        key
        for half, part in itertools.product(("w13", "w2"), EXTRA)
        if getattr(layer, key := f"{half}_{part}", None) is not None
    ]
    checks = (
        ("Humming" in name, f"its weights are those of {name}"),
        (
            layer.local_num_experts == layer.global_num_experts,
            f"it has {layer.local_num_experts} of {layer.global_num_experts} experts",
        ),
        (activation == "situ", f"its activation is {activation}"),
        (all(b is not None and b > 0 for b in betas), "its activation has no bounds"),
        (not layer.apply_router_weight_on_input, "it weighs its input"),
        (not extra, f"it has {', '.join(extra)}"),
        (
            (shape, held) in FORMS,
            "L x I of E experts, K of them a row, are {} x {} of {}, {}".format(*shape)
            + f", with {held} rows of gate",
        ),
    )
    return [words for right, words in checks if not right] or _formats(layer)


def _formats(layer: Any) -> list[str]:
    """Of a Humming layer's halves what is not MXFP4 for bf16 as it is."""
    found = []
    for half, config in layer.humming_configs.items():
        formats = tuple(str(getattr(config, name)) for name in FORMATS)
        if formats != tuple(FORMATS.values()):
            found.append(f"{half} is {' '.join(formats)}")
        if config.has_zero_point:
            found.append(f"{half} has a zero point")
        if (size := layer.weight_schemas[half].hadamard_block_size) > 1:
            found.append(f"{half} is rotated in blocks of {size}")
    return found
