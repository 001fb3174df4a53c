# SPDX-License-Identifier: Apache-2.0
"""Transformer parts shared by the small target and by the drafters.

Both kinds of attention split their key side in two: `context_kv` turns normed inputs
into what is cached for a position, and `forward` attends from block rows to that cache
and to the block itself. For a decoder the cache comes from the layer's own inputs; for
a DSpark drafter it is injected from fused target features (arXiv 2607.05147).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import DSparkConfig, RopeConfig

#: What a layer caches for its context: tensors whose dimension 1 is the position.
LayerCache = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weight


def yarn_mscale(factor: float, mscale: float) -> float:
    """Attention temperature of YaRN: 0.1 * mscale * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Inverse wavelengths [dim / 2], float64, with YaRN's blend when configured.

    YaRN (arXiv 2309.00071) keeps wavelengths that turn often within the original
    context, stretches the long ones by ``factor`` and ramps in between.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    inverse = rope.theta**-exponents
    if rope.yarn is None:
        return inverse
    original = rope.yarn["original_max_position_embeddings"]

    def turning_dim(turns: float) -> float:
        return (
            dim
            * math.log(original / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = max(math.floor(turning_dim(rope.yarn["beta_fast"])), 0)
    high = min(math.ceil(turning_dim(rope.yarn["beta_slow"])), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return inverse / rope.yarn["factor"] * (1 - keep) + inverse * keep


class Rope(nn.Module):
    """Rotates the last dimension of [B, T, heads, dim] by absolute positions [B, T]."""

    def __init__(self, rope: RopeConfig, dim: int) -> None:
        super().__init__()
        self.interleaved = rope.interleaved
        self.register_buffer(
            "inverse", rope_frequencies(rope, dim).float(), persistent=False
        )
        self.amplitude = 1.0
        if rope.yarn is not None:
            factor = rope.yarn["factor"]
            self.amplitude = yarn_mscale(factor, rope.yarn["mscale"]) / yarn_mscale(
                factor, rope.yarn["mscale_all_dim"]
            )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None].to(self.inverse.dtype) * self.inverse
        cos = (angles.cos() * self.amplitude)[:, :, None, :].to(x.dtype)
        sin = (angles.sin() * self.amplitude)[:, :, None, :].to(x.dtype)
        if self.interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GroupedQueryAttention(nn.Module):
    """Qwen3 attention: grouped queries, RMSNorm on each query and key head, RoPE."""

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        rope: RopeConfig,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, eps)
        self.k_norm = RMSNorm(head_dim, eps)
        self.rope = Rope(rope, head_dim)

    def context_kv(self, x: Tensor, positions: Tensor) -> LayerCache:
        """Keys and values [B, T, kv_heads, head_dim] for x [B, T, hidden]."""
        batch, length, _ = x.shape
        heads = (batch, length, self.num_kv_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x).view(heads))
        return self.rope(keys, positions), self.v_proj(x).view(heads)

    def forward(
        self, x: Tensor, positions: Tensor, cache: LayerCache, mask: Tensor | None
    ) -> Tensor:
        """Attend from x [B, Q, hidden] to ``cache`` (Q's own entries included).

        ``mask`` [B or 1, Q, T] is True where a row may look; None lets it see all.
        """
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.num_heads, -1))
        q = self.rope(q, positions)
        groups = self.num_heads // self.num_kv_heads
        k, v = (t.repeat_interleave(groups, 2).transpose(1, 2) for t in cache)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, None if mask is None else mask[:, None]
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """K3 drafter attention: multi-head latent attention with rope, unabsorbed.

    Cached per position: the normed latent [B, T, kv_lora_rank] and one rotated key
    [B, T, qk_rope_head_dim] shared by all heads.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        c = config
        self.c = c
        qk = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, c.num_heads * qk, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(
            c.kv_lora_rank,
            c.num_heads * (c.qk_nope_head_dim + c.v_head_dim),
            bias=False,
        )
        self.o_proj = nn.Linear(c.num_heads * c.v_head_dim, c.hidden_size, bias=False)
        self.rope = Rope(c.rope, c.qk_rope_head_dim)
        self.scale = qk**-0.5
        if c.rope.yarn is not None:
            self.scale *= (
                yarn_mscale(c.rope.yarn["factor"], c.rope.yarn["mscale_all_dim"]) ** 2
            )

    def context_kv(self, x: Tensor, positions: Tensor) -> LayerCache:
        latent, key = self.kv_a_proj_with_mqa(x).split(
            (self.c.kv_lora_rank, self.c.qk_rope_head_dim), -1
        )
        rotated = self.rope(key[:, :, None], positions)[:, :, 0]
        return self.kv_a_layernorm(latent), rotated

    def forward(
        self, x: Tensor, positions: Tensor, cache: LayerCache, mask: Tensor | None
    ) -> Tensor:
        c = self.c
        batch, rows, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = q.view(batch, rows, c.num_heads, -1).split(
            (c.qk_nope_head_dim, c.qk_rope_head_dim), -1
        )
        q = torch.cat((q_nope, self.rope(q_rope, positions)), -1)
        latent, key_rope = cache
        kv = self.kv_b_proj(latent).view(batch, latent.shape[1], c.num_heads, -1)
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), -1)
        shared = key_rope[:, :, None].expand(-1, -1, c.num_heads, -1)
        k = torch.cat((k_nope, shared), -1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            None if mask is None else mask[:, None],
            scale=self.scale,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU with residuals; names as in the checkpoints."""

    def __init__(
        self, attention: nn.Module, hidden: int, intermediate: int, eps: float
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = SwiGLU(hidden, intermediate)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        context: LayerCache | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, LayerCache]:
        """Returns the layer's output and ``context`` extended by x's own entries."""
        normed = self.input_layernorm(x)
        own = self.self_attn.context_kv(normed, positions)
        cache = own if context is None else append_cache(context, own)
        x = x + self.self_attn(normed, positions, cache, mask)
        return x + self.mlp(self.post_attention_layernorm(x)), cache


def append_cache(cache: LayerCache, new: LayerCache) -> LayerCache:
    """Concatenate two caches along the position."""
    return torch.cat((cache[0], new[0]), 1), torch.cat((cache[1], new[1]), 1)
