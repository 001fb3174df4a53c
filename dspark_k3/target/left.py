# SPDX-License-Identifier: Apache-2.0
"""Ops that nobody named and that the loaded layers have no kernel of ours for.

They are left to vLLM in all layers of all ranks; what was named is refused. Shapes,
formats and vLLM's choice of kernels are the same on every rank, but what the weights
hold, as a scale that our kernels do not compute, is seen in a rank's own share. So each
rank is told what the others found, once, before any of them binds a kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from dspark_k3.settings import Settings
from dspark_k3.target import agreement, experts, mla, route
from dspark_k3.target.scope import UnsupportedTarget


def _of_mla(layer: Any) -> list[str]:
    is_kda = hasattr(layer.self_attn, "in_proj_qkvgfab")
    return [] if is_kda else mla.differences(layer.self_attn)


def _of_route(layer: Any) -> list[str]:
    return route.of_runner(layer.mlp.experts) if layer.is_moe_layer else []


def _of_experts(layer: Any) -> list[str]:
    if not layer.is_moe_layer:
        return []
    return experts.differences(layer.mlp.experts.routed_experts)


#: What keeps a kernel of ours from a decoder layer of vLLM's, by op; nothing where the
#: layer has no such part.
LOOKS: dict[str, Callable[[Any], list[str]]] = {
    "mla_core": _of_mla,
    "moe_route": _of_route,
    "moe_experts": _of_experts,
}
#: Layers by what was found there, the first one each, by op.
Found = dict[str, dict[str, int]]


def settle(layers: Iterable[Any], settings: Settings) -> Settings:
    """The settings to run by: ops that some layer has no kernel for are left to vLLM.

    Every rank must call it.

    Args:
        layers: vLLM's decoder layers, their weights loaded.
        settings: with what is known from the configuration already left.

    Raises:
        UnsupportedTarget: an op that was named has no kernel; with everything found,
            on every rank.
    """
    if not any(settings.ours(op) for op in LOOKS):
        return settings
    ranks = agreement.of_all_ranks(_look(layers, settings))
    reasons = {}
    for op in LOOKS:
        # The first place where each was found.
        where: dict[str, str] = {}
        for rank, found in enumerate(ranks):
            for what, layer in found[op].items():
                on = f", rank {rank}" if len(ranks) > 1 else ""
                where.setdefault(what, f"{what} (layer {layer}{on})")
        if where:
            reasons[op] = ", ".join(where.values())
    if refused := [op for op in reasons if op in settings.named]:
        raise UnsupportedTarget(
            'dspark-k3: "ops" asks for ops that have no kernel for the loaded layers:'
            + "".join(
                f'\n  {op}: found {reasons[op]}; set "ops": {{"{op}": "stock"}}'
                for op in refused
            )
        )
    return settings.without(reasons)


def notice(settings: Settings) -> str:
    """A line for the log: what is left to vLLM, why, and what makes it an error."""
    named = json.dumps(dict.fromkeys(settings.left, "ours"))
    return (
        "left to vLLM, for we have no kernel for them here: "
        + ", ".join(f"{op} ({why})" for op, why in settings.left.items())
        + f'; "ops": {named} makes that an error'
    )


def _look(layers: Iterable[Any], settings: Settings) -> Found:
    found: Found = {op: {} for op in LOOKS}
    for layer in layers:
        for op, look in LOOKS.items():
            if settings.ours(op):
                for what in look(layer):
                    found[op].setdefault(what, layer.layer_idx)
    return found
