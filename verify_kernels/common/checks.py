# SPDX-License-Identifier: Apache-2.0
"""Checks of what launches are given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Name, tensor, dtype, shape, open strides, alignment in bytes.
Argument = tuple[str, Tensor | None, torch.dtype, Sequence[int], int, int]


def check(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Raise ValueError unless ``tensor`` has this dtype and shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be {dtype} "
            f"{tuple(shape)}"
        )


def check_strides(name: str, tensor: Tensor, opened: int, align: int) -> None:
    """Raise ValueError unless all but the first ``opened`` dimensions are contiguous
    and every item along those starts at a multiple of ``align`` bytes."""
    contiguous = tensor.is_contiguous()
    if not contiguous:
        contiguous, inner = True, 1
        held = list(zip(tensor.shape, tensor.stride(), strict=True))[opened:]
        for size, stride in reversed(held):
            contiguous = contiguous and (size == 1 or stride == inner)
            inner *= size
    steps = [tensor.stride(i) for i in range(opened) if tensor.shape[i] > 1]
    aligned = all(s * tensor.element_size() % align == 0 for s in steps)
    if not contiguous or not aligned or tensor.data_ptr() % align:
        wanted = f"it must be contiguous and start at a multiple of {align} bytes"
        if opened:
            wanted = (
                f"all dimensions but the first {opened} must be contiguous, and what "
                f"they hold start at a multiple of {align} bytes"
            )
        raise ValueError(
            f"{name} has strides {tensor.stride()} and address "
            f"{tensor.data_ptr():#x}; {wanted}"
        )


def check_all(arguments: Sequence[Argument], device: torch.device, of: str) -> None:
    """Raise ValueError unless all fit and are on ``device``, that of ``of``."""
    for name, tensor, dtype, shape, opened, align in arguments:
        if tensor is None:
            continue
        check(name, tensor, dtype, shape)
        check_strides(name, tensor, opened, align)
        if tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device} and {of} on {device}; all tensors must "
                "be on one device"
            )
