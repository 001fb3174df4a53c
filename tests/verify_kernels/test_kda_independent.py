# SPDX-License-Identifier: Apache-2.0
"""KDA's reference against code of others: fla-core, Transformers, torch's own ops."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.verify_kernels.test_kda_reference import batch_of, take
from verify_kernels.kda.reference import (
    L2_EPS,
    KdaRows,
    KdaState,
    KdaWeights,
    commit,
    log_decay,
    verify,
)

HEADS, K, V, COUNT = 3, 16, 12, 24
EPS = 2.0**-24  # half a unit in the last place of fp32


def optional(name: str) -> ModuleType:
    with warnings.catch_warnings():  # fla says on import that there is no GPU
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


def fla_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    naive = optional("fla.ops.kda.naive")
    return naive.naive_recurrent_kda(q, k, v, g, beta)[0]


def transformers_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> Tensor:
    name = "transformers.models.kimi_linear.modeling_kimi_linear"
    recurrence = optional(name).recurrent_kimi_delta_attention
    # Past a decorator that would use fla's kernel or one to be downloaded.
    return inspect.unwrap(recurrence)(q, k, v, g, beta, None, False)[0]


def sample(dtype: torch.dtype, decay: float) -> tuple[KdaWeights, KdaRows]:
    """fp32 values in ``dtype``; g reaches from ``decay`` times -5 to 0."""
    gen = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(dtype)

    heads = (COUNT, HEADS)
    w = KdaWeights(
        normal(4, HEADS, K),
        normal(4, HEADS, K),
        normal(4, HEADS, V),
        normal(HEADS),
        normal(HEADS, K),
        normal(V),
        lower_bound=-5.0 * decay,
    )
    wide = [normal(*heads, n) for n in (K, K, V, K)]
    return w, KdaRows(*wide, normal(*heads), normal(*heads, V))


def conv(z: Tensor, weight: Tensor) -> Tensor:
    """[1, T, H, C] by torch's depthwise convolution, from a first token on."""
    count, heads, width = z.shape
    line = F.pad(z.reshape(count, -1).T, (3, 0))
    kernel = weight.reshape(4, 1, heads * width).permute(2, 1, 0)
    y = F.conv1d(line, kernel, groups=heads * width).T
    return F.silu(y).reshape(1, count, heads, width)


def front(rows: KdaRows, w: KdaWeights) -> dict[str, Tensor]:
    """q (unscaled), k, v, g, beta [1, T, H, ..] by torch's own convolution and norm."""

    def unit(x: Tensor) -> Tensor:
        # rms_norm's mean and its eps, both times the width, are the sum and L2_EPS.
        n = x.shape[-1]
        return F.rms_norm(x, (n,), eps=L2_EPS / n) / n**0.5

    return {
        "q": unit(conv(rows.q, w.conv_q)),
        "k": unit(conv(rows.k, w.conv_k)),
        "v": conv(rows.v, w.conv_v),
        "g": log_decay(rows.r, w)[None],
        "beta": torch.sigmoid(rows.b)[None],
    }


def decode(rows: KdaRows, w: KdaWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs of verify steps of widths 1 to 8, all accepted; states after each row."""
    cache, got, states, at = KdaState.allocate(2, HEADS, K, V, dtype), [], [], 0
    for width in (1, 8, 5, 3, 7):
        index = list(range(at, at + width))
        got.append(verify(batch_of([width], [1]), take(rows, index), w, cache))
        for t in range(width):
            partial = cache.clone()
            commit(partial, 1, t + 1)
            states.append(partial.state[1])
        commit(cache, 1, width)
        at += width
    return torch.cat(got), torch.stack(states)


def back(o: Tensor, rows: KdaRows, w: KdaWeights) -> Tensor:
    return F.rms_norm(o, (V,), w.norm, w.norm_eps) * torch.sigmoid(rows.gate)


def state_bound(
    x: dict[str, Tensor], states: Tensor, extra: Tensor | float = 0.0
) -> Tensor:
    """Bound on |S_fp32 - S| [T, H], Frobenius norms throughout.

    A step multiplies an earlier error by diag(a) (I - beta k k^T), of norm at most
    max(a), and rounds its inputs (g by eps |g| <= 5 eps), a sum over K terms and six
    products and sums: (K + 20) eps (|S_before| + |v|), and ``extra`` on top.
    """
    size = states.flatten(2).norm(dim=-1)
    before = torch.cat((torch.zeros_like(size[:1]), size[:-1]))
    own = (K + 20) * EPS * (before + x["v"][0].norm(dim=-1)) + extra
    factor = x["g"][0].exp().amax(-1)
    bounds = [own[0]]
    for t in range(1, COUNT):
        bounds.append(factor[t] * bounds[-1] + own[t])
    return torch.stack(bounds)


def output_bound(x: dict[str, Tensor], states: Tensor) -> Tensor:
    """Bound on |o_fp32 - o| [T, H]: o = S q adds (K + 4) eps |S|; |q~| <= K^-1/2."""
    size = states.flatten(2).norm(dim=-1)
    return (state_bound(x, states) + (K + 4) * EPS * size) * K**-0.5


@pytest.mark.parametrize(
    ("recurrence", "decay"),
    [
        (fla_recurrence, 1.0),
        (fla_recurrence, 0.02),
        (transformers_recurrence, 1.0),
        (transformers_recurrence, 0.02),
    ],
)
def test_fp64_recurrence_is_that_of_other_packages(
    recurrence: Callable[..., Tensor], decay: float
) -> None:
    """Their fp32 differs from our fp64 by no more than fp32 rounding can do, at K3's
    decay and at one fifty times slower, where the state holds every token."""
    w, rows = sample(torch.float64, decay)
    x = front(rows, w)
    got, states = decode(rows, w, torch.float64)
    o = recurrence(**{name: value.float() for name, value in x.items()})[0].double()
    bound = output_bound(x, states)
    # The norm's derivative is at most 1 / rms; rms itself moves with the error.
    rms = (o.pow(2).mean(-1) + w.norm_eps).sqrt()
    room = (rms - bound / V**0.5).clamp_min(w.norm_eps**0.5)
    bound = bound / room * w.norm.abs().amax()
    difference = (got - back(o, rows, w)).abs().amax(-1)
    assert (difference <= bound).all(), (difference / bound).max()
    assert bound.median() < 1e-2  # outputs are near 1: a wrong term shows


@pytest.mark.parametrize("decay", [1.0, 0.02])
def test_fp32_reference_stays_within_its_rounding_bound(decay: float) -> None:
    """`state_bound`, plus what fp32 does before the recurrence: 6 eps of the
    convolution's absolute terms through SiLU's slope of at most 1.1, the norm of k, and
    g's exponent x, rounded 5 times, through the sigmoid's slope of 1/4."""
    w, rows = sample(torch.float64, decay)
    w32, rows32 = sample(torch.float32, decay)
    _, states = decode(rows, w, torch.float64)
    _, states32 = decode(rows32, w32, torch.float32)
    x = front(rows, w)

    def conv_error(z: Tensor, weight: Tensor) -> Tensor:
        past = F.pad(z.abs(), (0, 0, 0, 0, 3, 0))
        terms = sum(weight[i].abs() * past[i : i + COUNT] for i in range(4))
        return 7 * EPS * torch.as_tensor(terms).norm(dim=-1)

    length = conv(rows.k, w.conv_k)[0].norm(dim=-1)
    key = conv_error(rows.k, w.conv_k) / length + (K + 4) * EPS
    exponent = (w.a_log.exp()[:, None] * (rows.r + w.dt_bias)).abs().amax(-1)
    gate = 5 * decay * EPS * (5 / 4 * exponent + 4)
    size = states.flatten(2).norm(dim=-1)
    before = torch.cat((torch.zeros_like(size[:1]), size[:-1]))
    value = x["v"][0].norm(dim=-1)
    extra = conv_error(rows.v, w.conv_v) + (2 * before + value) * key + before * gate
    bound = state_bound(x, states, extra)
    error = (states32.double() - states).flatten(2).norm(dim=-1)
    assert (error <= bound).all()
    assert bound.max() < 1e-3 * size.max()


def test_front_and_back_are_torch_ops_in_fp64() -> None:
    """Convolution, SiLU, L2 norm and gated RMSNorm against F.conv1d and F.rms_norm,
    with the recurrence as matrices: each row's rounding is eps times a few dozen."""
    w, rows = sample(torch.float64, 1.0)
    x = front(rows, w)
    state = torch.zeros(HEADS, V, K, dtype=torch.float64)
    outs = []
    eye = torch.eye(K, dtype=torch.float64)
    for t in range(COUNT):
        k, beta = x["k"][0, t], x["beta"][0, t][:, None, None]
        turn = eye - beta * k[:, :, None] * k[:, None, :]
        decay = torch.diag_embed(x["g"][0, t].exp())
        state = state @ decay @ turn + beta * x["v"][0, t][:, :, None] * k[:, None, :]
        outs.append((state @ x["q"][0, t][:, :, None])[..., 0] / K**0.5)
    got, states = decode(rows, w, torch.float64)
    torch.testing.assert_close(states[-1], state, rtol=1e-11, atol=1e-12)
    expected = back(torch.stack(outs), rows, w)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_decay_is_flas_lower_bound_gate() -> None:
    """fp32 on both sides: the exponent's rounding, at most 4 eps of |x| <= 40, and the
    sigmoid's slope of at most 5 / 4."""
    gate = optional("fla.ops.kda.gate")
    w, rows = sample(torch.float32, 1.0)
    expected = gate.naive_kda_lowerbound_gate(rows.r, w.a_log, w.dt_bias.flatten())
    bound = 1.25 * 4 * EPS * 40 + 5 * 4 * EPS
    torch.testing.assert_close(log_decay(rows.r, w), expected, rtol=0, atol=bound)


def test_eight_rows_in_matrix_form_leave_the_committed_state() -> None:
    """The form kernels use: u from one triangular solve, the state from one sum. With g
    above -0.1 the factors e^{-L} stay below e^{0.8}, so fp64 loses nothing to them."""
    w, rows = sample(torch.float64, 0.02)
    x = front(rows, w)
    cache = KdaState.allocate(2, HEADS, K, V, torch.float64)
    first, second = list(range(5)), list(range(5, 13))
    verify(batch_of([5], [1]), take(rows, first), w, cache)
    commit(cache, 1, 5)
    before = cache.state[1].clone()
    verify(batch_of([8], [1]), take(rows, second), w, cache)
    for h in range(HEADS):
        k, v, g = (x[n][0, 5:13, h] for n in ("k", "v", "g"))
        beta, total = x["beta"][0, 5:13, h], g.cumsum(0)
        p, s = total.exp() * k, (-total).exp() * k
        lower = torch.tril(beta[:, None] * (p @ s.T), -1)
        right = beta[:, None] * (v - p @ before[h].T)
        eye = torch.eye(8, dtype=torch.float64)
        u = torch.linalg.solve_triangular(eye + lower, right, upper=False)
        torch.testing.assert_close(cache.u[1, :, h], u, rtol=1e-11, atol=1e-12)
        for n in range(9):
            kept = cache.clone()
            commit(kept, 1, n)
            end = total[n - 1] if n else torch.zeros(K, dtype=torch.float64)
            expected = before[h] * end.exp() + u[:n].T @ (s[:n] * end.exp())
            torch.testing.assert_close(
                kept.state[1, h], expected, rtol=1e-11, atol=1e-12
            )


def test_unpack_splits_the_packed_projection() -> None:
    """Packed order [q | k | v | g | f_a | beta | pad]; r = W_fb f_a, one row at a time,
    the same bits for every M; bfloat16 once, where vLLM stores it."""
    gen = torch.Generator().manual_seed(3)
    rank, count = 5, 6
    _, rows = sample(torch.float64, 1.0)
    rows = take(rows, list(range(count)))
    f_a = torch.randn(count, rank, generator=gen, dtype=torch.float64)
    w_fb = torch.randn(HEADS * K, rank, generator=gen, dtype=torch.float64)
    parts = [
        rows.q,
        rows.k,
        rows.v,
        rows.gate,
        f_a,
        rows.b,
        torch.full((6, 9), torch.nan),
    ]
    packed = torch.cat([p.reshape(count, -1) for p in parts], dim=1)
    got = KdaRows.unpack(packed, w_fb, HEADS, V)
    for name in ("q", "k", "v", "b", "gate"):
        assert torch.equal(getattr(got, name), getattr(rows, name)), name
    r = torch.einsum("nr,mr->mn", w_fb, f_a).view(count, HEADS, K)
    torch.testing.assert_close(got.r, r, rtol=1e-13, atol=1e-13)
    rounded = KdaRows.unpack(packed, w_fb, HEADS, V, bf16_decay=True)
    assert torch.equal(rounded.r, got.r.bfloat16().double())
    for i in range(count):
        alone = KdaRows.unpack(packed[i : i + 1], w_fb, HEADS, V)
        assert torch.equal(alone.r[0], got.r[i])
    with pytest.raises(ValueError, match=r"packed is 175 wide.* = 176 columns"):
        KdaRows.unpack(packed[:, :175], w_fb, HEADS, V)
    with pytest.raises(ValueError, match="w_fb has 48 rows and heads is 5"):
        KdaRows.unpack(packed, w_fb, 5, V)
