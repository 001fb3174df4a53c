# SPDX-License-Identifier: Apache-2.0
"""A kernel that leaves one word all over the shared memory of every SM."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
import cutlass.cute.runtime as rt
from cutlass import Int32

from verify_kernels.common import ptx

#: All that a CTA can have on every architecture here, so an SM holds one at a time.
BYTES = 227 * 1024
THREADS = 1024


class StaleKernel:
    """A CTA an SM writes the one ``word`` to each word of its shared memory."""

    @cute.jit
    def __call__(self, word: cute.Tensor, ctas: Int32, stream):
        self.kernel(word).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            smem=BYTES,
            stream=stream,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, word: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        value = word[0]
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        for at in cutlass.range(16 * thread, BYTES, 16 * THREADS, unroll=1):
            ptx.store_shared_128_if(base + at, Int32(1), (value,) * 4)


@functools.cache
def compiled(arch: str):
    """Callable (word int32 [1], CTAs)."""
    word = rt.make_fake_compact_tensor(Int32, (1,), assumed_align=4)
    stream = rt.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    return cute.compile(StaleKernel(), word, Int32(1), stream, options=options)
