# SPDX-License-Identifier: Apache-2.0
"""The variants to compile, the grid, and the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common.variant import Variant, cached, device_arch
from verify_kernels.skinny_gemm import choice
from verify_kernels.skinny_gemm.choice import Choice, Cut, Outputs
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.tiling import SUM_ORDER, register_limit
from verify_kernels.skinny_gemm.wide_tiling import WideTiling

#: An output's type, or its name.
Output: TypeAlias = torch.dtype | str
_NAMES: dict[Output, str] = {torch.bfloat16: "bf16", torch.float32: "fp32"}


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
    from verify_kernels.skinny_gemm.wide_staged import StagedWideGemmKernel

    types = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32}
    dtypes = tuple(types[output] for output in outputs)
    kernel: Any
    if isinstance(cut, DirectTiling):
        kernel = DirectGemmKernel(cut, dtypes)
    elif isinstance(cut, WideTiling):
        make = StagedWideGemmKernel if cut.staged else WideGemmKernel
        kernel = make(cut, dtypes)
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


def _names(out_dtype: Output | Sequence[Output]) -> Outputs:
    """ "bf16" or "fp32" for each matrix; another type as it is spelled."""
    if isinstance(out_dtype, (torch.dtype, str)):
        out_dtype = (out_dtype,)
    return tuple(_NAMES.get(d, str(d)) for d in out_dtype)


def serves(k: int, outputs: Output | Sequence[Output] = torch.bfloat16) -> bool:
    """Whether there are kernels, for any N, with these outputs.

    Args:
        k: columns of X and W.
        outputs: torch.bfloat16 or torch.float32 (or "bf16", "fp32") for the only
            matrix of a launch, or one for each of several.
    """
    return _names(outputs) in choice.outputs_of(k)


def _nothing(*arguments: Any) -> None:
    """What is launched for no rows."""


#: By M: the kernel and its CTAs.
Launches = list[tuple[Callable[..., None], int]]


def _check_rows(rows: int, ys: Sequence[Tensor]) -> None:
    if rows > MAX_ROWS:
        raise ValueError(
            f"x has {rows} rows; at most {MAX_ROWS}: split the step or use another "
            "GEMM for prefill"
        )
    for y in ys:
        if y.shape[0] != rows:
            raise ValueError(f"out has {y.shape[0]} rows and x {rows}; give it {rows}")


def _in_parts(
    launches: Launches, pdl: int, x: Tensor, ws: list[Tensor], ys: Sequence[Tensor]
) -> None:
    """More rows than one launch serves: as many at a time, then what is left."""
    rows, most = x.shape[0], len(launches) - 1
    _check_rows(rows, ys)
    for first in range(0, rows, most):
        part = slice(first, min(first + most, rows))
        kernel, ctas = launches[part.stop - first]
        kernel(x[part], ws, [y[part] for y in ys], ctas, pdl)


class BoundGemm:
    """A `SkinnyGemm` for weights that stay: kernels and grids are looked up.

    Made by `SkinnyGemm.bind`. It holds the weights' memory, so values that are written
    there in place count, and a parameter that is given other memory must be bound
    again. May be captured in a graph.
    """

    __slots__ = ("_launches", "_pdl", "_single", "_ws")

    def __init__(
        self, launches: Launches, ws: list[Tensor], single: bool, pdl: bool
    ) -> None:
        self._launches = launches
        self._ws = ws
        self._single = single
        self._pdl = int(pdl)

    def __call__(self, x: Tensor, out: Tensor | Sequence[Tensor]) -> None:
        """Launch on the current stream.

        Args:
            x, out: as those of a `SkinnyGemm`; ``out`` is a tensor if one was bound, a
                list if a list was.

        Raises:
            ValueError: x and out do not fit each other or the weights; nothing is
                written then. The compiled function checks, so the words are its own.
        """
        rows = x.shape[0]
        ys = [out] if self._single else out
        if rows < len(self._launches):
            kernel, ctas = self._launches[rows]
            kernel(x, self._ws, ys, ctas, self._pdl)
        else:
            _in_parts(self._launches, self._pdl, x, self._ws, ys)


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
        outputs = _names(out_dtype)
        if isinstance(out_dtype, torch.dtype):
            outputs *= groups
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
        self._found: dict[tuple[int | None, int], Launches] = {}

    def _launches(self, device: torch.device, n: int) -> Launches:
        """The launch for every M that one launch serves, compiled and looked up once
        for weights of ``n`` rows in all."""
        index = device.index
        if known := self._found.get((index, n)):
            return known
        if device.type != "cuda":
            raise ValueError(
                f"x is on {device}; the kernel needs a CUDA device: move the tensors "
                "there or use verify_kernels.skinny_gemm.reference"
            )
        arch = device_arch(index)
        launches: Launches = [(_nothing, 0)]
        chosen = choice.choices(self.k, n, self._outputs, self.pdl)
        for rows, best in chosen.items():
            kernel = cached(variant(best.cut, self._outputs), arch) if n else _nothing
            launch = (kernel, grid(best, n, index))
            launches += [launch] * (rows + 1 - len(launches))
        self._found[index, n] = launches
        return launches

    def bind(self, w: Tensor | Sequence[Tensor]) -> BoundGemm:
        """The launch for weights that stay where they are.

        What depends on the weights is checked and looked up here, and what is not yet
        in the cache is compiled; a call is then a list lookup and the launch.

        Args:
            w: as in a call; on the device that launches are for.

        Raises:
            ValueError: a number of matrices, a dtype, shape, stride or device that does
                not fit.
        """
        single = isinstance(w, Tensor)
        ws = [w] if isinstance(w, Tensor) else list(w)
        if len(ws) != self.groups:
            raise ValueError(
                f"w has {len(ws)} matrices; this SkinnyGemm was made for {self.groups}"
            )
        for number, part in enumerate(ws):
            name = "w" if single else f"w[{number}]"
            if (
                part.dtype != torch.bfloat16
                or part.dim() != 2
                or part.shape[1] != self.k
            ):
                raise ValueError(
                    f"{name} is {part.dtype} {tuple(part.shape)}; it must be "
                    f"torch.bfloat16 [N, {self.k}]"
                )
            if not part.is_contiguous() or part.data_ptr() % 16:
                raise ValueError(
                    f"{name} has strides {part.stride()} and address "
                    f"{part.data_ptr():#x}; it must be contiguous from a multiple of "
                    "16 bytes on: bind a contiguous copy"
                )
            if part.device != ws[0].device:
                raise ValueError(
                    f"{name} is on {part.device} and the first on {ws[0].device}; "
                    "weights of one launch must be on one device"
                )
        device = ws[0].device
        if device.type != "cuda":
            raise ValueError(
                f"w is on {device}; the kernel needs a CUDA device: move the weights "
                "there or use verify_kernels.skinny_gemm.reference"
            )
        launches = self._launches(device, sum(part.shape[0] for part in ws))
        return BoundGemm(launches, [part.detach() for part in ws], single, self.pdl)

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
        ws = [w] if isinstance(w, Tensor) else list(w)
        ys = [out] if isinstance(out, Tensor) else list(out)
        if len(ws) != self.groups or len(ys) != self.groups:
            raise ValueError(
                f"w has {len(ws)} matrices and out {len(ys)}; this SkinnyGemm was made "
                f"for {self.groups}"
            )
        _check_rows(rows, ys)
        launches = self._launches(x.device, sum(part.shape[0] for part in ws))
        if rows < len(launches):
            kernel, ctas = launches[rows]
            kernel(x, ws, ys, ctas, int(self.pdl))
        else:
            _in_parts(launches, int(self.pdl), x, ws, ys)
