# SPDX-License-Identifier: Apache-2.0
"""A kernel that only reads; imported where Triton is there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _xor(source, out, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((BLOCK,), tl.int32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=4):
        total ^= tl.load(source + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total))


def read(source: Tensor) -> Tensor:
    """Combine an int32 tensor to one word a program.

    Its words are a multiple of 4,096 and fewer than 2^31, the range of the offsets.
    """
    programs = 8 * torch.cuda.get_device_properties(source.device).multi_processor_count
    out = torch.empty(programs, dtype=torch.int32, device=source.device)
    _xor[(programs,)](source, out, source.numel() // _BLOCK, _BLOCK, num_warps=4)
    return out
