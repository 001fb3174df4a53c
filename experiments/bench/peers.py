# SPDX-License-Identifier: Apache-2.0
"""cuBLAS and vLLM 0.33's kernels as candidates, found when the bench runs.

What cannot be offered is said with the reason, never left out in silence.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from experiments.bench.candidate import (
    CUBLAS,
    MODES,
    Candidate,
    Inputs,
    Mode,
    Offer,
    reason,
)
from experiments.bench.shapes import Projection

VLLM = "vllm"
SKINNY = "vllm_skinny"
LL_BF16 = "vllm_ll_bf16"
#: vLLM's own choice before a kernel that its choice leaves unused.
VLLM_KERNELS = (LL_BF16, VLLM, SKINNY)
#: vLLM's H200 table uses its CuTe GEMM up to here, but for one shape (1536 x 7168: 6),
#: and that kernel's time grows with M (22.8 µs at M = 1, 39.7 at 8 for 6288 x 7168).
SKINNY_MAX_ROWS = 4
LL_BF16_MAX_ROWS = 16
_K3 = "vllm.models.kimi_k3"
_CUTE = "vllm.model_executor.kernels.linear.cute_dsl"
_EPS = 1e-5


def _package_without_init(name: str) -> None:
    """Make the package ``name`` importable without running its ``__init__``.

    That of vLLM's K3 imports the whole model and every kernel library it may use;
    the single files that the bench needs depend on none of those.
    """
    if name not in sys.modules:
        parent, _, leaf = name.rpartition(".")
        module = ModuleType(name)
        module.__path__ = [
            str(Path(p) / leaf) for p in importlib.import_module(parent).__path__
        ]
        sys.modules[name] = module


@functools.cache
def load(name: str) -> ModuleType | str:
    """A vLLM module by its name, or why it cannot be had.

    ``ops/__init__`` of vLLM's K3 rebinds ``ops.attn_res`` to the function, so modules
    are taken from ``import_module`` and not as attributes.
    """
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    try:
        if name.startswith(_K3):
            _package_without_init(_K3)
        return importlib.import_module(name)
    except Exception as error:
        return reason(error)


def preload() -> None:
    """Import vLLM's modules; before a :class:`CudaTimer` is made."""
    for name in ("low_latency_gemm", "ops.attn_res"):
        load(f"{_K3}.nvidia.{name}")
    load(f"{_CUTE}.ll_bf16")


@contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def cublas(shape: Projection) -> Offer:
    """``torch.mm``; torch launches it without the programmatic attribute."""

    def run(inputs: Inputs, out: Tensor) -> Tensor:
        x, w = inputs
        if shape.fp32_out:
            return torch.mm(x, w.t(), out_dtype=torch.float32)
        return torch.mm(x, w.t(), out=out)

    return Offer([Candidate(CUBLAS, "plain", run)])


@functools.cache
def _skinny(mode: Mode) -> Any:
    """vLLM's CuTe GEMM, compiled with or without programmatic launch."""
    module: Any = load(f"{_CUTE}.skinny_gemm")
    gemm = module.ShapeDynamicSkinnyGemm()
    if mode == "plain":
        gemm._use_pdl = lambda: False
    return gemm


def _plan(module: Any, shape: Projection) -> dict[int, Any]:
    """vLLM's choice for this device by M; an M without one goes to cuBLAS."""
    table = module._low_latency_table() or {}
    spec = table.get((shape.n, shape.k))
    return {} if spec is None else module._build_plan(spec)


def _planned(module: Any, plan: dict[int, Any], mode: Mode) -> Callable[..., Tensor]:
    def run(inputs: Inputs, out: Tensor) -> Tensor:
        x, w = inputs
        backend, config = plan.get(x.shape[0], (None, None))
        if backend == "cute":
            return _skinny(mode)(x, w, config)
        if backend == "dsv3_fused_a":
            module.ops.dsv3_fused_a_gemm(out, x, w.t(), enable_pdl=mode == "pdl")
            return out
        return torch.mm(x, w.t(), out=out)

    return run


def _vllm_gemm(shape: Projection, rows: int, modes: tuple[Mode, ...]) -> Offer:
    module: Any = load(f"{_K3}.nvidia.low_latency_gemm")
    if isinstance(module, str):
        return Offer(missing={VLLM: module, SKINNY: module})
    plan = _plan(module, shape)
    backend = plan.get(rows, (None, None))[0]
    offer = Offer()
    if backend is None:
        offer.missing[VLLM] = f"its own choice for this shape at M={rows} is cuBLAS"
    elif backend == "dsv3_fused_a" and not hasattr(torch.ops._C, "dsv3_fused_a_gemm"):
        offer.missing[VLLM] = "torch.ops._C.dsv3_fused_a_gemm is not in this build"
    else:
        offer.candidates.extend(
            Candidate(VLLM, mode, _planned(module, plan, mode), backend)
            for mode in modes
        )
    if backend == "cute":
        return offer
    if rows > SKINNY_MAX_ROWS:
        offer.missing[SKINNY] = f"vLLM uses it up to M={SKINNY_MAX_ROWS}"
        return offer
    heuristic = _skinny("pdl")._config
    config = heuristic(rows, shape.n, shape.k)
    if shape.n % config.outputs_per_block or shape.k % (
        config.block_size * config.vector_width
    ):
        offer.missing[SKINNY] = f"its heuristic gives {config}, which does not divide"
        return offer
    for mode in modes:

        def run(inputs: Inputs, out: Tensor, mode: Mode = mode) -> Tensor:
            return _skinny(mode)(*inputs)

        offer.candidates.append(Candidate(SKINNY, mode, run, "heuristic config"))
    return offer


@functools.cache
def _ll_bf16(mode: Mode, one_row: bool) -> Any:
    """vLLM prefetches weights before the wait at M = 1 only."""
    module: Any = load(f"{_CUTE}.ll_bf16")
    return module.LLBf16Gemm(prefetch_pdl_weights=one_row and mode == "pdl")


def _router(rows: int, modes: tuple[Mode, ...]) -> Offer:
    module: Any = load(f"{_CUTE}.ll_bf16")
    if isinstance(module, str):
        return Offer(missing={LL_BF16: module})
    if rows > LL_BF16_MAX_ROWS:
        return Offer(missing={LL_BF16: f"vLLM uses it up to M={LL_BF16_MAX_ROWS}"})

    def runner(mode: Mode) -> Callable[..., Tensor]:
        def run(inputs: Inputs, out: Tensor) -> Tensor:
            x, w = inputs
            with _replaced(module, "use_pdl", lambda: mode == "pdl"):
                return _ll_bf16(mode, x.shape[0] == 1)(x, w, torch.float32)

        return run

    return Offer([Candidate(LL_BF16, mode, runner(mode)) for mode in modes])


def gemm(shape: Projection, rows: int, modes: tuple[Mode, ...] = MODES) -> Offer:
    """Every peer for one projection at M = rows.

    ``vllm`` is what vLLM's table for the device picks; ``vllm_skinny`` its CuTe GEMM
    under its own heuristic, where the table does not pick that already; the router's
    peer is ``vllm_ll_bf16``, vLLM's first choice for it.
    """
    other = _router(rows, modes) if shape.fp32_out else _vllm_gemm(shape, rows, modes)
    return cublas(shape) + other


class _WithoutPdl:
    """vLLM's platform, saying that it has no programmatic launch."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_arch_support_pdl(self) -> bool:
        """False, whatever the device."""
        return False


@contextmanager
def without_pdl(module: Any) -> Iterator[None]:
    """A vLLM module that asks its platform for programmatic launch is told no."""
    with _replaced(module, "current_platform", _WithoutPdl(module.current_platform)):
        yield


def attn_res(num_blocks: int, modes: tuple[Mode, ...] = MODES) -> Offer:
    """vLLM's AttnRes kernel; it updates the prefix in place, as ours does."""
    module: Any = load(f"{_K3}.nvidia.ops.attn_res")
    if isinstance(module, str):
        return Offer(missing={VLLM: module})

    def runner(mode: Mode) -> Callable[..., Tensor]:
        def run(inputs: Inputs, out: Tensor) -> Tensor:
            with without_pdl(module) if mode == "plain" else nullcontext():
                return module.attn_res(*inputs, num_blocks, -1, _EPS, _EPS)

        return run

    return Offer([Candidate(VLLM, mode, runner(mode)) for mode in modes])
