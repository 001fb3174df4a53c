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
from verify_kernels.attn_res.host import HIDDEN, variant_name
from verify_kernels.common.variant import Variant, variants
from verify_kernels.skinny_gemm import host
from verify_kernels.skinny_gemm.tiling import Tiling

#: Changes PTX before it runs.
Edit = Callable[[str], str]


@functools.cache
def compiled(op: str, name: str) -> tuple[Variant, str]:
    """A variant and its PTX."""
    return compiled_variant(next(v for v in variants((op,)) if v.name == name))


@functools.cache
def ring_of(tiling: Tiling, outputs: tuple[str, ...]) -> str:
    """PTX of the ring kernel."""
    return compiled_variant(host.variant(tiling, outputs))[1]


def ring_gemm(k: int, rows: int) -> str:
    """PTX of the ring kernel for this K and M, one matrix."""
    return ring_of(tiling_for(k, rows), ("bf16",))


def compiled_variant(variant: Variant) -> tuple[Variant, str]:
    """A variant and its PTX."""
    with tempfile.TemporaryDirectory() as directory:
        variant.compile("sm_90a", Path(directory))
        (ptx,) = Path(directory).glob("*.ptx")
        return variant, ptx.read_text()


def tiling_for(k: int, rows: int) -> Tiling:
    """Of the rings that a search tries first the one for this M."""
    return next(t for most, t in RING[k].items() if rows <= most)


def skinny_gemm(
    x: Tensor,
    ws: Sequence[Tensor],
    outputs: Sequence[str] = ("bf16",),
    *,
    tiling: Tiling | None = None,
    clusters: int = 1,
    seed: int = 0,
    edit: Edit = str,
    races: bool = False,
) -> list[Tensor]:
    """One launch of the ring kernel, with `tiling_for` or another tiling; x and the
    results in rows apart."""
    rows, k = x.shape
    t = tiling or tiling_for(k, rows)
    ptx = ring_of(t, tuple(outputs))
    memory = GlobalMemory()
    x = padded(x)
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    ys = [
        torch.full((rows, w.shape[0] + 3), torch.nan, dtype=kinds[o])[:, :-3]
        for w, o in zip(ws, outputs, strict=True)
    ]
    at = memory.add(x, "x", dynamic=True)
    parameters = [tensor_argument(at, (rows,), x.stride()[:1])]
    for g, w in enumerate(ws):
        parameters.append(tensor_argument(memory.add(w, f"w{g}"), w.shape[:1]))
    for g, y in enumerate(ys):
        at = memory.add(y, f"y{g}", dynamic=True, writable=True)
        parameters.append(tensor_argument(at, y.shape, y.stride()[:1]))
    launch(
        edit(ptx),
        memory,
        parameters,
        grid=(clusters * t.cluster, 1, 1),
        block=(t.threads, 1, 1),
        cluster=(t.cluster, 1, 1),
        shared_bytes=t.shared_bytes,
        seed=seed,
        races=races,
    )
    return ys


def attn_res(
    form: tuple[int, str, bool, bool],
    arguments: dict[str, Any],
    *,
    seed: int = 0,
    edit: Edit = str,
    races: bool = False,
) -> list[Tensor]:
    """One launch; the output, the prefix and the blocks."""
    variant, ptx = compiled("attn_res", variant_name(*form))
    rows = arguments["prefix"].shape[0]
    call = fresh(arguments)
    call["out"] = torch.full((rows, HIDDEN + 8), torch.nan).bfloat16()[:, :HIDDEN]
    memory = GlobalMemory()
    parameters = []
    for name in variant.kernel.parameters:
        tensor = call[name]
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
    launch(
        edit(ptx),
        memory,
        parameters,
        grid=(variant.kernel.ctas, rows, 1),
        block=(128, 1, 1),
        cluster=(variant.kernel.ctas, 1, 1),
        shared_bytes=variant.kernel.shared_bytes,
        seed=seed,
        races=races,
    )
    return [call["out"], call["prefix"], call["blocks"]]
