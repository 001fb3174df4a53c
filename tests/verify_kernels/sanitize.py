# SPDX-License-Identifier: Apache-2.0
"""Small launches of every kernel, for scripts/sanitize.sh to run under its tools.

    python -m tests.verify_kernels.sanitize [--only] FAULT

Results are checked, then one planted fault follows (`planted.memory`) that the tool
must report: a run in which it does not has shown nothing. With --only there is nothing
but the fault. Tensors are made on the CPU and copied, and torch's
caching allocator must be off (PYTORCH_NO_CUDA_MEMORY_CACHING=1), or a kernel that
leaves its tensor is still inside the allocator's block.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.verify_kernels import mla_cases
from tests.verify_kernels import test_kda_commit as kda_commit_tests
from tests.verify_kernels import test_kda_kernel as kda_tests
from tests.verify_kernels import test_kda_kernel_snapshots as kda_snapshot_tests
from tests.verify_kernels import test_kda_slots as kda_slots_tests
from tests.verify_kernels import test_markov as markov_tests
from tests.verify_kernels import test_mla_kernels as mla_tests
from tests.verify_kernels import test_moe_experts as expert_tests
from tests.verify_kernels import test_moe_route as route_tests
from verify_kernels.attn_res import attn_res
from verify_kernels.attn_res import reference as attn_res_reference
from verify_kernels.common.variant import Variant, cached, device_arch
from verify_kernels.kda.host import CLUSTERS
from verify_kernels.moe.host import forms as route_forms
from verify_kernels.prefetch import PrefetchPlan, prefetch
from verify_kernels.skinny_gemm import host
from verify_kernels.skinny_gemm import reference as gemm_reference

#: Kernel -> CTAs of a launch over n rows: few, so that each has several tiles and every
#: ring goes round. A skinny GEMM of another design gets its line here.
GRIDS: dict[str, Callable[[Any, int], int]] = {
    "SkinnyGemmKernel": lambda tiling, n: 2 * tiling.cluster,
    "DirectGemmKernel": lambda tiling, n: -(-n // tiling.rows),
    "WideGemmKernel": lambda tiling, n: tiling.cluster,
    "StagedWideGemmKernel": lambda tiling, n: tiling.cluster,
}
#: K, rows of each weight, bytes of an element of each output, and M. Each is launched
#: in every design that is compiled for it. At K = 7168 the ring holds M = 9's tokens in
#: registers and has some of M = 33's in shared memory, and there are clusters. Staged,
#: X of K = 33792 comes in turns.
GEMMS: tuple[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (
    (768, (160,), (2,), (1, 9, 33)),
    (7168, (160,), (2,), (1, 9, 33)),
    (7168, (20, 60, 80), (4, 2, 2), (9,)),
    (512, (40,), (4,), (1, 9)),
    (33792, (160,), (2,), (33,)),
)
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def near(name: str, found: Tensor, exact: Tensor) -> None:
    """Sane numbers, not accurate ones: other tests are for that."""
    error = float((found.cpu().double() - exact).norm() / exact.norm())
    if not error < 0.01:
        raise SystemExit(f"sanitize: {name} is off by {error:.3g}")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def designs(k: int, sizes: tuple[int, ...], rows: int) -> dict[str, Variant]:
    """Of each kernel that is compiled for this K and these outputs, the variant for the
    fewest rows that are enough; none of a kernel that takes fewer."""
    found: dict[str, Variant] = {}
    for variant in host.variants():
        kernel = variant.kernel
        name, bits = type(kernel).__name__, [d.width for d in kernel.out_dtypes]
        if name not in GRIDS:
            raise SystemExit(f"sanitize: {name} has no grid; give it a line in GRIDS")
        if kernel.t.k != k or bits != [8 * size for size in sizes]:
            continue
        tokens = kernel.t.token_tiles
        best = found.get(name)
        if 8 * tokens >= rows and (not best or tokens < best.kernel.t.token_tiles):
            found[name] = variant
    return found


def gemms() -> None:
    """Every design of the skinny GEMM."""
    arch = device_arch(torch.cuda.current_device())
    launched = set()
    for k, shares, sizes, numbers in GEMMS:
        n = sum(shares)
        x, w = normal(max(numbers), k), normal(n, k)
        exact = gemm_reference.skinny_gemm(x, w)
        weights = [part.cuda() for part in w.split(shares)]
        for m in numbers:
            for name, variant in designs(k, sizes, m).items():
                outs = [
                    torch.full((m, share), torch.nan, dtype=DTYPES[size]).cuda()
                    for share, size in zip(shares, sizes, strict=True)
                ]
                ctas = GRIDS[name](variant.kernel.t, n)
                cached(variant, arch)(x[:m].cuda(), weights, outs, ctas, 1)
                found = torch.cat([y.cpu().float() for y in outs], 1)
                near(f"{name} {variant.name} M {m}", found, exact[:m])
                launched.add(name)
    print("sanitize: launched", *sorted(launched), flush=True)


def residuals(hidden: int) -> None:
    """A delta in two, block write, mix of two blocks, norm."""
    prefix, delta, extra = (normal(3, hidden) for _ in range(3))
    blocks = normal(3, 3, hidden)
    weights = [normal(hidden) for _ in range(3)]
    choice = {"num_blocks": 2, "write_block": 2}
    exact, _ = attn_res_reference.attn_res(
        prefix.clone(), delta, blocks.clone(), *weights, extra=extra, **choice
    )
    on_gpu = [t.cuda() for t in (prefix, delta, blocks, *weights)]
    out = torch.full((3, hidden), torch.nan, dtype=torch.bfloat16).cuda()
    near(
        f"attn_res of {hidden}",
        attn_res(*on_gpu, out, extra=extra.cuda(), **choice),
        exact,
    )


def deltas() -> None:
    """KDA in all layouts and every cluster size: rows to fold, a request without rows,
    padding. The checks raise AssertionError."""
    forms = [kda_tests.run_on_gpu(ctas) for ctas in CLUSTERS]
    kda_tests.check_ragged_steps(forms[-1], "cuda", 1)
    kda_tests.check_equal_over(forms, "cuda")
    snapshots = [kda_snapshot_tests.on_gpu(ctas) for ctas in CLUSTERS]
    kda_snapshot_tests.check_same_as_fold(forms[-1], snapshots, "cuda")
    slots = [kda_slots_tests.on_gpu(ctas) for ctas in CLUSTERS]
    kda_slots_tests.check_same_as_fold(forms[-1], slots, "cuda")
    kda_slots_tests.check_what_is_told(slots[0], "cuda")
    commit = kda_commit_tests.commit_on_gpu()
    kda_commit_tests.check_commit_is_the_fold(forms[0], commit, "cuda")


def routes() -> None:
    """Every form, with threads that have no row and with several rows one after the
    other. The checks raise AssertionError."""
    for form in route_forms():
        for kind, rows in (("plain", 3), ("equal", 35)):
            logits, bias = route_tests.inputs(*form[:2], rows, kind)
            found = route_tests.on_gpu(logits, bias, form)
            route_tests.check(found, logits, bias, form[1])


def experts() -> None:
    """A small shape: clusters without work, more than eight pairs of an expert, columns
    without one. And K3's at TP 16: more items than clusters, an expert twice in a row;
    with the norm too.
    The checks raise AssertionError."""
    small, large = ((128, 64, 16, 4), 64), ((3584, 192, 896, 16), 192)
    for (shape, held), rows, spread in (
        (small, 1, None),
        (small, 33, 8),
        (large, 9, None),
    ):
        count = min(shape[2], 64)
        weights = expert_tests.experts_of((*shape[:2], count, 0), 0, "cuda")
        bank = expert_tests.some_experts(shape, held, 0, count)
        ids, shares = expert_tests.choice(shape, rows, rows, spread)
        ids[0, 2] = ids[0, 0]
        latent = expert_tests.latent_rows(shape, rows, rows).cuda()
        found = expert_tests.result(
            expert_tests.on_gpu, shape, bank, latent, ids, shares.cuda(), "cuda"
        )
        expert_tests.check_errors(
            found.cuda(), latent, ids.cuda() % count, shares.cuda(), weights
        )
        if rows > 1:
            expert_tests.check_normed(expert_tests.on_gpu, shape, bank, 3, "cuda")


def attention() -> None:
    """Two tiles, both stages, several splits, a request without rows and one without a
    slot; and the kernels around. The checks raise AssertionError."""
    case = mla_cases.make(
        [200, 9, 5, 0], [3, 0, 2, 2], 30, page=16, rows=9, dead=(2,), device="cuda"
    )
    mla_tests.check(case)
    mla_tests.test_a_whole_sublayer(2, 256)


def drafts() -> None:
    """Both ranks, fewer tiles than CTAs and more, requests of one turn and of two. The
    checks raise AssertionError."""
    for rank, requests, vocab in ((32, 33, 256), (256, 3, 40_000)):
        case = markov_tests.make(requests, 2, vocab, rank).to("cuda")
        noise = markov_tests.noise_to(markov_tests.noise_of(case), "cuda")
        markov_tests.check_requests_alone(markov_tests.on_gpu, case, noise)
    flat = markov_tests.make(6, 2, 512).to("cuda")
    markov_tests.check_strange_numbers(markov_tests.on_gpu, flat)


def prefetches() -> None:
    weight = torch.arange(100_000, dtype=torch.int32)
    on_gpu = weight.cuda()
    prefetch(PrefetchPlan([on_gpu, (on_gpu.data_ptr() + 8, 4000)], device="cuda"))
    if not torch.equal(on_gpu.cpu(), weight):
        raise SystemExit("sanitize: prefetch changed memory")


def plant(name: str) -> None:
    """A fault that the tool must report; some stop the kernel or the context."""
    from tests.verify_kernels.planted import memory
    from tests.verify_kernels.planted.base import planted

    fault = planted(getattr(memory, name)())
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


def main(fault: str, only: bool) -> None:
    torch.manual_seed(0)
    if not only:
        gemms()
        residuals(7168)
        residuals(512)
        deltas()
        routes()
        experts()
        attention()
        drafts()
        prefetches()
        torch.cuda.synchronize()
        print("sanitize: results are right", flush=True)
    plant(fault)


if __name__ == "__main__":
    main(sys.argv[-1], "--only" in sys.argv)
