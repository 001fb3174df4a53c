# SPDX-License-Identifier: Apache-2.0
"""Sizes of the parts around MLA's attention, and the forms they are compiled in."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from verify_kernels.common.variant import Variant, fake

#: Columns of a cache line: the latent, then what would be rotated.
LATENT = 512
ROPE = 64
LINE = LATENT + ROPE
#: Of a head: what W_UK takes, and what W_UV gives.
NOPE = 128
VALUE = 128
#: Columns of q_a: Kimi K3's, and those of a tiny model.
Q_LORAS = (1536, 256)


def front_variant(q_lora: int) -> Variant:
    """The norms and the cache lines of rows with this many columns of q_a."""
    from verify_kernels.mla.front import FrontKernel

    return Variant(
        op="mla",
        name=f"front_q{q_lora}",
        kernel=FrontKernel(q_lora),
        arguments=functools.partial(_front_arguments, q_lora),
        max_registers=64,
        max_shared_bytes=1024,
    )


def absorb_variant() -> Variant:
    """W_UK of every head, for any number of heads."""
    from verify_kernels.mla.heads import AbsorbKernel

    return Variant(
        op="mla",
        name="absorb",
        kernel=AbsorbKernel(),
        arguments=_absorb_arguments,
        max_registers=128,
        max_shared_bytes=16 * 1024,
    )


def value_variant() -> Variant:
    """W_UV of every head and the gate, for any number of heads."""
    from verify_kernels.mla.heads import ValueKernel

    return Variant(
        op="mla",
        name="value",
        kernel=ValueKernel(),
        arguments=_value_arguments,
        max_registers=128,
        max_shared_bytes=8 * 1024,
    )


def attend_variant() -> Variant:
    """Attention over splits of the keys."""
    from verify_kernels.mla.attend import AttendKernel

    return Variant("mla", "attend", AttendKernel(), _attend_arguments)


def merge_variant() -> Variant:
    """The sum of the splits."""
    from verify_kernels.mla.merge import MergeKernel

    return Variant(
        op="mla",
        name="merge",
        kernel=MergeKernel(),
        arguments=_merge_arguments,
        max_registers=128,
        max_shared_bytes=72 * 1024,
    )


def _attend_arguments() -> Sequence[Any]:
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    requests, rows, heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
    bf16, i32, f32 = cutlass.BFloat16, cutlass.Int32, cutlass.Float32
    pairs, splits = cute.sym_int(), cute.sym_int()
    return (
        fake(bf16, (rows, heads, LINE), 1, 16),
        fake(bf16, (cute.sym_int(), cute.sym_int(), LINE), 1, 16),
        fake(i32, (requests, cute.sym_int()), 1, 4),
        fake(i32, (cute.sym_int(),), 0, 4),
        fake(i32, (requests,), 0, 4),
        fake(i32, (requests,), 0, 4),
        fake(f32, (pairs, splits, LATENT), 1, 16),
        fake(f32, (pairs, splits, 2), 1, 16),
        cutlass.Float32(0.0),
        *[cutlass.Int32(0)] * 5,
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _merge_arguments() -> Sequence[Any]:
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    requests, rows, heads = cute.sym_int(), cute.sym_int(), cute.sym_int()
    bf16, i32, f32 = cutlass.BFloat16, cutlass.Int32, cutlass.Float32
    pairs, splits = cute.sym_int(), cute.sym_int()
    return (
        fake(f32, (pairs, splits, LATENT), 1, 16),
        fake(f32, (pairs, splits, 2), 1, 16),
        fake(i32, (cute.sym_int(),), 0, 4),
        fake(i32, (requests,), 0, 4),
        fake(i32, (requests,), 0, 4),
        fake(bf16, (rows, heads, LATENT), 1, 16),
        fake(f32, (rows, heads), 1, 4),
        *[cutlass.Int32(0)] * 5,
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _front_arguments(q_lora: int) -> Sequence[Any]:
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    rows, requests = cute.sym_int(), cute.sym_int()
    bf16, i32 = cutlass.BFloat16, cutlass.Int32
    return (
        fake(bf16, (rows, cute.sym_int()), 1, 16),
        fake(bf16, (q_lora,), 0, 16),
        fake(bf16, (LATENT,), 0, 16),
        fake(bf16, (cute.sym_int(), cute.sym_int(), LINE), 1, 16),
        fake(i32, (requests, cute.sym_int()), 1, 4),
        fake(i32, (cute.sym_int(),), 0, 4),
        fake(i32, (requests,), 0, 4),
        fake(i32, (requests,), 0, 4),
        fake(bf16, (rows, q_lora), 1, 16),
        cutlass.Float32(0.0),
        cutlass.Int32(0),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _absorb_arguments() -> Sequence[Any]:
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    rows, heads, bf16 = cute.sym_int(), cute.sym_int(), cutlass.BFloat16
    return (
        fake(bf16, (rows, cute.sym_int()), 1, 16),
        fake(bf16, (heads, NOPE, LATENT), 1, 16),
        fake(bf16, (rows, heads, LINE), 1, 16),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _value_arguments() -> Sequence[Any]:
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    rows, heads, bf16 = cute.sym_int(), cute.sym_int(), cutlass.BFloat16
    columns = cute.sym_int()
    return (
        fake(bf16, (rows, heads, LATENT), 1, 16),
        fake(bf16, (heads, VALUE, LATENT), 1, 16),
        fake(bf16, (rows, columns), 1, 16),
        fake(bf16, (rows, columns), 1, 16),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
