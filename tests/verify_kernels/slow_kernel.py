# SPDX-License-Identifier: Apache-2.0
"""A kernel that lets its dependents start at once and writes long after."""

import cutlass
import cutlass.cute as cute
import cutlass.cute.runtime as rt
from cutlass import Int64

THREADS = 256
CTAS = 8


class SlowCopyKernel:
    """target = source, once ``cycles`` of the SM's clock have gone by."""

    @cute.jit
    def __call__(self, source: cute.Tensor, target: cute.Tensor, cycles: Int64, stream):
        # The carve-out of the kernels that follow: else no CTA of theirs fits beside.
        self.kernel(source, target, cycles).launch(
            grid=[CTAS, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, source: cute.Tensor, target: cute.Tensor, cycles: Int64):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        begin = cute.arch.clock64()
        now = begin
        while now - begin < cycles:
            now = cute.arch.clock64()
        first = block * THREADS + thread
        for i in cutlass.range(first, source.shape[0], CTAS * THREADS, unroll=1):
            target[i] = source[i]


def compiled(arch: str):
    """Callable (source int32 [n], target int32 [n], cycles int)."""

    def vector(n):
        return rt.make_fake_compact_tensor(cutlass.Int32, (n,), assumed_align=4)

    n = cute.sym_int()
    stream = rt.make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = (vector(n), vector(n), Int64(1), stream)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    return cute.compile(SlowCopyKernel(), *arguments, options=options)
