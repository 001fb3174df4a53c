# SPDX-License-Identifier: Apache-2.0
"""What a trained tiny pair is worth on held-out text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.backbone import DSparkDrafter
from drafters.calibration import expected_calibration_error
from drafters.loop import traces
from drafters.target import Target
from experiments.corpora import Kind, held_out_bytes, held_out_prompts
from experiments.tiny_k3.target import K3Target
from experiments.tiny_k3.train import expert_load
from verify_kernels.model.parallel import forward


@torch.no_grad()
def bits_per_byte(target: K3Target, kind: Kind, windows: int, length: int) -> float:
    """Cross-entropy in bits over ``windows`` evenly spread pieces of held-out text."""
    text = torch.frombuffer(bytearray(held_out_bytes(kind)), dtype=torch.uint8)
    starts = torch.linspace(0, len(text) - length - 1, windows).long()[:, None]
    tokens = text[starts + torch.arange(length + 1)].long().to(target.embedding.device)
    total = 0.0
    for part in tokens.split(32):
        logits, _, _ = target(part[:, :-1])
        nats = F.cross_entropy(
            logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
        )
        total += float(nats)
    return total / (windows * length) / math.log(2)


@torch.no_grad()
def expert_use(target: K3Target, tokens: Tensor) -> dict[int, dict[str, float]]:
    """By MoE layer, over tokens [B, T]: ``entropy``, of the distribution of choices in
    units of its maximum (1 is perfectly even), and the ``least`` and ``most`` used
    experts' shares in units of the even share."""
    counts: dict[int, Tensor] = {}
    experts = target.config.experts

    def count(layer: int, ids: Tensor) -> None:
        counts[layer] = expert_load(ids, experts)

    forward(
        target.config, target.weights, tokens, experts=target.experts, on_route=count
    )
    use = {}
    for layer, load in counts.items():
        share = (load / load.sum()).double()
        entropy = -(share * share.clamp(min=1e-12).log()).sum() / math.log(experts)
        use[layer] = {
            "entropy": float(entropy),
            "least": float(share.min()) * experts,
            "most": float(share.max()) * experts,
        }
    return use


@dataclass(frozen=True)
class Acceptance:
    """accepted drafts and confidence logits [k] of every round."""

    accepted: list[int]
    confidence_logits: list[list[float]]

    @property
    def length(self) -> float:
        """Tokens a verify step commits, bonus included."""
        return 1 + sum(self.accepted) / len(self.accepted)

    def calibration(self) -> dict[str, float]:
        """``error``, the expected calibration error over all positions that a round
        reached, and the ``predicted`` and ``observed`` rates of acceptance there."""
        predicted, observed = [], []
        for kept, logits in zip(self.accepted, self.confidence_logits, strict=True):
            reached = logits[: kept + 1]
            predicted += torch.sigmoid(torch.tensor(reached)).tolist()
            observed += [float(i < kept) for i in range(len(reached))]
        guess, seen = torch.tensor(predicted), torch.tensor(observed)
        return {
            "error": expected_calibration_error(guess, seen),
            "predicted": float(guess.mean()),
            "observed": float(seen.mean()),
        }


def acceptance(
    target: Target,
    drafter: DSparkDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    tokens: int,
    draft_length: int | None = None,
) -> Acceptance:
    """Speculate after each prompt with the engine-free loop, prompt i with seed i."""
    accepted: list[int] = []
    confidence: list[list[float]] = []
    for trace in traces(
        target,
        drafter,
        prompts,
        max_new_tokens=tokens,
        temperature=temperature,
        draft_length=draft_length,
    ):
        accepted += trace.accepted
        confidence += trace.confidence_logits
    return Acceptance(accepted, confidence)


def report(
    target: Target, drafter: DSparkDrafter, kind: Kind, *, prompts: int, tokens: int
) -> dict[str, Any]:
    """Acceptance lengths at temperature 0 and 1 on held-out prompts, calibration at 1.

    Best on a CPU: a round is some 900 small operations on eight rows (25 ms on one
    virtual core, 2026-11-30), for which a GPU mostly waits.
    """
    chosen = held_out_prompts(kind, prompts)
    greedy = acceptance(target, drafter, chosen, temperature=0.0, tokens=tokens)
    drawn = acceptance(target, drafter, chosen, temperature=1.0, tokens=tokens)
    return {
        "acceptance_length": {"T=0": greedy.length, "T=1": drawn.length},
        "rounds": {"T=0": len(greedy.accepted), "T=1": len(drawn.accepted)},
        "confidence": drawn.calibration(),
    }
