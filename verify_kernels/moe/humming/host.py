# SPDX-License-Identifier: Apache-2.0
"""Experts in Humming's layout: a rank's bank of them, compiled forms, launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common.variant import Variant, fake
from verify_kernels.moe.host import fake_plan, multiprocessors
from verify_kernels.moe.humming.layout import (
    BLOCK_BYTES,
    COLUMNS,
    ROWS,
    Blocks,
    check_scales,
    filled_columns,
    filled_rows,
    pack,
    pack_stacked,
)
from verify_kernels.moe.mxfp4 import GROUP, Mxfp4

#: (latent, inner, experts, top_k). vLLM gives a rank at least 256 rows of K3's experts
#: (``min_moe_intermediate_per_partition``): at TP 16 the last ranks have zeros. One GPU
#: with such a rank's share alone has 192.
SHAPES = (
    *((3584, inner, 896, 16) for inner in (3072, 1536, 768, 384, 256, 192)),
    (128, 128, 16, 4),
    (128, 64, 16, 4),
)
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class HummingBank:
    """A rank's routed experts where a Humming layer holds them; static.

    Attributes:
        up: gate's rows, then up's, [E, 2 I, L].
        down: [E, L, I].
        latent, inner: L and I, what they are filled up with not included.

    Raises:
        ValueError: these do not belong together.
    """

    SHAPES: ClassVar[tuple[Shape, ...]] = SHAPES

    up: Blocks
    down: Blocks
    latent: int
    inner: int

    def __post_init__(self) -> None:
        for name, blocks, rows, columns in (
            ("up", self.up, 2 * self.inner, self.latent),
            ("down", self.down, self.latent, self.inner),
        ):
            found = tuple(blocks.words.shape)
            wanted = words_shape(self.experts, rows, columns)
            if found != wanted:
                raise ValueError(
                    f"{name} has words {found}; with L = {self.latent} and I = "
                    f"{self.inner} they are {wanted}"
                )

    @property
    def experts(self) -> int:
        """E."""
        return self.up.words.shape[0]

    @classmethod
    def of(cls, gate: Mxfp4, up: Mxfp4, down: Mxfp4) -> HummingBank:
        """From the checkpoint's layout, as Humming would repack it: gate and up
        [E, I, L], down [E, L, I]; for tests and benches.

        Raises:
            ValueError: the shapes do not belong together or the kernels do not take
                them, or a scale is above 2^1.
        """
        inner, half = gate.packed.shape[1:]
        return cls(pack_stacked(gate, up), pack(down), 2 * half, inner)

    @classmethod
    def of_layer(
        cls,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        latent: int,
        inner: int,
    ) -> HummingBank:
        """From a Humming layer's parameters, which stay where they are.

        Raises:
            ValueError: the layer holds something else, or a scale above 2^1.
        """
        bank = cls(
            Blocks.of_layer(w13, w13_scale),
            Blocks.of_layer(w2, w2_scale),
            latent,
            inner,
        )
        for blocks in (bank.up, bank.down):
            check_scales(blocks)
        return bank

    def bytes(self) -> int:
        """Of all weights and scales."""
        return self.up.bytes() + self.down.bytes()

    @staticmethod
    def variant_name(half: str, shape: Shape) -> str:
        """Name of a half, "up" or "down"; says all that its kernel is made from."""
        latent, inner, experts, top_k = shape
        return f"humming_{half}_l{latent}_i{inner}_e{experts}_k{top_k}"

    @staticmethod
    def grid(device: int) -> int:
        """Clusters of the first half: as many as fit a GPU, one CTA an SM."""
        return multiprocessors(device) // 2


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


def _up_arguments(latent: int, inner: int, experts: int, top_k: int) -> Sequence[Any]:
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    return (
        fake(cutlass.BFloat16, (cute.sym_int(), latent), 1, 16),
        *_weights(experts, 2 * inner, latent),
        *fake_plan(experts, top_k),
        fake(cutlass.BFloat16, (MAX_ROWS * top_k, inner), 0, 16),
        cutlass.Float32(0.0),
        cutlass.Float32(0.0),
        cutlass.Int32(0),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _down_arguments(latent: int, inner: int, experts: int, top_k: int) -> Sequence[Any]:
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    rows = cute.sym_int()
    return (
        fake(cutlass.BFloat16, (MAX_ROWS * top_k, inner), 0, 16),
        *_weights(experts, latent, inner),
        fake(cutlass.Float32, (rows, top_k), 0, 16),
        *fake_plan(experts, top_k),
        fake(cutlass.BFloat16, (rows, latent), 1, 2),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def variants() -> list[Variant]:
    """Both halves for every shape in `SHAPES`."""
    from verify_kernels.moe.humming.down import ExpertsDownKernel
    from verify_kernels.moe.humming.up import ExpertsUpKernel

    halves = (
        ("up", ExpertsUpKernel, _up_arguments),
        ("down", ExpertsDownKernel, _down_arguments),
    )
    return [
        Variant(
            op="moe",
            name=HummingBank.variant_name(half, shape),
            kernel=kernel(*shape),
            arguments=functools.partial(arguments, *shape),
            max_registers=255,
        )
        for shape in SHAPES
        for half, kernel, arguments in halves
    ]
