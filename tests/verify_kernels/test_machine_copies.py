# SPDX-License-Identifier: Apache-2.0
"""The machine that runs PTX: copies that the lane waits for itself (cp.async)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.verify_kernels.machine import Fault
from tests.verify_kernels.machine.arithmetic import _high_half
from tests.verify_kernels.machine.small import run, words

SEEDS = range(24)
#: Lane i has 16 bytes of its own at smem + 16 i, from 16 bytes a lane of tensor 0.
PLACE = """
shl.b32 %r1, %r0, 4; add.s32 %r2, %r1, smem;
mul.wide.u32 %d9, %r0, 16; add.s64 %d7, %d0, %d9;
"""
COPY = "cp.async.cg.shared.global.L2::256B [%r2], [%d7], 16;"
COMMIT, WAIT = "cp.async.commit_group;", "cp.async.wait_group {};"
READ = "ld.shared.b32 %r3, [%r2+4];"
STORE = "st.global.b32 [%d11], %r3;"


def found(
    body: str, inputs: Sequence[Tensor], races: bool = False
) -> set[tuple[int, ...]]:
    """The different results, first words of the last tensor, over all seeds."""
    results = set()
    for seed in SEEDS:
        out = words()
        run(PLACE + body, [*inputs, out], seed=seed, races=races)
        results.add(tuple(out.view(torch.int32)[::2].tolist()))
    return results


def numbers() -> Tensor:
    return torch.arange(128, dtype=torch.int32)


RIGHT = tuple(range(1, 128, 4))


def test_a_copy_is_there_when_its_group_has_been_waited_for() -> None:
    body = COPY + COMMIT + WAIT.format(0) + READ + STORE
    assert found(body, [numbers()], races=True) == {RIGHT}


def test_without_the_wait_it_may_be() -> None:
    late = COPY + COMMIT + READ + STORE + WAIT.format(0)
    assert {RIGHT, (-1,) * 32} <= found(late, [numbers()])
    with pytest.raises(Fault, match=r"a read at 4 of .* is not ordered with the store"):
        found(late, [numbers()], races=True)


def test_groups_come_in_order_and_may_be_empty() -> None:
    """The first of two groups is there when one is left, also if that is empty."""
    for second in ("", COPY.replace("[%r2]", "[%r2+512]")):
        body = COPY + COMMIT + second + COMMIT + WAIT.format(1) + READ + STORE
        assert found(body + WAIT.format(0), [numbers()], races=True) == {RIGHT}
    # What has not been committed is in no group.
    body = COMMIT + COPY + WAIT.format(0) + READ + STORE + COMMIT + WAIT.format(0)
    assert len(found(body, [numbers()])) > 1


def test_a_place_is_not_touched_until_then_by_anybody() -> None:
    store = "st.shared.b32 [%r2], %r0;"
    with pytest.raises(
        Fault, match=r"a store at 0 of .* is not ordered with the store"
    ):
        found(COPY + COMMIT + store + WAIT.format(0), [numbers()], races=True)
    other = "xor.b32 %r4, %r2, 16; ld.shared.b32 %r3, [%r4];"
    waited = COPY + COMMIT + WAIT.format(0)
    with pytest.raises(Fault, match="a read at 16 of"):
        found(waited + other + STORE, [numbers()], races=True)
    met = waited + "bar.warp.sync -1;" + other + STORE
    assert found(met, [numbers()], races=True) == {
        tuple(i ^ 4 for i in range(0, 128, 4))
    }


def test_a_copy_over_a_load_that_is_under_way_is_a_fault() -> None:
    """It passes the load; what its place is computed from has come."""
    first = COPY + COMMIT + WAIT.format(0) + READ
    again = COPY + COMMIT + WAIT.format(0) + STORE
    with pytest.raises(Fault, match="was under way when a store came"):
        found(first + again, [numbers()], races=True)
    tied = "and.b32 %r5, %r3, 0; add.s32 %r2, %r2, %r5;"
    assert found(first + tied + again, [numbers()], races=True) == {RIGHT}


def test_zeros_come_for_a_size_of_zero() -> None:
    """16 bytes or none; the rest of what PTX knows is refused."""
    odd = "and.b32 %r6, %r0, 1; shl.b32 %r6, %r6, 4;" + COPY.replace("16;", "16, %r6;")
    body = odd + COMMIT + WAIT.format(0) + READ + STORE
    right = tuple(v if v // 4 % 2 else 0 for v in RIGHT)
    assert found(body, [numbers()], races=True) == {right}
    with pytest.raises(Fault, match="all 16 bytes or none"):
        found(body.replace("%r6, 4;", "%r6, 3;"), [numbers()])
    for form in (COPY.replace(".cg", ".ca"), COPY.replace("16;", "8;")):
        with pytest.raises(ValueError, match="the machine"):
            found(form, [numbers()])


def test_a_warp_does_not_leave_copies_behind() -> None:
    with pytest.raises(Fault, match="ends while a copy has not been waited for"):
        found(COPY + COMMIT, [numbers()])


def test_groups_are_counted_for_whole_warps() -> None:
    some = "setp.lt.u32 %p1, %r0, 7; @%p1 "
    with pytest.raises(Fault, match="for whole warps only"):
        found(some + COMMIT, [numbers()])


def test_the_high_half_of_a_product() -> None:
    a = [0, 1, 2**64 - 1, 2635249153617166336, 2**32, 0x123456789ABCDEF0]
    b = [2**64 - 1, 7, 2**64 - 1, 2**40 + 3, 2**32, 0xFEDCBA9876543210]
    high = _high_half(np.array(a, np.uint64), np.array(b, np.uint64))
    assert high.tolist() == [x * y >> 64 for x, y in zip(a, b, strict=True)]
