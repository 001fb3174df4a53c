# SPDX-License-Identifier: Apache-2.0
"""Sizes and random weights of a Kimi K3-shaped model, in the layouts of the ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.dense.reference import MlpWeights
from verify_kernels.kda.reference import TAPS, KdaWeights
from verify_kernels.mla.reference import MlaWeights
from verify_kernels.moe.mxfp4 import GROUP, Mxfp4, quantise
from verify_kernels.moe.reference import MoeWeights

#: Saved blocks of attention residuals that the ops are made for.
MAX_RESIDUAL_BLOCKS = 8


@dataclass(frozen=True)
class K3Config:
    """The defaults are a small model that has every kind of layer and two saved blocks.

    ``mla_layers`` are 0-based, all others are KDA; ``dense_layers`` first layers have
    a plain MLP of width ``dense_inner``; ``residual_block`` is the number of layers
    between two saved blocks. ``round_prefix`` is what attention residuals round the
    prefix to, or None: the model's only rounding point.

    Raises:
        ValueError: for sizes that no layer could have.
    """

    vocab_size: int = 48
    hidden: int = 20
    layers: int = 4
    residual_block: int = 2
    mla_layers: tuple[int, ...] = (1, 3)
    heads: int = 2
    kda_k: int = 6
    kda_v: int = 4
    decay_rank: int = 3
    decay_lower_bound: float = -5.0
    q_lora: int = 7
    kv_lora: int = 6
    nope: int = 5
    rope: int = 2
    v_head: int = 4
    dense_layers: int = 1
    dense_inner: int = 24
    experts: int = 6
    top_k: int = 2
    latent: int = 32
    expert_inner: int = 32
    shared_inner: int = 10
    routed_scale: float = 1.0
    norm_eps: float = 1e-5
    round_prefix: torch.dtype | None = torch.bfloat16

    def __post_init__(self) -> None:
        if any(not 0 <= layer < self.layers for layer in self.mla_layers):
            raise ValueError(
                f"mla_layers is {self.mla_layers}; each must be 0 to {self.layers - 1}"
            )
        if self.saved_blocks(self.layers) > MAX_RESIDUAL_BLOCKS:
            raise ValueError(
                f"residual_block is {self.residual_block} with {self.layers} layers, "
                f"{self.saved_blocks(self.layers)} saved blocks; at most "
                f"{MAX_RESIDUAL_BLOCKS}, so make the blocks longer"
            )
        for name in ("latent", "expert_inner"):
            if getattr(self, name) % GROUP:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; MXFP4 experts need a multiple "
                    f"of {GROUP}"
                )
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"top_k is {self.top_k}; it must be 1 to experts = {self.experts}"
            )

    @classmethod
    def kimi_k3(cls) -> K3Config:
        """The published sizes: 93 layers, every fourth and the last one MLA."""
        return cls(
            vocab_size=163840,
            hidden=7168,
            layers=93,
            residual_block=12,
            mla_layers=(*range(3, 92, 4), 92),
            heads=96,
            kda_k=128,
            kda_v=128,
            decay_rank=128,
            q_lora=1536,
            kv_lora=512,
            nope=128,
            rope=64,
            v_head=128,
            dense_layers=1,
            dense_inner=33792,
            experts=896,
            top_k=16,
            latent=3584,
            expert_inner=3072,
            shared_inner=6144,
        )

    def starts_block(self, layer: int) -> bool:
        """Whether the layer saves a block and its MLP restarts the prefix."""
        return layer % self.residual_block == 0

    def saved_blocks(self, layer: int) -> int:
        """Blocks saved before ``layer``; after the last layer with ``layers``."""
        return -(-layer // self.residual_block)


@dataclass(frozen=True)
class ResidualWeights:
    """norm, query [H], and output_norm [H] of the RMSNorm that follows the mix."""

    norm: Tensor
    query: Tensor
    output_norm: Tensor


@dataclass(frozen=True)
class KdaLayer:
    """in_proj [q | k | v | gate | f_a | beta, H]; w_fb [heads K, rank]; out [H, ..]."""

    in_proj: Tensor
    w_fb: Tensor
    core: KdaWeights
    out: Tensor


@dataclass(frozen=True)
class MlaLayer:
    """in_proj [q_a | kv_a | gate, H]; out [H, heads v_head]."""

    in_proj: Tensor
    core: MlaWeights
    out: Tensor


@dataclass(frozen=True)
class K3Layer:
    before_mixer: ResidualWeights
    mixer: KdaLayer | MlaLayer
    before_mlp: ResidualWeights
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True)
class K3Weights:
    """embedding, head [V, H] (untied) and the layers, all of one dtype."""

    embedding: Tensor
    layers: tuple[K3Layer, ...]
    output: ResidualWeights
    head: Tensor


class _Random:
    """Draws in a fixed order; bf16 numbers, as in a checkpoint, held in ``dtype``."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def matrix(self, *shape: int, gain: float = 1.0) -> Tensor:
        """Entries of deviation gain / sqrt(last dimension)."""
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return (drawn * gain * shape[-1] ** -0.5).bfloat16().to(self.dtype)

    def vector(self, *shape: int, mean: float = 0.0, spread: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return (mean + spread * drawn).bfloat16().to(self.dtype)

    def norm(self, size: int) -> Tensor:
        return self.vector(size, mean=1.0, spread=0.2)

    def bank(self, *shape: int) -> Mxfp4:
        return quantise(self.matrix(*shape, gain=2.0))


def random_weights(
    config: K3Config, seed: int = 0, dtype: torch.dtype = torch.float64
) -> K3Weights:
    """Weights on the CPU whose text depends on everything: no gate is shut, mixes and
    routing are spread out, and decays run from fast to slow."""
    draw, c = _Random(seed, dtype), config

    def residual() -> ResidualWeights:
        query = draw.matrix(c.hidden)
        return ResidualWeights(draw.norm(c.hidden), query, draw.norm(c.hidden))

    def kda() -> KdaLayer:
        keys, values = c.heads * c.kda_k, c.heads * c.kda_v
        width = 2 * keys + 2 * values + c.decay_rank + c.heads
        return KdaLayer(
            in_proj=draw.matrix(width, c.hidden),
            w_fb=draw.matrix(keys, c.decay_rank),
            core=KdaWeights(
                conv_q=draw.vector(TAPS, c.heads, c.kda_k),
                conv_k=draw.vector(TAPS, c.heads, c.kda_k),
                conv_v=draw.vector(TAPS, c.heads, c.kda_v),
                a_log=draw.vector(c.heads),
                dt_bias=draw.vector(c.heads, c.kda_k, mean=-2.0),
                norm=draw.norm(c.kda_v),
                lower_bound=c.decay_lower_bound,
                norm_eps=c.norm_eps,
            ),
            out=draw.matrix(c.hidden, values, gain=2.0),
        )

    def mla() -> MlaLayer:
        values = c.heads * c.v_head
        return MlaLayer(
            in_proj=draw.matrix(c.q_lora + c.kv_lora + c.rope + values, c.hidden),
            core=MlaWeights(
                q_a_norm=draw.norm(c.q_lora),
                kv_norm=draw.norm(c.kv_lora),
                w_qb=draw.matrix(c.heads * (c.nope + c.rope), c.q_lora, gain=2.0),
                w_uk=draw.matrix(c.heads, c.nope, c.kv_lora),
                w_uv=draw.matrix(c.heads, c.v_head, c.kv_lora),
                norm_eps=c.norm_eps,
            ),
            out=draw.matrix(c.hidden, values, gain=2.0),
        )

    def mlp(inner: int) -> MlpWeights:
        return MlpWeights(
            draw.matrix(inner, c.hidden),
            draw.matrix(inner, c.hidden),
            draw.matrix(c.hidden, inner),
        )

    def moe() -> MoeWeights:
        return MoeWeights(
            router=draw.matrix(c.experts, c.hidden, gain=2.0),
            bias=draw.vector(c.experts, spread=0.1),
            latent_down=draw.matrix(c.latent, c.hidden),
            latent_norm=draw.norm(c.latent),
            latent_up=draw.matrix(c.hidden, c.latent),
            w1=draw.bank(c.experts, c.expert_inner, c.latent),
            w3=draw.bank(c.experts, c.expert_inner, c.latent),
            w2=draw.bank(c.experts, c.latent, c.expert_inner),
            shared=mlp(c.shared_inner),
            top_k=c.top_k,
            routed_scale=c.routed_scale,
            norm_eps=c.norm_eps,
        )

    def layer(index: int) -> K3Layer:
        return K3Layer(
            residual(),
            mla() if index in c.mla_layers else kda(),
            residual(),
            mlp(c.dense_inner) if index < c.dense_layers else moe(),
        )

    return K3Weights(
        embedding=draw.vector(c.vocab_size, c.hidden),
        layers=tuple(layer(i) for i in range(c.layers)),
        output=residual(),
        head=draw.matrix(c.vocab_size, c.hidden),
    )
