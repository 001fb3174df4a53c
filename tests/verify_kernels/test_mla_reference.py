# SPDX-License-Identifier: Apache-2.0
"""Absorbed, paged, ragged MLA against dense attention with keys and values written out.

Tolerance in fp64: a score is a chain of three contractions of at most 7 terms with
absolute sums near 100, so it is off by at most 2,000 eps = 4e-13; softmax doubles that
and values are below 20, so 1e-11 holds them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verify_kernels import VerifyBatch
from verify_kernels.mla.reference import (
    MlaRows,
    MlaWeights,
    finish,
    insert,
    merge,
    partial,
    queries,
    verify,
)

# No two of them equal, so that a swapped pair shows.
HEADS, NOPE, ROPE, Q_LORA, KV_LORA, V_HEAD = 3, 4, 2, 7, 5, 6
LINE = KV_LORA + ROPE
DTYPE = torch.float64
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def weights(dtype: torch.dtype = DTYPE) -> MlaWeights:
    g = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=DTYPE).to(dtype)

    return MlaWeights(
        normal(Q_LORA),
        normal(KV_LORA),
        normal(HEADS * (NOPE + ROPE), Q_LORA),
        normal(HEADS, NOPE, KV_LORA),
        normal(HEADS, V_HEAD, KV_LORA),
    )


def tokens(count: int, seed: int) -> MlaRows:
    g = torch.Generator().manual_seed(seed)
    widths = (Q_LORA, LINE, HEADS * V_HEAD)
    return MlaRows(*(torch.randn(count, w, generator=g, dtype=DTYPE) for w in widths))


def cut(rows: MlaRows, begin: int, end: int) -> MlaRows:
    return MlaRows(rows.q_a[begin:end], rows.kv_a[begin:end], rows.gate[begin:end])


def join(parts: list[MlaRows]) -> MlaRows:
    return MlaRows(
        torch.cat([p.q_a for p in parts]),
        torch.cat([p.kv_a for p in parts]),
        torch.cat([p.gate for p in parts]),
    )


def dense(rows: MlaRows, w: MlaWeights) -> Tensor:
    """Independent: one request from its first token, no absorption, torch's SDPA."""
    count = rows.q_a.shape[0]
    q = F.rms_norm(rows.q_a, (Q_LORA,), w.q_a_norm, 1e-5) @ w.w_qb.T
    q = q.view(count, HEADS, NOPE + ROPE).transpose(0, 1)
    c = F.rms_norm(rows.kv_a[:, :KV_LORA], (KV_LORA,), w.kv_norm, 1e-5)
    k = torch.einsum("hnc,tc->htn", w.w_uk, c)
    shared = rows.kv_a[:, KV_LORA:].expand(HEADS, count, ROPE)
    k = torch.cat((k, shared), dim=-1)
    v = torch.einsum("hvc,tc->htv", w.w_uv, c)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(0, 1).reshape(count, HEADS * V_HEAD) * torch.sigmoid(rows.gate)


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class World:
    """Requests over one paged cache: NaN wherever no committed token put a line."""

    def __init__(
        self, lengths: list[int], page: int, seed: int = 0, dtype: torch.dtype = DTYPE
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        blocks = [-(-n // page) for n in lengths]
        # Each request's entries past its last page name no page at all.
        self.table = torch.full((len(lengths), max(blocks) + 1), -9, dtype=torch.int32)
        pages = torch.randperm(sum(blocks) + 2, generator=g).tolist()
        for b, count in enumerate(blocks):
            self.table[b, :count] = ints([pages.pop() for _ in range(count)])
        self.page = page
        self.cache = torch.full((sum(blocks) + 2, page, LINE), torch.nan, dtype=dtype)
        self.tokens = [tokens(n, 100 * seed + b) for b, n in enumerate(lengths)]

    def fill(self, b: int, count: int, w: MlaWeights) -> None:
        rows = cut(self.tokens[b], 0, count)
        c = F.rms_norm(rows.kv_a[:, :KV_LORA], (KV_LORA,), w.kv_norm, 1e-5)
        lines = torch.cat((c, rows.kv_a[:, KV_LORA:]), dim=1)
        for p in range(count):
            self.cache[self.table[b, p // self.page], p % self.page] = lines[p]

    def batch(
        self, histories: list[int], widths: list[int], slots: list[int] | None = None
    ) -> VerifyBatch:
        starts = [sum(widths[:b]) for b in range(len(widths) + 1)]
        slots = slots or list(range(1, len(widths) + 1))
        zero = ints([0] * len(widths))
        return VerifyBatch(ints(starts), ints(histories), ints(slots), zero, self.table)

    def rows(self, histories: list[int], widths: list[int]) -> MlaRows:
        pairs = zip(self.tokens, histories, widths, strict=True)
        return join([cut(r, h, h + w) for r, h, w in pairs])


ragged = st.lists(
    st.tuples(st.integers(0, 13), st.integers(0, 8)), min_size=1, max_size=5
)


@settings(max_examples=50, deadline=None)
@given(shape=ragged, page=st.integers(1, 6), seed=st.integers(0, 3))
def test_ragged_paged_rows_are_dense_attention(
    shape: list[tuple[int, int]], page: int, seed: int
) -> None:
    """Field cases F01, F06, F13: row t sees history + t + 1 keys, whatever the page
    size and order; only the step's own lines are written."""
    histories, widths = [h for h, _ in shape], [w for _, w in shape]
    w, world = weights(), World([h + n for h, n in shape], page, seed)
    for b, history in enumerate(histories):
        world.fill(b, history, w)
    before = world.cache.clone()
    batch = world.batch(histories, widths)
    got = verify(batch, world.rows(histories, widths), w, world.cache)
    expected = [dense(r, w)[h:] for r, h in zip(world.tokens, histories, strict=True)]
    torch.testing.assert_close(got, torch.cat(expected), **CLOSE)
    written = torch.isnan(before) & ~torch.isnan(world.cache)
    assert int(written.sum()) == sum(widths) * LINE
    kept = ~torch.isnan(before)
    assert torch.equal(world.cache[kept], before[kept])


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=5
    ),
    history=st.integers(0, 5),
    page=st.integers(1, 5),
)
def test_verify_then_accept_is_plain_decoding(
    steps: list[tuple[int, int]], history: int, page: int
) -> None:
    """Field case F13: outputs and cache lines bit for bit; rejected lines are
    overwritten by the rows that come instead."""
    w, drafts = weights(), tokens(50, 99)
    total = history + sum(min(a, n) for n, a in steps)
    spec, plain = World([total + 8], page), World([total + 8], page)
    for world in (spec, plain):
        world.fill(0, history, w)
    at, got = history, []
    for width, accept in steps:
        accept = min(accept, width)
        true = cut(spec.tokens[0], at, at + accept)
        wrong = cut(drafts, at, at + width - accept)
        batch = spec.batch([at], [width])
        got.append(verify(batch, join([true, wrong]), w, spec.cache)[:accept])
        at += accept
    expected = [
        verify(plain.batch([p], [1]), cut(plain.tokens[0], p, p + 1), w, plain.cache)
        for p in range(history, total)
    ]
    assert torch.equal(torch.cat(got), torch.cat(expected))
    lines = [(plain.table[0, p // page], p % page) for p in range(total)]
    for at_line in lines:
        assert torch.equal(spec.cache[at_line], plain.cache[at_line])


@settings(max_examples=30, deadline=None)
@given(shape=ragged.filter(lambda s: sum(w for _, w in s)))
def test_rows_do_not_depend_on_batch_mates(shape: list[tuple[int, int]]) -> None:
    """Field case F01: each row equals the same row alone and one at a time, on other
    pages, bit for bit."""
    histories, widths = [h for h, _ in shape], [w for _, w in shape]
    w, world = weights(), World([h + n for h, n in shape], 4)
    for b, history in enumerate(histories):
        world.fill(b, history, w)
    batch = world.batch(histories, widths)
    together = verify(batch, world.rows(histories, widths), w, world.cache)
    begin = 0
    for b, (history, width) in enumerate(shape):
        alone = World([history + width], 4, seed=17)
        alone.tokens = [world.tokens[b]]
        alone.fill(0, history, w)
        for t in range(width):
            row = cut(world.tokens[b], history + t, history + t + 1)
            out = verify(alone.batch([history + t], [1]), row, w, alone.cache)
            assert torch.equal(out[0], together[begin + t])
        begin += width


def test_rows_are_invariant_at_the_sizes_of_k3() -> None:
    """One TP16 rank in fp32, where torch's products take their blocked paths."""
    g = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    w = MlaWeights(
        normal(1536),
        normal(512),
        normal(6 * 192, 1536) / 39,
        normal(6, 128, 512) / 11,
        normal(6, 128, 512) / 22,
    )
    rows, zero = MlaRows(normal(8, 1536), normal(8, 576), normal(8, 768)), ints([0])
    cache = torch.full((4, 64, 576), torch.nan)
    cache[3], cache[0, :57] = normal(64, 576), normal(57, 576)
    table = ints([[3, 0, 2, -1]])
    whole = VerifyBatch(ints([0, 8]), ints([121]), ints([1]), zero, table)
    together = verify(whole, rows, w, cache.clone())
    assert torch.isfinite(together).all()
    for t in range(8):
        one = VerifyBatch(ints([0, 1]), ints([121 + t]), ints([1]), zero, table)
        alone = verify(one, cut(rows, t, t + 1), w, cache)
        assert torch.equal(alone[0], together[t])


def test_each_row_sees_exactly_its_own_keys() -> None:
    """Field case F06: at page boundaries and far ones, key H + t moves row t and key
    H + t + 1 does not."""
    histories, widths = [0, 1, 5, 63, 64, 4095], [8, 1, 7, 2, 8, 3]
    w = weights()
    world = World([h + n for h, n in zip(histories, widths, strict=True)], 64)
    for b, history in enumerate(histories):
        world.fill(b, history, w)
    batch, rows = world.batch(histories, widths), world.rows(histories, widths)
    base = verify(batch, rows, w, world.cache)
    query = queries(batch, rows, w)
    begin = 0
    for b, (history, width) in enumerate(zip(histories, widths, strict=True)):
        torch.testing.assert_close(
            base[begin : begin + width], dense(world.tokens[b], w)[history:], **CLOSE
        )
        for t in range(width):
            changed = world.cache.clone()
            position = history + t
            changed[world.table[b, position // 64], position % 64] += 1
            latent, _ = partial(batch, query, w, changed)
            same = (finish(batch, latent, rows, w) == base).all(-1)
            moved = range(begin + t, begin + width)
            assert [i for i in range(len(same)) if not same[i]] == list(moved)
        begin += width


@settings(max_examples=40, deadline=None)
@given(
    history=st.integers(0, 20),
    width=st.integers(1, 8),
    chunk=st.integers(1, 9),
    ranks=st.integers(1, 9),
)
def test_splits_over_keys_merge_to_the_whole(
    history: int, width: int, chunk: int, ranks: int
) -> None:
    """Key chunks at absolute positions, and positions dealt to context-parallel ranks;
    many splits are empty for some rows, and empty splits change no bit."""
    w, world = weights(), World([history + width], 4)
    world.fill(0, history, w)
    batch = world.batch([history], [width])
    rows = cut(world.tokens[0], history, history + width)
    insert(batch, rows, w, world.cache)
    query = queries(batch, rows, w)
    whole, lse = partial(batch, query, w, world.cache)
    end = history + width
    chunks = [slice(a, a + chunk) for a in range(0, end + chunk, chunk)]
    dealt = [slice(rank, None, ranks) for rank in range(ranks)]
    for keys in (chunks, dealt):
        parts = [partial(batch, query, w, world.cache, k) for k in keys]
        latents = torch.stack([p[0] for p in parts])
        lses = torch.stack([p[1] for p in parts])
        merged = merge(latents, lses)
        torch.testing.assert_close(merged[0], whole, **CLOSE)
        torch.testing.assert_close(merged[1], lse, **CLOSE)
        nothing = torch.zeros_like(whole)[None], torch.full_like(lse, -torch.inf)[None]
        padded = merge(
            torch.cat((nothing[0], latents, nothing[0])),
            torch.cat((nothing[1], lses, nothing[1])),
        )
        assert torch.equal(padded[0], merged[0])
        assert torch.equal(padded[1], merged[1])
    alone = merge(whole[None], lse[None])  # weight exp(0) = 1, log(1) = 0
    assert torch.equal(alone[0], whole) and torch.equal(alone[1], lse)
    torch.testing.assert_close(
        finish(batch, whole, rows, w), dense(world.tokens[0], w)[history:], **CLOSE
    )


def test_log_sum_exp_is_of_the_scaled_scores() -> None:
    w, world = weights(), World([6], 4)
    world.fill(0, 6, w)
    batch = world.batch([5], [1])
    query = queries(batch, cut(world.tokens[0], 5, 6), w)
    _, lse = partial(batch, query, w, world.cache, slice(1, 4))
    at = [1, 2, 3]
    lines = torch.stack([world.cache[world.table[0, p // 4], p % 4] for p in at])
    scores = torch.einsum("hc,pc->hp", query[0], lines) / (NOPE + ROPE) ** 0.5
    torch.testing.assert_close(lse[0], torch.logsumexp(scores, -1), **CLOSE)


def test_merge_of_empty_splits_is_empty() -> None:
    latents, lses = torch.zeros(3, 2, HEADS, KV_LORA), torch.zeros(3, 2, HEADS)
    latent, lse = merge(latents, lses.fill_(-torch.inf))
    assert (latent == 0).all() and (lse == -torch.inf).all()


def test_padding_leaves_no_trace() -> None:
    """Field case F20: requests without a slot, of width 0, and rows past the end."""
    w, world = weights(), World([5, 5, 5, 5], 4)
    world.fill(0, 3, w)
    world.fill(3, 3, w)
    world.table[1:3] = -1  # never read
    before = world.cache.clone()
    nan = MlaRows(*(x * torch.nan for x in vars(tokens(2, 0)).values()))
    live = [cut(world.tokens[b], 3, 5) for b in (0, 3)]
    rows = join([live[0], nan, live[1], nan])
    batch = world.batch([3, 3, 3, 3], [2, 2, 0, 2], [1, 0, 5, 2])
    out = verify(batch, rows, w, world.cache)
    assert (out[2:4] == 0).all() and (out[6:] == 0).all()
    for b, begin in ((0, 0), (3, 4)):
        expected = dense(world.tokens[b], w)[3:]
        torch.testing.assert_close(out[begin : begin + 2], expected, **CLOSE)
    written = torch.isnan(before) & ~torch.isnan(world.cache)
    assert int(written.sum()) == 4 * LINE
    _, lse = partial(batch, queries(batch, rows, w), w, world.cache)
    assert (lse[2:4] == -torch.inf).all() and (lse[6:] == -torch.inf).all()


@pytest.mark.parametrize("outlier", [1.0, 100.0])
def test_fp32_stays_within_its_rounding_bound(outlier: float) -> None:
    """Also with one key channel a hundred times the rest. The bound: 20 roundings of a
    score's sum of absolute terms, twice that on a softmax weight, times the values."""
    w, world = weights(), World([12], 4)
    world.tokens[0].kv_a[:, KV_LORA + 1] *= outlier
    world.fill(0, 9, w)
    batch, rows = world.batch([9], [3]), cut(world.tokens[0], 9, 12)
    single = MlaRows(rows.q_a.float(), rows.kv_a.float(), rows.gate.float())
    expected = dense(world.tokens[0], w)[9:]
    cache = world.cache.float()
    got = verify(batch, single, weights(torch.float32), cache)

    q_a = F.rms_norm(rows.q_a, (Q_LORA,), w.q_a_norm, 1e-5).abs()
    q = (q_a @ w.w_qb.abs().T).view(3, HEADS, NOPE + ROPE)
    terms = torch.einsum("thn,hnc->thc", q[..., :NOPE], w.w_uk.abs())
    lines = cache.double()[~torch.isnan(cache)].view(-1, LINE).abs().amax(0)
    terms = torch.cat((terms, q[..., NOPE:]), dim=-1)
    score = 20 * 2**-24 * w.scale * torch.einsum("thc,c->th", terms, lines)
    value = torch.einsum("hvc,c->hv", w.w_uv.abs(), lines[:KV_LORA])
    bound = (2 * score[..., None] + 10 * 2**-24) * value
    assert bound.max() < 0.2 * expected.abs().max()  # or it would show nothing
    assert ((got.double() - expected).abs() <= bound.flatten(1)).all()


def test_a_narrower_cache_rounds_lines_once() -> None:
    w, world = weights(), World([12], 4)
    world.fill(0, 9, w)
    batch, rows = world.batch([9], [3]), cut(world.tokens[0], 9, 12)
    narrow, wide = world.cache.bfloat16(), world.cache.clone()
    got = verify(batch, rows, w, narrow)
    insert(batch, rows, w, wide)
    rounded = wide.bfloat16().double()
    latent, _ = partial(batch, queries(batch, rows, w), w, rounded)
    assert torch.equal(got, finish(batch, latent, rows, w))
    assert torch.equal(narrow.isnan(), wide.isnan())


def test_unpack_splits_the_packed_projection() -> None:
    """Packed order [q_a | kv_a | gate], pad columns not read."""
    w, world = weights(), World([4], 4)
    rows = world.tokens[0]
    pad = torch.full((4, 3), torch.nan, dtype=DTYPE)
    packed = torch.cat((rows.q_a, rows.kv_a, rows.gate, pad), dim=1)
    got = MlaRows.unpack(packed, w)
    for name in ("q_a", "kv_a", "gate"):
        assert torch.equal(getattr(got, name), getattr(rows, name)), name
    with pytest.raises(ValueError, match=r"7 \+ 7 \+ 18 = 32 columns"):
        MlaRows.unpack(packed[:, :31], w)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("batch", {"block_table": None}, "block_table is None"),
        ("batch", {"block_table": ints([[0]])}, "need 2 pages of 4"),
        ("batch", {"block_table": ints([[0, 99]])}, r"each in 0 \.\. 3"),
        ("batch", {"block_table": ints([[0, -1]])}, r"each in 0 \.\. 3"),
        ("batch", {"history": ints([-1])}, r"history\[0\] is negative"),
        ("rows", {"kv_a": torch.zeros(4, 6, dtype=DTYPE)}, "kv_a is torch.float64"),
        ("rows", {"gate": torch.zeros(4, 18)}, "gate is torch.float32"),
        ("rows", {"q_a": torch.zeros(3, 7, dtype=DTYPE)}, r"kv_a is .*\(4, 7\)"),
        ("weights", {"kv_norm": torch.zeros(4, dtype=DTYPE)}, "kv_norm is"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    part: str, change: dict[str, object], words: str
) -> None:
    w, world = weights(), World([8], 4)
    parts = {"batch": world.batch([3], [4]), "rows": cut(world.tokens[0], 3, 7)}
    parts["weights"] = w
    parts[part] = replace(parts[part], **change)
    with pytest.raises(ValueError, match=words):
        verify(parts["batch"], parts["rows"], parts["weights"], world.cache)
    assert torch.isnan(world.cache).all()


def test_too_few_rows_and_a_wrong_cache_or_slice_are_refused() -> None:
    w, world = weights(), World([8], 4)
    batch, rows = world.batch([3], [4]), cut(world.tokens[0], 3, 7)
    with pytest.raises(ValueError, match="q_a has 3 rows and row_start ends at 4"):
        verify(batch, cut(rows, 0, 3), w, world.cache)
    with pytest.raises(ValueError, match=r"cache is .*\[blocks, page, 7\]"):
        verify(batch, rows, w, world.cache[..., :6])
    query = queries(batch, rows, w)
    for keys in (slice(-2, None), slice(0, -1), slice(None, None, -1)):
        with pytest.raises(ValueError, match="absolute positions"):
            partial(batch, query, w, world.cache, keys)
