# SPDX-License-Identifier: Apache-2.0
"""The experts' kernels' PTX on the CPU, under many schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from tests.verify_kernels import test_moe_experts as tests
from tests.verify_kernels.machine import GlobalMemory, kernels, launch, tensor_argument
from tests.verify_kernels.machine.memory import Fault
from verify_kernels.common.variant import Variant
from verify_kernels.dense.reference import SITU_BETA, SITU_LINEAR_BETA
from verify_kernels.moe import ExpertBank, ExpertPlan, down, experts, up
from verify_kernels.moe.experts import Shape

#: A block along K for each of eight warps; K3's cut of K over the warps, and one of
#: five groups a warp; several steps of I; more experts than the second half's threads.
TINY = (128, 128, 16, 4)
WIDE = (3584, 64, 16, 4)
ODD = (1280, 64, 16, 4)
STEPS = (128, 384, 16, 4)
SMALL = (128, 64, 16, 4)
MANY = (128, 64, 896, 16)


@dataclass(frozen=True)
class Half:
    """How a half is made and launched."""

    kernel: Callable[..., Any]
    arguments: Callable[..., Any]
    #: CTAs, given the latent columns and the rows.
    grid: Callable[[int, int], tuple[int, int, int]]


HALVES = (
    Half(
        lambda latent, inner, _, *form: up.ExpertsUpKernel(latent, inner, *form),
        experts._up_arguments,
        lambda latent, rows: (6, 1, 1),
    ),
    Half(
        down.ExpertsDownKernel,
        experts._down_arguments,
        lambda latent, rows: (latent // 32, -(-rows // 8), 1),
    ),
)


@functools.cache
def compiled(half: Half, *form: int) -> tuple[Any, str]:
    """A half's kernel and PTX."""
    kernel = half.kernel(*form)
    made = functools.partial(half.arguments, *form)
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
        "weights": (shares, rows, ()),
        "out": (inner, (), ()),
    }
    second = {
        "x": (inner, (), ()),
        "words": (bank.down.words, (), ()),
        "scales": (bank.down.scales, (), ()),
        "out": (out, rows, out.stride()[:1]),
    }
    numbers = [np.float32(x).tobytes() for x in (SITU_BETA, SITU_LINEAR_BETA)]
    for half, tensors, rest in zip(HALVES, (first, second), (numbers, []), strict=True):
        kernel, ptx = compiled(half, *shape, bank.held)
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
            grid=half.grid(shape[0], len(latent)),
            block=(getattr(kernel, "threads", up.THREADS), 1, 1),
            cluster=(2, 1, 1),
            shared_bytes=kernel.shared_bytes,
            seed=seed,
            races=True,
        )


@pytest.mark.parametrize(
    ("shape", "rows", "spread"),
    [
        (TINY, 1, None),
        (TINY, 9, 5),
        (TINY, 33, 8),
        (WIDE, 2, None),
        (ODD, 2, None),
        (STEPS, 3, None),
    ],
    ids=str,
)
def test_rows_are_right(shape: Shape, rows: int, spread: int | None) -> None:
    """Nine rows of five experts: more than eight pairs of one."""
    weights = tests.experts_of(shape, rows)
    ids, shares = tests.choice(shape, rows, rows, spread)
    latent = tests.latent_rows(shape, rows, rows)
    one = functools.partial(run, shape)
    found = tests.result(one, shape, weights.bank(), latent, ids, shares)
    tests.check_errors(found, latent, ids, shares, weights)


def test_rows_of_zeros_are_not_read() -> None:
    """A layer that has 64 rows of gate more, and of up: here they are no zeros."""
    weights = tests.experts_of(SMALL, 7)
    ids, shares = tests.choice(SMALL, 3, 7)
    latent = tests.latent_rows(SMALL, 3, 7)
    bank = tests.filled(weights, 128, 0x77)
    found = tests.result(
        functools.partial(run, SMALL), SMALL, bank, latent, ids, shares
    )
    right = tests.result(
        functools.partial(run, SMALL),
        SMALL,
        weights.bank(),
        latent,
        ids,
        shares,
    )
    assert torch.equal(found, right)


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
    for seed in (1, 2):
        assert torch.equal(part(list(range(12)), seed=seed), whole)
    for pick in ([0], [11], [3, 7, 5]):
        assert torch.equal(part(pick), whole[pick]), pick
    padded = part([4, 2, 8, 9], padding=2)
    assert torch.equal(padded[:2], whole[[4, 2]])
    assert not padded[2:].any()


@pytest.mark.parametrize("shape", [TINY, STEPS], ids=str)
def test_a_row_may_have_an_expert_twice(shape: Shape) -> None:
    """Or only one, four times; beside rows that have it once."""
    weights = tests.experts_of(shape, 2)
    bank = weights.bank()
    ids, shares = tests.choice(shape, 10, 2, 6)
    ids[1, 2] = ids[1, 0]
    ids[2, 1:] = ids[2, 0]
    ids[4:6] = ids[3]
    ids[9] = ids[2]
    latent = tests.latent_rows(shape, 10, 2)
    one = functools.partial(run, shape)
    found = tests.result(one, shape, bank, latent, ids, shares)
    tests.check_errors(found, latent, ids, shares, weights)
    alone = tests.result(one, shape, bank, latent[2:3], ids[2:3], shares[2:3])
    assert torch.equal(alone, found[2:3])


def test_more_experts_than_threads() -> None:
    """The second half finds its experts in two rounds; some rows are the same, and one
    has an expert eight times."""
    weights = tests.experts_of(MANY, 4)
    ids, shares = tests.choice(MANY, 24, 4)
    ids[7:9] = ids[6]
    ids[10, 3:11] = ids[10, 2]
    assert len(ids.unique()) > down.ExpertsDownKernel(*MANY, 64).threads
    latent = tests.latent_rows(MANY, 24, 4)
    one = functools.partial(run, MANY)
    found = tests.result(one, MANY, weights.bank(), latent, ids, shares)
    tests.check_errors(found, latent, ids, shares, weights)


def test_rows_without_any_expert_are_zero() -> None:
    weights = tests.experts_of(SMALL, 5)
    ids, shares = tests.choice(SMALL, 9, 5)
    latent = tests.latent_rows(SMALL, 9, 5)
    one = functools.partial(run, SMALL)
    ids = torch.full_like(ids, -1)
    assert not tests.result(one, SMALL, weights.bank(), latent, ids, shares).any()


def test_a_place_is_asked_for_when_its_products_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under some schedule a copy comes too early without the tie (`after`)."""
    weights = tests.experts_of(WIDE, 6)
    ids, shares = tests.choice(WIDE, 2, 6)
    latent = tests.latent_rows(WIDE, 2, 6)

    def fault(seed: int) -> bool:
        one = functools.partial(run, WIDE, seed=seed)
        try:
            tests.result(one, WIDE, weights.bank(), latent, ids, shares)
        except Fault:
            return True
        return False

    assert not fault(1)
    compiled.cache_clear()
    monkeypatch.setattr(up, "after", lambda acc, zero: zero)
    try:
        assert any(fault(seed) for seed in (1, 0, 2))
    finally:
        compiled.cache_clear()
