# SPDX-License-Identifier: Apache-2.0
"""A KDA layer of vLLM's over caches as vLLM lays them out, and our launch by reference.

In Triton's interpreter `compare` runs vLLM's own convolution, recurrence and norm and
ours over the same steps (`test_kda_core` does so in a child process).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from verify_kernels import VerifyBatch
from verify_kernels.batch import MAX_WIDTH
from verify_kernels.kda import KdaVerifyWeights
from verify_kernels.kda.host import DIM, TAPS
from verify_kernels.kda.reference import KdaRows, KdaWeights
from verify_kernels.kda.snapshot import KdaSnapshots, verify
from verify_kernels.layer import products

HIDDEN = 64


class ReferenceLaunch:
    """What `verify_kernels.kda.bind_snapshots` gives, by the reference.

    ``last`` [slots]: rows of a request's last step, at its first slot; 1 after a
    prompt. The kernel knows nothing of them, the reference checks the counts by them.
    """

    def __init__(
        self,
        weights: KdaVerifyWeights,
        state: Tensor,
        window: Tensor,
        *,
        ctas: int | None = None,
        pdl: bool = True,
    ) -> None:
        heads = state.shape[1]
        self._w_fb = weights.w_fb.float()
        taps = weights.conv.view(3, heads, DIM, TAPS).movedim(-1, 1)
        self._weights = KdaWeights(
            *taps.unbind(),
            a_log=weights.a_log,
            dt_bias=weights.dt_bias,
            norm=weights.norm,
            lower_bound=weights.lower_bound,
            norm_eps=weights.norm_eps,
        )
        self.last = torch.ones(len(state), dtype=torch.int64)
        self.steps = 0

    def __call__(
        self,
        packed: Tensor,
        state: Tensor,
        window: Tensor,
        slots: Tensor,
        row_start: Tensor,
        accepted: Tensor,
        out: Tensor,
    ) -> None:
        heads = out.shape[1]
        windows = window.unflatten(-1, (3, heads, DIM)).unbind(2)
        cache = KdaSnapshots(state, *windows, width=self.last)
        rows = KdaRows.unpack(packed.float(), self._w_fb, heads, DIM, bf16_decay=True)
        table = slots.new_zeros(len(slots), MAX_WIDTH)
        table[:, : slots.shape[1]] = slots
        batch = VerifyBatch(
            row_start, torch.zeros_like(accepted), slots[:, 0], accepted, table
        )
        self.steps += 1
        found = verify(batch, rows, self._weights, cache, table)
        written = int(row_start[-1])
        out[:written] = found[:written]
        assert not cache.clamped


def linear(n: int, k: int, scale: float = 1.0) -> Any:
    weight = (scale * torch.randn(n, k) / k**0.5).bfloat16()
    return SimpleNamespace(weight=nn.Parameter(weight, requires_grad=False))


def layer(heads: int = 2) -> Any:
    """vLLM's class with random weights, through its own loaders where it has them;
    nothing is built that needs an engine."""
    from vllm.models.kimi_k3.nvidia import kda
    from vllm.third_party.flash_linear_attention.ops.kda import FusedRMSNormGated

    module = object.__new__(kda.KimiK3DeltaAttention)
    nn.Module.__init__(module)
    width = heads * DIM
    padding = -(4 * width + DIM + heads) % 16
    conv = nn.Parameter(torch.empty(3 * width, 1, TAPS), requires_grad=False)
    load = kda._make_decode_conv1d_weight_loader([width] * 3, 1, 0, None)
    for shard in range(3):
        load(conv, torch.randn(width, TAPS) / 2, shard)
    vars(module).update(
        prefix="kda",
        head_dim=DIM,
        num_heads=heads,
        local_num_heads=heads,
        local_projection_size=width,
        conv_size=TAPS,
        gate_lower_bound=-4.0,
        in_proj_padding=padding,
        in_proj_qkvgfab=linear(4 * width + DIM + heads + padding, HIDDEN, 2.0),
        f_b_proj=linear(width, DIM),
        o_proj=linear(HIDDEN, width),
        conv1d=SimpleNamespace(weight=conv, bias=None),
        A_log=nn.Parameter(torch.randn(heads) / 2, requires_grad=False),
        dt_bias=nn.Parameter(torch.randn(width), requires_grad=False),
        kda_decode_backend="triton",
        kda_spec_decode_backend="native",
        kda_prefill_backend="triton",
        decode_conv1d_weight=None,
        decode_norm_weight=None,
        use_recoverssm=False,
    )
    # A CustomOp asks for the engine's configuration when it is made.
    norm = object.__new__(FusedRMSNormGated)
    nn.Module.__init__(norm)
    vars(norm).update(
        weight=(1 + 0.3 * torch.randn(DIM)).bfloat16(),
        eps=3e-5,
        activation="sigmoid",
    )
    norm.forward = norm.forward_native
    vars(module)["o_norm"] = norm
    return module


def bind_pages(module: Any, blocks: int, drafts: int, page: int | None = None) -> None:
    """Caches in pages of ``page`` bytes (as many as they need if None) as vLLM's
    `bind_kv_cache` makes them of a raw allocation; random contents."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    shapes = MambaStateShapeCalculator.kda_state_shape(
        1, module.num_heads, DIM, conv_kernel_size=TAPS, num_spec=drafts
    )
    dtypes = (torch.bfloat16, torch.float32)
    needed = sum(prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
    page = page or needed
    raw = torch.zeros(blocks * page, dtype=torch.int8)
    vars(module)["get_state_shape"] = lambda: shapes
    vars(module)["get_state_dtype"] = lambda: dtypes
    module.bind_kv_cache(raw.as_strided((blocks, 1, 1, needed), (page, page, page, 1)))
    for cache in module.kv_cache:
        cache.copy_(torch.randn(cache.shape))


def interpret() -> None:
    """Have vLLM's layer call its Triton kernels, in the interpreter."""
    import importlib.util
    from unittest import mock

    import triton.language as tl
    from vllm.models.kimi_k3.nvidia import kda
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent
    from vllm.platforms import current_platform

    # On a CPU its module has another convolution, without drafts.
    name = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(type(current_platform), "is_cpu", lambda self: False):
        spec.loader.exec_module(module)
    kda.causal_conv1d_update = module.causal_conv1d_update
    # The interpreter replaces the functions of `tl`, not other names for them.
    fused_recurrent.exp = lambda x: tl.exp(x)
    fused_recurrent.log = lambda x: tl.log(x)


class RowGemm:
    """SkinnyGemm by torch, a row at a time, so that its bits do not depend on M."""

    def __init__(self, k: int, *, out_dtype: Any, pdl: bool) -> None:
        pass

    def bind(self, w: Tensor) -> Callable[[Tensor, Tensor], None]:
        def launch(x: Tensor, out: Tensor) -> None:
            for i, row in enumerate(x):
                out[i] = w.float() @ row.float()

        return launch


def stand_in(patch: Callable[[Any, str, Any], None]) -> dict[str, Any]:
    """Replace what needs a GPU or an engine. Returns the metadata by layer that a step
    reads, for the caller to fill."""
    from vllm.models.kimi_k3.nvidia import kda as stock

    from dspark_k3.target import kda, sublayers

    context = SimpleNamespace(attn_metadata={})
    patch(products, "SkinnyGemm", RowGemm)
    patch(sublayers, "get_tensor_model_parallel_world_size", lambda: 1)
    patch(kda, "bind_snapshots", ReferenceLaunch)
    patch(kda, "get_forward_context", lambda: context)
    patch(stock, "get_forward_context", lambda: context)
    return context.attn_metadata


def requests(count: int, drafts: int) -> list[Any]:
    """With four tokens computed and 1 + ``drafts`` slots each, from slot 1 on."""
    from tests.dspark_k3.test_kda_slots import Request

    width = 1 + drafts
    return [
        Request(i, 4, [1 + i * width + t for t in range(width)], computed=4)
        for i in range(count)
    ]


def compare(drafts: int, steps: int, seed: int = 0) -> float:
    """Steps of two requests, planned by vLLM, run by vLLM's kernels and by ours.

    One set of caches sees vLLM's kernels alone, one ours alone, one either at random.
    Returns the largest difference of an element of the core's output.
    """
    from dspark_k3.target import kda, sublayers
    from tests.dspark_k3.test_kda_slots import Engine

    torch.manual_seed(seed)
    rng = random.Random(seed)
    plans = stand_in(setattr)
    interpret()
    module = layer()
    bind_pages(module, 1 + 2 * (1 + drafts), drafts)
    worlds = [tuple(c.clone() for c in module.kv_cache) for _ in range(3)]
    theirs = sublayers.Kda(module, pdl=True)
    ours = []
    for caches in worlds:
        vars(module)["kv_cache"] = caches
        ours.append(kda.KdaVerify(module, pdl=True))
        ours[-1].prepare_kv()
    engine = Engine(2, drafts)
    live = requests(2, drafts)
    worst = 0.0
    for _ in range(steps):
        batch = rng.sample(live, rng.randint(1, 2))
        drafted = [rng.choice([0, drafts, rng.randint(0, drafts)]) for _ in batch]
        widths = [1 + d for d in drafted]
        plans["kda"] = engine.plan(batch, widths, widths, widths, drafted)
        hidden = torch.randn(sum(widths), HIDDEN).bfloat16()
        found = []
        for number, caches in enumerate(worlds):
            vars(module)["kv_cache"] = caches
            by_us = number == 1 or (number == 2 and rng.random() < 0.5)
            runs: Any = ours[number] if by_us else theirs
            runs(hidden, torch.arange(len(hidden)))
            found.append(runs._out[: len(hidden)].float().clone())
            launch: Any = ours[number]._launch
            for request, rows in zip(batch, widths, strict=True):
                launch.last[request.slots[0]] = rows
        for other in found[1:]:
            worst = max(worst, float((found[0] - other).abs().max()))
        for request, rows in zip(batch, widths, strict=True):
            accepted = rng.randint(1, rows)
            request.computed += accepted
            engine.state.num_accepted_tokens_gpu[request.index] = accepted
    return worst
