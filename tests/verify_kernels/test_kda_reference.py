# SPDX-License-Identifier: Apache-2.0
"""verify(q) then commit(a) is a plain steps, for every q, a, batch and layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verify_kernels import VerifyBatch
from verify_kernels.kda.reference import (
    KdaRows,
    KdaState,
    KdaWeights,
    commit,
    log_decay,
    verify,
)

HEADS, K, V = 2, 6, 4  # K != V, so that a transposed state shows (field case F19)
DTYPE = torch.float64


def weights(seed: int = 0) -> KdaWeights:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=DTYPE)

    return KdaWeights(
        normal(4, HEADS, K),
        normal(4, HEADS, K),
        normal(4, HEADS, V),
        normal(HEADS),
        normal(HEADS, K),
        normal(V),
    )


def tokens(count: int, seed: int) -> KdaRows:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, generator=g, dtype=DTYPE)

    return KdaRows(
        normal(HEADS, K),
        normal(HEADS, K),
        normal(HEADS, V),
        normal(HEADS, K),
        normal(HEADS),
        normal(HEADS, V),
    )


def take(rows: KdaRows, index: list[int]) -> KdaRows:
    return KdaRows(*(getattr(rows, f)[index] for f in KdaRows.__dataclass_fields__))


def join(parts: list[KdaRows]) -> KdaRows:
    names = KdaRows.__dataclass_fields__
    return KdaRows(*(torch.cat([getattr(p, f) for p in parts]) for f in names))


def batch_of(
    widths: list[int], slots: list[int], accepted: list[int] | None = None
) -> VerifyBatch:
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    starts = [0]
    for width in widths:
        starts.append(starts[-1] + width)
    batch = VerifyBatch(
        ints(starts),
        ints([0] * len(widths)),
        ints(slots),
        ints(accepted or [0] * len(widths)),
    )
    batch.check()
    return batch


def fresh(slots: int = 4) -> KdaState:
    return KdaState.allocate(slots, HEADS, K, V, DTYPE)


def textbook(rows: KdaRows, w: KdaWeights) -> torch.Tensor:
    """Independent: one request from its first token, matrices written out."""
    outs = []
    count = rows.q.shape[0]
    for h in range(HEADS):
        s = torch.zeros(V, K, dtype=DTYPE)
        for t in range(count):

            def conv(z: torch.Tensor, c: torch.Tensor, t: int = t, h: int = h):
                past = [z[j, h] if j >= 0 else 0 * z[0, h] for j in range(t - 3, t + 1)]
                y = sum(c[i, h] * past[i] for i in range(4))
                return y / (1 + torch.exp(-y))

            q, k = conv(rows.q, w.conv_q), conv(rows.k, w.conv_k)
            v = conv(rows.v, w.conv_v)
            q = q / (q @ q + 1e-6).sqrt() / K**0.5
            k = k / (k @ k + 1e-6).sqrt()
            x = torch.exp(w.a_log[h]) * (rows.r[t, h] + w.dt_bias[h])
            s = s @ torch.diag(torch.exp(-5.0 / (1 + torch.exp(-x))))
            beta = 1 / (1 + torch.exp(-rows.b[t, h]))
            s = s + torch.outer(beta * (v - s @ k), k)
            o = s @ q
            o = o / (o.pow(2).mean() + 1e-5).sqrt() * w.norm
            outs.append((t, h, o / (1 + torch.exp(-rows.gate[t, h]))))
    out = torch.zeros(count, HEADS, V, dtype=DTYPE)
    for t, h, o in outs:
        out[t, h] = o
    return out


def test_plain_decoding_is_the_textbook_recurrence() -> None:
    w, rows, cache = weights(), tokens(9, 1), fresh()
    got = []
    for t in range(9):
        got.append(verify(batch_of([1], [2]), take(rows, [t]), w, cache))
        commit(cache, 2, 1)
    torch.testing.assert_close(torch.cat(got), textbook(rows, w), rtol=1e-11, atol=0)


def plain(rows: KdaRows, w: KdaWeights, count: int) -> KdaState:
    cache = fresh()
    for t in range(count):
        verify(batch_of([1], [1]), take(rows, [t]), w, cache)
        commit(cache, 1, 1)
    return cache


steps = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 8)), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(steps=steps, fold=st.booleans(), seed=st.integers(0, 5))
def test_verify_then_commit_is_plain_steps(
    steps: list[tuple[int, int]], fold: bool, seed: int
) -> None:
    """Field cases F02, F13, F19: state and window, every width and accepted count, both
    layouts, bit for bit; rejected rows leave no trace."""
    w, cache, kept, waiting = weights(seed), fresh(), [], 0
    for number, (width, accept) in enumerate(steps):
        rows = tokens(width, 100 * seed + number)
        batch = batch_of([width], [1], [waiting])
        verify(batch, rows, w, cache, fold=fold)
        waiting = min(accept, width)
        if waiting:
            kept.append(take(rows, list(range(waiting))))
        if not fold:
            commit(cache, 1, waiting)
    if fold:
        commit(cache, 1, waiting)
    expected = plain(join(kept), w, sum(len(r.b) for r in kept)) if kept else fresh()
    for name in ("state", "window_q", "window_k", "window_v"):
        assert torch.equal(getattr(cache, name), getattr(expected, name)), name
    assert cache.overruns == 0


@settings(max_examples=40, deadline=None)
@given(widths=st.lists(st.integers(0, 8), min_size=1, max_size=7))
def test_rows_do_not_depend_on_batch_mates(widths: list[int]) -> None:
    """Field case F01: ragged rows equal the same request alone, bit for bit."""
    w = weights()
    slots = list(range(1, len(widths) + 1))
    parts = [tokens(width, i) for i, width in enumerate(widths)]
    together = verify(batch_of(widths, slots), join(parts), w, fresh(9))
    begin = 0
    for width, rows in zip(widths, parts, strict=True):
        alone = verify(batch_of([width], [1]), rows, w, fresh())
        assert torch.equal(together[begin : begin + width], alone)
        for shorter in range(width):  # row t does not depend on later rows
            cut = take(rows, list(range(shorter)))
            part = verify(batch_of([shorter], [1]), cut, w, fresh())
            assert torch.equal(part, alone[:shorter])
        begin += width


def test_padding_leaves_no_trace() -> None:
    """Field case F20: slots <= 0 and rows past the end are neither read nor written."""
    w, cache = weights(), fresh()
    rows = tokens(7, 3)
    for field in KdaRows.__dataclass_fields__:
        getattr(rows, field)[2:4] = torch.nan  # the request without a slot
        getattr(rows, field)[5:] = torch.nan  # rows past row_start[B]
    before = cache.clone()
    out = verify(batch_of([2, 2, 1], [1, 0, 3]), rows, w, cache)
    assert torch.isfinite(out).all() and (out[2:4] == 0).all() and (out[5:] == 0).all()
    for slot in (0, 2):
        assert torch.equal(cache.state[slot], before.state[slot])
        assert torch.isnan(cache.u[slot]).all() and cache.width[slot] == 0
    assert torch.equal(cache.state[1], before.state[1])  # not committed yet


@pytest.mark.parametrize(("accept", "kept"), [(0, 0), (3, 3), (5, 3), (-1, 0)])
def test_accepted_count_is_clamped_and_counted(accept: int, kept: int) -> None:
    """Field case F03: 0 commits nothing; too many commits what exists, counted."""
    w, cache, rows = weights(), fresh(), tokens(3, 4)
    verify(batch_of([3], [1]), rows, w, cache)
    commit(cache, 1, accept)
    assert torch.equal(cache.state, plain(rows, w, kept).state)
    assert cache.overruns == (accept > 3)


def test_fold_clamps_and_counts_accepted_counts() -> None:
    """Field case F03 through verify: accepted 0, the width, width + 2 and 1 in one
    batch; request 0 keeps its bits, request 2 has the whole step, one event counted."""
    w, cache = weights(), fresh(5)
    rows = [tokens(3, b) for b in range(4)]
    slots = [1, 2, 3, 4]
    verify(batch_of([3] * 4, slots), join(rows), w, cache, fold=True)
    before = cache.clone()
    nexts = [tokens(2, 10 + b) for b in range(4)]
    batch = batch_of([2] * 4, slots, [0, 3, 5, 1])
    got = verify(batch, join(nexts), w, cache, fold=True)
    assert cache.overruns == 1
    assert torch.equal(cache.state[1], before.state[1])
    for b, kept in enumerate([0, 3, 3, 1]):
        expected = plain(rows[b], w, kept)
        for name in ("state", "window_q", "window_k", "window_v"):
            assert torch.equal(
                getattr(cache, name)[b + 1], getattr(expected, name)[1]
            ), (name, b)
        alone = verify(batch_of([2], [1]), nexts[b], w, expected)
        assert torch.equal(got[2 * b : 2 * b + 2], alone)


@pytest.mark.parametrize("fold", [True, False])
def test_a_live_slot_of_width_0_leaves_its_records_waiting(fold: bool) -> None:
    """Field case F20: width 0 is padding, so its accepted count is not read either; the
    step with the request's next rows brings the count again."""
    w, cache = weights(), fresh()
    first, second, other = tokens(4, 1), tokens(2, 2), tokens(3, 3)
    verify(batch_of([4], [1]), first, w, cache, fold=fold)
    before = cache.clone()
    verify(batch_of([0, 3], [1, 2], [9, 0]), other, w, cache, fold=fold)
    for name in ("state", "window_q", "u", "key", "g", "z_q", "width"):
        left, right = getattr(cache, name)[1], getattr(before, name)[1]
        assert torch.equal(left.nan_to_num(), right.nan_to_num()), name
    assert cache.overruns == 0 and cache.width[1] == 4
    if not fold:
        commit(cache, 1, 3)
    got = verify(batch_of([2], [1], [3]), second, w, cache, fold=fold)
    expected = plain(first, w, 3)
    assert torch.equal(got, verify(batch_of([2], [1]), second, w, expected))
    assert torch.equal(cache.state[1], expected.state[1])


def test_uncommitted_records_are_not_lost_silently() -> None:
    w, cache = weights(), fresh()
    verify(batch_of([3], [1]), tokens(3, 4), w, cache)
    with pytest.raises(ValueError, match="slot 1 holds 3 uncommitted rows"):
        verify(batch_of([1], [1]), tokens(1, 5), w, cache)
    with pytest.raises(ValueError, match="slot 1 holds 3 uncommitted rows"):
        verify(batch_of([1, 1], [2, 1]), tokens(2, 5), w, cache)
    assert torch.isnan(cache.u[2]).all()  # refused before the first request's rows


def test_strong_gates_stay_finite() -> None:
    """Field case F17: every exponent that reaches exp is <= 0, at both ends."""
    w = weights()
    for value in (-1e4, 0.0, 1e4):
        g = log_decay(torch.full((1, HEADS, K), value, dtype=DTYPE), w)
        assert (g <= 0).all() and (g >= -5).all()
        rows = tokens(8, 6)
        rows.r[:] = value
        assert torch.isfinite(verify(batch_of([8], [1]), rows, w, fresh())).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"row_start": torch.tensor([0, 9], dtype=torch.int32)}, "0 to 8 rows"),
        ({"row_start": torch.tensor([1, 2], dtype=torch.int32)}, "begin with 0"),
        ({"accepted": torch.zeros(1)}, "accepted is torch.float32"),
    ],
)
def test_batch_contract(change: dict[str, torch.Tensor], words: str) -> None:
    good = batch_of([1], [1])
    parts = {f: getattr(good, f) for f in VerifyBatch.__dataclass_fields__} | change
    with pytest.raises(ValueError, match=words):
        VerifyBatch(**parts).check()
    with pytest.raises(ValueError, match="one slot for two"):
        batch_of([1, 1], [2, 2])
