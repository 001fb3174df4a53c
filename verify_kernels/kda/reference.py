# SPDX-License-Identifier: Apache-2.0
"""KDA verify and commit in plain torch: the truth for the kernels, fp32 or fp64.

Per head, state S [V, K]. With z the projections before the convolution, row t:

    y_t  = SiLU(sum_{i<4} w_i z_{t-3+i})                     (q, k and v alike)
    q~   = q / sqrt(|q|^2 + 1e-6) K^-1/2,  k~ = k / sqrt(|k|^2 + 1e-6)
    g    = lower * sigmoid(exp(A_log) (r + dt_bias)),  a = exp(g)     per key channel
    S   <- S diag(a);  u = sigmoid(b) (v - S k~);  S <- S + u k~^T;  o = S q~
    out  = RMSNorm(o) * sigmoid(gate)

A verify step must not change what rejected rows would have changed, so it leaves
records (u, k~, g and z of each row), and a commit folds the accepted ones:

    S_n = S_0 diag(e^{L_n}) + sum_{t<n} u_t (k~_t e^{L_n - L_t})^T,
    L_t = g_1 + .. + g_t

in the recurrence's own order, so that the bits are those of plain decoding. Two layouts
live here: *eager* commits after sampling; *fold* commits the previous step's records
while the next step loads the state. The convolution window (the last three z) commits
with the state. A third, one snapshot a row, is in `verify_kernels.kda.snapshot`; all
three run the one `step` below.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verify_kernels.batch import MAX_WIDTH, VerifyBatch

TAPS = 4
L2_EPS = 1e-6


@dataclass(frozen=True)
class KdaWeights:
    """conv_q, conv_k [4, H, K]; conv_v [4, H, V]; a_log [H]; dt_bias [H, K]; norm [V].

    The decay's logarithm lies in (lower_bound, 0).
    K = V is not assumed, so the convolutions of q and k and that of v are kept apart.
    """

    conv_q: Tensor
    conv_k: Tensor
    conv_v: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    lower_bound: float = -5.0
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class KdaRows:
    """Projections of the step's rows, M rows (padding included).

    q, k [M, H, K] and v [M, H, V] before the convolution; r [M, H, K], the decay input
    after W_fb; b [M, H]; gate [M, H, V].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    b: Tensor
    gate: Tensor

    @classmethod
    def unpack(
        cls,
        packed: Tensor,
        w_fb: Tensor,
        heads: int,
        value_dim: int,
        *,
        bf16_decay: bool = False,
    ) -> KdaRows:
        """Split vLLM's packed projection [q | k | v | g | f_a | beta | pad].

        packed [M, 2 H K + 2 H V + R + H + pad], where pad >= 0 columns are not read;
        w_fb [H K, R] takes the low-rank f_a to r. With ``bf16_decay`` r is rounded to
        bfloat16, as it is between vLLM's two GEMMs. Each row's r is one product of its
        own, so that its bits do not depend on M. ValueError if the widths do not fit.
        """
        key_width, rank = w_fb.shape
        sizes = [key_width, key_width, heads * value_dim, heads * value_dim]
        sizes += [rank, heads]
        if key_width % heads:
            raise ValueError(
                f"w_fb has {key_width} rows and heads is {heads}; the rows must be a "
                "multiple of heads: pass the heads of this rank"
            )
        if packed.shape[1] < sum(sizes):
            raise ValueError(
                f"packed is {packed.shape[1]} wide; q, k, v, g, f_a and beta need "
                f"{' + '.join(map(str, sizes))} = {sum(sizes)} columns"
            )
        q, k, v, gate, f_a, beta = packed[:, : sum(sizes)].split(sizes, dim=1)
        r = torch.empty_like(q)
        for i, row in enumerate(f_a):
            r[i] = w_fb @ row.clone()
        if bf16_decay:
            r = r.bfloat16().to(packed.dtype)
        key, value = (heads, key_width // heads), (heads, value_dim)
        return cls(
            q=q.unflatten(1, key),
            k=k.unflatten(1, key),
            v=v.unflatten(1, value),
            r=r.unflatten(1, key),
            b=beta,
            gate=gate.unflatten(1, value),
        )


@dataclass
class KdaState:
    """Slots of committed state and the records of each slot's last verify step.

    state [slots, H, V, K]; window_q, window_k [slots, 3, H, K] and window_v
    [slots, 3, H, V], oldest first; u [slots, 8, H, V]; key, g, z_q, z_k
    [slots, 8, H, K]; z_v [slots, 8, H, V]; width [slots], rows recorded and not yet
    committed; overruns counts accepted counts that exceeded what was verified.
    """

    state: Tensor
    window_q: Tensor
    window_k: Tensor
    window_v: Tensor
    u: Tensor
    key: Tensor
    g: Tensor
    z_q: Tensor
    z_k: Tensor
    z_v: Tensor
    width: Tensor
    overruns: int = 0

    @classmethod
    def allocate(
        cls,
        slots: int,
        heads: int,
        k: int,
        v: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KdaState:
        """Zero state and windows; records NaN, so that a read before a write shows."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        def poison(*shape: int) -> Tensor:
            size = (slots, *shape)
            return torch.full(size, torch.nan, dtype=dtype, device=device)

        past = TAPS - 1
        return cls(
            state=zeros(heads, v, k),
            window_q=zeros(past, heads, k),
            window_k=zeros(past, heads, k),
            window_v=zeros(past, heads, v),
            u=poison(MAX_WIDTH, heads, v),
            key=poison(MAX_WIDTH, heads, k),
            g=poison(MAX_WIDTH, heads, k),
            z_q=poison(MAX_WIDTH, heads, k),
            z_k=poison(MAX_WIDTH, heads, k),
            z_v=poison(MAX_WIDTH, heads, v),
            width=torch.zeros(slots, dtype=torch.int64, device=device),
        )

    def clone(self) -> KdaState:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return KdaState(
            **{n: x.clone() if torch.is_tensor(x) else x for n, x in values.items()}
        )


def convolve(taps: Tensor, weight: Tensor) -> Tensor:
    """SiLU of one row's causal convolution: its taps [4, H, C], oldest first."""
    total = weight[0] * taps[0]
    for i in range(1, TAPS):
        total = total + weight[i] * taps[i]
    return F.silu(total)


def log_decay(r: Tensor, weights: KdaWeights) -> Tensor:
    """g [.., H, K] in (lower_bound, 0): the exponent that reaches exp is never > 0."""
    rate = weights.a_log.exp()[:, None]
    return weights.lower_bound * torch.sigmoid(rate * (r + weights.dt_bias))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def _apply(state: Tensor, u: Tensor, key: Tensor, g: Tensor) -> Tensor:
    return state * g.exp()[:, None, :] + u[:, :, None] * key[:, None, :]


class Step(NamedTuple):
    """One row's result: out, u [H, V]; state [H, V, K] after it; key, g [H, K]."""

    out: Tensor
    state: Tensor
    u: Tensor
    key: Tensor
    g: Tensor


def step(
    state: Tensor,
    taps: tuple[Tensor, Tensor, Tensor],
    rows: KdaRows,
    i: int,
    weights: KdaWeights,
) -> Step:
    """Advance one request by row ``i`` of ``rows``; ``state`` [H, V, K] is not changed.

    taps: raw q, k [4, H, K] and v [4, H, V], oldest first, row ``i``'s own last.
    Every layout calls this, one row at a time: with all rows of a request in one call,
    torch's results differed in the last bit with the number of rows.
    """
    q = _unit(convolve(taps[0], weights.conv_q))
    q = q * q.shape[-1] ** -0.5
    key = _unit(convolve(taps[1], weights.conv_k))
    v = convolve(taps[2], weights.conv_v)
    g = log_decay(rows.r[i], weights)
    beta = torch.sigmoid(rows.b[i])[:, None]
    decayed = state * g.exp()[:, None, :]
    u = beta * (v - (decayed * key[:, None, :]).sum(-1))
    after = _apply(state, u, key, g)
    o = (after * q[:, None, :]).sum(-1)
    scale = torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + weights.norm_eps)
    out = o * scale * weights.norm * torch.sigmoid(rows.gate[i])
    return Step(out, after, u, key, g)


def commit(cache: KdaState, slot: int, accepted: int) -> None:
    """Fold the first ``accepted`` recorded rows of ``slot`` into its committed state.

    0 commits nothing. More than was verified commits what exists and counts the event
    in ``cache.overruns``. The records are spent either way.
    """
    recorded = int(cache.width[slot])
    if accepted > recorded:
        cache.overruns += 1
    count = min(max(accepted, 0), recorded)
    for t in range(count):
        cache.state[slot] = _apply(
            cache.state[slot], cache.u[slot, t], cache.key[slot, t], cache.g[slot, t]
        )
    if count:
        for name in ("q", "k", "v"):
            window = getattr(cache, f"window_{name}")
            line = torch.cat((window[slot], getattr(cache, f"z_{name}")[slot, :count]))
            window[slot] = line[-(TAPS - 1) :]
    cache.width[slot] = 0


def verify(
    batch: VerifyBatch,
    rows: KdaRows,
    weights: KdaWeights,
    cache: KdaState,
    *,
    fold: bool = False,
) -> Tensor:
    """Gated, normed outputs [M, H, V] of every row; padding rows and slots <= 0 give 0.

    With ``fold`` the previous step's records are committed first, by
    ``batch.accepted``, clamped and counted as in `commit`. Without it they must have
    been committed: ValueError, and nothing written, if some were not. The committed
    state is not touched by the step's own rows; their records are.

    A request of width 0 is padding even if its slot is live: its records stay waiting
    and its ``accepted`` is not read, so pass that count again with its next rows.
    """
    starts, slots = batch.row_start.tolist(), batch.state_slots.tolist()
    accepted = batch.accepted.tolist()
    live = [b for b, s in enumerate(slots) if s > 0 and starts[b] < starts[b + 1]]
    for b in live:
        if not fold and cache.width[slots[b]]:
            raise ValueError(
                f"slot {slots[b]} holds {int(cache.width[slots[b]])} uncommitted rows; "
                "call commit after sampling, or verify with fold=True"
            )
    out = torch.zeros_like(rows.v)
    for b in live:
        slot, begin, end = slots[b], starts[b], starts[b + 1]
        if fold:
            commit(cache, slot, accepted[b])
        width = end - begin
        line_q = torch.cat((cache.window_q[slot], rows.q[begin:end]))
        line_k = torch.cat((cache.window_k[slot], rows.k[begin:end]))
        line_v = torch.cat((cache.window_v[slot], rows.v[begin:end]))
        state = cache.state[slot]
        for t in range(width):
            own = slice(t, t + TAPS)
            taps = (line_q[own], line_k[own], line_v[own])
            result = step(state, taps, rows, begin + t, weights)
            out[begin + t], state = result.out, result.state
            cache.u[slot, t] = result.u
            cache.key[slot, t] = result.key
            cache.g[slot, t] = result.g
        cache.z_q[slot, :width] = rows.q[begin:end]
        cache.z_k[slot, :width] = rows.k[begin:end]
        cache.z_v[slot, :width] = rows.v[begin:end]
        cache.width[slot] = width
    return out
