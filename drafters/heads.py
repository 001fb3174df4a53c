# SPDX-License-Identifier: Apache-2.0
"""The sequential head of DSpark and its confidence head (arXiv 2607.05147, sec. 3).

P(x_1..x_k | x_0) = prod_j softmax(U_j + B_j(x_<j)): the backbone gives all U_j in one
parallel pass; a Markov head adds a cheap bias that depends on what was drafted so far,
so neighbouring drafts agree with each other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafters.config import CheckpointError, DSparkConfig


class MarkovHead(nn.Module):
    """Base of the three heads; rank r, vocabulary V (inputs), V_d (outputs).

    ``state`` is whatever a head carries from slot to slot: [B, r] for the rnn head,
    zeros that nobody reads otherwise.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, config.draft_vocab_size, bias=False)

    def initial_state(self, batch: int) -> Tensor:
        return self.markov_w1.weight.new_zeros(batch, self.rank)

    def embed(self, previous: Tensor) -> Tensor:
        """W1[x_{j-1}]: [B] token ids to [B, r]."""
        return self.markov_w1(previous)

    def step(
        self, embedded: Tensor, hidden: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Bias [B, V_d] for one slot and the next state.

        ``embedded`` [B, r] is `embed` of the previous token, ``hidden`` [B, d] the
        backbone's row of this slot.
        """
        raise NotImplementedError


class VanillaMarkovHead(MarkovHead):
    """B = W2 W1[x_{j-1}]: a low-rank bigram table."""

    def step(
        self, embedded: Tensor, hidden: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.markov_w2(embedded), state


class GatedMarkovHead(MarkovHead):
    """B = W2 (g * W1[x_{j-1}]), g = sigmoid(G [h_j ; W1[x_{j-1}]])."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)

    def step(
        self, embedded: Tensor, hidden: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), -1)))
        return self.markov_w2(gate * embedded), state


class RnnMarkovHead(MarkovHead):
    """A gated recurrence over the drafted prefix.

    (gate, candidate, out) = split(J [s_{j-1} ; W1[x_{j-1}] ; h_j]);
    s_j = sigmoid(gate) s_{j-1} + (1 - sigmoid(gate)) tanh(candidate);
    B = W2 tanh(out).
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * self.rank + config.hidden_size, 3 * self.rank)

    def step(
        self, embedded: Tensor, hidden: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        joint = self.joint_proj(torch.cat((state, embedded, hidden), -1))
        gate, candidate, out = joint.chunk(3, -1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return self.markov_w2(torch.tanh(out)), state


class ConfidenceHead(nn.Module):
    """logit of c_j = P(x_j survives | x_<j survived) = w [h_j ; W1[x_{j-1}]] + b.

    It sees the token before x_j and never x_j itself: that is what lets a threshold on
    it decide the verified length without biasing the output.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        extra = config.markov_rank if self.with_markov else 0
        self.proj = nn.Linear(config.hidden_size + extra, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """[..., d] and [..., r] to logits [...]."""
        if self.with_markov:
            if embedded is None:
                raise ValueError("confidence_head_with_markov needs the Markov embed")
            hidden = torch.cat((hidden, embedded), -1)
        return self.proj(hidden).squeeze(-1)


_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": VanillaMarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RnnMarkovHead,
}


def build_markov_head(config: DSparkConfig) -> MarkovHead | None:
    """The head a checkpoint asks for; None for rank 0 (a plain DFlash drafter)."""
    if config.markov_head_type == "none":
        if config.confidence_head and config.confidence_head_with_markov:
            raise CheckpointError(
                "confidence_head_with_markov=true with markov_rank=0: there is no "
                "Markov embedding to feed it"
            )
        return None
    return _HEADS[config.markov_head_type](config)
