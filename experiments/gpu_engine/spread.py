# SPDX-License-Identifier: Apache-2.0
"""Weights for models without a checkpoint whose routing looks like routing.

vLLM's dummy weights are uniform in +-0.001, norms included, and equal in every layer.
What reaches a router is then tiny, its correction bias decides alone, and every row of
every layer goes to the same experts: a verify step of eight rows reads 16 experts
instead of about 120. So after them

* norm weights are 1, which gives projections inputs of unit size;
* embedding rows are N(0, 1), so that tokens differ;
* router weights are N(0, 1 / hidden), another draw in each layer, and the correction
  bias is 0: logits are about N(0, 1) and the 16 largest of 896 depend on the token;
* the LM head is N(0, 1 / hidden), so that sampling at temperature 1 spreads tokens over
  the vocabulary, drafts too.

Everything else stays vLLM's. Rows then choose experts nearly independently, which is
the uniform estimate of ``experiments.byte_model.distinct_experts`` and an upper bound
for real text, whose rows share experts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["one", "unit", "fan_in", "zero"]


def rule_of(name: str) -> Rule | None:
    """What fills the parameter ``name``; None leaves it as it is."""
    parts = name.split(".")
    if parts[-1] == "e_score_correction_bias":
        return "zero"
    if parts[-1] != "weight" or len(parts) < 2:
        return None
    module = parts[-2]
    if module.endswith("norm"):
        return "one"
    if module == "embed_tokens":
        return "unit"
    if module in ("gate", "lm_head"):
        return "fan_in"
    return None


@torch.no_grad()
def fill(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Fill the parameters in place by :func:`rule_of`.

    A draw is seeded by the parameter's name, so it does not depend on the order, on the
    process or on who runs the model. Returns how many parameters each rule filled.
    """
    filled = dict.fromkeys(("one", "unit", "fan_in", "zero"), 0)
    for name, tensor in parameters:
        rule = rule_of(name)
        if rule is None:
            continue
        filled[rule] += 1
        if rule == "one":
            tensor.fill_(1.0)
            continue
        if rule == "zero":
            tensor.zero_()
            continue
        generator = torch.Generator(tensor.device).manual_seed(
            zlib.crc32(name.encode())
        )
        std = 1.0 if rule == "unit" else tensor.shape[-1] ** -0.5
        tensor.normal_(0.0, std, generator=generator)
    return filled


def distinct(ids: Tensor) -> int:
    """How many experts the ids [rows, top_k] name; negative ones are padding."""
    return int(torch.unique(ids[ids >= 0]).numel())


def register_loader() -> None:
    """Make vLLM's load format "dummy" fill weights as this module says.

    Only for the process that calls it.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class SpreadLoader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
            super().load_weights(model, model_config)
            fill(model.named_parameters())

    register_model_loader("dummy")(SpreadLoader)
