# SPDX-License-Identifier: Apache-2.0
"""The experts' kernels' PTX on the CPU, under many schedules."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from tests.verify_kernels import test_moe_experts as tests
from tests.verify_kernels.machine import GlobalMemory, kernels, launch, tensor_argument
from verify_kernels.common.variant import Variant
from verify_kernels.dense.reference import SITU_BETA, SITU_LINEAR_BETA
from verify_kernels.moe import ExpertBank, ExpertPlan
from verify_kernels.moe.down import ExpertsDownKernel
from verify_kernels.moe.experts import Shape, _down_arguments, _up_arguments
from verify_kernels.moe.up import ExpertsUpKernel

#: Two tiles of K for eight warps; K3's cut of K over the warps, and of I in steps.
TINY = (128, 128, 16, 4)
WIDE = (3584, 64, 16, 4)
STEPS = (128, 384, 16, 4)
CTAS = 3


@functools.cache
def half(shape: Shape, down: bool) -> tuple[Any, str]:
    """A half's kernel and PTX."""
    kernel = ExpertsDownKernel(*shape) if down else ExpertsUpKernel(*shape)
    arguments = _down_arguments if down else _up_arguments
    made = functools.partial(arguments, *shape)
    return kernel, kernels.ptx_of(Variant("moe", "half", kernel, made))


def run(
    shape: Shape,
    latent: Tensor,
    shares: Tensor,
    plan: ExpertPlan,
    bank: ExpertBank,
    inner: Tensor,
    out: Tensor,
    *,
    seed: int = 0,
) -> None:
    """Both launches."""
    rows = latent.shape[:1]
    first = {
        "x": (latent, rows, latent.stride()[:1]),
        "words": (bank.up.words, (), ()),
        "scales": (bank.up.scales, (), ()),
        "out": (inner, (), ()),
    }
    second = {
        "x": (inner, (), ()),
        "words": (bank.down.words, (), ()),
        "scales": (bank.down.scales, (), ()),
        "weights": (shares, rows, ()),
        "out": (out, rows, out.stride()[:1]),
    }
    numbers = [np.float32(x).tobytes() for x in (SITU_BETA, SITU_LINEAR_BETA)]
    for (kernel, ptx), tensors, rest, grid in (
        (half(shape, False), first, numbers, CTAS),
        (half(shape, True), second, [], shape[0] // 16),
    ):
        memory = GlobalMemory()
        parameters = []
        for name in kernel.parameters:
            given = tensors.get(name) or (getattr(plan, name), (), ())
            tensor, extents, strides = given
            address = memory.add(tensor, name, dynamic=True, writable=name == "out")
            parameters.append(tensor_argument(address, extents, strides))
        launch(
            ptx,
            memory,
            parameters + rest,
            grid=(grid, 1, 1),
            block=(256, 1, 1),
            cluster=(1, 1, 1),
            shared_bytes=kernel.shared_bytes,
            seed=seed,
            races=True,
        )


@pytest.mark.parametrize(
    ("shape", "rows", "spread"),
    [(TINY, 1, None), (TINY, 9, 5), (TINY, 33, 8), (WIDE, 2, None), (STEPS, 3, None)],
    ids=str,
)
def test_rows_are_right(shape: Shape, rows: int, spread: int | None) -> None:
    """Nine rows of five experts: more than eight pairs of one."""
    tests.check(functools.partial(run, shape), shape, rows, rows, spread)


def test_rows_schedules_and_padding_have_the_same_bits() -> None:
    bank = tests.experts_of(TINY, 1).bank()
    ids, shares = tests.choice(TINY, 12, 1, 6)
    latent = tests.latent_rows(TINY, 12, 1)

    def part(pick: list[int], seed: int = 0, padding: int = 0) -> Tensor:
        chosen = ids[pick].clone()
        chosen[len(pick) - padding :] = -1
        rows = (latent[pick], chosen, shares[pick])
        one = functools.partial(run, TINY, seed=seed)
        return tests.result(one, TINY, bank, *rows)

    whole = part(list(range(12)))
    assert torch.equal(part(list(range(12)), seed=1), whole)
    for pick in ([0], [11], [3, 7, 5]):
        assert torch.equal(part(pick), whole[pick]), pick
    padded = part([4, 2, 8, 9], padding=2)
    assert torch.equal(padded[:2], whole[[4, 2]])
    assert not padded[2:].any()
