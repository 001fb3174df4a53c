# SPDX-License-Identifier: Apache-2.0
"""The experts' kernels: layout and checks anywhere, numbers on a GPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.bench.neighbours import neighbours
from verify_kernels.batch import MAX_ROWS
from verify_kernels.dense.reference import situ
from verify_kernels.moe import (
    ExpertBank,
    ExpertPlan,
    moe_experts,
    moe_route,
    reference,
)
from verify_kernels.moe.experts import (
    FORMS,
    SHAPES,
    ExpertWorkspace,
    Shape,
    variants,
    words_shape,
)
from verify_kernels.moe.layout import Blocks
from verify_kernels.moe.mxfp4 import Mxfp4, dequantise

#: Of the size of a row's mean square.
NORM_EPS = 1.0
#: Latent rows, weights of the choice, plan, bank, workspace, out -> nothing.
Run = Callable[[Tensor, Tensor, ExpertPlan, Any, ExpertWorkspace, Tensor], None]


@dataclass(frozen=True)
class Weights:
    """A rank's experts in the checkpoint's layout."""

    gate: Mxfp4
    up: Mxfp4
    down: Mxfp4

    def bank(self) -> ExpertBank:
        return ExpertBank.of(self.gate, self.up, self.down)

    def expert(self, e: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = (
            dequantise(w[e], dtype) for w in (self.gate, self.up, self.down)
        )
        return gate, up, down


def mxfp4(shape: tuple[int, ...], seed: int, device: str = "cpu") -> Mxfp4:
    """All codes, scales from 2^-10 to 2^-5 and now and then 2^1 or 2^-127."""
    g = torch.Generator(device).manual_seed(seed)
    lead, k = shape[:-1], shape[-1]

    def draw(low: int, high: int, size: tuple[int, ...]) -> Tensor:
        return torch.randint(
            low, high, size, generator=g, dtype=torch.uint8, device=device
        )

    scales = draw(117, 123, (*lead, k // 32))
    rare = draw(0, 64, scales.shape)
    scales[rare == 0] = 0
    scales[rare == 1] = 128
    return Mxfp4(draw(0, 256, (*lead, k // 2)), scales)


def experts_of(shape: Shape, seed: int = 0, device: str = "cpu") -> Weights:
    latent, inner, experts, _ = shape
    return Weights(
        mxfp4((experts, inner, latent), seed, device),
        mxfp4((experts, inner, latent), seed + 1, device),
        mxfp4((experts, latent, inner), seed + 2, device),
    )


def filled(weights: Weights, held: int, byte: int = 0) -> ExpertBank:
    """A Humming layer's bank of ``held`` rows of gate and up, those past the experts'
    full of a byte, with scales of 1."""
    more = held - weights.gate.packed.shape[1]

    def fill(one: Mxfp4, rows: int, columns: int) -> Mxfp4:
        pad = torch.nn.functional.pad
        return Mxfp4(
            pad(one.packed, (0, columns // 2, 0, rows), value=byte),
            pad(one.scales, (0, columns // 32, 0, rows), value=127),
        )

    gate, up = (fill(one, more, 0) for one in (weights.gate, weights.up))
    whole = ExpertBank.of(gate, up, fill(weights.down, 0, more))
    return replace(whole, inner=held - more)


def choice(
    shape: Shape, rows: int, seed: int, spread: int | None = None
) -> tuple[Tensor, Tensor]:
    """Ids int64 [M, K], of ``spread`` experts only, and shares that add up to 1."""
    _, _, experts, top_k = shape
    g = torch.Generator().manual_seed(seed)
    pool = torch.randperm(experts, generator=g)[: spread or experts]
    order = torch.rand(rows, len(pool), generator=g).argsort(1)[:, :top_k]
    shares = torch.rand(rows, top_k, generator=g) + 0.05
    return pool[order], shares / shares.sum(1, keepdim=True)


def plan_of(ids: Tensor, experts: int, device: str = "cpu") -> ExpertPlan:
    made = reference.expert_plan(ids, experts, MAX_ROWS)
    return ExpertPlan(*(tensor.to(device) for tensor in made))


def latent_rows(shape: Shape, rows: int, seed: int) -> Tensor:
    """Rows apart, with NaN between, a channel far out and one of zeros."""
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, shape[0], generator=g)
    values[:, 7] *= 40
    values[:, 11] = 0
    buffer = torch.full((rows, shape[0] + 24), torch.nan, dtype=torch.bfloat16)
    buffer[:, 8 : 8 + shape[0]] = values.bfloat16()
    return buffer[:, 8 : 8 + shape[0]]


def by_torch(
    latent: Tensor, ids: Tensor, shares: Tensor, weights: Weights, dtype: torch.dtype
) -> Tensor:
    """The sum in ``dtype``; in fp32 with the roundings to bf16 that a model has. A row
    may have an expert twice."""
    out = torch.zeros(latent.shape, dtype=dtype, device=latent.device)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        gate, up, down = weights.expert(expert, dtype)
        row, slot = (ids == expert).nonzero(as_tuple=True)
        z = latent[row].to(dtype)
        h = situ(z @ gate.T, z @ up.T)
        if dtype == torch.float32:
            h = h.bfloat16().float()
        out.index_add_(0, row, shares[row, slot].to(dtype)[:, None] * (h @ down.T))
    return out.bfloat16().to(dtype) if dtype == torch.float32 else out


def check_errors(
    found: Tensor, latent: Tensor, ids: Tensor, shares: Tensor, weights: Weights
) -> None:
    """No error is more than twice the largest of plain torch, nor is the mean."""
    exact = by_torch(latent, ids, shares, weights, torch.float64)
    plain = by_torch(latent, ids, shares, weights, torch.float32).double()
    scale = exact.square().mean(1, keepdim=True).sqrt()
    ours, theirs = ((x.double() - exact) / scale for x in (found, plain))
    assert ours.square().mean() <= 4 * theirs.square().mean(), len(ids)
    assert ours.abs().max() <= 2 * theirs.abs().max(), len(ids)


def check_norm(found: Tensor, summed: Tensor, weight: Tensor, eps: float) -> None:
    """Errors of an RMSNorm against fp64 are at most twice one rounding to bf16. Rows
    whose mean square is of eps' size tell another eps apart."""
    exact = summed.double()
    exact = exact * (exact.square().mean(1, keepdim=True) + eps).rsqrt()
    exact = exact * weight.double()
    ours = (found.double() - exact).abs()
    assert (ours <= 2 * 2**-8 * exact.abs()).all()


def workspace(shape: Shape, device: str = "cpu") -> ExpertWorkspace:
    """Full of NaN."""
    latent, inner, _, top_k = shape
    space = ExpertWorkspace.allocate(latent, inner, top_k, device)
    for tensor in (space.inner, space.sums):
        tensor.fill_(torch.nan)
    return space


def result(
    run: Run,
    shape: Shape,
    bank: ExpertBank,
    latent: Tensor,
    ids: Tensor,
    shares: Tensor,
    device: str = "cpu",
) -> Tensor:
    """What a run gives on the CPU; its workspace was NaN, and what lies between rows of
    the output still is."""
    rows, columns = latent.shape
    space = workspace(shape, device)
    buffer = torch.full((rows + 1, columns + 16), torch.nan, device=device).bfloat16()
    out = buffer[:rows, 4 : 4 + columns]
    run(latent, shares, plan_of(ids, shape[2], device), bank, space, out)
    assert torch.isfinite(out).all()
    buffer = buffer.clone()
    buffer[:rows, 4 : 4 + columns] = torch.nan
    assert buffer.isnan().all()
    unused = torch.ones(len(space.inner), dtype=torch.bool)
    unused[(ids >= 0).flatten().nonzero().flatten()] = False
    assert space.inner.cpu()[unused].isnan().all()
    assert space.sums.cpu()[:, unused].isnan().all()
    return out.cpu()


def on_gpu(
    latent: Tensor,
    shares: Tensor,
    plan: ExpertPlan,
    bank: ExpertBank,
    space: ExpertWorkspace,
    out: Tensor,
    **options: Any,
) -> None:
    moe_experts(latent, shares, plan, bank, space, out, **options)


def changed(bank: Any, change: Callable[[Tensor], Tensor], **other: int) -> Any:
    """A bank whose tensors are changed, all in one way."""

    def there(half: Any) -> Any:
        return type(half)(change(half.words), change(half.scales))

    return replace(bank, up=there(bank.up), down=there(bank.down), **other)


def moved(bank: Any, device: str) -> Any:
    return changed(bank, lambda x: x.to(device))


def arguments() -> dict[str, Any]:
    shape = SHAPES[-1]
    ids, shares = choice(shape, 3, 0)
    return {
        "latent": latent_rows(shape, 3, 0),
        "shares": shares,
        "plan": plan_of(ids, shape[2]),
        "bank": experts_of(shape).bank(),
        "space": workspace(shape),
    }


def test_few_items_have_sms_alone() -> None:
    """Only as many as the GPU has pairs of SMs, and only where that is compiled."""

    def blocks(experts: int, rows: int, columns: int) -> Blocks:
        words = torch.empty(
            words_shape(experts, rows, columns), dtype=torch.int32, device="meta"
        )
        _, steps, across, _ = words.shape
        scales = words.new_empty(experts, steps // 2, 64 * across, dtype=torch.uint8)
        return Blocks(words, scales)

    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    names = {variant.name for variant in variants()}
    for shape, held in FORMS:
        latent, inner, experts, top_k = shape
        up = blocks(experts, 2 * held, latent)
        bank = ExpertBank(up, blocks(experts, latent, held), latent, inner, held)
        for sms, rows in itertools.product((40, 78, 132, 148), range(1, 65)):
            half, clusters = bank.first_half(sms, rows * top_k)
            items = rows * top_k * (inner // 64)
            assert clusters == min(items, sms)
            assert (half == "up_alone") == (items <= min(66, sms // 2))
            items = rows * top_k * (2 if inner == 3072 else 1) * (latent // 64)
            assert bank.second_half(sms, rows * top_k) == min(items, 2 * sms)
            assert bank.variant_name(half, shape) in names


def test_no_rows_and_no_device() -> None:
    call = arguments()
    empty = call | {"latent": call["latent"][:0], "shares": call["shares"][:0]}
    assert moe_experts(**empty).shape == (0, 128)
    with pytest.raises(ValueError, match="latent is on cpu; the kernels need a CUDA"):
        moe_experts(**call)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"latent": torch.zeros(3, 128)}, r"latent is torch.float32 \(3, 128\)"),
        ({"latent": torch.zeros(65, 128).bfloat16()}, "65 rows; at most 64"),
        ({"latent": torch.zeros(3, 64).bfloat16()}, "64 columns; the experts take 128"),
        (
            {"latent": torch.zeros(3, 132).bfloat16()[:, :128]},
            r"latent has strides \(132, 1\)",
        ),
        (
            {"latent": torch.zeros(3, 136).bfloat16()[:, 1:129]},
            "latent has strides .* start at a multiple of 16 bytes",
        ),
        (
            {"shares": torch.zeros(3, 2)},
            "2 of 16 experts of 128 x 64, 64 rows of gate held: no kernel",
        ),
        ({"shares": torch.zeros(2, 4)}, r"shares is torch.float32 \(2, 4\)"),
        (
            {"space": replace(workspace(SHAPES[-1]), inner=torch.zeros(256, 64))},
            r"space.inner is torch.float32 \(256, 64\)",
        ),
        (
            {"space": workspace((128, 3072, 16, 4))},
            r"space.inner is torch.bfloat16 \(256, 3072\)",
        ),
        (
            {"space": replace(workspace(SHAPES[-1]), sums=torch.zeros(2, 256, 128))},
            r"space.sums is torch.float32 \(2, 256, 128\); it must be .* \(1, 256",
        ),
        (
            {"norm_weight": torch.ones(128)},
            r"norm_weight is torch.float32 \(128,\)",
        ),
        (
            {"plan": ExpertPlan.allocate(896, 16, "cpu")},
            r"plan.experts is torch.int32 \(896,\)",
        ),
        ({"out": torch.zeros(3, 128)}, r"out is torch.float32 \(3, 128\)"),
        (
            {"out": torch.zeros(3, 128, device="meta").bfloat16()},
            "out is on meta and latent on cpu",
        ),
        (
            {"bank": moved(experts_of(SHAPES[-1]).bank(), "meta")},
            "bank is on meta and latent on cpu",
        ),
        (
            {"space": workspace(SHAPES[-1], "meta")},
            "space.inner is on meta and latent on cpu",
        ),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        moe_experts(**arguments() | change)


def some_experts(
    shape: Shape, held: int, seed: int, count: int = 64, device: str = "cuda"
) -> ExpertBank:
    """A bank on the GPU whose first ``count`` experts differ and then come again: a
    checkpoint of this size would take minutes to draw and pack."""
    latent, inner, experts, _ = shape
    count = min(count, experts)
    weights = experts_of((latent, inner, count, 0), seed, device)
    bank = weights.bank() if held == inner else filled(weights, held)
    times = -(-experts // count)
    repeated: ExpertBank = changed(
        bank, lambda x: x.repeat(times, *[1] * (x.dim() - 1))[:experts]
    )
    return repeated


def test_some_experts_have_the_form_asked_for() -> None:
    for shape, held in FORMS:
        if shape[2] == 16:
            bank = some_experts(shape, held, 0, 6, "cpu")
            assert (bank.latent, bank.inner, bank.experts) == shape[:3]
            assert bank.held == held and bank.takes(shape)
            assert torch.equal(bank.up.words[:4], bank.up.words[12:])


def gpu_forms(most: int) -> Any:
    """Forms with I up to ``most``."""
    forms = [form for form in FORMS if form[0][1] <= most]
    return pytest.mark.parametrize(("shape", "held"), forms, ids=str)


@pytest.mark.gpu
@gpu_forms(3072)
def test_against_torch(shape: Shape, held: int) -> None:
    count = min(64, shape[2])
    small = experts_of((*shape[:2], count, 0), 5, "cuda")
    bank = some_experts(shape, held, 5)
    for rows, spread in ((1, None), (2, None), (5, 20), (8, None), (9, 20), (64, None)):
        spread = None if spread is None or spread > shape[2] else spread
        ids, shares = choice(shape, rows, rows, spread)
        latent = latent_rows(shape, rows, rows).cuda()
        found = result(on_gpu, shape, bank, latent, ids, shares.cuda(), "cuda").cuda()
        check_errors(found, latent, ids.cuda() % count, shares.cuda(), small)


def check_normed(
    run: Callable[..., None], shape: Shape, bank: ExpertBank, rows: int, device: str
) -> None:
    """The norm of the sum that there is without it, 0 for a row without experts; a row
    has the bits that it has alone. Raises AssertionError."""
    ids, shares = choice(shape, rows, 4)
    ids[1] = -1
    latent, shares = latent_rows(shape, rows, 4).to(device), shares.to(device)
    g = torch.Generator().manual_seed(4)
    weight = (1 + torch.rand(shape[0], generator=g)).bfloat16()

    def normed(*arguments: Any) -> None:
        run(*arguments, norm_weight=weight.to(device), norm_eps=NORM_EPS)

    summed = result(run, shape, bank, latent, ids, shares, device)
    found = result(normed, shape, bank, latent, ids, shares, device)
    check_norm(found, summed, weight, NORM_EPS)
    assert not found[1].any() and found[0].any()
    last = latent[-1:], ids[-1:], shares[-1:]
    assert torch.equal(result(normed, shape, bank, *last, device), found[-1:])


@pytest.mark.gpu
@gpu_forms(3072)
def test_the_sum_may_be_normed(shape: Shape, held: int) -> None:
    check_normed(on_gpu, shape, some_experts(shape, held, 9, 16), 33, "cuda")


@pytest.mark.gpu
@gpu_forms(384)
def test_rows_do_not_depend_on_batch_mates(shape: Shape, held: int) -> None:
    """Field case F40: each row alone and the first M of 64 for every M, bit for bit."""
    bank = some_experts(shape, held, 6)
    ids, shares = choice(shape, 64, 6, min(shape[2], 40))
    latent, shares = latent_rows(shape, 64, 6).cuda(), shares.cuda()

    def part(pick: slice) -> Tensor:
        rows = (latent[pick], ids[pick], shares[pick].contiguous())
        return result(on_gpu, shape, bank, *rows, "cuda")

    whole = part(slice(0, 64))
    for m in range(64):
        assert torch.equal(part(slice(m, m + 1)), whole[m : m + 1]), m
    for m in range(2, 64):
        assert torch.equal(part(slice(0, m)), whole[:m]), m


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("shape", "held"), [f for f in FORMS if f[0][1] not in (768, 1536)], ids=str
)
def test_a_thousand_repeats_with_another_stream_busy(
    shape: Shape, held: int, norm: bool, pdl: bool
) -> None:
    bank = some_experts(shape, held, 7)
    weight = torch.linspace(0.5, 2, shape[0], device="cuda").bfloat16()
    one = functools.partial(moe_experts, norm_weight=weight if norm else None)
    latent = latent_rows(shape, 64, 7).cuda()
    space = workspace(shape, "cuda")
    sizes = (1, 64, 2, 33, 8, 5, 16, 3)
    cases = {}
    for m in sizes:
        ids, shares = choice(shape, m, m)
        plan, shares = plan_of(ids, shape[2], "cuda"), shares.cuda()
        wanted = one(latent[:m], shares, plan, bank, space, pdl=False)
        cases[m] = (plan, shares, wanted)
    live, out = torch.empty_like(latent), torch.empty_like(latent)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with neighbours() as disturb:
        for i in range(1000):
            disturb()
            m = sizes[i % len(sizes)]
            plan, shares, wanted = cases[m]
            live.fill_(torch.nan)
            live[:m].copy_(latent[:m])
            space.inner.fill_(torch.nan)
            space.sums.fill_(torch.nan)
            one(live[:m], shares, plan, bank, space, out[:m], pdl=pdl)
            wrong += (out[:m] != wanted).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True])
def test_programmatic_neighbours_wait_for_each_other(norm: bool) -> None:
    """Routing, experts, routing, experts of other rows through the same workspace and
    the same plan, all launched programmatically with nothing of torch's between."""
    shape, held = (3584, 192, 896, 16), 192
    bank = some_experts(shape, held, 8)
    weight = torch.linspace(0.5, 2, shape[0], device="cuda").bfloat16()
    one = functools.partial(moe_experts, norm_weight=weight if norm else None)
    space = workspace(shape, "cuda")
    bias = torch.zeros(shape[2], device="cuda")
    g = torch.Generator().manual_seed(8)
    steps = []
    plan = ExpertPlan.allocate(shape[2], shape[3], "cuda")
    for m in (8, 1, 33, 4):
        logits = torch.randn(m, shape[2], generator=g).cuda()
        shares, ids = moe_route(logits, bias, shape[3], plan, pdl=False)
        latent = latent_rows(shape, m, m).cuda()
        wanted = one(latent, shares, plan, bank, space, pdl=False)
        steps.append((logits, shares, ids, latent, wanted))
    rounds = 250
    found = [
        wanted.new_full((rounds, *wanted.shape), torch.nan) for *_, wanted in steps
    ]
    torch.cuda.synchronize()
    for i in range(rounds):
        for (logits, shares, ids, latent, _), out in zip(steps, found, strict=True):
            moe_route(logits, bias, shape[3], plan, shares, ids)
            one(latent, shares, plan, bank, space, out[i])
    for (*_, wanted), out in zip(steps, found, strict=True):
        assert (out == wanted).all()
