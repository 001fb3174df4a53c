# SPDX-License-Identifier: Apache-2.0
"""What the planted kernels share: y = w x, 64 threads, w static, x and y dynamic."""

import cutlass.cute as cute
import cutlass.cute.runtime as rt
from cutlass import BFloat16, Float32, Int32

from verify_kernels.common.variant import Variant

THREADS = 64


class Planted:
    """Host part and promise; subclasses give ``kernel`` and what they promise else."""

    parameters = ("w", "x", "y")
    early_loads = ("w",)
    early_release = ""
    pdl = True
    launched_with_pdl = True
    shared_bytes = 0
    launched_with_shared = 0

    @cute.jit
    def __call__(self, w: cute.Tensor, x: cute.Tensor, y: cute.Tensor, stream):
        self.kernel(w, x, y).launch(
            grid=[4, 1, 1],
            block=[THREADS, 1, 1],
            smem=self.launched_with_shared,
            stream=stream,
            use_pdl=self.launched_with_pdl,
        )


def arguments():
    """Fake w [128] and x [m] in bf16, y [m, 8] in fp32, and a stream."""
    m = cute.sym_int()
    return (
        rt.make_fake_compact_tensor(BFloat16, (128,), assumed_align=16),
        rt.make_fake_compact_tensor(BFloat16, (m,), assumed_align=16),
        rt.make_fake_compact_tensor(Float32, (m, 8), stride_order=(1, 0)),
        rt.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def index_arguments():
    """As `arguments`, with x in int32: positions."""
    w, _, y, stream = arguments()
    x = rt.make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=16)
    return w, x, y, stream


def planted(kernel, make=arguments, **budgets):
    """A variant of a planted kernel."""
    return Variant("planted", type(kernel).__name__, kernel, make, **budgets)
