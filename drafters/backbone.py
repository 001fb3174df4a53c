# SPDX-License-Identifier: Apache-2.0
"""The DSpark drafter: a parallel backbone fed by target features, and its heads.

One round drafts k tokens after the anchor x_0 (the last token the target produced):

1. target features of every committed token before the anchor are fused,
   H_ctx = RMSNorm(W_c concat(H^(l1) .. H^(lm))), and each layer projects H_ctx to keys
   and values with its own block weights (context-KV injection); this happens once for
   a committed token;
2. the block [anchor, mask, mask, ...] runs through the layers in one pass, every row
   seeing the whole block and the context strictly before the anchor;
3. the Markov head samples left to right on top of the block's base logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters.config import DSparkConfig
from drafters.heads import ConfidenceHead, build_markov_head
from drafters.layers import (
    DecoderLayer,
    GroupedQueryAttention,
    LatentAttention,
    LayerCache,
    RMSNorm,
    append_cache,
)

#: Draws one token per row from probabilities [B, V]: ids [B].
Sampler = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Proposal:
    """One drafted block for B requests.

    ``tokens`` [B, k]; ``probs`` [B, k, V], exactly the distribution each token was
    drawn from; ``confidence_logits`` [B, k] or None without a confidence head.
    """

    tokens: Tensor
    probs: Tensor
    confidence_logits: Tensor | None


class DSparkDrafter(nn.Module):
    """Backbone, Markov head and confidence head of one checkpoint.

    ``embed_tokens`` and ``lm_head`` are the target's, frozen: K3's format leaves them
    out, and `drafters.checkpoint.load_drafter` then asks for the target's.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        c = config
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        taps = len(c.target_layer_ids)
        self.fc = nn.Linear(taps * c.target_hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(
            DecoderLayer(
                self._attention(), c.hidden_size, c.intermediate_size, c.rms_norm_eps
            )
            for _ in range(c.num_layers)
        )
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.markov_head = build_markov_head(c)
        self.confidence_head = ConfidenceHead(c) if c.confidence_head else None
        # Draft-vocabulary id -> target id, for a reduced output vocabulary.
        self.register_buffer(
            "draft_to_target", torch.arange(c.draft_vocab_size), persistent=False
        )

    def _attention(self) -> nn.Module:
        c = self.config
        if c.layout == "k3":
            return LatentAttention(c)
        return GroupedQueryAttention(
            c.hidden_size,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            c.rms_norm_eps,
            c.rope,
        )

    def context_kv(self, features: Tensor, positions: Tensor) -> list[LayerCache]:
        """Cache entries of every layer for newly committed tokens.

        features [B, T, m * target_hidden] in the order of ``target_layer_ids``,
        positions [B, T]. The layers' input norm is not applied here: it belongs to the
        block only.
        """
        fused = self.hidden_norm(self.fc(features))
        return [layer.self_attn.context_kv(fused, positions) for layer in self.layers]

    def block_hidden(
        self,
        block: Tensor,
        positions: Tensor,
        context: Sequence[LayerCache],
        mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden rows [B, Q, d] of block tokens [B, Q] at absolute positions [B, Q].

        ``mask`` [B or 1, Q, T + Q]: which context and block rows a row sees; None for
        a single block that sees everything.
        """
        x = self.embed_tokens(block)
        for layer, cache in zip(self.layers, context, strict=True):
            x, _ = layer(x, positions, cache, mask)
        return self.norm(x)

    def prediction_rows(self, hidden: Tensor) -> Tensor:
        """The k rows that predict: all, or all but the anchor's (fill-in layout)."""
        return hidden if self.config.anchor_first else hidden[:, 1:]

    @torch.no_grad()
    def propose(
        self,
        anchor: Tensor,
        position: Tensor,
        context: Sequence[LayerCache],
        draft_length: int,
        to_probs: Callable[[Tensor], Tensor],
        sample: Sampler,
    ) -> Proposal:
        """Draft ``draft_length`` tokens after anchor [B] at absolute position [B].

        ``to_probs`` turns logits [B, V] into the distribution to draw from (temperature
        and truncation live there), ``sample`` draws. Raises CheckpointError when
        draft_length is outside 1..block_size.
        """
        c = self.config
        c.check_draft_length(draft_length)
        rows = c.block_inputs(draft_length)
        block = anchor.new_full((anchor.shape[0], rows), c.mask_token_id)
        block[:, 0] = anchor
        positions = position[:, None] + torch.arange(rows, device=anchor.device)
        hidden = self.prediction_rows(self.block_hidden(block, positions, context))
        base = self.lm_head(hidden)
        previous = anchor
        state = embedded = None
        if self.markov_head is not None:
            state = self.markov_head.initial_state(anchor.shape[0])
        tokens, probs, confidence = [], [], []
        for j in range(draft_length):
            logits = base[:, j]
            if self.markov_head is not None:
                embedded = self.markov_head.embed(previous)
                bias, state = self.markov_head.step(embedded, hidden[:, j], state)
                logits = logits + bias
            if self.confidence_head is not None:
                confidence.append(self.confidence_head(hidden[:, j], embedded))
            distribution = to_probs(self._to_target_vocabulary(logits))
            previous = sample(distribution)
            tokens.append(previous)
            probs.append(distribution)
        return Proposal(
            torch.stack(tokens, 1),
            torch.stack(probs, 1),
            torch.stack(confidence, 1) if confidence else None,
        )

    def _to_target_vocabulary(self, logits: Tensor) -> Tensor:
        if self.config.draft_vocab_size == self.config.vocab_size:
            return logits
        full = logits.new_full((logits.shape[0], self.config.vocab_size), -torch.inf)
        full[:, self.draft_to_target] = logits
        return full


def extend_context(
    context: list[LayerCache] | None, new: list[LayerCache]
) -> list[LayerCache]:
    """Append committed tokens' entries to every layer's context."""
    if context is None:
        return new
    return [append_cache(old, add) for old, add in zip(context, new, strict=True)]
