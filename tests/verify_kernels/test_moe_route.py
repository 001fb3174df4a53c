# SPDX-License-Identifier: Apache-2.0
"""The routing kernel: its checks anywhere, its numbers on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.bench.neighbours import STALE, neighbours
from verify_kernels.batch import MAX_ROWS
from verify_kernels.moe import ExpertPlan, moe_route, reference
from verify_kernels.moe.host import FORMS, Form, forms, variant_name

SCALE = 2.5
#: fp32's unit roundoff.
UNIT = 2.0**-24
#: Scores + biases that are this close may be chosen in either order.
CLOSE = 32 * UNIT
KINDS = ("plain", "crowded", "ties", "equal", "one", "ascending", "nan", "infinite")


@dataclass(frozen=True)
class Routed:
    """What one launch leaves."""

    weights: Tensor
    ids: Tensor
    plan: ExpertPlan

    @classmethod
    def stale(
        cls, rows: int, num_experts: int, top_k: int, device: torch.device | str
    ) -> Routed:
        """Outputs full of NaN and of ids that exist nowhere."""
        plan = ExpertPlan.allocate(num_experts, top_k, device)
        for tensor in vars(plan).values():
            tensor.fill_(-77)
        shape = rows, top_k
        return cls(
            torch.full(shape, torch.nan, device=device),
            torch.full(shape, -77, dtype=torch.int32, device=device),
            plan,
        )

    def bits(self) -> tuple[Tensor, ...]:
        return (self.weights.view(torch.int32), self.ids, *vars(self.plan).values())


#: Logits, bias and a form to what a launch leaves.
Run = Callable[[Tensor, Tensor, Form], Routed]


def padded(logits: Tensor) -> Tensor:
    """The same, in rows that are not adjacent."""
    rows, width = logits.shape
    buffer = logits.new_full((rows, width + 12), torch.nan)
    buffer[:, 4 : 4 + width] = logits
    return buffer[:, 4 : 4 + width]


def clear(logits: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """bool [M]: the first top_k + 1 choices of a row are equal by equal logit and
    bias, or not `CLOSE`."""
    choice = torch.sigmoid(logits.double()) + bias.double()
    order = torch.sort(choice, descending=True, stable=True).indices[:, : top_k + 1]
    gap = -choice.gather(1, order).diff(dim=1)
    same = (logits.gather(1, order).diff(dim=1) == 0) & (bias[order].diff(dim=1) == 0)
    return (same | (gap > CLOSE)).all(1)


def inputs(
    num_experts: int, top_k: int, rows: int, kind: str, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits in rows apart and a bias, on the CPU; the choice does not hang on the last
    bits of a score."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def small(count: int, *shape: int) -> Tensor:
        return torch.randint(count, shape, generator=generator).float()

    bias = 0.1 * normal(num_experts)
    if kind == "equal":
        return padded(torch.zeros(rows, num_experts)), torch.zeros(num_experts)
    if kind == "ties":
        return padded(small(4, rows, num_experts)), 0.25 * small(3, num_experts)
    if kind == "ascending":
        # All of the last groups pass the threshold.
        logits = torch.linspace(-3, 3, num_experts).repeat(rows, 1)
        logits[1::2] = logits[1::2].flip(1)
        return padded(logits), torch.zeros(num_experts)
    logits = 2 * normal(rows, num_experts)
    if kind == "one":
        bias[num_experts // 3] = 5
    if kind == "crowded":
        # One warp finds more than the eight keys that a lane reads at a time.
        bias[num_experts // 2 : num_experts // 2 + 12] += 1
    while not (good := clear(logits, bias, top_k)).all():
        logits[~good] = 2 * normal(int((~good).sum()), num_experts)
    if kind == "nan":
        logits[0::3] = torch.nan
        logits[1::3, num_experts // 2] = torch.nan
        logits[1::3, 3] = -torch.nan
        bias[num_experts // 2 + 1] = torch.nan
    if kind == "infinite":
        # Scores of 0 and of 1, so that the bias orders; a row of scores of 0.
        logits[0::3] = -torch.inf
        logits[1::3, 2:] = -torch.inf
        logits[2::3, ::2] = torch.inf
    return padded(logits), bias


def check(
    found: Routed,
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    padding: Tensor | None = None,
) -> None:
    """Ids and plan equal the reference's, weights are in their bound; rows that pad
    have none.

    A score's relative error, in units of 2^-24: the product by -log2 e has |x| (twice,
    for the constant), 2^x, 1 + 2^x and its inverse have 4, 1 and 2; the sum takes over
    the largest and adds 4, the quotient and the scale add 2.
    """
    logits, bias = logits.cpu(), bias.cpu()
    num_experts = logits.shape[1]
    wanted, _ = reference.route(logits, bias, top_k, compute=torch.float32)
    ids = found.ids.cpu().long()
    live = torch.ones(len(ids), dtype=torch.bool) if padding is None else ~padding.cpu()
    assert torch.equal(ids[live], wanted[live]) and (ids[~live] == -1).all()
    picked = logits.gather(1, wanted).double()
    scores = torch.sigmoid(picked)
    exact = scores / scores.sum(1, keepdim=True) * SCALE
    exact[~live] = 0
    weights = found.weights.cpu().double()
    assert torch.equal(torch.isnan(weights), torch.isnan(exact))
    finite = torch.where(torch.isfinite(picked), picked.abs(), 0.0)
    score_units = 2 * finite.amax(1, keepdim=True) + 7
    allowed = (2 * score_units + 6) * UNIT * exact
    assert not ((weights - exact).abs() > allowed).any()
    planned = reference.expert_plan(ids, num_experts, MAX_ROWS)
    for name, right in zip(vars(found.plan), planned, strict=True):
        assert torch.equal(getattr(found.plan, name).cpu(), right), name


def check_rows_alone(run: Run, form: Form, rows: int, picks: list[slice]) -> None:
    """Rows in other company, and in other places, have the same bits."""
    logits, bias = inputs(*form[:2], rows, "plain", seed=1)
    whole = run(logits, bias, form)
    for pick in picks:
        part = run(logits[pick], bias, form)
        for one, other in zip(part.bits()[:2], whole.bits()[:2], strict=True):
            assert torch.equal(one, other[pick]), pick


def with_padding(rows: int) -> Tensor:
    """bool [M]: some rows between others, and all of the last third."""
    padding = torch.arange(rows) % 5 == 1
    padding[-(rows // 3) :] = rows >= 3
    return padding


def on_gpu(
    logits: Tensor,
    bias: Tensor,
    form: Form,
    *,
    padding: Tensor | None = None,
    pdl: bool = True,
) -> Routed:
    found = Routed.stale(*logits.shape, form[1], "cuda")
    if logits.device.type == "cpu":
        logits, bias = padded(logits.cuda()), bias.cuda()
    moe_route(
        *(logits, bias, form[1], found.plan, found.weights, found.ids),
        padding=None if padding is None else padding.cuda(),
        routed_scale=SCALE,
        cut=form[2:],
        pdl=pdl,
    )
    return found


def name_of(form: object) -> str:
    return variant_name(*form) if isinstance(form, tuple) else str(form)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", forms(), ids=name_of)
def test_every_form_against_the_reference(form: Form, kind: str) -> None:
    with neighbours() as disturb:
        for rows in (1, 2, 3, 8, 31, 33, 64):
            logits, bias = inputs(*form[:2], rows, kind, seed=rows)
            for _ in STALE:
                disturb()
                check(on_gpu(logits, bias, form), logits, bias, form[1])


@pytest.mark.gpu
@pytest.mark.parametrize("form", forms(), ids=name_of)
def test_rows_that_pad_choose_nothing(form: Form) -> None:
    for rows in (1, 2, 3, 8, 33, 64):
        logits, bias = inputs(*form[:2], rows, "nan", seed=rows)
        for padding in (with_padding(rows), torch.ones(rows, dtype=torch.bool)):
            found = on_gpu(logits, bias, form, padding=padding)
            check(found, logits, bias, form[1], padding)


@pytest.mark.gpu
@pytest.mark.parametrize("form", forms(), ids=name_of)
def test_rows_do_not_depend_on_batch_mates(form: Form) -> None:
    """Field case F40: each row alone and the first M of 64 for every M, bit for bit."""
    picks = [slice(m, m + 1) for m in range(64)] + [slice(0, m) for m in range(2, 64)]
    check_rows_alone(on_gpu, form, 64, picks)


@pytest.mark.gpu
@pytest.mark.parametrize("model", FORMS)
def test_forms_give_the_same_bits(model: tuple[int, int]) -> None:
    logits, bias = inputs(*model, 64, "plain", seed=2)
    results = [on_gpu(logits, bias, f).bits() for f in forms() if f[:2] == model]
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("form", forms(), ids=name_of)
def test_a_thousand_repeats_with_another_stream_busy(form: Form, pdl: bool) -> None:
    """Same bits each time, M cycling, logits rewritten by the launch before, while
    another stream fills the GPU."""
    logits, bias = inputs(*form[:2], 64, "plain", seed=3)
    logits, bias = padded(logits.cuda()), bias.cuda()
    sizes = (1, 64, 2, 33, 8, 5, 16, 3)
    wanted = {m: on_gpu(logits[:m], bias, form, pdl=False).bits() for m in sizes}
    live = torch.empty_like(logits)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with neighbours() as disturb:
        for i in range(1000):
            disturb()
            m = sizes[i % len(sizes)]
            live.fill_(torch.nan)
            live[:m].copy_(logits[:m])
            found = on_gpu(live[:m], bias, form, pdl=pdl)
            for one, right in zip(found.bits(), wanted[m], strict=True):
                wrong += (one != right).sum()
    assert int(wrong) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("form", forms(), ids=name_of)
def test_dependent_launches_in_a_graph(form: Form) -> None:
    """Every launch releases the next at entry, which overwrites the same outputs: 200
    programmatic launches, the last with its own result."""
    first, bias = inputs(*form[:2], 8, "plain", seed=4)
    last, _ = inputs(*form[:2], 8, "plain", seed=5)
    first, bias = padded(first.cuda()), bias.cuda()
    wanted = on_gpu(padded(last.cuda()), bias, form, pdl=False)
    last = padded(last.cuda())
    found = Routed.stale(*first.shape, form[1], "cuda")

    def chain() -> None:
        for i in range(200):
            moe_route(
                *(last if i % 2 else first, bias, form[1], found.plan),
                *(found.weights, found.ids),
                routed_scale=SCALE,
                cut=form[2:],
            )

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(100):
        for tensor in found.bits():
            tensor.fill_(-5)
        graph.replay()
        for one, right in zip(found.bits(), wanted.bits(), strict=True):
            assert torch.equal(one, right)


def arguments() -> dict[str, Any]:
    logits, bias = inputs(896, 16, 3, "plain")
    plan = ExpertPlan.allocate(896, 16, "cpu")
    return {"logits": logits, "bias": bias, "top_k": 16, "plan": plan}


def test_no_rows_and_no_device() -> None:
    """M = 0 is an empty step anywhere; rows on the CPU are refused."""
    call = arguments()
    weights, ids = moe_route(**call | {"logits": call["logits"][:0]})
    assert weights.shape == ids.shape == (0, 16)
    planned = reference.expert_plan(ids, 896, MAX_ROWS)
    for name, right in zip(vars(call["plan"]), planned, strict=True):
        assert torch.equal(getattr(call["plan"], name), right), name
    with pytest.raises(ValueError, match=r"logits is on cpu; the kernel needs a CUDA"):
        moe_route(**call)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logits": torch.zeros(65, 896)}, "logits has 65 rows; at most 64"),
        ({"logits": torch.zeros(3, 896).bfloat16()}, r"logits is torch.bfloat16 \(3"),
        ({"logits": torch.zeros(896)}, r"logits is torch.float32 \(896,\)"),
        ({"logits": torch.zeros(3, 897)[:, :896]}, r"logits has strides \(897, 1\)"),
        ({"logits": torch.zeros(3, 900)[:, 1:897]}, "logits has strides .* multiple"),
        (
            {"logits": torch.zeros(896, 3).T},
            "all dimensions but the first 1 must be co",
        ),
        ({"top_k": 8}, "top_k 8 of 896 experts: no kernel.* 16 of 896, 4 of 16"),
        ({"cut": (2, 2)}, r"cut is \(2, 2\); the compiled .*\(8, 4\)"),
        ({"bias": torch.zeros(895)}, r"bias is torch.float32 \(895,\)"),
        ({"bias": torch.zeros(896).double()}, "bias is torch.float64"),
        ({"bias": torch.zeros(2 * 896)[::2]}, r"bias has strides \(2,\)"),
        ({"weights": torch.zeros(3, 15)}, r"weights is torch.float32 \(3, 15\)"),
        ({"ids": torch.zeros(3, 16).long()}, "ids is torch.int64"),
        ({"ids": torch.zeros(2, 16).int()}, r"ids is torch.int32 \(2, 16\)"),
        (
            {"plan": ExpertPlan.allocate(16, 4, "cpu")},
            r"plan.experts is torch.int32 \(16,\)",
        ),
        ({"bias": torch.zeros(896, device="meta")}, "bias is on meta and logits on cp"),
        ({"padding": torch.zeros(3)}, r"padding is torch.float32 \(3,\); .* \(3,\)"),
        ({"padding": torch.zeros(4).bool()}, r"padding is torch.bool \(4,\)"),
        (
            {"padding": torch.zeros(6).bool()[::2]},
            r"padding has strides \(2",
        ),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        moe_route(**arguments() | change)


def test_forms_cover_every_step_and_names_differ() -> None:
    for table in FORMS.values():
        limits = [most for most, _, _ in table]
        assert limits == sorted(set(limits)) and limits[-1] == MAX_ROWS
    names = [variant_name(*form) for form in forms()]
    assert len(set(names)) == len(names)
