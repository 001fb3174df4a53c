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
share these numbers: *eager* commits after sampling; *fold* commits the previous step's
records while the next step loads the state. The convolution window (the last three z)
commits with the state.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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
        cls, slots: int, heads: int, k: int, v: int, dtype: torch.dtype
    ) -> KdaState:
        """Zero state and windows; records NaN, so that a read before a write shows."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype)

        def poison(*shape: int) -> Tensor:
            return torch.full((slots, *shape), torch.nan, dtype=dtype)

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
            width=torch.zeros(slots, dtype=torch.int64),
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
    ``batch.accepted``. Without it they must have been committed (`commit`). The
    committed state is not touched by the step's own rows; their records are.
    """
    out = torch.zeros_like(rows.v)
    starts, slots = batch.row_start.tolist(), batch.state_slots.tolist()
    accepted = batch.accepted.tolist()
    for b, slot in enumerate(slots):
        begin, end = starts[b], starts[b + 1]
        if slot <= 0 or begin == end:
            continue
        if fold:
            commit(cache, slot, accepted[b])
        elif cache.width[slot]:
            raise ValueError(
                f"slot {slot} holds {int(cache.width[slot])} uncommitted rows; call "
                "commit after sampling, or verify with fold=True"
            )
        own = slice(begin, end)
        width = end - begin
        lines = {
            name: torch.cat((getattr(cache, f"window_{name}")[slot], z[own]))
            for name, z in (("q", rows.q), ("k", rows.k), ("v", rows.v))
        }
        state = cache.state[slot]
        # One row at a time: with all rows of a request in one call, torch's results
        # differed in the last bit with the number of rows.
        for t in range(width):
            q = _unit(convolve(lines["q"][t : t + TAPS], weights.conv_q))
            q = q * q.shape[-1] ** -0.5
            key = _unit(convolve(lines["k"][t : t + TAPS], weights.conv_k))
            v = convolve(lines["v"][t : t + TAPS], weights.conv_v)
            g = log_decay(rows.r[begin + t], weights)
            beta = torch.sigmoid(rows.b[begin + t])[:, None]
            decayed = state * g.exp()[:, None, :]
            u = beta * (v - (decayed * key[:, None, :]).sum(-1))
            state = _apply(state, u, key, g)
            o = (state * q[:, None, :]).sum(-1)
            scale = torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + weights.norm_eps)
            gate = torch.sigmoid(rows.gate[begin + t])
            out[begin + t] = o * scale * weights.norm * gate
            cache.u[slot, t], cache.key[slot, t], cache.g[slot, t] = u, key, g
        for name in ("q", "k", "v"):
            getattr(cache, f"z_{name}")[slot, :width] = getattr(rows, name)[own]
        cache.width[slot] = width
    return out
