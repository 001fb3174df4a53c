# SPDX-License-Identifier: Apache-2.0
"""Training of a DSpark drafter against a frozen target (arXiv 2607.05147, sec. 3.4).

Loss of slot j (0-based) of a block, weighted by exp(-j / decay):

    0.1 CE(q_j, x_j) + 0.9 ||q_j - p_j||_1 + 1.0 BCE(c_j, 1 - ||q_j - p_j||_1 / 2)

with p the target's distribution, q the drafter's under teacher forcing, and the
confidence label (the probability that a token drawn from q is accepted) detached. The
embedding and the LM head stay the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.backbone import DSparkDrafter
from drafters.captured import Step
from drafters.target import Qwen3Target, Target

#: Yields batches of token ids [B, T + 1].
Batches = Iterator[Tensor]
#: Called with (step, message); long work shows progress through it.
Report = Callable[[int, str], None]


@dataclass(frozen=True)
class Schedule:
    """AdamW with warm-up over 5 % of ``steps`` and a cosine to zero."""

    steps: int
    learning_rate: float
    weight_decay: float = 0.0
    clip: float = 1.0

    def rate(self, step: int) -> float:
        warm = max(1, self.steps // 20)
        if step < warm:
            return self.learning_rate * (step + 1) / warm
        progress = (step - warm) / max(1, self.steps - warm)
        return (
            self.learning_rate
            * 0.5
            * (1 + torch.cos(torch.tensor(progress * torch.pi)).item())
        )


def optimise(
    step: Step, schedule: Schedule, inputs: Iterator[tuple[Tensor, ...]], report: Report
) -> bool:
    """``schedule.steps`` steps on one tuple of ``inputs`` each; whether they ended as
    replays of a CUDA graph. What keeps a CUDA device from that is reported."""
    told = False
    for number in range(schedule.steps):
        loss = step(schedule.rate(number), *next(inputs))
        if step.obstacle is not None and not told:
            told = True
            report(number, f"steps run uncaptured ({step.obstacle})")
        if number % 50 == 0 or number == schedule.steps - 1:
            report(number, f"loss {loss.item():.3f}")
    return step.captured


def train_target(
    target: Qwen3Target, batches: Batches, schedule: Schedule, report: Report
) -> bool:
    """Next-token cross-entropy (nats per token). Returns as `optimise` does."""

    def loss_of(tokens: Tensor) -> Tensor:
        logits, _, _ = target(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    step = Step(
        target.parameters(),
        loss_of,
        clip=schedule.clip,
        weight_decay=schedule.weight_decay,
    )
    return optimise(step, schedule, ((tokens,) for tokens in batches), report)


def initialise(drafter: DSparkDrafter, target: Target) -> None:
    """Share the target's embedding and head, frozen; start the Markov bias at zero.

    W1 ~ N(0, 0.5) and W2 = 0: with the usual 0.02 for both the head hardly learns.
    """
    drafter.embed_tokens.weight.data.copy_(target.embedding.data)
    drafter.lm_head.weight.data.copy_(target.head.data)
    drafter.embed_tokens.weight.requires_grad_(False)
    drafter.lm_head.weight.requires_grad_(False)
    if drafter.markov_head is not None:
        nn.init.normal_(drafter.markov_head.markov_w1.weight, std=0.5)
        nn.init.zeros_(drafter.markov_head.markov_w2.weight)


def block_mask(anchors: Tensor, context: int, block: int) -> Tensor:
    """Which keys the packed blocks see: [B, A * block, context + A * block], bool.

    A block with its anchor at position a sees context positions strictly before a (the
    anchor's own target features do not exist yet when it drafts) and all of itself.
    """
    batch, count = anchors.shape
    where = anchors.device
    owner = torch.arange(count * block, device=where) // block
    sees_context = torch.arange(context, device=where) < anchors[:, owner, None]
    sees_block = (owner[:, None] == owner).expand(batch, -1, -1)
    return torch.cat((sees_context, sees_block), -1)


def drafter_loss(
    drafter: DSparkDrafter,
    target: Target,
    tokens: Tensor,
    anchors: Tensor,
    decay: float = 4.0,
) -> Tensor:
    """Weighted loss of blocks at ``anchors`` [B, A] of ``tokens`` [B, T] (scalar).

    Every anchor needs block_size tokens after it: anchors <= T - 1 - block_size.
    """
    c = drafter.config
    block = c.block_size
    batch, length = tokens.shape
    count = anchors.shape[1]
    with torch.no_grad():
        logits, features, _ = target(tokens, c.target_layer_ids)
    where = tokens.device
    positions = torch.arange(length, device=where).expand(batch, length)
    context = drafter.context_kv(features, positions)
    offsets = torch.arange(block, device=where)
    at = anchors[:, :, None] + offsets  # position of each slot's input
    rows = torch.arange(batch, device=where)[:, None, None]
    inputs = torch.full((batch, count, block), c.mask_token_id, device=where)
    inputs[:, :, 0] = tokens[rows[:, :, 0], anchors]
    hidden = drafter.block_hidden(
        inputs.flatten(1),
        at.flatten(1),
        context,
        block_mask(anchors, length, block),
    ).view(batch, count, block, -1)
    previous, labels = tokens[rows, at], tokens[rows, at + 1]
    goal = logits[rows, at].softmax(-1)
    state = embedded = None
    if drafter.markov_head is not None:
        state = drafter.markov_head.initial_state(batch * count).view(batch, count, -1)
    weight = torch.exp(-offsets / decay)
    # Heads and losses stay in the weights' precision under autocast.
    with torch.autocast(where.type, enabled=False):
        hidden = hidden.to(drafter.lm_head.weight.dtype)
        base = drafter.lm_head(hidden)
        total = base.new_zeros(())
        for j in range(block):
            scores = base[:, :, j]
            if drafter.markov_head is not None:
                embedded = drafter.markov_head.embed(previous[:, :, j])
                bias, state = drafter.markov_head.step(embedded, hidden[:, :, j], state)
                scores = scores + bias
            distance = (scores.softmax(-1) - goal[:, :, j]).abs().sum(-1)
            entropy = F.cross_entropy(
                scores.flatten(0, 1), labels[:, :, j].flatten(), reduction="mean"
            )
            loss = 0.1 * entropy + 0.9 * distance.mean()
            if drafter.confidence_head is not None:
                confidence = drafter.confidence_head(hidden[:, :, j], embedded)
                loss = loss + F.binary_cross_entropy_with_logits(
                    confidence, (1 - distance / 2).detach().clamp(0, 1)
                )
            total = total + weight[j] * loss
    return total / weight.sum()


def drafter_step(
    drafter: DSparkDrafter,
    target: Target,
    schedule: Schedule,
    autocast: torch.dtype | None = None,
) -> Step:
    """The step of `train_drafter`: its inputs are those of `drafter_loss`."""

    def loss_of(tokens: Tensor, anchors: Tensor) -> Tensor:
        # No cached casts: they would outlive a step.
        with torch.autocast(
            tokens.device.type,
            autocast,
            enabled=autocast is not None,
            cache_enabled=False,
        ):
            return drafter_loss(drafter, target, tokens, anchors)

    return Step(
        [p for p in drafter.parameters() if p.requires_grad],
        loss_of,
        clip=schedule.clip,
        weight_decay=schedule.weight_decay,
    )


def train_drafter(
    drafter: DSparkDrafter,
    target: Target,
    batches: Batches,
    schedule: Schedule,
    report: Report,
    *,
    anchors_per_sequence: int = 24,
    generator: torch.Generator | None = None,
    autocast: torch.dtype | None = None,
) -> bool:
    """Train against the frozen target; its logits and features are made on the fly.

    ``autocast`` is the dtype of matrix products, or None for that of the weights.
    Returns as `optimise` does.
    """
    last = drafter.config.block_size + 1

    def inputs() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches:
            tokens = batch[:, :-1]
            anchors = torch.randint(
                1,
                tokens.shape[1] - last,
                (tokens.shape[0], anchors_per_sequence),
                generator=generator,
            )
            yield tokens, anchors.to(tokens.device)

    step = drafter_step(drafter, target, schedule, autocast)
    return optimise(step, schedule, inputs(), report)
