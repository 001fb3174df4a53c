# SPDX-License-Identifier: Apache-2.0
"""This package's kernels as candidates."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.bench.candidate import (
    MODES,
    OURS,
    Candidate,
    Inputs,
    Mode,
    Offer,
    reason,
)
from experiments.bench.shapes import Projection

_EPS = 1e-5


def _load(module: str, name: str) -> tuple[Any, Offer]:
    try:
        return getattr(importlib.import_module(module), name), Offer()
    except (ImportError, AttributeError) as error:
        return None, Offer(missing={OURS: reason(error)})


def _gemms(parts: Sequence[Projection], modes: tuple[Mode, ...]) -> Offer:
    kind, offer = _load("verify_kernels.skinny_gemm", "SkinnyGemm")
    if kind is None:
        return offer
    dtypes = [torch.float32 if part.fp32_out else torch.bfloat16 for part in parts]
    for mode in modes:
        try:
            gemm = kind(parts[0].k, out_dtype=dtypes, pdl=mode == "pdl")
        except Exception as error:
            offer.missing[f"{OURS}:{mode}"] = reason(error)
            continue

        def run(inputs: Inputs, out: Any, gemm: Any = gemm) -> Any:
            x, *weights = inputs
            gemm(x, weights, out)
            return out

        offer.candidates.append(Candidate(OURS, mode, run))
    return offer


def skinny_gemm(shape: Projection, modes: tuple[Mode, ...] = MODES) -> Offer:
    """``verify_kernels.skinny_gemm.SkinnyGemm`` for one projection."""
    return _gemms((shape,), modes)


def grouped_gemm(parts: Sequence[Projection], modes: tuple[Mode, ...] = MODES) -> Offer:
    """The same for several projections of one X in one launch."""
    return _gemms(parts, modes)


def attn_res(num_blocks: int, modes: tuple[Mode, ...] = MODES) -> Offer:
    """``verify_kernels.attn_res.attn_res`` with N = num_blocks, no block written."""
    function, offer = _load("verify_kernels.attn_res", "attn_res")
    if function is None:
        return offer
    for mode in modes:

        def run(inputs: Inputs, out: Tensor, mode: Mode = mode) -> Tensor:
            function(
                *inputs,
                out,
                num_blocks=num_blocks,
                eps=_EPS,
                output_norm_eps=_EPS,
                pdl=mode == "pdl",
            )
            return out

        offer.candidates.append(Candidate(OURS, mode, run))
    return offer
