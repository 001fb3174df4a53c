# SPDX-License-Identifier: Apache-2.0
"""The chosen experts on the GPU: weights, compiled forms, checks, launches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common.checks import Argument, check_all
from verify_kernels.common.variant import Variant, cached, device_arch, fake
from verify_kernels.dense.reference import SITU_BETA, SITU_LINEAR_BETA
from verify_kernels.moe.host import (
    ExpertPlan,
    down_arguments,
    multiprocessors,
    up_arguments,
)
from verify_kernels.moe.humming import host as humming
from verify_kernels.moe.humming.host import HummingBank
from verify_kernels.moe.layout import (
    COLUMNS,
    CTAS_PER_SM,
    ROWS,
    WARPS,
    Tiles,
    chunk_of,
    pack,
    pack_gate_up,
    slots_of,
)
from verify_kernels.moe.mxfp4 import Mxfp4

#: (latent, inner, experts, top_k): Kimi K3 by tensor-parallel degree, and a tiny model.
SHAPES = (
    *((3584, 3072 // tp, 896, 16) for tp in (1, 2, 4, 8, 16)),
    (128, 128, 16, 4),
    (128, 64, 16, 4),
)
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class ExpertBank:
    """A rank's routed experts, repacked (`verify_kernels.moe.layout`); static.

    Attributes:
        up: gate and up [E, 2 I, L].
        down: [E, L, I].
        latent, inner, experts: L, I and E.

    Raises:
        ValueError: these do not belong together.
    """

    SHAPES: ClassVar[tuple[Shape, ...]] = SHAPES

    up: Tiles
    down: Tiles
    latent: int
    inner: int
    experts: int

    def __post_init__(self) -> None:
        run, chunk = -(-self.latent // COLUMNS // WARPS), chunk_of(self.inner)
        for name, tiles, lead, length in (
            ("up", self.up, (2 * self.inner // ROWS, WARPS), run),
            (
                "down",
                self.down,
                (self.latent // ROWS, self.inner // COLUMNS // chunk),
                chunk,
            ),
        ):
            found = tuple(tiles.words.shape), tuple(tiles.scales.shape)
            wanted = (
                (self.experts, *lead, length, 128),
                (self.experts, *lead, 16, slots_of(length)),
            )
            if found != wanted:
                raise ValueError(
                    f"{name} has words and scales {found}; with L = {self.latent}, I = "
                    f"{self.inner} and E = {self.experts} they are {wanted}"
                )

    @classmethod
    def of(cls, gate: Mxfp4, up: Mxfp4, down: Mxfp4) -> ExpertBank:
        """From the checkpoint's layout: gate and up [E, I, L], down [E, L, I].

        It needs as much memory again as they do while it runs, a few percent more after
        it: scales are padded to what a lane reads at once.

        Raises:
            ValueError: the shapes do not belong together or the kernels do not take
                them, or a scale is above 2^1.
        """
        experts, inner, half = gate.packed.shape
        latent = 2 * half
        if tuple(down.packed.shape) != (experts, latent, inner // 2):
            raise ValueError(
                f"down is {tuple(down.packed.shape)} and gate "
                f"{tuple(gate.packed.shape)}; they must be [E, L, I / 2] and "
                "[E, I, L / 2]"
            )
        chunks = inner // COLUMNS // chunk_of(inner) if inner % COLUMNS == 0 else 1
        return cls(
            pack_gate_up(gate, up, WARPS),
            pack(down, chunks),
            latent,
            inner,
            experts,
        )

    def bytes(self) -> int:
        """Of all weights and scales."""
        return self.up.bytes() + self.down.bytes()

    def takes(self, shape: Shape) -> bool:
        """Whether there are kernels for (latent, inner, experts, top_k)."""
        return shape in self.SHAPES

    @staticmethod
    def variant_name(half: str, shape: Shape) -> str:
        """Name of a half, "up" or "down"; says all that its kernel is made from."""
        latent, inner, experts, top_k = shape
        return f"{half}_l{latent}_i{inner}_e{experts}_k{top_k}"

    @staticmethod
    def grid(device: int) -> int:
        """CTAs of the first half: as many as fit a GPU."""
        return CTAS_PER_SM * multiprocessors(device)


def _weights(lead: tuple[int, ...], run: int) -> list[Any]:
    """Fake words and scales of runs of tiles."""
    import cutlass

    return [
        fake(cutlass.Int32, (*lead, run, 128), 0, 16),
        fake(cutlass.Int16, (*lead, 16, slots_of(run)), 0, 16),
    ]


def _up_arguments(latent: int, inner: int, experts: int, top_k: int) -> Sequence[Any]:
    run = -(-latent // COLUMNS // WARPS)
    weights = _weights((experts, 2 * inner // ROWS, WARPS), run)
    return up_arguments(weights, latent, inner, experts, top_k)


def _down_arguments(latent: int, inner: int, experts: int, top_k: int) -> Sequence[Any]:
    chunk = chunk_of(inner)
    lead = (experts, latent // ROWS, inner // COLUMNS // chunk)
    return down_arguments(_weights(lead, chunk), latent, inner, experts, top_k)


def variants() -> list[Variant]:
    """Both halves for every shape in `SHAPES`, and those for Humming's layout."""
    from verify_kernels.moe.down import ExpertsDownKernel
    from verify_kernels.moe.up import ExpertsUpKernel

    halves = (
        ("up", ExpertsUpKernel, _up_arguments),
        ("down", ExpertsDownKernel, _down_arguments),
    )
    own = [
        Variant(
            op="moe",
            name=ExpertBank.variant_name(half, shape),
            kernel=kernel(*shape),
            arguments=functools.partial(arguments, *shape),
            max_registers=128,
            max_shared_bytes=113 * 1024,
        )
        for shape in SHAPES
        for half, kernel, arguments in halves
    ]
    return [*own, *humming.variants()]


@functools.cache
def _compiled(device: int, name: str) -> Callable[..., None]:
    variant = next(v for v in variants() if v.name == name)
    return cached(variant, device_arch(device))


def moe_experts(
    latent: Tensor,
    shares: Tensor,
    plan: ExpertPlan,
    bank: ExpertBank | HummingBank,
    inner: Tensor,
    out: Tensor | None = None,
    *,
    beta: float = SITU_BETA,
    linear_beta: float = SITU_LINEAR_BETA,
    pdl: bool = True,
) -> Tensor:
    """This rank's weighted sum of the chosen experts; two launches.

    The equations are in `verify_kernels.moe.reference` (`experts`): products of bf16
    rows with the exact MXFP4 weights in fp32, SiTU rounded to bf16, the sum over the
    experts in fp32 in a fixed order, rounded once. Every distinct expert's weights are
    read once; in Humming's layout those of the first half again, from L2, for every
    eight rows more that chose it. A row's bits do not depend on other rows or on M.

    Args:
        latent: bf16 [M, L], M = 0 .. 64; rows may lie apart, at multiples of 16 bytes.
        shares: fp32 [M, K], the weights that `moe_route` gave.
        plan: of the same rows. Rows without an expert give 0.
        bank: static; in a layout of ours, or where a Humming layer of vLLM's holds it
            (the two differ in the order of sums along K, so in bits).
        inner: bf16 [64 K, I], workspace; its rows are those of the pairs.
        out: bf16 [M, L], rows may lie apart, or None to allocate it. No output may
            share memory with another argument.
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
            f"{top_k} of {bank.experts} experts of {bank.latent} x {bank.inner}: no "
            "kernel is compiled for them; SHAPES lists those that are, and "
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
        ("inner", inner, bf16, (MAX_ROWS * top_k, bank.inner), 0, 16),
        ("out", out, bf16, (rows, columns), 1, 2),
    ]
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
    there = isinstance(bank, HummingBank)
    if isinstance(bank, HummingBank):
        up_name, down_name = bank.up_name(shape), bank.down_name(shape)
    else:
        up_name, down_name = (bank.variant_name(half, shape) for half in ("up", "down"))
    _compiled(device.index, up_name)(
        latent,
        bank.up.words,
        bank.up.scales,
        *needed,
        *([shares] if there else []),
        inner,
        beta,
        linear_beta,
        bank.grid(device.index),
        int(pdl),
    )
    _compiled(device.index, down_name)(
        inner,
        bank.down.words,
        bank.down.scales,
        *([] if there else [shares]),
        *needed,
        out,
        int(pdl),
    )
    return out
