# SPDX-License-Identifier: Apache-2.0
"""The same Kimi K3 over whole sequences: all positions at once, differentiable.

`K3Model.step` is the truth, one row at a time. `forward` computes the same numbers in
batched products, for training and for prompts: KDA in chunks (`chunk_kda`), MLA with
expanded keys and values, every expert for every token with the weights of those that
were not chosen at 0. Bits depend on the batch here; values agree within rounding.

Arithmetic is in the dtype of the weights. Under ``torch.autocast`` the products of
wide matrices run in its dtype; the recurrence, the router, norms, mixes and the
residual prefix stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.dense.reference import MlpWeights, rms_norm, situ
from verify_kernels.kda.reference import L2_EPS, TAPS, log_decay
from verify_kernels.model.weights import (
    K3Config,
    K3Weights,
    KdaLayer,
    MlaLayer,
    ResidualWeights,
)
from verify_kernels.moe.mxfp4 import dequantise
from verify_kernels.moe.reference import MoeWeights

#: Rows of a chunk. Decays are at least e^-5 a row: over 15 rows the largest factor is
#: e^75, inside fp32.
CHUNK = 16

#: By layer: w1, w3 [E, I, L] and w2 [E, L, I], dequantised.
Experts = Mapping[int, tuple[Tensor, Tensor, Tensor]]
#: Called with (layer, expert ids int64 [N, k]) of every MoE layer.
OnRoute = Callable[[int, Tensor], None]


class KdaPast(NamedTuple):
    """One KDA layer after a call: the state before it and the records of its rows.

    state [B, H, V, K]; raw [B, 3 + T, channels], the projections before the
    convolution with the three before the call first; u [B, T, H, V]; key, g
    [B, T, H, K].
    """

    state: Tensor
    raw: Tensor
    u: Tensor
    key: Tensor
    g: Tensor


@dataclass(frozen=True)
class Past:
    """What a call leaves for the next; ``length`` tokens, all or (after `crop`) fewer.

    mla: cache lines [B, length, kv_lora + rope] by layer.
    """

    length: int
    kda: dict[int, KdaPast]
    mla: dict[int, Tensor]


class Output(NamedTuple):
    """logits [B, T, V]; features [B, T, taps * H] or None; past."""

    logits: Tensor
    features: Tensor | None
    past: Past


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gated delta rule in chunks of 16 rows.

    q (scaled), k (unit length), g (log decay, at least -5) [B, T, H, K]; v
    [B, T, H, V]; beta in (0, 1) [B, T, H]; state [B, H, V, K] before the rows. Returns
    o and u [B, T, H, V] and the state after the rows. With G the running sum of g and
    S the state before the chunk,

        u_i + beta_i sum_{j<i} <k_i, e^{G_i - G_j} k_j> u_j = beta_i (v_i - S e^{G_i}
        k_i),    o_i = S e^{G_i} q_i + sum_{j<=i} <q_i, e^{G_i - G_j} k_j> u_j

    (WY form of the delta rule, arXiv 2406.06484, with KDA's decay per channel).
    """
    batch, length, heads, _ = q.shape
    pad = -length % CHUNK

    def chunks(x: Tensor) -> Tensor:
        if pad:
            x = F.pad(x, (0, 0, 0, 0, 0, pad))
        return x.transpose(1, 2).unflatten(2, (-1, CHUNK))

    q, k, v, g = chunks(q), chunks(k), chunks(v), chunks(g)
    b = chunks(beta[..., None])
    total = g.cumsum(-2)
    # Any reference cancels; the middle row keeps both factors within e^40.
    middle = total[..., CHUNK // 2, None, :].detach()
    rise, fall = (total - middle).exp(), (middle - total).exp()
    decay = total.exp()
    k_fall = (k * fall).mT
    lower = (b * ((k * rise) @ k_fall)).tril(-1)
    inner = ((q * rise) @ k_fall).tril()
    eye = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    right = torch.cat((b * v, b * k * decay), -1)
    solved = torch.linalg.solve_triangular(
        eye + lower, right, upper=False, unitriangular=True
    )
    last = total[..., -1:, :]
    k_last = k * (last - total).exp()

    def by_chunk(x: Tensor) -> tuple[Tensor, ...]:
        # One copy here keeps every product of the loop on dense matrices.
        return x.flatten(0, 1).transpose(0, 1).contiguous().unbind(0)

    own, seen = solved.split((v.shape[-1], k.shape[-1]), -1)
    state = state.flatten(0, 1)
    starts, us = [], []
    for own_c, seen_c, k_c, decay_c in zip(
        by_chunk(own),
        by_chunk(-seen),
        by_chunk(k_last),
        by_chunk(last.exp()),
        strict=True,
    ):
        u = torch.baddbmm(own_c, seen_c, state.mT)
        starts.append(state)
        us.append(u)
        state = torch.baddbmm(state * decay_c, u.mT, k_c)
    u_all, before = (
        torch.stack(x, 1).unflatten(0, (batch, heads)) for x in (us, starts)
    )
    o = (q * decay) @ before.mT + inner @ u_all

    def rows(x: Tensor) -> Tensor:
        return x.flatten(2, 3).transpose(1, 2)[:, :length]

    return rows(o), rows(u_all), state.unflatten(0, (batch, heads))


def dense_banks(weights: K3Weights, dtype: torch.dtype) -> Experts:
    """All experts of all MoE layers, dequantised to ``dtype``."""
    banks = {}
    for i, layer in enumerate(weights.layers):
        if isinstance(layer.mlp, MoeWeights):
            m = layer.mlp
            w1, w3, w2 = (dequantise(w, dtype) for w in (m.w1, m.w3, m.w2))
            banks[i] = (w1, w3, w2)
    return banks


def forward(
    config: K3Config,
    weights: K3Weights,
    tokens: Tensor,
    *,
    experts: Experts,
    taps: Sequence[int] = (),
    past: Past | None = None,
    on_route: OnRoute | None = None,
) -> Output:
    """Logits of every position of token ids [B, T], which follow ``past``.

    ``experts`` from `dense_banks` (or fake-quantised masters, in training). A tap l
    gives the residual prefix after layer l, what vLLM hands a drafter as the layer's
    auxiliary hidden state; -1 the embedding. One feature row concatenates the taps in
    the order given.

    Raises:
        ValueError: for a tap that is not a layer.
    """
    c, w = config, weights
    if any(not -1 <= tap < c.layers for tap in taps):
        raise ValueError(f"taps is {list(taps)}; each must be -1 to {c.layers - 1}")
    if past is None:
        past = _empty(config, weights, tokens.shape[0])
    past = crop(past, past.length)
    prefix = F.embedding(tokens, w.embedding)
    tapped = {-1: prefix}
    saved: list[Tensor] = []
    delta: Tensor | None = None
    kda, mla = {}, {}
    for i, layer in enumerate(w.layers):
        start = c.starts_block(i)
        prefix = _advance(c, prefix, delta)
        tapped.setdefault(i - 1, prefix)
        hidden = _mix(c, prefix, saved, layer.before_mixer)
        if start:
            saved.append(prefix)
        if isinstance(layer.mixer, KdaLayer):
            out, kda[i] = _kda(c, layer.mixer, hidden, past.kda[i])
        else:
            out, mla[i] = _mla(layer.mixer, hidden, past.mla[i])
        prefix = _advance(c, out, None) if start else _advance(c, prefix, out)
        hidden = _mix(c, prefix, saved, layer.before_mlp)
        if isinstance(layer.mlp, MoeWeights):
            delta, ids = _moe(layer.mlp, hidden, experts[i])
            if on_route is not None:
                on_route(i, ids)
        else:
            delta = _mlp(hidden, layer.mlp)
    prefix = _advance(c, prefix, delta)
    tapped[c.layers - 1] = prefix
    hidden = _mix(c, prefix, saved, w.output)
    logits = F.linear(hidden, w.head).to(hidden.dtype)
    features = torch.cat([tapped[tap] for tap in taps], -1) if taps else None
    return Output(logits, features, Past(past.length + tokens.shape[1], kda, mla))


def crop(past: Past, length: int) -> Past:
    """``past`` cut back to its first ``length`` tokens, as a verify step needs it.

    Only tokens of the last call can be taken back.

    Raises:
        ValueError: if ``length`` lies before the last call or beyond its end.
    """
    kda = {}
    for i, p in past.kda.items():
        keep = length - (past.length - p.u.shape[1])
        if not 0 <= keep <= p.u.shape[1]:
            raise ValueError(
                f"length is {length}; the last call covers "
                f"{past.length - p.u.shape[1]} to {past.length}"
            )
        u, key, g = p.u[:, :keep], p.key[:, :keep], p.g[:, :keep]
        state = p.state
        if keep:
            total = g.cumsum(1)
            left = (total[:, -1:] - total).exp()
            state = state * total[:, -1, :, None, :].exp()
            state = state + torch.einsum("bthv,bthk->bhvk", u, key * left)
        kda[i] = KdaPast(
            state, p.raw[:, keep : keep + TAPS - 1], u[:, :0], key[:, :0], g[:, :0]
        )
    return Past(length, kda, {i: lines[:, :length] for i, lines in past.mla.items()})


def _empty(config: K3Config, weights: K3Weights, batch: int) -> Past:
    c, new = config, weights.embedding.new_zeros
    keys, values = (c.heads, c.kda_k), (c.heads, c.kda_v)
    channels = c.heads * (2 * c.kda_k + c.kda_v)
    kda, mla = {}, {}
    for i in range(c.layers):
        if i in c.mla_layers:
            mla[i] = new(batch, 0, c.kv_lora + c.rope)
        else:
            kda[i] = KdaPast(
                state=new(batch, c.heads, c.kda_v, c.kda_k),
                raw=new(batch, TAPS - 1, channels),
                u=new(batch, 0, *values),
                key=new(batch, 0, *keys),
                g=new(batch, 0, *keys),
            )
    return Past(0, kda, mla)


def _advance(config: K3Config, prefix: Tensor, delta: Tensor | None) -> Tensor:
    """prefix + delta, rounded as attention residuals round the prefix."""
    new = prefix if delta is None else prefix + delta
    if config.round_prefix is None:
        return new
    return new.to(config.round_prefix).to(new.dtype)


def _mix(
    config: K3Config, prefix: Tensor, saved: Sequence[Tensor], weights: ResidualWeights
) -> Tensor:
    hidden = prefix
    if saved:
        sources = torch.stack((*saved, prefix), -2)
        spread = torch.rsqrt(sources.pow(2).mean(-1) + config.norm_eps)
        with torch.autocast(prefix.device.type, enabled=False):
            scores = F.linear(sources, (weights.norm * weights.query)[None])
        shares = torch.softmax(scores[..., 0] * spread, -1)
        hidden = (shares[..., None] * sources).sum(-2)
    return rms_norm(hidden, weights.output_norm, config.norm_eps)


def _kda(
    config: K3Config, layer: KdaLayer, x: Tensor, past: KdaPast
) -> tuple[Tensor, KdaPast]:
    c, core = config, layer.core
    keys, values = c.heads * c.kda_k, c.heads * c.kda_v
    sizes = [2 * keys + values, values, c.decay_rank, c.heads]
    packed = F.linear(x, layer.in_proj)
    z, gate, f_a, b = packed[..., : sum(sizes)].split(sizes, -1)
    r = F.linear(f_a, layer.w_fb).to(x.dtype).unflatten(-1, (c.heads, c.kda_k))
    with torch.autocast(x.device.type, enabled=False):
        raw = torch.cat((past.raw, z.to(x.dtype)), 1)
        taps = torch.cat(
            [t.flatten(1) for t in (core.conv_q, core.conv_k, core.conv_v)], 1
        )
        length = x.shape[1]
        mixed = raw[:, :length] * taps[0]
        for i in range(1, TAPS):
            mixed = mixed + raw[:, i : i + length] * taps[i]
        q, k, v = (
            part.unflatten(-1, (c.heads, -1))
            for part in F.silu(mixed).split((keys, keys, values), -1)
        )
        q, key = _unit(q) * c.kda_k**-0.5, _unit(k)
        g = log_decay(r, core)
        o, u, _ = chunk_kda(q, key, v, g, torch.sigmoid(b.to(x.dtype)), past.state)
        o = rms_norm(o, core.norm, core.norm_eps)
        o = o * torch.sigmoid(gate.to(x.dtype).unflatten(-1, (c.heads, -1)))
    out = F.linear(o.flatten(2), layer.out).to(x.dtype)
    return out, KdaPast(past.state, raw, u, key, g)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def _mla(layer: MlaLayer, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    w = layer.core
    heads, v_head, _ = w.w_uv.shape
    sizes = [w.q_a_norm.shape[0], w.line, heads * v_head]
    q_a, kv_a, gate = (
        part.to(x.dtype)
        for part in F.linear(x, layer.in_proj)[..., : sum(sizes)].split(sizes, -1)
    )
    q = F.linear(rms_norm(q_a, w.q_a_norm, w.norm_eps), w.w_qb)
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    own = torch.cat(
        (
            rms_norm(kv_a[..., : w.kv_lora], w.kv_norm, w.norm_eps),
            kv_a[..., w.kv_lora :],
        ),
        -1,
    )
    lines = torch.cat((past, own), 1)
    latent, shared = lines.split((w.kv_lora, w.rope), -1)
    nope, v = (
        F.linear(latent, m.flatten(0, 1)).unflatten(-1, (heads, -1)).transpose(1, 2)
        for m in (w.w_uk, w.w_uv)
    )
    k = torch.cat((nope, shared.to(nope.dtype)[:, None].expand(-1, heads, -1, -1)), -1)
    rows, before = x.shape[1], past.shape[1]
    mask = None
    if before:
        mask = torch.ones(rows, before + rows, dtype=torch.bool, device=x.device)
        mask = mask.tril(before)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=w.scale
    )
    gated = out.transpose(1, 2).flatten(2) * torch.sigmoid(gate)
    return F.linear(gated, layer.out).to(x.dtype), lines


def _mlp(x: Tensor, weights: MlpWeights) -> Tensor:
    inner = situ(F.linear(x, weights.gate), F.linear(x, weights.up))
    return F.linear(inner, weights.down).to(x.dtype)


def _moe(
    weights: MoeWeights, x: Tensor, bank: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    w = weights
    w1, w3, w2 = bank
    with torch.autocast(x.device.type, enabled=False):
        scores = torch.sigmoid(F.linear(x, w.router))
        # A stable sort prefers the lower id among equals, as `route` does.
        order = torch.sort(scores.detach() + w.bias, descending=True, stable=True)
        ids = order.indices[..., : w.top_k]
        picked = scores * torch.zeros_like(scores).scatter(-1, ids, 1.0)
        share = picked / picked.sum(-1, keepdim=True) * w.routed_scale
    latent = F.linear(x, w.latent_down)
    inner = situ(
        F.linear(latent, w1.flatten(0, 1)), F.linear(latent, w3.flatten(0, 1))
    ).unflatten(-1, (w1.shape[0], -1))
    weighted = (inner * share[..., None].to(inner.dtype)).flatten(-2)
    routed = F.linear(weighted, w2.transpose(0, 1).flatten(1)).to(x.dtype)
    up = F.linear(rms_norm(routed, w.latent_norm, w.norm_eps), w.latent_up)
    return up.to(x.dtype) + _mlp(x, w.shared), ids.flatten(0, -2)
