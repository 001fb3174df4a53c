# SPDX-License-Identifier: Apache-2.0
"""The snapshot layout gives the bits of the eager and fold layouts, and of decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.verify_kernels.test_kda_reference import (
    DTYPE,
    HEADS,
    K,
    V,
    batch_of,
    fresh,
    join,
    plain,
    take,
    tokens,
    weights,
)
from verify_kernels.kda import reference
from verify_kernels.kda.reference import KdaRows, KdaState
from verify_kernels.kda.snapshot import KdaSnapshots, verify


def snapshots(slots: int) -> KdaSnapshots:
    return KdaSnapshots.allocate(slots, HEADS, K, V, DTYPE)


def table_of(lines: list[list[int]]) -> Tensor:
    return torch.tensor([line + [0] * (8 - len(line)) for line in lines]).int()


def same_committed(
    cache: KdaSnapshots, line: list[int], accepted: int, other: KdaState, slot: int
) -> None:
    names = ("state", "window_q", "window_k", "window_v")
    for name, got in zip(names, cache.committed(line, accepted), strict=True):
        assert torch.equal(got, getattr(other, name)[slot]), name


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=5
    ),
    order=st.permutations(list(range(1, 9))),
    start=st.integers(0, 4),
    fold=st.booleans(),
)
def test_snapshots_are_the_other_layouts(
    steps: list[tuple[int, int]], order: list[int], start: int, fold: bool
) -> None:
    """Field cases F02, F13, F19: outputs, state and window bit for bit, every width and
    accepted count, from a prompt of any length on; K != V, unwritten slots NaN."""
    w, cache = weights(), snapshots(9)
    committed = plain(tokens(start, 50), w, start)
    cache.place(order[0], committed, 1)
    slots, accepted, waiting = table_of([order]), 1, 0
    for number, (width, accept) in enumerate(steps):
        rows = tokens(width, number)
        batch = batch_of([width], [order[0]], [accepted])
        got = verify(batch, rows, w, cache, slots)
        other = batch_of([width], [1], [waiting])
        expected = reference.verify(other, rows, w, committed, fold=fold)
        assert torch.equal(got, expected)
        accepted = waiting = min(accept, width)
        if not fold:
            reference.commit(committed, 1, accepted)
    if fold:
        reference.commit(committed, 1, accepted)
    same_committed(cache, order, accepted, committed, 1)
    assert cache.clamped == 0
    unused = [s for s in range(9) if s not in order[: max(w for w, _ in steps)]]
    assert torch.isnan(cache.state[unused]).all()


@settings(max_examples=30, deadline=None)
@given(
    plan=st.lists(
        st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=3),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
def test_ragged_batches_keep_requests_apart(
    plan: list[list[tuple[int, int]]], seed: int
) -> None:
    """Field case F01: three ragged steps, a request of width 0 keeping its place, give
    every request the bits it has alone."""
    g = torch.Generator().manual_seed(seed)
    count = len(plan)
    pool = (torch.randperm(8 * count, generator=g) + 1).tolist()
    lines = [pool[8 * b : 8 * b + 8] for b in range(count)]
    w, cache, start = weights(), snapshots(8 * count + 1), fresh()
    kept: list[list[KdaRows]] = [[] for _ in plan]
    accepted = [1] * count
    for line in lines:
        cache.place(line[0], start, 0)
    for number in range(3):
        widths = [steps[number][0] for steps in plan]
        parts = [tokens(n, 10 * b + number) for b, n in enumerate(widths)]
        batch = batch_of(widths, [line[0] for line in lines], accepted)
        verify(batch, join(parts), w, cache, table_of(lines))
        for b, width in enumerate(widths):
            if width:
                accepted[b] = min(plan[b][number][1], width)
                kept[b].append(take(parts[b], list(range(accepted[b]))))
    for b, line in enumerate(lines):
        if kept[b]:
            rows = join(kept[b])
            expected = plain(rows, w, len(rows.b))
            same_committed(cache, line, accepted[b], expected, 1)


@pytest.mark.parametrize("width", range(1, 9))
def test_window_array_is_rolled_as_documented(width: int) -> None:
    """Field case F02: [c[a], c[a + 1], x_0 ..] raw, in s_0 alone; stale past that."""
    w, cache = weights(), snapshots(9)
    cache.place(3, fresh(), 0)
    line = [3, 1, 2, 4, 5, 6, 7, 8]
    first, second = tokens(5, 1), tokens(width, 2)
    verify(batch_of([5], [3], [1]), first, w, cache, table_of([line]))
    assert torch.isnan(cache.window_v[3, 7:]).all()
    verify(batch_of([width], [3], [4]), second, w, cache, table_of([line]))
    for name in ("q", "k", "v"):
        # Four of the first five rows were accepted; the last two of them are taps.
        expected = torch.cat((getattr(first, name)[2:4], getattr(second, name)))
        window = getattr(cache, f"window_{name}")
        assert torch.equal(window[3, : 2 + width], expected), name
        assert torch.isnan(window[[0, 1, 2, 4, 5, 6, 7, 8]]).all(), name


def test_accepted_counts_are_clamped_and_counted() -> None:
    """Field case F03: below 1 starts from row 0, above the width from the last row;
    each is counted, and neither indexes outside the request's slots."""
    w, cache = weights(), snapshots(33)
    lines = [list(range(8 * b + 1, 8 * b + 9)) for b in range(4)]
    for line in lines:
        cache.place(line[0], fresh(), 0)
    rows = [tokens(3, b) for b in range(4)]
    heads = [line[0] for line in lines]
    slots = table_of(lines)
    verify(batch_of([3] * 4, heads, [1] * 4), join(rows), w, cache, slots)
    nexts = [tokens(2, 10 + b) for b in range(4)]
    batch = batch_of([2] * 4, heads, [0, 3, 5, 1])
    got = verify(batch, join(nexts), w, cache, slots)
    assert cache.clamped == 2
    for b, count in enumerate([1, 3, 3, 1]):
        committed = plain(rows[b], w, count)
        expected = reference.verify(batch_of([2], [1]), nexts[b], w, committed)
        assert torch.equal(got[2 * b : 2 * b + 2], expected)


def test_padding_leaves_no_trace() -> None:
    """Field case F20: no slot, width 0 and rows past the end; their lines of the table
    are not read."""
    w, cache = weights(), snapshots(9)
    cache.place(1, fresh(), 0)
    cache.place(2, fresh(), 0)
    rows = tokens(7, 3)
    for field in KdaRows.__dataclass_fields__:
        getattr(rows, field)[2:4] = torch.nan
        getattr(rows, field)[4:] = torch.nan
    slots = table_of([[1, 3], [99, -7], [2, 2]])
    kept = cache.state[2].clone()
    batch = batch_of([2, 2, 0], [1, -1, 2], [1, 9, 9])
    out = verify(batch, rows, w, cache, slots)
    alone = take(rows, [0, 1])
    assert torch.equal(out[:2], reference.verify(batch_of([2], [1]), alone, w, fresh()))
    assert (out[2:] == 0).all()
    assert torch.equal(cache.state[2], kept) and cache.width[2] == 1
    assert torch.isnan(cache.state[[0, 4, 5, 6, 7, 8]]).all() and cache.clamped == 0


@pytest.mark.parametrize(
    ("lines", "heads", "words"),
    [
        ([[2, 1, 3], [4, 5]], [1, 4], r"slots\[0, 0\] is 2 and state_slots\[0\] is 1"),
        ([[1, 2, 2], [4, 5]], [1, 4], "must be distinct"),
        ([[1, 2, 0], [4, 5]], [1, 4], r"in 1 \.\. 8"),
        ([[1, 2, 9], [4, 5]], [1, 4], r"in 1 \.\. 8"),
        ([[1, 2, 5], [4, 5]], [1, 4], "name slot 5 for requests 0 and 1"),
        ([[1, 2, 3], [6, 5]], [1, 6], "slot 6 of request 1 holds no state"),
    ],
)
def test_a_wrong_table_is_refused_before_anything_is_written(
    lines: list[list[int]], heads: list[int], words: str
) -> None:
    cache = snapshots(9)
    cache.place(1, fresh(), 0)
    cache.place(4, fresh(), 0)
    before = replace(cache, state=cache.state.clone(), width=cache.width.clone())
    with pytest.raises(ValueError, match=words):
        batch = batch_of([3, 2], heads, [1, 1])
        verify(batch, tokens(5, 1), weights(), cache, table_of(lines))
    assert torch.equal(cache.state.isnan(), before.state.isnan())
    assert torch.equal(cache.width, before.width)


def test_wrong_dtype_and_waiting_records_are_refused() -> None:
    cache, committed = snapshots(9), fresh()
    with pytest.raises(ValueError, match=r"slots is torch.int64 .* int32 \[1, 8\]"):
        slots = table_of([[1]]).long()
        verify(batch_of([1], [1]), tokens(1, 1), weights(), cache, slots)
    reference.verify(batch_of([2], [1]), tokens(2, 1), weights(), committed)
    with pytest.raises(ValueError, match="slot 1 holds 2 uncommitted rows"):
        cache.place(1, committed, 1)
