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
from verify_kernels.batch import MAX_ROWS
from verify_kernels.common.variant import Variant
from verify_kernels.dense.reference import SITU_BETA, SITU_LINEAR_BETA
from verify_kernels.moe import ExpertBank, ExpertPlan, HummingBank, down, experts, up
from verify_kernels.moe.experts import Shape
from verify_kernels.moe.humming import down as humming_down
from verify_kernels.moe.humming import host as humming
from verify_kernels.moe.humming import up as humming_up

#: One or two tiles of K for each of eight warps, or none; K3's cut of K over the warps;
#: several steps of I.
TINY = (128, 128, 16, 4)
WIDE = (3584, 64, 16, 4)
STEPS = (128, 384, 16, 4)
SMALL = (128, 64, 16, 4)


@dataclass(frozen=True)
class Half:
    """How a half is made and launched: clusters of some CTAs, whose number is given or
    follows from the latent columns that one owns, and the rows if not all."""

    kernel: Callable[..., Any]
    arguments: Callable[..., Any]
    ctas: int
    clusters: int = 0
    columns: int = 0
    given: int = 4
    rows: int = MAX_ROWS

    def grid(self, latent: int) -> int:
        return self.ctas * (self.clusters or latent // self.columns)


HALVES = {
    ExpertBank: (
        Half(up.ExpertsUpKernel, experts._up_arguments, 1, clusters=3),
        Half(down.ExpertsDownKernel, experts._down_arguments, 1, columns=16),
    ),
    HummingBank: (
        Half(humming_up.ExpertsUpKernel, humming._up_arguments, 2, clusters=3, given=5),
        Half(
            humming_down.ExpertsDownKernel,
            humming._down_arguments,
            2,
            columns=64,
            given=5,
            rows=8,
        ),
    ),
}
KINDS = pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.__name__)


@functools.cache
def compiled(half: Half, *form: int) -> tuple[Any, str]:
    """A half's kernel and PTX."""
    kernel = half.kernel(*form)
    made = functools.partial(half.arguments, *form[: half.given])
    return kernel, kernels.ptx_of(Variant("moe", "half", kernel, made))


def run(
    shape: Shape,
    latent: Tensor,
    shares: Tensor,
    plan: ExpertPlan,
    bank: tests.Bank,
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
        "weights": (shares, rows, ()),
        "out": (out, rows, out.stride()[:1]),
    }
    numbers = [np.float32(x).tobytes() for x in (SITU_BETA, SITU_LINEAR_BETA)]
    for half, tensors, rest in zip(
        HALVES[type(bank)], (first, second), (numbers, []), strict=True
    ):
        form = (*shape, bank.held) if isinstance(bank, HummingBank) else shape
        kernel, ptx = compiled(half, *form)
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
            grid=(half.grid(shape[0]), -(-len(latent) // half.rows), 1),
            block=(getattr(kernel, "threads", 256), 1, 1),
            cluster=(half.ctas, 1, 1),
            shared_bytes=kernel.shared_bytes,
            seed=seed,
            races=True,
        )


@pytest.mark.parametrize(
    ("shape", "rows", "spread"),
    [(TINY, 1, None), (TINY, 9, 5), (TINY, 33, 8), (WIDE, 2, None), (STEPS, 3, None)],
    ids=str,
)
@KINDS
def test_rows_are_right(
    kind: type[tests.Bank], shape: Shape, rows: int, spread: int | None
) -> None:
    """Nine rows of five experts: more than eight pairs of one."""
    weights = tests.experts_of(shape, rows)
    ids, shares = tests.choice(shape, rows, rows, spread)
    latent = tests.latent_rows(shape, rows, rows)
    one = functools.partial(run, shape)
    found = tests.result(one, shape, weights.bank(kind), latent, ids, shares)
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
        weights.bank(HummingBank),
        latent,
        ids,
        shares,
    )
    assert torch.equal(found, right)


@KINDS
def test_rows_schedules_and_padding_have_the_same_bits(kind: type[tests.Bank]) -> None:
    bank = tests.experts_of(TINY, 1).bank(kind)
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
    bank = weights.bank(HummingBank)
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
