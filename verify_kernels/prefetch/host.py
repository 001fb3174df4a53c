# SPDX-License-Identifier: Apache-2.0
"""What to prefetch, checked and cut into pieces once, and the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verify_kernels.common.variant import Variant, cached, device_arch

#: Bytes of one request. Short enough to spread 1 MB over several SMs.
PIECE = 16 * 1024
#: A bulk prefetch takes addresses and sizes in units of 16 bytes.
UNIT = 16
DEFAULT_SMS = 8


def _arguments() -> Sequence[Any]:
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    table = rt.make_fake_compact_tensor(
        cutlass.Int64, (cute.sym_int(), 2), stride_order=(1, 0), assumed_align=16
    )
    stream = rt.make_fake_stream(use_tvm_ffi_env_stream=True)
    return table, cutlass.Int32(1), stream


def variants() -> list[Variant]:
    """The one form there is."""
    from verify_kernels.prefetch.kernel import PrefetchKernel

    return [
        Variant(
            op="prefetch",
            name="bulk",
            kernel=PrefetchKernel(),
            arguments=_arguments,
            max_registers=40,
            max_shared_bytes=0,
        )
    ]


@functools.cache
def _compiled(device: int) -> Callable[..., None]:
    return cached(variants()[0], device_arch(device))


def pieces(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes) ranges in requests of at most `PIECE` bytes, in order.

    A range's ends are drawn in to multiples of 16, so no byte outside it is asked for.

    Raises:
        ValueError: for a negative address or size.
    """
    found = []
    for address, size in ranges:
        if address < 0 or size < 0:
            raise ValueError(
                f"range ({address:#x}, {size}): address and bytes must not be negative"
            )
        at = -(-address // UNIT) * UNIT
        end = (address + size) // UNIT * UNIT
        while at < end:
            count = min(PIECE, end - at)
            found.append((at, count))
            at += count
    return found


class PrefetchPlan:
    """Ranges of device memory to bring into L2, prepared once.

    Attributes:
        table: int64 [P, 2] on the device, (address, bytes) of each request.
        bytes: the sum of all ranges.
        sms: CTAs of one launch; each takes an SM's copy engine and one warp of it.
    """

    def __init__(
        self,
        ranges: Sequence[Tensor | tuple[int, int]],
        *,
        sms: int = DEFAULT_SMS,
        limit_bytes: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Check the ranges and copy the table to the device (it synchronises).

        Args:
            ranges: contiguous CUDA tensors, which the plan keeps alive, or
                (address, bytes) pairs, whose memory the caller keeps alive.
            sms: CTAs of one launch, 1 to the device's number of SMs.
            limit_bytes: most bytes in all; half of the device's L2 by default, so that
                the running kernels keep the other half.
            device: needed if all ranges are pairs; else that of the tensors.

        Raises:
            ValueError: for a tensor that is not contiguous or on another device, no
                device, too many SMs, or more bytes than the limit.
        """
        spans: list[tuple[int, int]] = []
        tensors: list[Tensor] = []
        where = None if device is None else torch.device(device)
        for i, given in enumerate(ranges):
            if not isinstance(given, Tensor):
                spans.append(given)
                continue
            if not given.is_contiguous():
                raise ValueError(
                    f"ranges[{i}] has strides {given.stride()}; a tensor to prefetch "
                    "must be contiguous: pass its storage's parts as separate tensors"
                )
            if where is None or where == torch.device(given.device.type):
                where = given.device
            if given.device != where:
                raise ValueError(
                    f"ranges[{i}] is on {given.device} and the plan on {where}; make "
                    "one plan a device"
                )
            tensors.append(given)
            spans.append((given.data_ptr(), given.numel() * given.element_size()))
        if sms < 1:
            raise ValueError(f"sms is {sms}; it must be at least 1")
        requests = pieces(spans)
        self.bytes = sum(size for _, size in spans)
        self.sms = sms
        self._check_limit(limit_bytes)
        if where is None or where.type != "cuda":
            raise ValueError(
                f"device is {where}; a plan needs a CUDA device: pass CUDA tensors, or "
                "device= with address ranges"
            )
        index = torch.cuda.current_device() if where.index is None else where.index
        about = torch.cuda.get_device_properties(index)
        if sms > about.multi_processor_count:
            raise ValueError(
                f"sms is {sms}; GPU {index} has {about.multi_processor_count} SMs"
            )
        if limit_bytes is None:
            self._check_limit(about.L2_cache_size // 2)
        self._alive = tuple(tensors)
        self._launch = _compiled(index) if requests else None
        self.table = torch.tensor(
            requests, dtype=torch.int64, device=torch.device("cuda", index)
        ).reshape(-1, 2)

    def _check_limit(self, limit_bytes: int | None) -> None:
        if limit_bytes is not None and self.bytes > limit_bytes:
            raise ValueError(
                f"ranges hold {self.bytes} bytes and limit_bytes is {limit_bytes}; "
                "what does not fit in L2 evicts what the kernels use: name fewer "
                "weights, or raise limit_bytes"
            )


def prefetch(plan: PrefetchPlan) -> None:
    """Request every range of ``plan`` into L2, on the current stream of its device.

    Returns once launched; the launch can be captured. Memory is not changed, and no
    result depends on it: order the stream only so that it starts when it is useful.
    """
    if plan._launch is not None:
        plan._launch(plan.table, plan.sms)
