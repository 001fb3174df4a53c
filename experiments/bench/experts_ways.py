# SPDX-License-Identifier: Apache-2.0
"""Ways of this package to run the routed experts; results are bf16 [M, L]."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from experiments.bench.candidate import OURS, Mode, reason
from experiments.bench.experts_data import Step, Weights
from experiments.bench.ways import Run, Way, Ways
from verify_kernels.moe import ExpertBank, ExpertPlan, ExpertWorkspace

#: What is timed: the experts, ids and shares being there, or routing before them.
EXPERTS, ROUTED = "experts", "route+experts"
PARTS = (EXPERTS, ROUTED)


def _workspace(step: Step, inner: int) -> tuple[ExpertWorkspace, Tensor]:
    """Between the launches, and of the result; full of NaN."""
    shape, device = step.shape, step.latent.device
    space = ExpertWorkspace.allocate(shape.latent, inner, shape.top_k, device)
    for tensor in (space.inner, space.sums):
        tensor.fill_(torch.nan)
    return space, torch.full_like(step.latent, torch.nan)


def ours(weights: Weights, modes: Sequence[Mode]) -> Ways[Step]:
    """``verify_kernels.moe``, the experts alone and after its routing."""
    try:
        return Ways(ways_of(weights.bank, OURS, modes))
    except ImportError as error:
        return Ways(missing={OURS: reason(error)})


def ways_of(
    bank: ExpertBank, name: str, modes: Sequence[Mode], note: str = ""
) -> list[Way[Step]]:
    """Our kernels over a bank, the experts alone and after our routing."""
    from verify_kernels.moe import moe_experts, moe_route

    def alone(pdl: bool) -> Callable[[Step], Run]:
        def make(step: Step) -> Run:
            space, out = _workspace(step, bank.inner)
            plans = [step.plan(copy) for copy in range(step.copies)]

            def run(copy: int) -> Tensor:
                return moe_experts(
                    step.latent,
                    step.shares[copy],
                    plans[copy],
                    bank,
                    space,
                    out,
                    pdl=pdl,
                )

            return run

        return make

    def routed(pdl: bool) -> Callable[[Step], Run]:
        def make(step: Step) -> Run:
            space, out = _workspace(step, bank.inner)
            shape, device = step.shape, step.latent.device
            plan = ExpertPlan.allocate(shape.experts, shape.top_k, device)
            shares = torch.full_like(step.shares[0], torch.nan)
            ids = torch.full_like(step.ids[0], -1)

            def run(copy: int) -> Tensor:
                moe_route(
                    step.logits[copy],
                    step.bias,
                    shape.top_k,
                    plan,
                    shares,
                    ids,
                    pdl=pdl,
                )
                return moe_experts(step.latent, shares, plan, bank, space, out, pdl=pdl)

            return run

        return make

    made = {EXPERTS: alone, ROUTED: routed}
    return [
        Way(name, mode, make(mode == "pdl"), note, part)
        for part, make in made.items()
        for mode in modes
    ]
