# SPDX-License-Identifier: Apache-2.0
"""X W^T by wgmma, W from registers and X from shared memory, and by mma.sync.

Both are one chain of k16 steps from zero, with the weights of a lane as 16-byte loads
bring them (verify_kernels/skinny_gemm/kernel.py): step 2 c + h uses words 2 h and
2 h + 1 of columns 32 c + 8 q ..
"""

from pathlib import Path

import cutlass
import cutlass.cute as cute
import cutlass.cute.runtime as rt
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from verify_kernels.common import ptx

K = 256
ROWS = 64
THREADS = 128
CHUNKS = K // 32


@dsl_user_op
def wgmma_chain(a, descriptor, tiles, *, loc=None, ip=None):
    """Sums of a lane, four a tile of 8 tokens, over the steps in ``a``, each four
    Int32; a step's descriptor is 16 past that of the step before. Clobber."""
    count = 4 * tiles
    sums = ",".join(f"${i}" for i in range(count))
    lines = [
        "{.reg .b64 d; .reg .pred first, more;",
        "setp.ne.b32 first, 0, 0; setp.eq.b32 more, 0, 0;",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(len(a)):
        words = ",".join(f"${count + 4 * step + i}" for i in range(4))
        lines += [
            f"add.s64 d, ${count + 4 * len(a)}, {16 * step};",
            f"wgmma.mma_async.sync.aligned.m64n{8 * tiles}k16.f32.bf16.bf16 {{{sums}}},"
            f" {{{words}}}, d, {'more' if step else 'first'}, 1, 1, 0;",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;}"]
    operands = [Int32(v).ir_value(loc=loc, ip=ip) for step in a for v in step]
    operands.append(Int64(descriptor).ir_value(loc=loc, ip=ip))
    out = ptx.asm(
        llvm.StructType.get_literal([T.f32()] * count),
        operands,
        "\n".join(lines),
        "=&f," * count + "r," * (4 * len(a)) + "l",
        effects=True,
        clobber=True,
        loc=loc,
        ip=ip,
    )
    return [
        Float32(llvm.extractvalue(T.f32(), out, [i], loc=loc, ip=ip))
        for i in range(count)
    ]


@dsl_user_op
def fence_proxy(*, loc=None, ip=None):
    """This thread's stores to shared memory, for wgmma to see. Clobber."""
    code = "fence.proxy.async.shared::cta;"
    ptx.asm(None, [], code, "", effects=True, clobber=True, loc=loc, ip=ip)


class TwoProductsKernel:
    """One CTA, one warpgroup, ``8 * tiles`` tokens."""

    def __init__(self, tiles):
        self.tiles = tiles
        self.shared_bytes = 8 * tiles * K * 2

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # [tokens, K]
        w: cute.Tensor,  # [ROWS, K]
        by_wgmma: cute.Tensor,  # [tokens, ROWS]
        by_mma: cute.Tensor,
        stream,
    ):
        self.kernel(x, w, by_wgmma, by_mma).launch(
            grid=[1, 1, 1],
            block=[THREADS, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        by_wgmma: cute.Tensor,
        by_mma: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        g, q = thread % 32 // 4, thread % 4
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()
        self.stage(x, base, thread)
        fence_proxy()
        cute.arch.sync_threads()

        row = thread // 32 * 16 + g
        words = []
        for half in cutlass.range_constexpr(2):
            source = (
                w.iterator.toint() + Int64(row + 8 * half) * (2 * K) + Int64(q * 16)
            )
            words.append([ptx.load_global_128(source, 64 * c) for c in range(CHUNKS)])
        low, high = words
        a = [
            (low[c][2 * h], high[c][2 * h], low[c][2 * h + 1], high[c][2 * h + 1])
            for c in range(CHUNKS)
            for h in range(2)
        ]
        start = (base & 0x3FFFF) >> 4
        strides = Int64(128 >> 4) << 16 | Int64(K // 8 * 128 >> 4) << 32
        sums = wgmma_chain(a, Int64(start) | strides, self.tiles)
        for n in cutlass.range_constexpr(self.tiles):
            total = (Float32(0.0),) * 4
            source = x.iterator.toint() + Int64(8 * n + g) * (2 * K) + Int64(q * 16)
            for c in cutlass.range_constexpr(CHUNKS):
                v = ptx.load_global_128(source, 64 * c)
                for h in cutlass.range_constexpr(2):
                    total = ptx.mma_16816(a[2 * c + h], (v[2 * h], v[2 * h + 1]), total)
            for i in cutlass.range_constexpr(4):
                token, column = 8 * n + 2 * q + i % 2, row + 8 * (i // 2)
                by_wgmma[token, column] = sums[4 * n + i]
                by_mma[token, column] = total[i]

    @cute.jit
    def stage(self, x, base, thread):
        """X as core matrices of 8 tokens by 16 bytes, columns as ``a`` has them: of
        core matrix 4 c + j, lane q's two are words j of its 16 bytes."""
        tasks = 8 * self.tiles * CHUNKS
        for first in cutlass.range_constexpr(0, tasks, THREADS):
            task = first + thread
            if task < tasks:
                token, c = task // CHUNKS, task % CHUNKS
                source = x.iterator.toint() + Int64(token) * (2 * K) + Int64(c * 64)
                v = [ptx.load_global_128(source, 16 * i) for i in range(4)]
                at = base + (token // 8 * (K // 8) + 4 * c) * 128 + token % 8 * 16
                for j in cutlass.range_constexpr(4):
                    ptx.store_shared_128_if(
                        at + 128 * j, Int32(1), [v[i][j] for i in range(4)]
                    )


def compiled(tiles: int, directory: Path | None = None):
    """Callable (x, w, by_wgmma, by_mma); PTX and cubin are kept in ``directory``."""

    def matrix(kind, rows, columns):
        return rt.make_fake_compact_tensor(
            kind, (rows, columns), stride_order=(1, 0), assumed_align=16
        )

    tokens = 8 * tiles
    arguments = [
        matrix(cutlass.BFloat16, tokens, K),
        matrix(cutlass.BFloat16, ROWS, K),
        matrix(cutlass.Float32, tokens, ROWS),
        matrix(cutlass.Float32, tokens, ROWS),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
    options = "--enable-tvm-ffi --gpu-arch sm_90a"
    if directory is not None:
        options += f" --keep-ptx --keep-cubin --dump-dir {directory}"
    return cute.compile(TwoProductsKernel(tiles), *arguments, options=options)
