# SPDX-License-Identifier: Apache-2.0
"""Ways to run the routed experts, and those of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from experiments.bench.candidate import OURS, Key, Mode, reason
from experiments.bench.experts_data import Step, Weights
from verify_kernels.batch import MAX_ROWS
from verify_kernels.moe import ExpertPlan

#: What is timed: the experts, ids and shares being there, or routing before them.
EXPERTS, ROUTED = "experts", "route+experts"
PARTS = (EXPERTS, ROUTED)

#: Runs a step with one of its copies' choices; the result is bf16 [M, L].
Run = Callable[[int], Tensor]


@dataclass(frozen=True)
class Way:
    """One way to run a part.

    Attributes:
        name: `candidate.OURS` or the peer's.
        mode: how its kernels are launched.
        part: of `PARTS`.
        make: prepares it for a step; what it returns may overwrite its last result.
        note: what a reader should know.
    """

    name: str
    mode: Mode
    part: str
    make: Callable[[Step], Run]
    note: str = ""

    @property
    def key(self) -> Key:
        """(name, mode)."""
        return self.name, self.mode


@dataclass(frozen=True)
class Ways:
    """Ways of one source, and those it cannot offer with the reason."""

    ways: list[Way] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: Ways) -> Ways:
        return Ways(self.ways + other.ways, {**self.missing, **other.missing})


def _workspace(step: Step, inner: int) -> tuple[Tensor, Tensor]:
    """Of the pairs' h, and of the result; full of NaN."""
    device = step.latent.device
    pairs = torch.full((MAX_ROWS * step.shape.top_k, inner), torch.nan, device=device)
    return pairs.bfloat16(), torch.full_like(step.latent, torch.nan)


def ours(weights: Weights, modes: Sequence[Mode]) -> Ways:
    """``verify_kernels.moe``, the experts alone and after its routing."""
    try:
        from verify_kernels.moe import moe_experts, moe_route
    except ImportError as error:
        return Ways(missing={OURS: reason(error)})
    bank = weights.bank

    def alone(pdl: bool) -> Callable[[Step], Run]:
        def make(step: Step) -> Run:
            inner, out = _workspace(step, bank.inner)
            plans = [step.plan(copy) for copy in range(step.copies)]

            def run(copy: int) -> Tensor:
                return moe_experts(
                    step.latent,
                    step.shares[copy],
                    plans[copy],
                    bank,
                    inner,
                    out,
                    pdl=pdl,
                )

            return run

        return make

    def routed(pdl: bool) -> Callable[[Step], Run]:
        def make(step: Step) -> Run:
            inner, out = _workspace(step, bank.inner)
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
                return moe_experts(step.latent, shares, plan, bank, inner, out, pdl=pdl)

            return run

        return make

    made = {EXPERTS: alone, ROUTED: routed}
    return Ways(
        [
            Way(OURS, mode, part, make(mode == "pdl"))
            for part, make in made.items()
            for mode in modes
        ]
    )
