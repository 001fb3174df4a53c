# SPDX-License-Identifier: Apache-2.0
"""Which experts a row takes, by our launch in place of vLLM's router.

vLLM's own kernel for K3's one group of 896 experts takes 10 µs at one row and 16 at
eight beside other work (a TP 16 share, H200, 2026-11-30).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark_k3.target.scope import STOCK_ROUTE
from verify_kernels.batch import MAX_ROWS
from verify_kernels.moe import ExpertPlan, moe_route
from verify_kernels.moe.host import FORMS


class Route:
    """Our routing with the numbers of a router of vLLM's.

    Rows that pad a graph choose experts as they do in vLLM's router for K3, whose
    experts kernels expect it.

    Args:
        router: vLLM's, of a K3 layer.
        index_dtype: of the ids that its experts take, None for any.
        pdl: launch as a programmatic dependent.

    Raises:
        ValueError: the router computes something else.
    """

    def __init__(
        self, router: Any, index_dtype: torch.dtype | None, *, pdl: bool
    ) -> None:
        found = differences(router, index_dtype)
        if found:
            raise ValueError(
                f"our routing kernel does not compute what {type(router).__name__} "
                f"does: {', '.join(found)}; {STOCK_ROUTE}"
            )
        self._router = router
        self._bias = router.e_score_correction_bias.data
        self._plan = ExpertPlan.allocate(
            router.global_num_experts, router.top_k, self._bias.device
        )
        shape = (MAX_ROWS, router.top_k)
        self._weights = self._bias.new_empty(shape)
        self._ids = self._bias.new_empty(shape, dtype=torch.int32)
        self._pdl = pdl

    @property
    def plan(self) -> ExpertPlan:
        """Which experts the rows of the last call need; overwritten by the next."""
        return self._plan

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights fp32 and ids int32 [M, K] of logits fp32 [M, E], until the next
        call."""
        rows = logits.shape[0]
        weights, ids = moe_route(
            logits,
            self._bias,
            self._router.top_k,
            self._plan,
            self._weights[:rows],
            self._ids[:rows],
            routed_scale=self._router.routed_scaling_factor,
            pdl=self._pdl,
        )
        # Whoever listens to vLLM's router hears of ours.
        if self._router.capture_fn is not None:
            self._router.capture_fn(ids)
        return weights, ids


def of_runner(runner: Any) -> list[str]:
    """What keeps our kernel from routing for a MoE runner of vLLM's; empty if nothing.

    What is read comes from the configuration: every rank finds the same.
    """
    method = runner.routed_experts.quant_method
    if method.is_monolithic:
        return [f"{type(method).__name__} chooses the experts itself"]
    return differences(runner.router, method.topk_indices_dtype)


def differences(router: Any, index_dtype: torch.dtype | None) -> list[str]:
    """What a router of vLLM's does that our kernel does not; empty if nothing."""

    def of(name: str, default: Any = None) -> Any:
        return getattr(router, name, default)

    bias = of("e_score_correction_bias")
    model = of("global_num_experts"), of("top_k")
    fits = isinstance(bias, Tensor) and bias.dtype == torch.float32
    checks = (
        (model in FORMS, f"it takes {model[1]} of {model[0]} experts"),
        (of("scoring_func") == "sigmoid", f"it scores by {of('scoring_func')}"),
        (of("renormalize") is True, "its weights are not renormalised"),
        (fits, "it has no fp32 bias"),
        (of("num_expert_group", 1) in (None, 1), "its experts are in groups"),
        (of("eplb_state") is None, "it balances experts by load"),
        (not of("num_fused_shared_experts", 0), "it adds shared experts"),
        (of("_hash_indices_table") is None, "it takes experts from a table"),
        (of("bias_vl") is None, "it has a bias for images"),
        (hasattr(router, "capture_fn"), "it reports its choice to nobody"),
        (index_dtype in (None, torch.int32), f"its ids are {index_dtype}"),
    )
    return [words for right, words in checks if not right]
