# SPDX-License-Identifier: Apache-2.0
"""The variants to compile, the grid, and the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common.variant import Variant, cached, device_arch
from verify_kernels.skinny_gemm import choice
from verify_kernels.skinny_gemm.choice import Choice, Cut, Outputs
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.tiling import SUM_ORDER, register_limit
from verify_kernels.skinny_gemm.wide_tiling import WideTiling

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def _fake_arguments(k: int, outputs: Sequence[str]) -> Sequence[Any]:
    """Fake arguments: M, every N and the row strides of X and Y are open."""
    import cutlass
    import cutlass.cute as cute
    import cutlass.cute.runtime as rt

    types = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32}
    m = cute.sym_int()
    x = rt.make_fake_tensor(
        cutlass.BFloat16, (m, k), (cute.sym_int64(divisibility=8), 1), assumed_align=16
    )
    ws, ys = [], []
    for output in outputs:
        n = cute.sym_int()
        ws.append(
            rt.make_fake_compact_tensor(
                cutlass.BFloat16, (n, k), stride_order=(1, 0), assumed_align=16
            )
        )
        ys.append(
            rt.make_fake_tensor(
                types[output],
                (m, n),
                (cute.sym_int64(), 1),
                assumed_align=types[output].width // 8,
            )
        )
    stream = rt.make_fake_stream(use_tvm_ffi_env_stream=True)
    return x, ws, ys, cutlass.Int32(1), cutlass.Int32(0), stream


def variant(cut: Cut, outputs: Outputs) -> Variant:
    """The kernel of ``cut`` for matrices with these outputs, "bf16" or "fp32" each."""
    import cutlass

    from verify_kernels.skinny_gemm.direct import DirectGemmKernel
    from verify_kernels.skinny_gemm.kernel import SkinnyGemmKernel
    from verify_kernels.skinny_gemm.wide import WideGemmKernel

    types = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32}
    dtypes = tuple(types[output] for output in outputs)
    kernel: Any
    if isinstance(cut, DirectTiling):
        kernel = DirectGemmKernel(cut, dtypes)
    elif isinstance(cut, WideTiling):
        kernel = WideGemmKernel(cut, dtypes)
    else:
        kernel = SkinnyGemmKernel(cut, dtypes)
    return Variant(
        op="skinny_gemm",
        name=f"{cut.name}_{'_'.join(outputs)}",
        kernel=kernel,
        arguments=functools.partial(_fake_arguments, cut.k, outputs),
        max_registers=register_limit(cut.threads, cut.ctas_per_sm),
    )


def variants() -> list[Variant]:
    """Every kernel that some shape is served by. Programmatic launch is an argument."""
    return [variant(cut, outputs) for cut, outputs in choice.kernels()]


@functools.cache
def clusters_held(device: int, size: int) -> int:
    """Clusters of ``size`` CTAs, one an SM, that ``device`` holds at once."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    if size == 1:
        return count
    from cutlass.utils import HardwareInfo

    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context that the query needs
        found = HardwareInfo(device).get_max_active_clusters(size)
    return min(found, count // size)


def grid(chosen: Choice, n: int, device: int) -> int:
    """CTAs of a launch over ``n`` rows of W on CUDA device ``device``."""
    size = chosen.cut.cluster
    if chosen.run:
        return -(-n // chosen.run) * size
    return clusters_held(device, size) * size


class SkinnyGemm:
    """Y_g = X W_g^T for 1 to 64 rows and one or more weight matrices in one launch.

    Row t of Y has the same bits whatever M is, whatever the other rows are and however
    many matrices share the launch: the order of the sums depends on K alone
    (`verify_kernels.skinny_gemm.tiling`). fp32 accumulation, one rounding.

    Args:
        k: columns of X and W; one of `tiling.SUM_ORDER`.
        out_dtype: torch.bfloat16 or torch.float32, or one for each matrix.
        groups: number of weight matrices, if ``out_dtype`` is one dtype.
        pdl: launch without waiting for earlier kernels to end; weights are requested
            at once, and the kernel waits itself before it reads X or writes Y. So no
            kernel just ahead on the stream may write the weights.

    Raises:
        ValueError: no kernel is compiled for this k and these outputs.
    """

    def __init__(
        self,
        k: int,
        *,
        out_dtype: torch.dtype | Sequence[torch.dtype] = torch.bfloat16,
        groups: int = 1,
        pdl: bool = True,
    ) -> None:
        dtypes = (
            (out_dtype,) * groups
            if isinstance(out_dtype, torch.dtype)
            else tuple(out_dtype)
        )
        outputs = tuple(_NAMES.get(d, str(d)) for d in dtypes)
        if k not in SUM_ORDER:
            raise ValueError(
                f"k={k}: the skinny GEMM is compiled for K = "
                f"{', '.join(map(str, SUM_ORDER))}"
            )
        if outputs not in choice.outputs_of(k):
            raise ValueError(
                f"outputs {outputs} of K {k} are not compiled; there are "
                f"{', '.join(map(str, choice.outputs_of(k)))}"
            )
        self.k = k
        self.groups = len(outputs)
        self.pdl = pdl
        self._outputs = outputs
        self._bound: dict[tuple[int | None, int], list[Callable[..., None]]] = {}

    def _bind(self, device: torch.device, n: int) -> list[Callable[..., None]]:
        """The launch for every M that one launch serves, compiled and looked up once
        for weights of ``n`` rows in all."""
        if device.type != "cuda":
            raise ValueError(
                f"x is on {device}; the kernel needs a CUDA device: move the tensors "
                "there or use verify_kernels.skinny_gemm.reference"
            )
        index = device.index
        arch = device_arch(index)
        launches: list[Callable[..., None]] = []
        chosen = choice.choices(self.k, n, self._outputs, self.pdl)
        for rows, best in chosen.items():
            kernel = cached(variant(best.cut, self._outputs), arch)
            ctas = grid(best, n, index)
            launch = functools.partial(_launch, kernel, ctas, int(self.pdl))
            launches += [launch] * (rows + 1 - len(launches))
        self._bound[index, n] = launches
        return launches

    def __call__(
        self,
        x: Tensor,
        w: Tensor | Sequence[Tensor],
        out: Tensor | Sequence[Tensor],
    ) -> None:
        """Launch on the current stream.

        Args:
            x: bf16 [M, K], M = 0 .. 64; rows may be any multiple of 16 bytes apart.
            w: bf16 [N, K], contiguous; or one a matrix.
            out: [M, N] in the matrix's output dtype; columns contiguous, rows any
                distance apart.

        Raises:
            ValueError: a number of rows, a dtype, shape, stride or device that does not
                fit; nothing is written then.
        """
        rows = x.shape[0]
        if rows > MAX_ROWS:
            raise ValueError(
                f"x has {rows} rows; at most {MAX_ROWS}: split the step or use another "
                "GEMM for prefill"
            )
        ws = [w] if isinstance(w, Tensor) else list(w)
        ys = [out] if isinstance(out, Tensor) else list(out)
        if len(ws) != self.groups or len(ys) != self.groups:
            raise ValueError(
                f"w has {len(ws)} matrices and out {len(ys)}; this SkinnyGemm was made "
                f"for {self.groups}"
            )
        for y in ys:
            if y.shape[0] != rows:
                raise ValueError(
                    f"out has {y.shape[0]} rows and x {rows}; give it {rows}"
                )
        n = sum(part.shape[0] for part in ws)
        launches = self._bound.get((x.device.index, n)) or self._bind(x.device, n)
        most = len(launches) - 1
        if not n:
            return
        if rows <= most:
            if rows:
                launches[rows](x, ws, ys)
            return
        for first in range(0, rows, most):
            part = slice(first, min(first + most, rows))
            launches[part.stop - first](x[part], ws, [y[part] for y in ys])


def _launch(
    kernel: Callable[..., None],
    ctas: int,
    pdl: int,
    x: Tensor,
    ws: list[Tensor],
    ys: list[Tensor],
) -> None:
    kernel(x, ws, ys, ctas, pdl)
