# SPDX-License-Identifier: Apache-2.0
"""Routing on the GPU: the plan's buffers, the compiled forms, checks, the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common.checks import Argument, check_all
from verify_kernels.common.variant import Variant, cached, device_arch, fake

#: (experts, top_k, CTAs of the cluster, rows of a CTA at a time).
Form = tuple[int, int, int, int]
#: (experts, top_k) of Kimi K3 and of a tiny model -> rows up to which a step takes a
#: form, and its CTAs and rows: the fastest of twelve (H200, 2026-11-30, chains of
#: programmatic launches: 2.6 us at one row, 3.1 at eight, 4.1 at 16, 7.8 at 64). Any
#: form takes any number of rows.
FORMS: dict[tuple[int, int], tuple[tuple[int, int, int], ...]] = {
    (896, 16): ((1, 1, 1), (8, 8, 1), (16, 8, 2), (MAX_ROWS, 8, 4)),
    (16, 4): ((MAX_ROWS, 1, 8),),
}


@dataclass(frozen=True)
class ExpertPlan:
    """Which experts a step needs, and for which rows; int32, contiguous.

    With D distinct experts in L live rows; a pair is row * K + slot, the place of a
    choice in the flat ids and weights.

    Attributes:
        experts: [E], the distinct experts in ascending order; -1 from D on.
        offsets: [E + 1], where each one's pairs begin; L K from D on.
        pairs: [64 K], pairs grouped by expert, rows ascending; -1 from L K on.
        counts: [2], D and L K.
    """

    experts: Tensor
    offsets: Tensor
    pairs: Tensor
    counts: Tensor

    @classmethod
    def allocate(
        cls, num_experts: int, top_k: int, device: torch.device | str
    ) -> ExpertPlan:
        """Buffers for any step of a model; nothing in them is valid yet."""

        return cls(
            *(
                torch.full((size,), -1, dtype=torch.int32, device=device)
                for size in plan_sizes(num_experts, top_k)
            )
        )

    def arguments(self, num_experts: int, top_k: int) -> list[Argument]:
        """In the kernels' order, to be checked."""
        sizes = plan_sizes(num_experts, top_k)
        return [
            (f"plan.{name}", tensor, torch.int32, (size,), 0, 16)
            for (name, tensor), size in zip(vars(self).items(), sizes, strict=True)
        ]


def plan_sizes(num_experts: int, top_k: int) -> tuple[int, ...]:
    """Extents of an `ExpertPlan`'s tensors, in their order."""
    return num_experts, num_experts + 1, MAX_ROWS * top_k, 2


def fake_plan(num_experts: int, top_k: int) -> list[Any]:
    """An `ExpertPlan`'s tensors to compile with, in their order."""
    import cutlass

    sizes = plan_sizes(num_experts, top_k)
    return [fake(cutlass.Int32, (size,), 0, 16) for size in sizes]


@functools.cache
def multiprocessors(device: int) -> int:
    """SMs of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def variant_name(num_experts: int, top_k: int, ctas: int, slots: int) -> str:
    """Name of a form; says all that its kernel is made from."""
    return f"route_e{num_experts}_k{top_k}_c{ctas}_s{slots}"


def _arguments(num_experts: int, top_k: int) -> Sequence[Any]:
    """Fake arguments: M and the logits' row stride are open."""
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    rows = cute.sym_int()
    return (
        fake(cutlass.Float32, (rows, num_experts), 1, 16),
        fake(cutlass.Float32, (num_experts,), 0, 16),
        fake(cutlass.Uint8, (cute.sym_int(),), 0, 1),
        fake(cutlass.Float32, (rows, top_k), 0, 16),
        fake(cutlass.Int32, (rows, top_k), 0, 16),
        *fake_plan(num_experts, top_k),
        cutlass.Float32(0.0),
        cutlass.Int32(0),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def forms() -> list[Form]:
    """Every compiled form."""
    return [
        (*model, ctas, slots)
        for model, table in FORMS.items()
        for _, ctas, slots in table
    ]


def variants() -> list[Variant]:
    """The forms in `FORMS`, and the experts'. Programmatic launch is an argument, not a
    form."""
    from verify_kernels.moe import experts
    from verify_kernels.moe.route import RouteKernel

    routes = [
        Variant(
            op="moe",
            name=variant_name(*form),
            kernel=RouteKernel(*form),
            arguments=functools.partial(_arguments, *form[:2]),
            # 28 warps of the largest form fit an SM.
            max_registers=72,
            max_shared_bytes=113 * 1024,
        )
        for form in forms()
    ]
    return [*routes, *experts.variants()]


@functools.cache
def _compiled(device: int, *form: int) -> Callable[..., None]:
    name = variant_name(*form)
    variant = next(v for v in variants() if v.name == name)
    return cached(variant, device_arch(device))


def _form(num_experts: int, top_k: int, rows: int, cut: tuple[int, int] | None) -> Form:
    """The compiled form for a call, or ValueError."""
    model = (num_experts, top_k)
    if model not in FORMS:
        known = ", ".join(f"{k} of {e}" for e, k in FORMS)
        raise ValueError(
            f"top_k {top_k} of {num_experts} experts: no kernel is compiled for it; "
            f"there are {known}, and verify_kernels.moe.reference computes others"
        )
    if cut is None:
        cut = next((c, s) for most, c, s in FORMS[model] if rows <= most)
    elif (*model, *cut) not in forms():
        there = [(c, s) for _, c, s in FORMS[model]]
        raise ValueError(f"cut is {cut}; the compiled (CTAs, rows) are {there}")
    return (*model, *cut)


def moe_route(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    plan: ExpertPlan,
    weights: Tensor | None = None,
    ids: Tensor | None = None,
    *,
    padding: Tensor | None = None,
    routed_scale: float = 1.0,
    cut: tuple[int, int] | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """Choose every row's experts, weigh them, and plan who computes them; one launch.

    The equations are in `verify_kernels.moe.reference` (`route`, `expert_plan`), in
    fp32 with s = 1 / (1 + 2^(-x log2 e)): scores differ from other sigmoids by a few
    units in the last place, and so does the order of experts whose s + bias are that
    close. Scores below 2^-126 are 0. A row's bits depend on its own logits and the
    bias only.

    As in the reference NaN is the largest of numbers: experts with NaN logits come
    first, lowest id first, and every weight of the row is NaN; a row whose chosen
    scores are all 0 has NaN weights too. Whatever the numbers are, the ids of a row are
    K different ones in 0 .. E - 1.

    Args:
        logits: fp32 [M, E], M = 0 .. 64; rows may lie apart, each at a multiple of 16
            bytes.
        bias: fp32 [E], added to the scores for the choice alone; static, read before
            earlier kernels end.
        top_k: K, with E one of `FORMS`.
        plan: of E and K; replaced. With M = 0 it is filled as for no row, by copies.
        weights, ids: fp32 and int32 [M, K], or None to allocate them; on a decode path
            pass them. No output may share memory with another argument.
        padding: bool [M], rows that are nobody's: they choose no expert, whatever their
            logits are, their ids are -1 and their weights 0. None if there are none.
        routed_scale: what a row's weights add up to.
        cut: (CTAs, rows of a CTA) among `FORMS`, by default the one for M; no bit
            depends on it.
        pdl: launch without waiting for earlier kernels to end; the kernel waits itself.

    Returns:
        weights and ids, by falling s + bias, the lower id first where they are equal.

    Raises:
        ValueError: for a shape, dtype, layout or device that the kernel does not take,
            or a cut that is not compiled.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32:
        raise ValueError(
            f"logits is {logits.dtype} {tuple(logits.shape)}; it must be torch.float32 "
            "[M, E]"
        )
    rows, num_experts = logits.shape
    if rows > MAX_ROWS:
        raise ValueError(f"logits has {rows} rows; at most {MAX_ROWS}")
    form = _form(num_experts, top_k, rows, cut)
    device = logits.device
    if weights is None:
        weights = logits.new_empty(rows, top_k)
    if ids is None:
        ids = logits.new_empty(rows, top_k, dtype=torch.int32)
    arguments: list[Argument] = [
        ("logits", logits, torch.float32, (rows, num_experts), 1, 16),
        ("bias", bias, torch.float32, (num_experts,), 0, 16),
        ("padding", padding, torch.bool, (rows,), 0, 1),
        ("weights", weights, torch.float32, (rows, top_k), 0, 16),
        ("ids", ids, torch.int32, (rows, top_k), 0, 16),
        *plan.arguments(num_experts, top_k),
    ]
    check_all(arguments, device, "logits")
    if rows == 0:
        for tensor, value in (
            (plan.experts, -1),
            (plan.offsets, 0),
            (plan.pairs, -1),
            (plan.counts, 0),
        ):
            tensor.fill_(value)
        return weights, ids
    if device.type != "cuda":
        raise ValueError(
            f"logits is on {device}; the kernel needs a CUDA device: move the tensors "
            "there or use verify_kernels.moe.reference"
        )
    # Without padding no byte of what stands for it is read.
    told = plan.counts if padding is None else padding
    _compiled(device.index, *form)(
        logits,
        bias,
        told.view(torch.uint8),
        weights,
        ids,
        plan.experts,
        plan.offsets,
        plan.pairs,
        plan.counts,
        routed_scale,
        int(padding is not None),
        int(pdl),
    )
    return weights, ids
