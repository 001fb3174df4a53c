# SPDX-License-Identifier: Apache-2.0
"""Attention and its merge on the CPU machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.verify_kernels import mla_cases
from tests.verify_kernels.machine import Fault, GlobalMemory, launch, tensor_argument
from tests.verify_kernels.machine.kernels import Edit, compiled, ptx_of
from tests.verify_kernels.mla_cases import LATENT, SCALE, Case, expected
from verify_kernels.batch import VerifyBatch
from verify_kernels.mla.plan import keys_of_split

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


def attend(
    case: Case,
    *,
    most: int = 6,
    causal: bool = True,
    counted: bool = False,
    ctas: int = 2,
    seed: int = 0,
    races: bool = False,
    edit: Edit = str,
    arch: str = "sm_90a",
) -> tuple[Tensor, Tensor]:
    """Latents and log-sum-exps by the two kernels; what they need not write is NaN."""
    batch, (rows, heads, _) = case.batch, case.query.shape
    history = batch.history + (batch.row_start.diff() if counted else 0)
    sums = torch.full((rows * heads, 1 << most, LATENT), torch.nan)
    scales = torch.full((rows * heads, 1 << most, 2), torch.nan)
    latent = torch.full((rows, heads, LATENT), torch.nan).bfloat16()
    lse = torch.full((rows, heads), torch.nan)
    assert batch.block_table is not None
    ints = (batch.row_start, history.int(), batch.state_slots)
    parts = (sums.shape[:2], (sums.stride(0),)), (scales.shape[:2], (scales.stride(0),))
    flags = [np.int32(v).tobytes() for v in (most, causal, counted)]

    def run(name: str, tensors: Sequence[tuple[str, Tensor, object, object]]) -> None:
        variant, ptx = compiled("mla", name)
        memory = GlobalMemory()
        arguments = [
            tensor_argument(
                memory.add(tensor, label, dynamic=True, writable=writable), *opened
            )
            for label, tensor, writable, opened in tensors
        ]
        attending = name == "attend"
        extra = [np.float32(SCALE * 1.4426950408889634).tobytes()] if attending else []
        tail = [] if attending else [np.int32(1).tobytes()]
        code = ptx if arch == "sm_90a" else ptx_of(variant, arch)
        launch(
            edit(code) if attending else code,
            memory,
            [*arguments, *extra, *flags, *tail],
            grid=(ctas, 1, 1) if attending else (heads, rows, 1),
            block=(256 if attending else 512, 1, 1),
            shared_bytes=variant.kernel.shared_bytes,
            seed=seed,
            races=races,
        )

    def opened(tensor: Tensor, strides: int = 0) -> tuple[object, object]:
        return tensor.shape[:2], tensor.stride()[:1] if strides else ()

    whole = [(n, t, False, (t.shape, ())) for n, t in zip("rhs", ints, strict=True)]
    run(
        "attend",
        [
            ("query", case.query, False, opened(case.query, 1)),
            ("cache", case.cache, False, opened(case.cache, 1)),
            ("table", batch.block_table, False, opened(batch.block_table, 1)),
            *whole,
            ("sums", sums, True, parts[0]),
            ("scales", scales, True, parts[1]),
        ],
    )
    run(
        "merge",
        [
            ("sums", sums, False, parts[0]),
            ("scales", scales, False, parts[1]),
            *whole,
            ("latent", latent, True, opened(latent, 1)),
            ("lse", lse, True, opened(lse, 1)),
        ],
    )
    return latent, lse


def check(case: Case, found: tuple[Tensor, Tensor], causal: bool = True) -> None:
    """No further from fp64 than twice plain bf16 torch."""
    truth, lse = expected(case, causal)
    plain, _ = expected(case, causal, torch.bfloat16)
    error = (found[0].double() - truth).norm()
    assert error <= 2 * (plain.double() - truth).norm()
    live = torch.isfinite(lse)
    assert torch.equal(torch.isfinite(found[1]), live)
    assert (found[1][live] - lse[live]).abs().max() < 1e-3
    assert not found[0][~live].any()


def same(one: Tensor, other: Tensor) -> bool:
    """Equal bits."""
    kind = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def alone(case: Case, request: int, t: int) -> Case:
    """A step with nothing but row t of a request."""
    batch = case.batch
    row = int(batch.row_start[request]) + t
    one = slice(request, request + 1)
    assert batch.block_table is not None
    return Case(
        VerifyBatch(
            torch.tensor([0, 1], dtype=torch.int32),
            batch.history[one] + t,
            batch.state_slots[one],
            batch.accepted[one],
            batch.block_table[one],
        ),
        case.query[row : row + 1],
        case.cache,
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_ragged_step(arch: str) -> None:
    """Two tiles, two blocks, one request whose slot is 0, one without rows."""
    heads = 30 if arch == "sm_90a" else 22
    case = mla_cases.make(
        [70, 9, 5, 0], [3, 0, 2, 2], heads=heads, page=16, rows=9, dead=(2,), gap=8
    )
    found = attend(case, most=1, ctas=3, seed=1, races=arch == "sm_90a", arch=arch)
    check(case, found)


@pytest.mark.parametrize("seed", range(4))
def test_splits_of_a_request(seed: int) -> None:
    """Blocks of both stages, splits of two blocks, the last with one; races are
    faults."""
    case = mla_cases.make([300], [2], heads=3, seed=seed)
    found = attend(case, most=2, ctas=1 + seed, seed=seed, races=True)
    check(case, found)
    again = attend(case, most=2, ctas=5, seed=seed + 1)
    assert all(same(a, b) for a, b in zip(found, again, strict=True))


def test_rows_of_a_request_to_both_sides_of_a_longer_split() -> None:
    """128 keys are two splits of 64; 129 are splits of 128."""
    case = mla_cases.make([126, 20], [5, 1], heads=2, page=32)
    found = attend(case, most=1, ctas=2)
    check(case, found)
    for request, t in ((0, 0), (0, 1), (0, 2), (0, 4), (1, 0)):
        row = int(case.batch.row_start[request]) + t
        one = attend(alone(case, request, t), most=1, ctas=1, seed=7)
        for whole, part in zip(found, one, strict=True):
            assert same(whole[row], part[0]), (request, t)


def test_rows_that_see_each_other() -> None:
    case = mla_cases.make([61], [7], heads=4)
    check(case, attend(case, causal=False, ctas=2), causal=False)


def test_lengths_that_count_the_rows() -> None:
    case = mla_cases.make([61, 3], [2, 1], heads=1)
    found = attend(case)
    counted = attend(case, counted=True, seed=3)
    assert all(same(a, b) for a, b in zip(found, counted, strict=True))


def test_a_row_sees_its_own_line_and_none_behind() -> None:
    case = mla_cases.make([64], [3], heads=1)
    before = attend(case)[0]
    assert case.batch.block_table is not None
    line = case.cache[case.batch.block_table[0, 1], 1]
    line *= -2
    after = attend(case)[0]
    assert same(before[0], after[0])
    assert not same(before[1], after[1]) and not same(before[2], after[2])


def test_no_request_at_all() -> None:
    case = mla_cases.make([5, 6], [1, 1], heads=2, dead=(0, 1))
    latent, lse = attend(case)
    assert not latent.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("stale", [500, 2**31 - 1, -(2**31), 2**28 + 2])
@pytest.mark.parametrize("dead", [(1,), ()], ids=["no_slot", "no_rows"])
def test_the_length_of_no_request_may_be_anything(
    stale: int, dead: tuple[int, ...]
) -> None:
    """Nor is there a table for it: what is looked up behind the end is in the table."""
    case = mla_cases.make([9, 3], [2, int(bool(dead))], heads=1, page=16, dead=dead)
    batch = case.batch
    assert batch.block_table is not None
    lengths = batch.history.clone()
    lengths[1] = stale
    narrow = batch.block_table[:, :1].contiguous()
    other = replace(case, batch=replace(batch, history=lengths, block_table=narrow))
    for whole, part in zip(attend(case, ctas=1), attend(other, ctas=1), strict=True):
        assert same(whole, part)


def test_nothing_is_right_without_its_wait() -> None:
    """The machine sees a missing fence, barrier or wait for copies."""
    case = mla_cases.make([40], [1], heads=1)
    for gone in (
        "cp.async.wait_group 0;",
        "fence.proxy.async.shared::cta;",
        "griddepcontrol.wait;",
    ):
        with pytest.raises((Fault, AssertionError)):
            found = attend(
                case, races=True, edit=lambda ptx, gone=gone: without(ptx, gone)
            )
            check(case, found)


def without(ptx: str, text: str) -> str:
    assert text in ptx
    return ptx.replace(text, "")


@pytest.mark.parametrize("keys", [1, 64, 65, 4096, 4097, 8192, 8193, 1 << 20])
@pytest.mark.parametrize("most", [4, 6])
def test_a_row_has_no_more_splits_than_it_may(keys: int, most: int) -> None:
    size = keys_of_split(keys, most)
    assert size >= 64 and size & (size - 1) == 0
    assert -(-keys // size) <= 1 << most
    assert size == 64 or -(-keys // (size // 2)) > 1 << most
