# SPDX-License-Identifier: Apache-2.0
"""Which tiling serves which M, the variants to compile, and the launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common.variant import Variant, cached, device_arch
from verify_kernels.skinny_gemm.tiling import SUM_ORDER, Tiling

_PAIR = {"ctas_per_sm": 2}
_DEEP = {"cluster": 8, "exchange_buffers": 2, "reducers": 3}

#: K -> {rows: what differs from Tiling's defaults for M up to so many rows}. Every
#: choice gives the same bits, so only speed was asked (H200, 2026-11-29, programmatic
#: chains, weights from HBM). Long copies feed the memory best, a larger cluster reads X
#: less often, and two CTAs an SM let the next kernel's weights come early where a run
#: of rows fits half an SM. Where 64 rows of X leave no room for the ring, M is cut.
CHOICES: dict[int, dict[int, dict[str, int]]] = {
    128: {
        8: {"row_tiles": 4, "stage_rows": 64, "stages": 2} | _PAIR,
        16: {"row_tiles": 4, "stage_rows": 64, "stages": 2, "held_tiles": 2} | _PAIR,
        32: {"row_tiles": 2, "stage_rows": 32, "held_tiles": 4},
        64: {"held_tiles": 8, "reducers": 2},
    },
    384: {
        8: {"row_tiles": 2, "stage_rows": 28, "stages": 3} | _PAIR,
        16: {"row_tiles": 2, "stage_rows": 28, "stages": 3, "held_tiles": 2} | _PAIR,
        32: {"held_tiles": 4, "stages": 6, "reducers": 2},
        64: {"held_tiles": 8, "stages": 4, "reducers": 3},
    },
    768: {
        8: {"stage_rows": 14, "stages": 4, "partial_buffers": 4} | _PAIR,
        16: {"stage_rows": 14, "stages": 3, "held_tiles": 2} | _PAIR,
        32: {"held_tiles": 4, "stages": 5, "reducers": 2},
        64: {"held_tiles": 4, "stages": 3, "partial_buffers": 1, "reducers": 3},
    },
    1536: {
        8: {"stages": 3} | _PAIR,
        16: {"cluster": 2, "held_tiles": 2, "stages": 3, "reducers": 2} | _PAIR,
        32: {"cluster": 2, "held_tiles": 4, "stages": 5, "reducers": 2},
        64: {"cluster": 2, "held_tiles": 4, "stages": 3, "reducers": 3}
        | {"partial_buffers": 1, "exchange_buffers": 2},
    },
    2112: {
        8: {"cluster": 2, "span": 1, "stages": 4},
        16: {"cluster": 2, "held_tiles": 2, "stages": 3, "reducers": 2},
        32: {"cluster": 2, "held_tiles": 2, "stages": 2, "exchange_buffers": 2},
    },
    3584: {
        8: {"cluster": 2, "span": 2, "stages": 3},
        16: {"cluster": 4, "held_tiles": 2, "stages": 5, "reducers": 2},
        32: {"cluster": 4, "held_tiles": 4, "stages": 4, "reducers": 2},
        64: {"cluster": 4, "held_tiles": 4, "stages": 3, "exchange_buffers": 2}
        | {"reducers": 3},
    },
    4224: {
        8: {"cluster": 4, "stages": 4},
        16: {"cluster": 4, "held_tiles": 2, "stages": 4, "reducers": 2},
        32: {"cluster": 4, "held_tiles": 2, "stages": 3, "exchange_buffers": 2},
    },
    6144: {
        8: {"cluster": 4, "span": 2, "stages": 3},
        16: {"cluster": 8, "held_tiles": 2, "stages": 6, "reducers": 2},
        32: {"held_tiles": 4, "stages": 5} | _DEEP,
        64: {"held_tiles": 4, "stages": 3} | _DEEP,
    },
    7168: {
        2: {"cluster": 2, "span": 2, "stages": 3},
        8: {"cluster": 4, "span": 2, "stages": 3},
        16: {"cluster": 8, "held_tiles": 2, "stages": 6, "reducers": 2},
        32: {"held_tiles": 4, "stages": 5} | _DEEP,
        64: {"held_tiles": 4, "stages": 3} | _DEEP,
    },
    12288: {
        2: {"cluster": 4, "stages": 4},
        8: {"cluster": 8, "stages": 4},
        16: {"held_tiles": 2, "stages": 3} | _DEEP | {"reducers": 2},
        32: {"held_tiles": 3, "stages": 3} | _DEEP,
    },
    33792: {
        8: {"cluster": 8, "stages": 1},
        16: {"cluster": 8, "stages": 1, "partial_buffers": 1}
        | {"exchange_buffers": 2, "reducers": 2},
    },
}


def _tilings(k: int) -> dict[int, Tiling]:
    return {
        rows: Tiling(k, token_tiles=-(-rows // 8), **choice)
        for rows, choice in CHOICES[k].items()
    }


#: K -> {rows: tiling}, rows ascending; more rows than the last are cut into launches.
TILINGS = {k: _tilings(k) for k in SUM_ORDER}

#: Outputs that are compiled: one matrix in bf16; at the model's width also one in fp32,
#: and the three that read a MoE layer's input: router (fp32), latent down and shared
#: gate-up.
OUTPUTS: dict[int, tuple[tuple[str, ...], ...]] = {
    k: (("bf16",), ("fp32",), ("fp32", "bf16", "bf16")) if k == 7168 else (("bf16",),)
    for k in SUM_ORDER
}
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


def _register_limit(tiling: Tiling) -> int:
    """ptxas's own limit: an SM's 65,536 registers, threads counted by four warps."""
    threads = tiling.ctas_per_sm * -(-tiling.threads // 128) * 128
    return min(255, 65536 // threads)


def _variant(tiling: Tiling, outputs: tuple[str, ...]) -> Variant:
    import cutlass

    from verify_kernels.skinny_gemm.kernel import SkinnyGemmKernel

    types = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32}
    return Variant(
        op="skinny_gemm",
        name=f"{tiling.name}_{'_'.join(outputs)}",
        kernel=SkinnyGemmKernel(tiling, tuple(types[o] for o in outputs)),
        arguments=functools.partial(_fake_arguments, tiling.k, outputs),
        max_registers=_register_limit(tiling),
    )


def variants() -> list[Variant]:
    """Every tiling with every output of its K. Programmatic launch is an argument."""
    return [
        _variant(tiling, outputs)
        for k in SUM_ORDER
        for tiling in TILINGS[k].values()
        for outputs in OUTPUTS[k]
    ]


@functools.cache
def _clusters(device: int, size: int) -> int:
    """Clusters of ``size`` CTAs, one an SM, that ``device`` holds at once."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    if size == 1:
        return count
    from cutlass.utils import HardwareInfo

    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the context that the query needs
        found = HardwareInfo(device).get_max_active_clusters(size)
    return min(found, count // size)


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
        if k not in TILINGS:
            raise ValueError(
                f"k={k}: the skinny GEMM is compiled for K = "
                f"{', '.join(map(str, TILINGS))}"
            )
        if outputs not in OUTPUTS[k]:
            raise ValueError(
                f"outputs {outputs} of K {k} are not compiled; there are "
                f"{', '.join(map(str, OUTPUTS[k]))}"
            )
        self.k = k
        self.groups = len(outputs)
        self.pdl = int(pdl)
        self.max_rows = max(TILINGS[k])
        self._outputs = outputs
        self._bound: dict[int, list[Callable[..., None]]] = {}

    def _bind(self, device: torch.device) -> list[Callable[..., None]]:
        """The launch for every M up to ``max_rows``, compiled and looked up once."""
        if device.type != "cuda":
            raise ValueError(
                f"x is on {device}; the kernel needs a CUDA device: move the tensors "
                "there or use verify_kernels.skinny_gemm.reference"
            )
        index = device.index
        arch = device_arch(index)
        launches: list[Callable[..., None]] = []
        for rows, tiling in TILINGS[self.k].items():
            kernel = cached(_variant(tiling, self._outputs), arch)
            clusters = _clusters(index, tiling.cluster)
            ctas = clusters * tiling.cluster
            launch = functools.partial(_launch, kernel, ctas, self.pdl)
            launches += [launch] * (rows + 1 - len(launches))
        self._bound[index] = launches
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
        launches = self._bound.get(x.device.index) or self._bind(x.device)
        if rows <= self.max_rows:
            if rows:
                launches[rows](x, ws, ys)
            return
        for first in range(0, rows, self.max_rows):
            part = slice(first, min(first + self.max_rows, rows))
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
