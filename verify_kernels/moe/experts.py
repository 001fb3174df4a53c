# SPDX-License-Identifier: Apache-2.0
"""The chosen experts on the GPU: weights, compiled forms, checks, launches."""

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
from verify_kernels.dense.reference import SITU_BETA, SITU_LINEAR_BETA
from verify_kernels.moe.host import ExpertPlan, fake_plan, multiprocessors
from verify_kernels.moe.layout import (
    BLOCK_BYTES,
    COLUMNS,
    ROWS,
    Blocks,
    check_scales,
    filled_columns,
    filled_rows,
    pack,
    pack_stacked,
    parts_of,
)
from verify_kernels.moe.mxfp4 import GROUP, Mxfp4

#: (latent, inner, experts, top_k) and rows of gate that the layer has. vLLM gives a
#: rank at least 256 of K3's (``min_moe_intermediate_per_partition``): at TP 16 every
#: rank has 192 and 64 of zeros. One GPU with such a rank's share alone has 192.
FORMS = (
    *(((3584, inner, 896, 16), inner) for inner in (3072, 1536, 768, 384, 192)),
    ((3584, 192, 896, 16), 256),
    ((128, 128, 16, 4), 128),
    ((128, 64, 16, 4), 64),
    ((128, 64, 16, 4), 256),
)
#: Of an SM.
REGISTERS = 65536
#: CTAs of a half that an SM holds.
CTAS_PER_SM = 2
#: Items up to which its CTAs may have SMs alone, if a GPU has so many pairs of SMs.
ALONE = 66
SHAPES = tuple(dict.fromkeys(shape for shape, _ in FORMS))
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class ExpertBank:
    """A rank's routed experts where a Humming layer holds them; static.

    Attributes:
        up: gate's rows, then up's, [E, 2 I, L].
        down: [E, L, I].
        latent, inner: L and I, what they are filled up with not included.
        held: rows of gate, and of up, that there are: I and then zeros.

    Raises:
        ValueError: these do not belong together.
    """

    up: Blocks
    down: Blocks
    latent: int
    inner: int
    held: int

    def __post_init__(self) -> None:
        if self.inner > self.held:
            raise ValueError(f"I = {self.inner}, of which {self.held} are there")
        for name, blocks, rows, columns in (
            ("up", self.up, 2 * self.held, self.latent),
            ("down", self.down, self.latent, self.held),
        ):
            found = tuple(blocks.words.shape)
            wanted = words_shape(self.experts, rows, columns)
            if found != wanted:
                raise ValueError(
                    f"{name} has words {found}; with L = {self.latent} and "
                    f"{self.held} rows of gate they are {wanted}"
                )

    @property
    def experts(self) -> int:
        """E."""
        return self.up.words.shape[0]

    @classmethod
    def of(cls, gate: Mxfp4, up: Mxfp4, down: Mxfp4) -> ExpertBank:
        """From the checkpoint's layout, as Humming would repack it: gate and up
        [E, I, L], down [E, L, I]; for tests and benches.

        Raises:
            ValueError: the shapes do not belong together or the kernels do not take
                them, or a scale is above 2^1.
        """
        inner, half = gate.packed.shape[1:]
        return cls(pack_stacked(gate, up), pack(down), 2 * half, inner, inner)

    @classmethod
    def of_layer(
        cls,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        latent: int,
        inner: int,
        held: int,
    ) -> ExpertBank:
        """From a Humming layer's parameters, which stay where they are.

        ``inner`` rows of gate and of up are computed, of ``held`` that there are.

        Raises:
            ValueError: the layer holds something else, other rows than those are not
                zero, or a scale is above 2^1.
        """
        bank = cls(
            Blocks.of_layer(w13, w13_scale),
            Blocks.of_layer(w2, w2_scale),
            latent,
            inner,
            held,
        )
        bank._check_filling()
        for blocks in (bank.up, bank.down):
            check_scales(blocks)
        return bank

    def _check_filling(self) -> None:
        """Raise ValueError unless h would be 0 in the rows that are not computed."""
        first, last, up = (n // ROWS for n in (self.inner, self.held, 2 * self.held))
        for start, end in ((first, last), (first + last, up)):
            if bool(self.up.words[:, :, start:end].any()):
                raise ValueError(
                    f"of {self.held} rows of gate those from {self.inner} on are not "
                    "all 0, or those of up"
                )

    def takes(self, shape: Shape) -> bool:
        """Whether there are kernels for (latent, inner, experts, top_k)."""
        return (shape, self.held) in FORMS

    def variant_name(self, half: str, shape: Shape) -> str:
        """Name of a half, "up", "up_alone" or "down"; says all that its kernel is made
        from."""
        return _name(half, shape, self.held)

    def first_half(self, sms: int, pairs: int) -> tuple[str, int]:
        """Which kernel, and its clusters: as many as fit a GPU, or have work if no two
        of ``pairs`` share an expert."""
        items = pairs * (self.inner // ROWS)
        if items <= min(ALONE, sms // 2):
            return "up_alone", items
        return "up", min(items, CTAS_PER_SM * sms // 2)

    def second_half(self, sms: int, pairs: int) -> int:
        """CTAs: as many as fit a GPU, or have a warp with work if no two pairs share an
        expert."""
        items = pairs * parts_of(self.inner) * (self.latent // ROWS)
        return min(items, CTAS_PER_SM * sms)


@dataclass(frozen=True)
class ExpertWorkspace:
    """What the launches hand on; any layer's, one after the other.

    Attributes:
        inner: bf16 [64 K, I], h of the pairs.
        sums: fp32 [parts of I, 64 K, L], what the pairs add to their rows.
    """

    inner: Tensor
    sums: Tensor

    @classmethod
    def allocate(
        cls, latent: int, inner: int, top_k: int, device: torch.device | str
    ) -> ExpertWorkspace:
        """For any step of a model; nothing in it is valid yet."""
        pairs = MAX_ROWS * top_k
        return cls(
            torch.empty(pairs, inner, dtype=torch.bfloat16, device=device),
            torch.empty(
                parts_of(inner), pairs, latent, dtype=torch.float32, device=device
            ),
        )

    def arguments(self, bank: ExpertBank, top_k: int) -> list[Argument]:
        """To be checked."""
        pairs = MAX_ROWS * top_k
        sums = (parts_of(bank.inner), pairs, bank.latent)
        return [
            ("space.inner", self.inner, torch.bfloat16, (pairs, bank.inner), 0, 16),
            ("space.sums", self.sums, torch.float32, sums, 0, 16),
        ]


def words_shape(experts: int, rows: int, columns: int) -> tuple[int, ...]:
    """Of matrices of N rows and K columns, filled up."""
    blocks = filled_rows(rows) // ROWS
    return experts, filled_columns(columns) // COLUMNS, blocks, BLOCK_BYTES // 4


def _weights(experts: int, rows: int, columns: int) -> list[Any]:
    """Fake words and scales."""
    import cutlass

    groups = filled_columns(columns) // GROUP
    return [
        fake(cutlass.Int32, words_shape(experts, rows, columns), 0, 16),
        fake(cutlass.Uint8, (experts, groups, filled_rows(rows)), 0, 16),
    ]


def _name(half: str, shape: Shape, held: int) -> str:
    latent, inner, experts, top_k = shape
    filled = f"of{held}" if held != inner else ""
    return f"{half}_l{latent}_i{inner}{filled}_e{experts}_k{top_k}"


def _up_arguments(
    latent: int, inner: int, experts: int, top_k: int, held: int
) -> Sequence[Any]:
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    rows = cute.sym_int()
    return (
        fake(cutlass.BFloat16, (rows, latent), 1, 16),
        *_weights(experts, 2 * held, latent),
        *fake_plan(experts, top_k),
        fake(cutlass.Float32, (rows, top_k), 0, 16),
        fake(cutlass.BFloat16, (MAX_ROWS * top_k, inner), 0, 16),
        cutlass.Float32(0.0),
        cutlass.Float32(0.0),
        cutlass.Int32(0),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _down_arguments(
    latent: int, inner: int, experts: int, top_k: int, held: int
) -> Sequence[Any]:
    import cutlass
    import cutlass.cute.runtime as rt

    return (
        fake(cutlass.BFloat16, (MAX_ROWS * top_k, inner), 0, 16),
        *_weights(experts, latent, held),
        *fake_plan(experts, top_k),
        fake(cutlass.Float32, (parts_of(inner), MAX_ROWS * top_k, latent), 0, 16),
        cutlass.Int32(0),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _combine_arguments(
    latent: int, top_k: int, parts: int, norm: bool
) -> Sequence[Any]:
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    return (
        fake(cutlass.Float32, (parts, MAX_ROWS * top_k, latent), 0, 16),
        fake(cutlass.Int32, (MAX_ROWS * top_k,), 0, 16),
        fake(cutlass.BFloat16, (latent,), 0, 16) if norm else None,
        fake(cutlass.BFloat16, (cute.sym_int(), latent), 1, 8),
        cutlass.Float32(0.0),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _combine_name(latent: int, top_k: int, parts: int, norm: bool) -> str:
    return f"combine_l{latent}_k{top_k}_p{parts}{'_norm' if norm else ''}"


def variants() -> list[Variant]:
    """Both halves for every form in `FORMS`, the first also alone on an SM, and the sum
    over the pairs, with and without a norm."""
    from verify_kernels.moe.combine import CombineKernel
    from verify_kernels.moe.down import THREADS as DOWN_THREADS
    from verify_kernels.moe.down import ExpertsDownKernel
    from verify_kernels.moe.up import THREADS, ExpertsUpKernel

    first = [
        Variant(
            op="moe",
            name=_name("up_alone" if alone else "up", shape, held),
            kernel=ExpertsUpKernel(*shape, held, alone=alone),
            arguments=functools.partial(_up_arguments, *shape, held),
            max_registers=255 if alone else REGISTERS // (CTAS_PER_SM * THREADS),
            max_shared_bytes=(227 if alone else 113) * 1024,
        )
        for shape, held in FORMS
        for alone in (False, True)
        # The fewest items are those of one row.
        if not alone or shape[3] * (shape[1] // ROWS) <= ALONE
    ]
    second = [
        Variant(
            op="moe",
            name=_name("down", shape, held),
            kernel=ExpertsDownKernel(*shape, held),
            arguments=functools.partial(_down_arguments, *shape, held),
            max_registers=REGISTERS // (CTAS_PER_SM * DOWN_THREADS),
            max_shared_bytes=113 * 1024,
        )
        for shape, held in FORMS
    ]
    sums = dict.fromkeys((s[0], s[3], parts_of(s[1])) for s in SHAPES)
    third = [
        Variant(
            op="moe",
            name=_combine_name(*each, norm),
            kernel=CombineKernel(*each, norm),
            arguments=functools.partial(_combine_arguments, *each, norm),
            max_shared_bytes=1024,
        )
        for each in sums
        for norm in (False, True)
    ]
    return [*first, *second, *third]


@functools.cache
def _compiled(device: int, name: str) -> Callable[..., None]:
    variant = next(v for v in variants() if v.name == name)
    return cached(variant, device_arch(device))


def moe_experts(
    latent: Tensor,
    shares: Tensor,
    plan: ExpertPlan,
    bank: ExpertBank,
    space: ExpertWorkspace,
    out: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    beta: float = SITU_BETA,
    linear_beta: float = SITU_LINEAR_BETA,
    pdl: bool = True,
) -> Tensor:
    """This rank's weighted sum of the chosen experts; three launches.

    The equations are in `verify_kernels.moe.reference` (`experts`): products of bf16
    rows with the exact MXFP4 weights in fp32, SiTU times the pair's share rounded to
    bf16, the sum over the experts in fp32 in the order of the row's choices, rounded
    once; with a norm, RMSNorm of the rounded sum in fp32, rounded once. Every distinct
    expert's weights are read once, and again, from L2, for every eight rows more that
    chose it. A row's bits do not depend on other rows or on M.

    Args:
        latent: bf16 [M, L], M = 0 .. 64; rows may lie apart, at multiples of 16 bytes.
        shares: fp32 [M, K], the weights that `moe_route` gave.
        plan: of the same rows, filled by `moe_route`: what it says is not checked.
            Rows without an expert give 0.
        bank: static.
        space: workspace.
        out: bf16 [M, L], rows may lie apart, at multiples of 8 bytes, or None to
            allocate it. No output may share memory with another argument.
        norm_weight: bf16 [L], static, of an RMSNorm that follows the sum, or None for
            none. Not for a rank's part of the sum.
        norm_eps: added to the mean square.
        beta, linear_beta: of SiTU.
        pdl: launch without waiting for earlier kernels to end; the kernels wait
            themselves.

    Returns:
        ``out``.

    Raises:
        ValueError: for a shape, dtype, layout or device that the kernels do not take.
    """
    if latent.ndim != 2 or latent.dtype != torch.bfloat16:
        raise ValueError(
            f"latent is {latent.dtype} {tuple(latent.shape)}; it must be "
            "torch.bfloat16 [M, L]"
        )
    rows, columns = latent.shape
    if rows > MAX_ROWS:
        raise ValueError(f"latent has {rows} rows; at most {MAX_ROWS}")
    if columns != bank.latent:
        raise ValueError(
            f"latent has {columns} columns; the experts take {bank.latent}"
        )
    top_k = shares.shape[-1] if shares.ndim == 2 else 0
    shape = (bank.latent, bank.inner, bank.experts, top_k)
    if not bank.takes(shape):
        raise ValueError(
            f"{top_k} of {bank.experts} experts of {bank.latent} x {bank.inner}, "
            f"{bank.held} rows of gate held: no kernel is compiled for them; FORMS in "
            "verify_kernels.moe.experts lists those that are, and "
            "verify_kernels.moe.reference computes others"
        )
    if out is None:
        out = latent.new_empty(rows, columns)
    device = latent.device
    bf16 = torch.bfloat16
    arguments: list[Argument] = [
        ("latent", latent, bf16, (rows, columns), 1, 16),
        ("shares", shares, torch.float32, (rows, top_k), 0, 16),
        *plan.arguments(bank.experts, top_k),
        *space.arguments(bank, top_k),
        ("out", out, bf16, (rows, columns), 1, 8),
    ]
    if norm_weight is not None:
        arguments.append(("norm_weight", norm_weight, bf16, (columns,), 0, 16))
    check_all(arguments, device, "latent")
    if bank.up.words.device != device:
        raise ValueError(
            f"bank is on {bank.up.words.device} and latent on {device}; all tensors "
            "must be on one device"
        )
    if rows == 0:
        return out
    if device.type != "cuda":
        raise ValueError(
            f"latent is on {device}; the kernels need a CUDA device: move the tensors "
            "there or use verify_kernels.moe.reference"
        )
    needed = (plan.experts, plan.offsets, plan.pairs, plan.counts)
    sms = multiprocessors(device.index)
    half, clusters = bank.first_half(sms, rows * top_k)
    _compiled(device.index, bank.variant_name(half, shape))(
        latent,
        bank.up.words,
        bank.up.scales,
        *needed,
        shares,
        space.inner,
        beta,
        linear_beta,
        clusters,
        int(pdl),
    )
    _compiled(device.index, bank.variant_name("down", shape))(
        space.inner,
        bank.down.words,
        bank.down.scales,
        *needed,
        space.sums,
        bank.second_half(sms, rows * top_k),
        int(pdl),
    )
    norm = norm_weight is not None
    name = _combine_name(bank.latent, top_k, parts_of(bank.inner), norm)
    _compiled(device.index, name)(
        space.sums, plan.pairs, norm_weight, out, norm_eps, int(pdl)
    )
    return out
