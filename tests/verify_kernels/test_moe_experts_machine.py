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
from verify_kernels.moe import (
    ExpertBank,
    ExpertPlan,
    combine,
    down,
    experts,
    layout,
    up,
)
from verify_kernels.moe.experts import ExpertWorkspace, Shape

#: A block along K for each of eight warps; K3's cut of K over the warps, and one of
#: five groups a warp; three steps of I, six in two laps, nine in three.
TINY = (128, 128, 16, 4)
WIDE = (3584, 64, 16, 4)
ODD = (1280, 64, 16, 4)
STEPS = (128, 192, 16, 4)
LAPS = (128, 384, 16, 4)
MORE = (128, 576, 16, 4)
SMALL = (128, 64, 16, 4)
#: Of the size of the rows' mean squares.
EPS = 1.0


@dataclass(frozen=True)
class Launch:
    """How a kernel of the three is made and launched."""

    kernel: Callable[..., Any]
    arguments: Callable[..., Any]
    #: CTAs and those of a cluster, given the kernel and the rows.
    grid: Callable[[Any, int], tuple[int, int, int]]
    cluster: Callable[[Any], int] = lambda kernel: 1


UP = Launch(
    up.ExpertsUpKernel,
    experts._up_arguments,
    lambda kernel, rows: (6, 1, 1),
    lambda kernel: 2,
)
DOWN = Launch(
    # Eight warps, so that each has several items.
    down.ExpertsDownKernel,
    experts._down_arguments,
    lambda kernel, rows: (1, 1, 1),
)
COMBINE = Launch(
    combine.CombineKernel,
    experts._combine_arguments,
    lambda kernel, rows: (kernel.ctas, rows, 1),
    lambda kernel: kernel.ctas,
)


@functools.cache
def compiled(one: Launch, *form: int) -> tuple[Any, str]:
    """Its kernel and PTX."""
    kernel = one.kernel(*form)
    made = functools.partial(one.arguments, *form)
    return kernel, kernels.ptx_of(Variant("moe", "one", kernel, made))


#: Tensor, extents and strides that are open.
Given = tuple[Tensor, Any, Any]


def launch_one(
    one: Launch,
    form: tuple[int, ...],
    tensors: dict[str, Given],
    numbers: list[bytes],
    rows: int,
    seed: int,
) -> None:
    kernel, ptx = compiled(one, *form)
    memory = GlobalMemory()
    parameters = []
    for name in kernel.parameters:
        tensor, extents, strides = tensors[name]
        address = memory.add(
            tensor,
            name,
            dynamic=name not in kernel.early_loads,
            writable=name == "out",
        )
        parameters.append(tensor_argument(address, extents, strides))
    threads = getattr(kernel, "threads", up.THREADS)
    launch(
        ptx,
        memory,
        parameters + numbers,
        grid=one.grid(kernel, rows),
        block=(threads, 1, 1),
        cluster=(one.cluster(kernel), 1, 1),
        shared_bytes=kernel.shared_bytes,
        seed=seed,
        races=True,
    )


def run(
    shape: Shape,
    latent: Tensor,
    shares: Tensor,
    plan: ExpertPlan,
    bank: ExpertBank,
    space: ExpertWorkspace,
    out: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = EPS,
    seed: int = 0,
) -> None:
    """All launches."""
    rows = latent.shape[:1]
    planned: dict[str, Given] = {
        name: (tensor, (), ()) for name, tensor in vars(plan).items()
    }
    first: dict[str, Given] = planned | {
        "x": (latent, rows, latent.stride()[:1]),
        "words": (bank.up.words, (), ()),
        "scales": (bank.up.scales, (), ()),
        "weights": (shares, rows, ()),
        "out": (space.inner, (), ()),
    }
    second: dict[str, Given] = planned | {
        "x": (space.inner, (), ()),
        "words": (bank.down.words, (), ()),
        "scales": (bank.down.scales, (), ()),
        "out": (space.sums, (), ()),
    }
    third: dict[str, Given] = planned | {
        "x": (space.sums, (), ()),
        "out": (out, rows, out.stride()[:1]),
    }
    if norm_weight is not None:
        third["weight"] = norm_weight, (), ()
    betas, eps = (
        [np.float32(x).tobytes() for x in numbers]
        for numbers in ((SITU_BETA, SITU_LINEAR_BETA), (norm_eps,))
    )
    half = (*shape, bank.held)
    sums = (shape[0], shape[3], len(space.sums), norm_weight is not None)
    sizes = (len(latent), seed)
    launch_one(UP, half, first, betas, *sizes)
    launch_one(DOWN, half, second, [], *sizes)
    launch_one(COMBINE, sums, third, eps, *sizes)


@pytest.mark.parametrize(
    ("shape", "rows", "spread"),
    [
        (TINY, 1, None),
        (TINY, 9, 5),
        (TINY, 33, 8),
        (WIDE, 2, None),
        (ODD, 2, None),
        (STEPS, 17, 5),
        (MORE, 9, 4),
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


def test_a_place_is_held_where_an_expert_has_one_item() -> None:
    """The compiler knew the zero of `after` there, so copies came to a place whose
    products were not there; under schedules in which data comes late."""
    bank = tests.experts_of(SMALL, 4).bank()
    ids, shares = tests.choice(SMALL, 9, 4, 5)
    rows = (tests.latent_rows(SMALL, 9, 4), ids, shares)

    def found(seed: int) -> Tensor:
        one = functools.partial(run, SMALL, seed=seed)
        return tests.result(one, SMALL, bank, *rows)

    assert torch.equal(found(1), found(3))


def test_a_pair_may_have_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three, as those of the widest I are two."""
    monkeypatch.setattr(layout, "_PART_COLUMNS", 128)
    compiled.cache_clear()
    weights = tests.experts_of(LAPS, 8)
    ids, shares = tests.choice(LAPS, 9, 8, 5)
    latent = tests.latent_rows(LAPS, 9, 8)
    one = functools.partial(run, LAPS)
    try:
        found = tests.result(one, LAPS, weights.bank(), latent, ids, shares)
    finally:
        compiled.cache_clear()
    tests.check_errors(found, latent, ids, shares, weights)


def test_experts_and_norm_together() -> None:
    one = functools.partial(run, TINY)
    tests.check_normed(one, TINY, tests.experts_of(TINY, 3).bank(), 3, "cpu")


@pytest.mark.parametrize("latent", [128, 3584])
def test_rows_are_normed(latent: int) -> None:
    """The norm of the sum that there is without it; of a row without experts 0."""
    top_k, rows = 4, 3
    ids = torch.tensor([[3, 1, 7, 2], [-1] * 4, [1, -1, 2, 9]])
    plan = tests.plan_of(ids, 16)
    g = torch.Generator().manual_seed(9)
    sums = torch.full((2, 64 * top_k, latent), torch.nan)
    live = (ids >= 0).flatten().nonzero().flatten()
    sums[:, live] = torch.randn(2, len(live), latent, generator=g)
    weight = (1 + torch.rand(latent, generator=g)).bfloat16()

    def combined(norm: bool, seed: int) -> Tensor:
        out = torch.full((rows, latent), torch.nan).bfloat16()
        tensors: dict[str, Given] = {
            "x": (sums, (), ()),
            "pairs": (plan.pairs, (), ()),
            "weight": (weight, (), ()),
            "out": (out, (rows,), (latent,)),
        }
        eps = [np.float32(EPS).tobytes()]
        launch_one(COMBINE, (latent, top_k, 2, norm), tensors, eps, rows, seed)
        return out

    summed, found = combined(False, 0), combined(True, 0)
    # In fp32, the parts of a pair and then the pairs in the order of the choices.
    exact = torch.zeros(rows, latent)
    for pair in live.tolist():
        exact[pair // top_k] += sums[0, pair] + sums[1, pair]
    assert torch.equal(summed, exact.bfloat16())
    tests.check_norm(found, summed, weight, EPS)
    assert not found[1].any()
    for seed in (1, 2):
        assert torch.equal(combined(True, seed), found)


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


def test_shapes_that_the_kernels_would_cut_wrongly_are_refused() -> None:
    with pytest.raises(ValueError, match="inner=3136: 2 parts of it are not whole"):
        down.ExpertsDownKernel(128, 3136, 16, 4, 3136)
    for latent in (384, 1408):
        combine.CombineKernel(latent, 4, 1, False)
        with pytest.raises(ValueError, match=f"latent={latent}: .* with a norm"):
            combine.CombineKernel(latent, 4, 1, True)


def test_rows_without_any_expert_are_zero() -> None:
    weights = tests.experts_of(SMALL, 5)
    ids, shares = tests.choice(SMALL, 9, 5)
    latent = tests.latent_rows(SMALL, 9, 5)
    one = functools.partial(run, SMALL)
    ids = torch.full_like(ids, -1)
    assert not tests.result(one, SMALL, weights.bank(), latent, ids, shares).any()


#: Of two places, and a copy under way to the other; K3's 3584 have seven.
PLACES = (1024, 64, 16, 4)


@pytest.mark.parametrize(("half", "shape"), [(up, PLACES), (down, STEPS)])
def test_a_place_is_asked_for_when_its_products_are_there(
    half: Any, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under some schedule a copy comes too early without the tie (`after`)."""
    weights = tests.experts_of(shape, 6)
    ids, shares = tests.choice(shape, 2, 6)
    latent = tests.latent_rows(shape, 2, 6)

    def fault(seed: int) -> bool:
        one = functools.partial(run, shape, seed=seed)
        try:
            tests.result(one, shape, weights.bank(), latent, ids, shares)
        except Fault:
            return True
        return False

    assert not fault(1)
    compiled.cache_clear()
    monkeypatch.setattr(half, "after", lambda acc, zero: zero)
    try:
        assert any(fault(seed) for seed in (1, 0, 2))
    finally:
        compiled.cache_clear()
