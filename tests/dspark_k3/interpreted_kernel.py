# SPDX-License-Identifier: Apache-2.0
"""A kernel that exercises the interpreter patches; run by test_plugin in a child."""

import numpy as np
import torch
import triton
import triton.language as tl
import triton.language.extra.libdevice as tldevice


@triton.jit
def _mix(u, BLOCK: tl.constexpr):
    return u * 2654435761 + 97


@triton.jit
def _kernel(x_ptr, mask_ptr, u_ptr, out_ptr, hash_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    # As in vLLM's Gumbel sampling: a block mask and a scalar one from an int64.
    scalar = tl.load(mask_ptr).to(tl.int64) >= 0
    mask = (tl.load(mask_ptr + offsets) != 0) & scalar
    x = tl.load(x_ptr + offsets, mask=mask, other=-0.5)
    tl.store(out_ptr + offsets, tldevice.log1p(x))
    u = tl.load(u_ptr + offsets).to(tl.uint32)
    tl.store(hash_ptr + offsets, _mix(u, BLOCK).to(tl.int64), mask=mask)


def main() -> None:
    n = 16
    rng = np.random.default_rng(0)
    x = rng.uniform(-0.9, 1.0, n).astype(np.float32)
    x[0] = 1e-9  # log(1 + x) without log1p would be 0
    mask = (np.arange(n) % 3 != 1).astype(np.int32)
    u = rng.integers(0, 2**32, n, dtype=np.uint64)
    out, hashed = torch.zeros(n), torch.full((n,), -1, dtype=torch.int64)
    _kernel[(1,)](
        torch.tensor(x),
        torch.tensor(mask),
        torch.tensor(u.astype(np.int64)),
        out,
        hashed,
        BLOCK=n,
    )
    expected = np.log1p(np.where(mask == 1, x, np.float32(-0.5)))
    np.testing.assert_array_equal(out.numpy(), expected)
    wrapped = ((u * 2654435761 + 97) % 2**32).astype(np.int64)
    np.testing.assert_array_equal(hashed.numpy(), np.where(mask == 1, wrapped, -1))
    print("kernel ok")
