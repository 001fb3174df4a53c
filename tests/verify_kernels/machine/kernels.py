# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels on the machine, from tensors on the CPU."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.bench.space import RING
from tests.verify_kernels.machine import GlobalMemory, launch, tensor_argument
from tests.verify_kernels.test_attn_res import fresh
from tests.verify_kernels.test_skinny_gemm import padded
from verify_kernels.attn_res.host import Form, variant_name
from verify_kernels.common.variant import Variant, variants
from verify_kernels.moe.host import ExpertPlan
from verify_kernels.moe.host import Form as RouteForm
from verify_kernels.moe.host import variant_name as route_name
from verify_kernels.skinny_gemm import host
from verify_kernels.skinny_gemm.choice import Cut
from verify_kernels.skinny_gemm.direct_tiling import DirectTiling
from verify_kernels.skinny_gemm.tiling import Tiling
from verify_kernels.skinny_gemm.wide_tiling import WideTiling

#: Changes PTX before it runs.
Edit = Callable[[str], str]
#: "bf16" or "fp32" for each matrix.
Outputs = tuple[str, ...]
BF16: Outputs = ("bf16",)


@functools.cache
def compiled(op: str, name: str) -> tuple[Variant, str]:
    """A variant and its PTX."""
    variant = next(v for v in variants((op,)) if v.name == name)
    return variant, ptx_of(variant)


def ptx_of(variant: Variant, arch: str = "sm_90a") -> str:
    """A variant's PTX."""
    with tempfile.TemporaryDirectory() as directory:
        variant.compile(arch, Path(directory))
        (ptx,) = Path(directory).glob("*.ptx")
        return ptx.read_text()


@functools.cache
def gemm_ptx(cut: Cut, outputs: Outputs = BF16, arch: str = "sm_90a") -> str:
    """PTX of a skinny GEMM of any design."""
    return ptx_of(host.variant(cut, outputs), arch)


def ring_gemm(k: int, rows: int) -> str:
    """PTX of the ring kernel for this K and M, one matrix."""
    return gemm_ptx(tiling_for(k, rows))


def tiling_for(k: int, rows: int) -> Tiling:
    """Of the rings that a search tries first the one for this M."""
    return next(t for most, t in RING[k].items() if rows <= most)


def division(cut: Cut, rows: int, clusters: int) -> tuple[int, ...]:
    """What the host part tells the kernel: rows of a cluster and clusters with one
    more; a wide one also turns and rows of a block; a ring nothing."""
    run, longer = divmod(rows, clusters)
    if isinstance(cut, DirectTiling):
        assert run + (longer > 0) <= cut.rows
        return run, longer
    if isinstance(cut, WideTiling):
        turns = -(-(run + (longer > 0)) // cut.turn_rows)
        return run, longer, turns, run // max(turns * cut.row_blocks, 1)
    return ()


def gemm(
    cut: Cut,
    x: Tensor,
    ws: Sequence[Tensor],
    clusters: int = 1,
    outputs: Outputs = BF16,
    *,
    seed: int = 0,
    edit: Edit = str,
    finite: bool = True,
    races: bool = False,
    arch: str = "sm_90a",
) -> list[Tensor]:
    """One launch of a skinny GEMM of any design, x and the results in rows apart.

    What is not to be written is NaN and stays so; with ``finite`` all results are
    finite.
    """
    rows = x.shape[0]
    memory = GlobalMemory()
    x = padded(x)
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    buffers = [
        torch.full((rows + 1, w.shape[0] + 3), torch.nan, dtype=kinds[o])
        for w, o in zip(ws, outputs, strict=True)
    ]
    ys = [b[:rows, : w.shape[0]] for b, w in zip(buffers, ws, strict=True)]
    at = memory.add(x, "x", dynamic=True)
    parameters = [tensor_argument(at, (rows,), x.stride()[:1])]
    for g, w in enumerate(ws):
        parameters.append(tensor_argument(memory.add(w, f"w{g}"), w.shape[:1]))
    for g, y in enumerate(ys):
        at = memory.add(y, f"y{g}", dynamic=True, writable=True)
        parameters.append(tensor_argument(at, y.shape, y.stride()[:1]))
    numbers = division(cut, sum(w.shape[0] for w in ws), clusters)
    launch(
        edit(gemm_ptx(cut, outputs, arch)),
        memory,
        parameters + [np.int32(n).tobytes() for n in numbers],
        grid=(clusters * cut.cluster, 1, 1),
        block=(cut.threads, 1, 1),
        cluster=(cut.cluster, 1, 1),
        shared_bytes=cut.shared_bytes,
        seed=seed,
        races=races,
    )
    for buffer, y in zip(buffers, ys, strict=True):
        assert torch.isfinite(y).all() or not finite
        assert torch.isnan(buffer[rows]).all() and torch.isnan(buffer[:, -3:]).all()
    return ys


def skinny_gemm(
    x: Tensor,
    ws: Sequence[Tensor],
    outputs: Sequence[str] = BF16,
    *,
    tiling: Tiling | None = None,
    clusters: int = 1,
    seed: int = 0,
    edit: Edit = str,
    races: bool = False,
) -> list[Tensor]:
    """One launch of the ring kernel, with `tiling_for` or another tiling."""
    cut = tiling or tiling_for(x.shape[1], x.shape[0])
    return gemm(
        cut,
        x,
        ws,
        clusters,
        tuple(outputs),
        seed=seed,
        edit=edit,
        finite=False,
        races=races,
    )


def attn_res(
    form: Form,
    arguments: dict[str, Any],
    *,
    seed: int = 0,
    edit: Edit = str,
    races: bool = False,
) -> list[Tensor]:
    """One launch; the output, the prefix and the blocks."""
    rows, hidden = arguments["prefix"].shape
    variant, ptx = compiled("attn_res", variant_name(hidden, *form))
    call = fresh(arguments)
    call["out"] = torch.full((rows, hidden + 8), torch.nan).bfloat16()[:, :hidden]
    memory = GlobalMemory()
    parameters = []
    has_extra = call.get("extra") is not None
    for name in variant.kernel.parameters:
        tensor = call[name] if name != "extra" or has_extra else call["delta"]
        address = memory.add(
            tensor,
            name,
            dynamic=not name.endswith("weight"),
            writable=name in ("out", "prefix", "blocks"),
        )
        open_extents = tensor.shape[:-1], tensor.stride()[:-1]
        parameters.append(tensor_argument(address, *open_extents))
    for name in ("eps", "output_norm_eps"):
        parameters.append(np.float32(arguments[name]).tobytes())
    parameters.append(np.int32(has_extra).tobytes())
    launch(
        edit(ptx),
        memory,
        parameters,
        grid=(variant.kernel.ctas, rows, 1),
        block=(variant.kernel.threads, 1, 1),
        cluster=(variant.kernel.ctas, 1, 1),
        shared_bytes=variant.kernel.shared_bytes,
        seed=seed,
        races=races,
    )
    return [call["out"], call["prefix"], call["blocks"]]


def moe_route(
    form: RouteForm,
    logits: Tensor,
    bias: Tensor,
    plan: ExpertPlan,
    weights: Tensor,
    ids: Tensor,
    *,
    padding: Tensor | None = None,
    routed_scale: float = 1.0,
    seed: int = 0,
    edit: Edit = str,
    races: bool = False,
) -> None:
    """One launch into the given outputs."""
    variant, ptx = compiled("moe", route_name(*form))
    kernel, rows = variant.kernel, logits.shape[:1]
    memory = GlobalMemory()
    parameters = [
        tensor_argument(
            memory.add(logits, "logits", dynamic=True), rows, logits.stride()[:1]
        ),
        tensor_argument(memory.add(bias, "bias")),
    ]
    # A launch without padding is given something else, which it must not read.
    told = torch.full(rows, 7, dtype=torch.uint8) if padding is None else padding
    address = memory.add(told.view(torch.uint8), "padding", dynamic=True)
    parameters.append(tensor_argument(address, rows))
    outputs = {"weights": weights, "ids": ids, **vars(plan)}
    for name in kernel.parameters[3:]:
        address = memory.add(outputs[name], name, dynamic=True, writable=True)
        parameters.append(
            tensor_argument(address, rows if outputs[name].ndim == 2 else ())
        )
    launch(
        edit(ptx),
        memory,
        [
            *parameters,
            np.float32(routed_scale).tobytes(),
            np.int32(padding is not None).tobytes(),
        ],
        grid=(kernel.ctas, 1, 1),
        block=(kernel.across, kernel.slots, 1),
        cluster=(kernel.ctas, 1, 1),
        shared_bytes=kernel.shared_bytes,
        seed=seed,
        races=races,
    )
