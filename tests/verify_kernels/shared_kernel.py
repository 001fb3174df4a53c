# SPDX-License-Identifier: Apache-2.0
"""A kernel that tells what it finds in shared memory that it has not written."""

import cutlass
import cutlass.cute as cute
import cutlass.cute.runtime as rt
from cutlass import Int32

BYTES = 128 * 1024
THREADS = 256


class SharedKernel:
    """found[block, i] is word i of its CTA's shared memory, as it was."""

    @cute.jit
    def __call__(self, found: cute.Tensor, stream):
        self.kernel(found).launch(
            grid=[found.shape[0], 1, 1],
            block=[THREADS, 1, 1],
            smem=BYTES,
            stream=stream,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, found: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        words = cute.make_tensor(
            cute.arch.get_dyn_smem(Int32, alignment=128), cute.make_layout(BYTES // 4)
        )
        for i in cutlass.range(thread, BYTES // 4, THREADS, unroll=1):
            found[block, i] = words[i]


def compiled(arch: str):
    """Callable (found int32 [CTAs, 32768])."""
    found = rt.make_fake_compact_tensor(
        Int32, (cute.sym_int(), BYTES // 4), stride_order=(1, 0), assumed_align=16
    )
    stream = rt.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    return cute.compile(SharedKernel(), found, stream, options=options)
