# SPDX-License-Identifier: Apache-2.0
"""The kernels' PTX on the CPU, under many schedules: numbers, bits, and no two accesses
to shared memory that nothing orders.

Compiled for sm_90a as for a GPU; see `machine` for what of one is modelled.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.verify_kernels import test_attn_res as attn_res_tests
from tests.verify_kernels import test_skinny_gemm as skinny_tests
from tests.verify_kernels.machine import GlobalMemory, launch, tensor_argument
from tests.verify_kernels.machine.kernels import attn_res, compiled, skinny_gemm
from verify_kernels.attn_res import reference as attn_res_reference
from verify_kernels.attn_res.host import FORMS, Form
from verify_kernels.prefetch.host import PIECE, pieces
from verify_kernels.skinny_gemm.tiling import Tiling

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

SEEDS = range(3)

#: K, N, clusters, and M whose tilings differ in tokens, in cluster and in the depth of
#: the ring, which turns over; last an N that leaves a cluster without rows.
SKINNY = [
    (128, 301, 2, (1, 9)),
    (384, 130, 1, (1, 9, 40)),
    (768, 75, 1, (2, 9)),
    (1536, 110, 1, (1, 9)),
    (3584, 100, 1, (3, 9)),
    (3584, 1, 2, (1, 9)),
]


@pytest.mark.parametrize(("k", "n", "clusters", "sizes"), SKINNY)
def test_skinny_gemm_is_right_and_bit_equal_under_every_schedule(
    k: int, n: int, clusters: int, sizes: tuple[int, ...]
) -> None:
    """Field case F40: rows have the same bits at every M too, whichever tiling it is
    that serves it."""
    x, w = skinny_tests.inputs(n, k, "noise", max(sizes), device="cpu")
    first: Tensor | None = None
    for rows in reversed(sizes):
        for seed in SEEDS:
            (y,) = skinny_gemm(
                x[:rows], [w], clusters=clusters, seed=100 * rows + seed, races=True
            )
            if first is None:
                skinny_tests.check_accuracy(y, x, w)
                first = y.clone()
            found = skinny_tests.bits(y)
            assert torch.equal(found, skinny_tests.bits(first[:rows])), (rows, seed)


@pytest.mark.parametrize(
    "t",
    [
        Tiling(7168, 1, 8, 1, 4, 1, 1, 1, 1, ctas_per_sm=3),
        Tiling(3584, 1, 4, 1, 15, 1, 1, 1, 1, ctas_per_sm=3),
        Tiling(1536, 1, 2, 1, 13, 1, 3, 2, 2, ctas_per_sm=3),
    ],
    ids=lambda t: t.name,
)
def test_rings_with_a_buffer_between_roles_or_two_give_the_same_bits(t: Tiling) -> None:
    """As those that hold all rows of a cluster, here with more rows than they hold."""
    x, w = skinny_tests.inputs(3 * t.stage_rows + 1, t.k, "noise", 8, device="cpu")
    (wanted,) = skinny_gemm(x, [w])
    skinny_tests.check_accuracy(wanted, x, w)
    for rows in (8, 1):
        for seed in SEEDS[:2]:
            (y,) = skinny_gemm(x[:rows], [w], tiling=t, seed=seed, races=True)
            right = skinny_tests.bits(wanted[:rows])
            assert torch.equal(skinny_tests.bits(y), right), (rows, seed)


def test_skinny_gemm_with_three_matrices_in_one_launch() -> None:
    """Rows of all three meet in one tile; the router's output is fp32."""
    outputs = ("fp32", "bf16", "bf16")
    x, w = skinny_tests.inputs(22, 7168, "outliers", 3, device="cpu")
    ws = list(w.split([9, 1, 12]))
    for seed in SEEDS[:2]:
        ys = skinny_gemm(x, ws, outputs, seed=seed, races=True)
        for y, part in zip(ys, ws, strict=True):
            skinny_tests.check_accuracy(y, x, part)


@pytest.mark.parametrize(
    ("hidden", "form"),
    [
        (7168, (0, "keep", True, True)),
        (7168, (2, "add", True, True)),
        (7168, (3, "restart", False, True)),
        (7168, (8, "add", False, False)),
        *((512, form) for form in FORMS[512]),
    ],
    ids=attn_res_tests.name_of,
)
def test_attn_res_is_right_and_bit_equal_under_every_schedule(
    hidden: int, form: Form
) -> None:
    arguments = attn_res_tests.inputs(form, 2, hidden=hidden, device="cpu")
    expected = attn_res_tests.fresh(arguments)
    exact, prefix = attn_res_reference.attn_res(**expected)
    bound = attn_res_tests.elementwise_bound(arguments, exact)
    first = attn_res(form, arguments, races=True)
    assert ((first[0].double() - exact).abs() <= bound).all()
    for found, right in zip(first[1:], (prefix, expected["blocks"]), strict=True):
        assert torch.equal(attn_res_tests.bits(found), attn_res_tests.bits(right))
    for seed in SEEDS[1:]:
        again = attn_res(form, arguments, seed=seed, races=True)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(attn_res_tests.bits(one), attn_res_tests.bits(other))
    alone = attn_res_tests.fresh(arguments, slice(1, 2))
    assert torch.equal(attn_res(form, alone)[0], first[0][1:])


@pytest.mark.parametrize(
    ("hidden", "form"), [(7168, (2, "add", True, True)), (512, (1, "add", False, True))]
)
def test_attn_res_with_a_delta_in_two(hidden: int, form: Form) -> None:
    """The bits of their sum in bf16 as one."""
    arguments = attn_res_tests.inputs(form, 2, hidden=hidden, device="cpu", more=True)
    _, prefix = attn_res_reference.attn_res(**attn_res_tests.fresh(arguments))
    found = attn_res(form, arguments, races=True)
    summed = arguments["delta"] + arguments["extra"]
    one = attn_res(form, arguments | {"delta": summed, "extra": None})
    assert torch.equal(attn_res_tests.bits(found[1]), attn_res_tests.bits(prefix))
    for two, single in zip(found, one, strict=True):
        assert torch.equal(attn_res_tests.bits(two), attn_res_tests.bits(single))


def test_prefetch_asks_for_every_piece_once() -> None:
    """More pieces than threads, so that threads take several."""
    weights = torch.zeros(70 * PIECE + 48, dtype=torch.uint8)
    memory = GlobalMemory()
    requests = pieces([(memory.add(weights, "weights"), weights.numel())])
    table = torch.tensor(requests, dtype=torch.int64)
    launch(
        compiled("prefetch", "bulk")[1],
        memory,
        [tensor_argument(memory.add(table, "table"), table.shape[:1]).ljust(16, b"\0")],
        grid=(2, 1, 1),
        block=(32, 1, 1),
        pdl=False,
    )
    assert sorted(memory.prefetched) == requests
    assert sum(size for _, size in requests) == weights.numel()
