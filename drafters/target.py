# SPDX-License-Identifier: Apache-2.0
"""What speculation needs from a target, and a small Qwen3 target in plain torch.

A `Target` gives logits for several rows at once, the raw outputs of chosen layers, and
a cache that can be cut back to the accepted tokens. `Qwen3Target` is one, its weight
names as in Hugging Face.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drafters.config import RopeConfig
from drafters.layers import DecoderLayer, GroupedQueryAttention, LayerCache, RMSNorm


class Target(Protocol):
    """A causal language model under a drafter; the cache is its own affair."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def embedding(self) -> Tensor:
        """[V, H]; its device is where token ids go."""

    @property
    def head(self) -> Tensor:
        """[V, H]."""

    def __call__(
        self, tokens: Tensor, taps: Sequence[int] = (), cache: Any = None
    ) -> tuple[Tensor, Tensor | None, Any]:
        """tokens [B, Q] after ``cache`` -> logits [B, Q, V], features, new cache."""

    def crop(self, cache: Any, length: int) -> Any:
        """``cache`` cut back to its first ``length`` tokens; at least as many as it
        held before the last call."""


@dataclass(frozen=True)
class Qwen3Config:
    """Sizes of the target; ``rope_theta`` unscaled, embeddings untied."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


class Qwen3Model(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        c = config
        rope = RopeConfig(c.rope_theta)
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(
                GroupedQueryAttention(
                    c.hidden_size,
                    c.num_heads,
                    c.num_kv_heads,
                    c.head_dim,
                    c.rms_norm_eps,
                    rope,
                ),
                c.hidden_size,
                c.intermediate_size,
                c.rms_norm_eps,
            )
            for _ in range(c.num_layers)
        )
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Qwen3Target(nn.Module):
    """Causal language model with feature taps."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.model = Qwen3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def embedding(self) -> Tensor:
        return self.model.embed_tokens.weight

    @property
    def head(self) -> Tensor:
        return self.lm_head.weight

    def crop(self, cache: list[LayerCache], length: int) -> list[LayerCache]:
        """The first ``length`` positions of every layer's cache."""
        return [(k[:, :length], v[:, :length]) for k, v in cache]

    def forward(
        self,
        tokens: Tensor,
        taps: Sequence[int] = (),
        cache: list[LayerCache] | None = None,
    ) -> tuple[Tensor, Tensor | None, list[LayerCache]]:
        """tokens [B, Q] after ``cache`` -> logits [B, Q, V], features, new cache.

        ``features`` [B, Q, len(taps) * hidden] are the raw outputs of layers ``taps``
        (-1 is the embedding output), concatenated in that order.
        """
        past = 0 if cache is None else cache[0][0].shape[1]
        batch, rows = tokens.shape
        where = tokens.device
        positions = torch.arange(past, past + rows, device=where).expand(batch, rows)
        mask = torch.ones(rows, past + rows, dtype=torch.bool, device=where)
        mask = mask.tril(past)[None]
        x = self.model.embed_tokens(tokens)
        outputs = {-1: x}
        grown = []
        for index, layer in enumerate(self.model.layers):
            context = None if cache is None else cache[index]
            x, entry = layer(x, positions, context, mask)
            grown.append(entry)
            outputs[index] = x
        features = torch.cat([outputs[i] for i in taps], -1) if taps else None
        return self.lm_head(self.model.norm(x)), features, grown
