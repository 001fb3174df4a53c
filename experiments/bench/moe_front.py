# SPDX-License-Identifier: Apache-2.0
"""The three projections of a MoE layer's input: one launch of ours, or three."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from experiments.bench import ours, peers
from experiments.bench.candidate import CUBLAS, Candidate, Inputs, Mode, Offer
from experiments.bench.core import Settings
from experiments.bench.product import ProductBench
from experiments.bench.shapes import Projection, moe_front

OP = "moe_front"
SEPARATE = "ours_separate"
TENSOR_PARALLEL = (8, 16)
Parts = Sequence[Projection]


def chained(name: str, mode: Mode, links: Sequence[Candidate]) -> Candidate:
    """One launch after the other on the same X, each with its weight and output."""

    def run(inputs: Inputs, outs: Sequence[Tensor]) -> list[Tensor]:
        x, *weights = inputs
        return [
            link.run((x, w), out)
            for link, w, out in zip(links, weights, outs, strict=True)
        ]

    return Candidate(name, mode, run, ", ".join(link.name for link in links))


def separate(parts: Parts, mode: Mode) -> Offer:
    """Our kernel once for each part."""
    single = [ours.skinny_gemm(part, (mode,)) for part in parts]
    links = [candidate for offer in single for candidate in offer.candidates]
    if len(links) == len(parts):
        return Offer([chained(SEPARATE, mode, links)])
    reasons = [why for offer in single for why in offer.missing.values()]
    return Offer(missing={SEPARATE: "; ".join(dict.fromkeys(reasons))})


def vllm(parts: Parts, rows: int, mode: Mode) -> Offer:
    """vLLM's kernel for each part, the first of :data:`peers.VLLM_KERNELS` that it has
    at this M, and cuBLAS, which it falls back to, where it has none."""
    links: list[Candidate] = []
    reasons: dict[str, str] = {}
    for part in parts:
        offer = peers.gemm(part, rows, (mode,))
        reasons.update(offer.missing)
        found = {candidate.name: candidate for candidate in offer.candidates}
        names = (name for name in (*peers.VLLM_KERNELS, CUBLAS) if name in found)
        links.append(found[next(names)])
    if any(link.name != CUBLAS for link in links):
        return Offer([chained(peers.VLLM, mode, links)])
    text = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    return Offer(missing={peers.VLLM: text})


def others(parts: Parts, rows: int, modes: tuple[Mode, ...]) -> Offer:
    """Three launches: cuBLAS's, ours, and vLLM's."""
    links = [peers.cublas(part).candidates[0] for part in parts]
    offer = Offer([chained(CUBLAS, "plain", links)])
    for mode in modes:
        offer += separate(parts, mode) + vllm(parts, rows, mode)
    return offer


class MoeFrontBench(ProductBench):
    """Router (fp32 out), latent down and shared gate-up of one rank.

    Args:
        tp: tensor-parallel size.
        settings: of the run.
        parts: instead of K3's.
        our_offer, peer_offer: where the candidates come from.
    """

    def __init__(
        self,
        tp: int,
        settings: Settings,
        parts: Parts = (),
        our_offer: Callable[[Parts, tuple[Mode, ...]], Offer] = ours.grouped_gemm,
        peer_offer: Callable[[Parts, int, tuple[Mode, ...]], Offer] = others,
    ) -> None:
        three = tuple(parts) or moe_front(tp)
        shape = {
            "tp": tp,
            "n": sum(part.n for part in three),
            "k": three[0].k,
            "parts": {part.name: part.n for part in three},
        }
        super().__init__(
            OP,
            f"{OP}@{tp}",
            shape,
            three,
            settings,
            lambda: our_offer(three, settings.modes),
            lambda rows: peer_offer(three, rows, settings.modes),
        )
