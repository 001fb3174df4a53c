# SPDX-License-Identifier: Apache-2.0
"""Small launches of every kernel, for scripts/sanitize.sh to run under its tools.

    python -m tests.verify_kernels.sanitize TOOL

Results are checked, then one planted fault follows that TOOL must report: a run in
which it does not has shown nothing. Tensors are made on the CPU and copied, and torch's
caching allocator must be off (PYTORCH_NO_CUDA_MEMORY_CACHING=1), or a kernel that
leaves its tensor is still inside the allocator's block.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from verify_kernels.attn_res import attn_res
from verify_kernels.attn_res import reference as attn_res_reference
from verify_kernels.common.variant import device_arch
from verify_kernels.prefetch import PrefetchPlan, prefetch
from verify_kernels.skinny_gemm import SkinnyGemm, host
from verify_kernels.skinny_gemm import reference as gemm_reference

#: Tool -> the planted kernel that it must report.
PLANTED = {
    "memcheck": "PastTheEnd",
    "racecheck": "NoBarrier",
    "synccheck": "HalfAtTheBarrier",
}
#: Few CTAs, so that each has several tiles and every ring goes round.
CLUSTERS, N = 2, 160


def near(name: str, found: Tensor, exact: Tensor) -> None:
    """Sane numbers, not accurate ones: other tests are for that."""
    error = float((found.cpu().double() - exact).norm() / exact.norm())
    if not error < 0.01:
        raise SystemExit(f"sanitize: {name} is off by {error:.3g}")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def gemms() -> None:
    """Without and with a cluster; one launch of three matrices. M = 9 at K = 768 holds
    its tokens in registers, M = 33 has some in shared memory."""
    host._clusters = lambda device, size: CLUSTERS
    for k, rows in ((768, (1, 9, 33)), (7168, (1, 9, 33))):
        x, w = normal(33, k), normal(N, k)
        exact = gemm_reference.skinny_gemm(x, w)
        gemm, weights = SkinnyGemm(k), w.cuda()
        for m in rows:
            out = torch.full((m, N), torch.nan, dtype=torch.bfloat16).cuda()
            gemm(x[:m].cuda(), weights, out)
            near(f"skinny_gemm K {k} M {m}", out, exact[:m])
    sizes = (20, 60, 80)
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    outs = [
        torch.full((9, n), torch.nan, dtype=dtype).cuda()
        for n, dtype in zip(sizes, dtypes, strict=True)
    ]
    parts = [part.cuda() for part in w.split(sizes)]
    SkinnyGemm(7168, out_dtype=dtypes)(x[:9].cuda(), parts, outs)
    found = torch.cat([y.cpu().float() for y in outs], 1)
    near("skinny_gemm of three", found, exact[:9])


def residuals() -> None:
    """Block write, mix of two blocks, norm."""
    prefix, delta, blocks = normal(3, 7168), normal(3, 7168), normal(3, 3, 7168)
    weights = [normal(7168) for _ in range(3)]
    choice = {"num_blocks": 2, "write_block": 2}
    exact, _ = attn_res_reference.attn_res(
        prefix.clone(), delta, blocks.clone(), *weights, **choice
    )
    on_gpu = [t.cuda() for t in (prefix, delta, blocks, *weights)]
    out = torch.full((3, 7168), torch.nan, dtype=torch.bfloat16).cuda()
    near("attn_res", attn_res(*on_gpu, out, **choice), exact)


def prefetches() -> None:
    weight = torch.arange(100_000, dtype=torch.int32)
    on_gpu = weight.cuda()
    prefetch(PrefetchPlan([on_gpu, (on_gpu.data_ptr() + 8, 4000)], device="cuda"))
    if not torch.equal(on_gpu.cpu(), weight):
        raise SystemExit("sanitize: prefetch changed memory")


def plant(tool: str) -> None:
    """The fault that the tool must report; memcheck stops the kernel or the context."""
    from tests.verify_kernels.planted import memory
    from tests.verify_kernels.planted.base import planted

    fault = planted(getattr(memory, PLANTED[tool])())
    kernel = fault.compile(device_arch(torch.cuda.current_device()))
    w, x, y = torch.ones(128), torch.ones(64), torch.zeros(64, 8)
    arguments = w.bfloat16().cuda(), x.bfloat16().cuda(), y.cuda()
    try:
        kernel(*arguments)
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("sanitize: after the planted fault:", str(error).splitlines()[0])
        sys.stdout.flush()
        # Without a context, freeing tensors on the way out would abort.
        os._exit(0)


def main(tool: str) -> None:
    torch.manual_seed(0)
    gemms()
    residuals()
    prefetches()
    torch.cuda.synchronize()
    print("sanitize: results are right", flush=True)
    plant(tool)


if __name__ == "__main__":
    main(sys.argv[1])
