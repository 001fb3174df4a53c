# SPDX-License-Identifier: Apache-2.0
"""The eager layout on the GPU: a commit after sampling, on the slots of the fold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verify_kernels.batch import MAX_WIDTH
from verify_kernels.common.checks import Argument, check_all
from verify_kernels.common.variant import Variant, cached, device_arch, fake
from verify_kernels.kda.host import (
    DIM,
    OPTIONS,
    WINDOW,
    KdaFoldState,
    cache_arguments,
    record_arguments,
)

#: A launch has one slot a z-coordinate.
MAX_SLOTS = 65535
#: Four CTAs of 256 threads an SM; at -O3 ptxas would spill here too, 72 bytes a thread.
MAX_REGISTERS = 64
MAX_SHARED_BYTES = 16 * 1024


def _arguments() -> Sequence[Any]:
    """Fake arguments: B, the heads, the slots and their strides are open."""
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    heads, requests, slots = cute.sym_int(), cute.sym_int(), cute.sym_int()
    fp32, int32 = cutlass.Float32, cutlass.Int32
    columns = (cute.sym_int(), cute.sym_int(), cute.sym_int())
    return (
        fake(int32, (requests,), 0, 4),
        fake(int32, (requests,), 0, 4),
        fake(fp32, (slots, heads, DIM, DIM), 1, 16),
        fake(cutlass.BFloat16, columns, 2, 16),
        *(fake(fp32, (slots, heads, MAX_WIDTH, DIM), 1, 16) for _ in range(3)),
        fake(int32, (slots, heads, 2), 1, 4),
        cutlass.Int32(0),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def commit_variant(rolling: bool) -> Variant:
    """The form for a window that rolls, or for that of `KdaFoldState`."""
    from verify_kernels.kda.commit import KdaCommitKernel

    return Variant(
        op="kda",
        name="slot_commit" if rolling else "commit",
        kernel=KdaCommitKernel(rolling),
        arguments=_arguments,
        max_registers=MAX_REGISTERS,
        max_shared_bytes=MAX_SHARED_BYTES,
        options=OPTIONS,
    )


@functools.cache
def compiled_commit(device: int, rolling: bool) -> Callable[..., None]:
    """The commit for a GPU."""
    return cached(commit_variant(rolling), device_arch(device))


def kda_commit(
    cache: KdaFoldState, slots: Tensor, accepted: Tensor, *, pdl: bool = True
) -> None:
    """Fold what was accepted of the last step of each slot; one launch, no sync.

    The *eager* layout of `verify_kernels.kda.reference`. Afterwards ``cache.state`` and
    the window's entries 0 to 2 are those of a sequence that ends with the last accepted
    row, as a prompt leaves them, so anything may read the slot. They have the bits to
    which the next `kda_verify` would have folded, and that step gives the same bits
    whether this was called or not.

    Of slot s = ``slots[b]``, ``min(accepted[b], counts[s, h, 0])`` rows are folded,
    none if that is negative, and the others are forgotten: ``counts[s, h, 0]`` becomes
    0. More accepted than recorded adds 1 to ``counts[s, h, 1]``. Slots <= 0 are not
    touched; no live slot may be named twice.

    A committed slot has no recorded rows, so a later `kda_verify` or `kda_commit` folds
    nothing whatever it is told; tell it 0, for more adds 1 to ``counts[s, h, 1]``
    again.

    Args:
        cache: updated in place; strides as of `kda_verify`.
        slots: int32 [B], B up to 65,535, on the cache's device, contiguous.
        accepted: int32 [B], likewise; rows of the last step, its committed token
            included.
        pdl: launch without waiting for earlier kernels to end; the kernel waits itself.

    Raises:
        ValueError: for a dtype, shape, stride or device that does not fit, or more than
            65,535 slots. Nothing is written then.
    """
    state, window = cache.state, cache.window
    heads = state.shape[1] if state.dim() == 4 else 0
    if not heads:
        raise ValueError(
            f"state is {tuple(state.shape)}; it must be [slots, H, {DIM}, {DIM}]"
        )
    if window.dim() != 3 or window.shape[1] < WINDOW:
        raise ValueError(
            f"window is {tuple(window.shape)}; it must be [slots, W, "
            f"{3 * heads * DIM}] with W at least {WINDOW}"
        )
    if slots.dim() != 1 or slots.shape[0] > MAX_SLOTS:
        raise ValueError(
            f"slots is {tuple(slots.shape)}; it must be [B] with B up to {MAX_SLOTS}"
        )
    # In the kernel's order.
    arguments: list[Argument] = [
        ("slots", slots, torch.int32, slots.shape, 0, 4),
        ("accepted", accepted, torch.int32, slots.shape, 0, 4),
        *cache_arguments(state, window),
        *record_arguments(cache),
    ]
    check_all(arguments, state.device, "state")
    if not slots.shape[0]:
        return
    if state.device.type != "cuda":
        raise ValueError(
            f"state is on {state.device}; the kernel needs a CUDA device: move the "
            "tensors there or use verify_kernels.kda.reference"
        )
    launch = compiled_commit(state.device.index, False)
    launch(*(tensor for _, tensor, *_ in arguments), int(pdl))
