# SPDX-License-Identifier: Apache-2.0
"""Weights, rows and routings of a rank's routed experts.

One layer's bank is enough: every copy of a step has its rows choose other experts of
it, one block after the other of a shuffled list of all, so that an expert comes back no
sooner than the bank allows. All copies have the same number of distinct experts, in the
same pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.byte_model import EXPERT_INTERMEDIATE, EXPERTS, LATENT, TOP_K
from verify_kernels.batch import MAX_ROWS
from verify_kernels.dense.reference import situ
from verify_kernels.moe import ExpertBank, ExpertPlan, reference
from verify_kernels.moe.experts import SHAPES
from verify_kernels.moe.layout import Blocks
from verify_kernels.moe.mxfp4 import GROUP, Mxfp4, dequantise

#: How rows choose: each for itself, or half of the row before's and half for itself.
INDEPENDENT, CORRELATED = "independent", "correlated"
ROUTINGS = (INDEPENDENT, CORRELATED)
#: Scale bytes drawn, 2^-10 to 2^-5: products of K3's widths then stay near 1.
_SCALES = (117, 123)
#: int64 words that packing may hold at a time; an expert at least.
_PACK_WORDS = 2**27


@dataclass(frozen=True)
class ExpertsShape:
    """A rank's share of a layer's experts.

    Attributes:
        tp: tensor-parallel size it is a share of, 0 for a shape that is not K3's.
        latent, inner, experts, top_k: L, I, E and K.
    """

    tp: int
    latent: int
    inner: int
    experts: int
    top_k: int

    @classmethod
    def of(cls, tp: int) -> ExpertsShape:
        """K3's experts over ``tp`` ranks.

        Raises:
            ValueError: for a size that the kernels have no share for.
        """
        sizes = [EXPERT_INTERMEDIATE // s[1] for s in SHAPES if s[2] == EXPERTS]
        if tp not in sizes:
            raise ValueError(
                f"tp={tp}: use {', '.join(map(str, sizes))}, the sizes the experts' "
                "kernels have shares for"
            )
        return cls(tp, LATENT, EXPERT_INTERMEDIATE // tp, EXPERTS, TOP_K)

    def live_bytes(self, distinct: int) -> int:
        """Of so many experts' gate, up and down: a nibble each and a byte for 32."""
        return distinct * 3 * self.latent * self.inner * 17 // 32

    def described(self) -> dict[str, Any]:
        """What a result line calls ``shape``, but for the step."""
        return {
            "tp": self.tp,
            "latent": self.latent,
            "inner": self.inner,
            "experts": self.experts,
            "top_k": self.top_k,
        }


@dataclass(frozen=True)
class Weights:
    """All experts in the checkpoint's layout, and the same numbers repacked for us.

    Attributes:
        gate, up: [E, I, L].
        down: [E, L, I].
        bank: ours.
    """

    gate: Mxfp4
    up: Mxfp4
    down: Mxfp4
    bank: ExpertBank

    @classmethod
    def draw(cls, shape: ExpertsShape, device: torch.device, seed: int = 0) -> Weights:
        """Every code, scales of a sane range."""
        generator = torch.Generator(device).manual_seed(seed)

        def matrices(rows: int, columns: int) -> Mxfp4:
            def draw(low: int, high: int, width: int) -> Tensor:
                size = shape.experts, rows, width
                empty = torch.empty(size, dtype=torch.uint8, device=device)
                return empty.random_(low, high, generator=generator)

            return Mxfp4(draw(0, 256, columns // 2), draw(*_SCALES, columns // GROUP))

        gate = matrices(shape.inner, shape.latent)
        up = matrices(shape.inner, shape.latent)
        down = matrices(shape.latent, shape.inner)
        return cls(gate, up, down, packed(gate, up, down))

    def expert(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down of one expert in fp64."""
        gate, up, down = (
            dequantise(one[number]) for one in (self.gate, self.up, self.down)
        )
        return gate, up, down


def packed(gate: Mxfp4, up: Mxfp4, down: Mxfp4) -> ExpertBank:
    """`ExpertBank.of`, some experts at a time: packing holds sixteen times their bytes,
    which is more than a GPU has for all experts of TP 1."""
    experts, inner, half = gate.packed.shape
    each = max(_PACK_WORDS // (4 * inner * half), 1)

    def part(weight: Mxfp4, at: int) -> Mxfp4:
        return Mxfp4(weight.packed[at : at + each], weight.scales[at : at + each])

    banks = [
        ExpertBank.of(part(gate, at), part(up, at), part(down, at))
        for at in range(0, experts, each)
    ]

    def joined(half: Callable[[ExpertBank], Blocks]) -> Blocks:
        return Blocks(
            torch.cat([half(bank).words for bank in banks]),
            torch.cat([half(bank).scales for bank in banks]),
        )

    return ExpertBank(
        joined(lambda bank: bank.up),
        joined(lambda bank: bank.down),
        2 * half,
        inner,
        inner,
    )


def chosen(shape: ExpertsShape, routing: str, rows: int, seed: int = 0) -> Tensor:
    """Ids int64 [M, K], distinct in a row, on the CPU.

    Row t is the same whatever M is. A correlated row takes K / 2 of the row before,
    and the rest of those that it has not.

    Raises:
        ValueError: for a routing that there is not.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing={routing!r}: use one of {', '.join(ROUTINGS)}")
    generator = torch.Generator().manual_seed(seed)

    def order(count: int) -> Tensor:
        return torch.randperm(count, generator=generator)

    ids = torch.empty(rows, shape.top_k, dtype=torch.int64)
    for t in range(rows):
        drawn, places = order(shape.experts), order(shape.top_k)
        if t and routing == CORRELATED:
            kept = ids[t - 1, places[: shape.top_k // 2]]
            fresh = drawn[~torch.isin(drawn, ids[t - 1])]
            drawn = torch.cat((kept, fresh))
        ids[t] = drawn[: shape.top_k]
    return ids


@dataclass(frozen=True)
class Step:
    """M rows, and in every copy another choice of experts for them.

    Attributes:
        shape: of the experts.
        latent: bf16 [M, L], with a channel far out and one of zeros.
        logits: fp32 [copies, M, E]; the chosen ones stand clear of the others.
        bias: fp32 [E], of the router.
        ids, shares: int32 and fp32 [copies, M, K], what routing makes of the logits.
    """

    shape: ExpertsShape
    latent: Tensor
    logits: Tensor
    bias: Tensor
    ids: Tensor
    shares: Tensor

    @classmethod
    def draw(
        cls,
        shape: ExpertsShape,
        routing: str,
        rows: int,
        copies: int,
        device: torch.device,
        seed: int = 0,
    ) -> Step:
        """A step of ``rows`` rows."""
        generator = torch.Generator().manual_seed(seed + 1)
        latent = torch.randn(rows, shape.latent, generator=generator)
        latent[:, 7] *= 40
        latent[:, 11] = 0
        pattern = chosen(shape, routing, rows, seed)
        used, place = pattern.unique(return_inverse=True)
        shuffled = torch.randperm(shape.experts, generator=generator)
        bias = (torch.rand(shape.experts, generator=generator) - 0.5) / 10
        lines, ids, shares = [], [], []
        for copy in range(copies):
            first = copy * len(used)
            block = torch.arange(first, first + len(used)) % shape.experts
            taken = shuffled[block][place]
            # sigmoid(+-0.5) are 0.24 apart, more than two biases.
            size = rows, shape.experts
            logits = -0.5 - 3 * torch.rand(size, generator=generator)
            high = 0.5 + 2 * torch.rand(rows, shape.top_k, generator=generator)
            logits.scatter_(1, taken, high)
            found, weights = reference.route(logits, bias, shape.top_k)
            lines.append(logits)
            ids.append(found.int())
            shares.append(weights.float())
        return cls(
            shape,
            latent.bfloat16().to(device),
            *(
                x.to(device)
                for x in (
                    torch.stack(lines), bias, torch.stack(ids), torch.stack(shares)
                )
            ),
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """M."""
        return self.latent.shape[0]

    @property
    def copies(self) -> int:
        """Choices of experts."""
        return self.ids.shape[0]

    def distinct(self, copy: int = 0) -> int:
        """Experts that any row takes."""
        return int(self.ids[copy].unique().numel())

    def part(self, first: int, last: int) -> Step:
        """Some of the rows alone, in their first choice."""
        return Step(
            self.shape,
            self.latent[first:last].clone(),
            self.logits[:1, first:last].clone(),
            self.bias,
            self.ids[:1, first:last].clone(),
            self.shares[:1, first:last].clone(),
        )

    def plan(self, copy: int) -> ExpertPlan:
        """Who computes what, made on the CPU."""
        made = reference.expert_plan(self.ids[copy].cpu(), self.shape.experts, MAX_ROWS)
        return ExpertPlan(*(x.to(self.latent.device) for x in made))


@dataclass(frozen=True)
class Truth:
    """The weighted sums [M, L] of a step's first copy.

    Attributes:
        exact: in fp64.
        plain: in fp32 torch with a model's roundings to bf16: SiTU's result, the sum.
    """

    exact: Tensor
    plain: Tensor

    @classmethod
    def of(cls, step: Step, weights: Weights) -> Truth:
        """Unpacks the chosen experts only, one at a time, in ascending order."""
        ids, shares = step.ids[0].long(), step.shares[0]
        kinds = torch.float64, torch.float32
        sums = [torch.zeros_like(step.latent, dtype=kind) for kind in kinds]
        for number in ids.unique().tolist():
            matrices = weights.expert(number)
            row, slot = (ids == number).nonzero(as_tuple=True)
            for total in sums:
                kind = total.dtype
                gate, up, down = (x.to(kind) for x in matrices)
                z = step.latent[row].to(kind)
                h = situ(z @ gate.T, z @ up.T)
                if kind == torch.float32:
                    h = h.bfloat16().float()
                total[row] += shares[row, slot].to(kind)[:, None] * (h @ down.T)
        return cls(sums[0], sums[1].bfloat16())
