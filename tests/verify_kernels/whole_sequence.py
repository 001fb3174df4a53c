# SPDX-License-Identifier: Apache-2.0
"""Kimi K3 over a whole sequence at once, in batched torch: another way to the logits.

No cache, no slots, no rows: dense attention with keys and values written out, the delta
rule as explicit matrices, all experts for all tokens, sources stacked for every mix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.dense.reference import MlpWeights
from verify_kernels.model.weights import (
    K3Config,
    K3Weights,
    KdaLayer,
    MlaLayer,
    ResidualWeights,
)
from verify_kernels.moe.mxfp4 import dequantise
from verify_kernels.moe.reference import MoeWeights


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def residual(sources: list[Tensor], w: ResidualWeights, eps: float) -> Tensor:
    stack = torch.stack(sources)  # [N + 1, T, H]
    scores = torch.einsum("nth,h->nt", rms(stack, w.norm, eps), w.query)
    mixed = torch.einsum("nt,nth->th", scores.softmax(0), stack)
    return rms(mixed, w.output_norm, eps)


def kda(x: Tensor, layer: KdaLayer, c: K3Config) -> Tensor:
    count, core, heads = len(x), layer.core, c.heads
    keys, values = heads * c.kda_k, heads * c.kda_v
    sizes = (keys, keys, values, values, c.decay_rank, heads)
    q, k, v, gate, f_a, beta = (x @ layer.in_proj.T).split(sizes, 1)

    def convolved(z: Tensor, weight: Tensor) -> Tensor:
        z = z.view(count, heads, -1)
        line = torch.cat((z.new_zeros(3, *z.shape[1:]), z))
        return silu(sum(weight[i] * line[i : i + count] for i in range(4)))

    q, k, v = (
        convolved(z, w)
        for z, w in ((q, core.conv_q), (k, core.conv_k), (v, core.conv_v))
    )
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / c.kda_k**0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    r = (f_a @ layer.w_fb.T).view(count, heads, -1) + core.dt_bias
    decay = torch.exp(
        c.decay_lower_bound * torch.sigmoid(core.a_log.exp()[:, None] * r)
    )
    state = x.new_zeros(heads, c.kda_v, c.kda_k)
    identity = torch.eye(c.kda_k, dtype=x.dtype)
    outs = []
    for t in range(count):
        b = torch.sigmoid(beta[t])[:, None, None]
        forget = identity - b * k[t, :, :, None] * k[t, :, None, :]
        state = state @ torch.diag_embed(decay[t]) @ forget
        state = state + b * v[t, :, :, None] * k[t, :, None, :]
        outs.append(state @ q[t, :, :, None])
    o = rms(torch.stack(outs)[..., 0], core.norm, c.norm_eps)
    return (o * torch.sigmoid(gate).view_as(o)).flatten(1) @ layer.out.T


def mla(x: Tensor, layer: MlaLayer, c: K3Config) -> Tensor:
    count, core = len(x), layer.core
    sizes = (c.q_lora, c.kv_lora, c.rope, c.heads * c.v_head)
    q_a, latent, pe, gate = (x @ layer.in_proj.T).split(sizes, 1)
    q = rms(q_a, core.q_a_norm, c.norm_eps) @ core.w_qb.T
    latent = rms(latent, core.kv_norm, c.norm_eps)
    key = torch.einsum("tc,hnc->thn", latent, core.w_uk)
    key = torch.cat((key, pe[:, None].expand(-1, c.heads, -1)), -1)
    value = torch.einsum("tc,hvc->thv", latent, core.w_uv)
    scores = torch.einsum("thd,shd->hts", q.view_as(key), key)
    scores = scores / (c.nope + c.rope) ** 0.5
    scores = scores + torch.full((count, count), -torch.inf).triu(1)
    o = torch.einsum("hts,shv->thv", scores.softmax(-1), value).flatten(1)
    return (o * torch.sigmoid(gate)) @ layer.out.T


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    g, u = x @ gate.T, x @ up.T
    return (4 * (g / 4).tanh() * g.sigmoid() * 25 * (u / 25).tanh()) @ down.T


def moe(x: Tensor, w: MoeWeights, eps: float) -> Tensor:
    scores = (x @ w.router.T).sigmoid()
    chosen = (scores + w.bias).topk(w.top_k, -1).indices
    shares = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    shares = shares / shares.sum(1, keepdim=True) * w.routed_scale
    latent = x @ w.latent_down.T
    banks = [dequantise(bank, x.dtype) for bank in (w.w1, w.w3, w.w2)]
    every = torch.stack(
        [mlp(latent, *(bank[e] for bank in banks)) for e in range(len(w.bias))], 1
    )
    routed = rms(torch.einsum("te,tel->tl", shares, every), w.latent_norm, eps)
    shared = mlp(x, w.shared.gate, w.shared.up, w.shared.down)
    return routed @ w.latent_up.T + shared


def logits(config: K3Config, weights: K3Weights, tokens: list[int]) -> Tensor:
    """[T, vocab] of T tokens; the prefix is not rounded."""
    c, eps = config, config.norm_eps
    prefix = weights.embedding[tokens]
    saved: list[Tensor] = []
    for index, layer in enumerate(weights.layers):
        starts = index % c.residual_block == 0
        hidden = residual([*saved, prefix], layer.before_mixer, eps)
        if starts:
            saved.append(prefix)
        if isinstance(layer.mixer, KdaLayer):
            mixed = kda(hidden, layer.mixer, c)
        else:
            mixed = mla(hidden, layer.mixer, c)
        prefix = mixed if starts else prefix + mixed
        hidden = residual([*saved, prefix], layer.before_mlp, eps)
        if isinstance(layer.mlp, MlpWeights):
            out = mlp(hidden, layer.mlp.gate, layer.mlp.up, layer.mlp.down)
        else:
            out = moe(hidden, layer.mlp, eps)
        prefix = prefix + out
    return residual([*saved, prefix], weights.output, eps) @ weights.head.T
