# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33's and flash-linear-attention's KDA kernels as peers.

``vllm`` is what ``KimiK3DeltaAttention`` launches between in_proj and o_proj where it
has no fused kernel: f_b's GEMM, ``causal_conv1d_update``, the recurrence, the gated
norm in place; for one row the packed decode kernel. ``vllm_native`` is its fused kernel
for one row without speculation. ``vllm_recoverssm`` verifies without storing states and
commits the accepted rows of all layers after sampling. ``fla`` has fla-core's
recurrence in place of vLLM's, which wants q, k, v and beta dense: three convolutions
and a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.bench import peers as vllm_peers
from experiments.bench.candidate import Mode
from experiments.bench.kda_data import KdaData, KdaShape
from experiments.bench.kda_ways import new_out
from experiments.bench.ways import Run, Way, Ways
from experiments.byte_model import KDA_LAYERS
from verify_kernels.kda import KdaVerifyWeights
from verify_kernels.kda.host import DIM

STOCK, NATIVE, RECOVER, FLA = "vllm", "vllm_native", "vllm_recoverssm", "fla"
#: Heads that vLLM's fused decode kernel is built for.
NATIVE_HEADS = (12, 24, 48, 96)
_RECURRENCE = "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent"
_RECOVER = "vllm.models.kimi_k3.nvidia.ops.recoverssm"
_CONVOLUTION = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
_NORM = "vllm.third_party.flash_linear_attention.ops.kda"
_OPS = "vllm._custom_ops"
_FLA = "fla.ops.kda.fused_recurrent"
_MODULES = (_RECURRENCE, _RECOVER, _CONVOLUTION, _NORM, _OPS, _FLA)


def preload() -> None:
    """Import the modules; before a ``CudaTimer`` is made."""
    for name in _MODULES:
        vllm_peers.load(name)


@dataclass(frozen=True)
class _Views:
    """A packed projection as vLLM splits it, all views.

    Attributes:
        qkv: [M, 3 H 128].
        gate: [M, H, 128].
        f_a: [M, 128].
        beta: [1, M, H].
    """

    qkv: Tensor
    gate: Tensor
    f_a: Tensor
    beta: Tensor

    @classmethod
    def of(cls, packed: Tensor, heads: int) -> _Views:
        width = heads * DIM
        sizes = [3 * width, width, DIM, heads]
        qkv, gate, f_a, beta = packed[:, : sum(sizes)].split(sizes, dim=-1)
        return cls(qkv, gate.unflatten(1, (heads, DIM)), f_a, beta.unsqueeze(0))


def _decay_input(views: _Views, w: KdaVerifyWeights, heads: int) -> Tensor:
    """f_b's projection [1, M, H, 128], a cuBLAS GEMM."""
    return F.linear(views.f_a, w.w_fb).unflatten(1, (heads, DIM)).unsqueeze(0)


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """q, k and v, each [1, M, H, 128]."""
    parts = qkv.split(heads * DIM, dim=-1)
    return tuple(part.unflatten(1, (heads, DIM)).unsqueeze(0) for part in parts)


@contextmanager
def _launched(mode: Mode, *modules: Any) -> Iterator[None]:
    """vLLM asks its platform at each launch whether there is programmatic launch."""
    with ExitStack() as stack:
        for module in modules if mode == "plain" else ():
            stack.enter_context(vllm_peers.without_pdl(module))
        yield


@dataclass(frozen=True)
class _Kernels:
    """vLLM's and fla's modules, imported."""

    recurrence: Any
    recover: Any
    convolution: Any
    norm: Any
    ops: Any
    fla: Any

    def convolve(self, data: KdaData, copy: int, qkv: Tensor, **options: Any) -> Tensor:
        """The convolution of q, k and v or of a part of their channels."""
        return self.convolution.causal_conv1d_update(
            qkv,
            options.pop("window", data.window).transpose(-1, -2),
            options.pop("weight", data.weights[copy].conv),
            None,
            activation="silu",
            conv_state_indices=data.tables[copy, :, 0],
            out=torch.empty_like(qkv, memory_format=torch.contiguous_format),
            **options,
        )

    def finish(
        self, out: Tensor, views: _Views, w: KdaVerifyWeights, norm: Tensor
    ) -> Tensor:
        """The gated norm, in place in [1, M, H, 128]."""
        self.norm.rms_norm_gated(out, views.gate, norm, None, "sigmoid", eps=w.norm_eps)
        return out[0]


def _spec(data: KdaData) -> dict[str, Any]:
    """What a speculative step tells the convolution."""
    return {
        "num_accepted_tokens": data.told,
        "query_start_loc": data.row_start,
        "max_query_len": data.shape.width,
        "validate_data": False,
    }


def _stock(kernels: _Kernels, mode: Mode) -> Callable[[KdaData], Run]:
    def make(data: KdaData) -> Run:
        heads = data.shape.heads
        views = _Views.of(data.packed, heads)
        norm = data.weights[0].norm.bfloat16()
        out = new_out(data.shape, data.packed.device).unsqueeze(0)

        def gates_of(w: KdaVerifyWeights) -> dict[str, Any]:
            return {
                "raw_g": _decay_input(views, w, heads),
                "raw_beta": views.beta,
                "A_log": w.a_log,
                "dt_bias": w.dt_bias.view(-1),
                "lower_bound": w.lower_bound,
                "initial_state": data.state,
            }

        def verify(copy: int) -> Tensor:
            w = data.weights[copy]
            given = gates_of(w)
            mixed = kernels.convolve(data, copy, views.qkv, **_spec(data))
            q, k, v = _split(mixed, heads)
            kernels.recurrence.fused_recurrent_kda(
                q=q,
                k=k,
                v=v,
                cu_seqlens=data.row_start,
                ssm_state_indices=data.tables[copy],
                num_accepted_tokens=data.told,
                out=out,
                **given,
            )
            return kernels.finish(out, views, w, norm)

        def decode(copy: int) -> Tensor:
            w = data.weights[copy]
            given = gates_of(w)
            mixed = kernels.convolve(data, copy, views.qkv, validate_data=True)
            found, _ = kernels.recurrence.fused_recurrent_kda_packed_decode(
                mixed_qkv=mixed, state_indices=data.tables[copy, :, 0], **given
            )
            out[0] = found[0]
            return kernels.finish(out, views, w, norm)

        def run(copy: int) -> Tensor:
            with _launched(mode, kernels.recurrence, kernels.convolution):
                return verify(copy) if data.shape.width > 1 else decode(copy)

        return run

    return make


def _native(kernels: _Kernels) -> Callable[[KdaData], Run]:
    def make(data: KdaData) -> Run:
        heads = data.shape.heads
        views = _Views.of(data.packed, heads)
        out = new_out(data.shape, data.packed.device).unsqueeze(0)
        window = data.window.transpose(-1, -2)
        taps = [
            w.conv.unflatten(0, (3, -1)).transpose(1, 2).contiguous()
            for w in data.weights
        ]

        def run(copy: int) -> Tensor:
            w = data.weights[copy]
            kernels.ops.fused_kda_decode(
                x=views.qkv,
                weight=taps[copy],
                bias=None,
                conv_state=window,
                raw_g=_decay_input(views, w, heads),
                raw_beta=views.beta,
                A_log=w.a_log,
                dt_bias=w.dt_bias.view(-1),
                state_indices=data.tables[copy, :, 0],
                state=data.state,
                out=out,
                lower_bound=w.lower_bound,
                output_gate=views.gate,
                norm_weight=w.norm,
                norm_eps=w.norm_eps,
            )
            return out[0]

        return run

    return make


def _recover(kernels: _Kernels, mode: Mode) -> Callable[[KdaData], Run]:
    """Verify of each copy, and after as many copies as a model has layers, or after the
    last, the commit of all of them, as vLLM commits all layers together."""

    def make(data: KdaData) -> Run:
        shape = data.shape
        heads, device = shape.heads, data.packed.device
        views = _Views.of(data.packed, heads)
        norm = data.weights[0].norm.bfloat16()
        out = new_out(shape, device).unsqueeze(0)
        ones = torch.ones_like(data.told)
        accepted = torch.full_like(data.told, shape.width)
        slots = data.tables[:, :, 0]
        records = [
            kernels.recover.KDARecoverSSMRecords.allocate(
                shape.requests, heads, shape.width, DIM, torch.bfloat16, device
            )
            for _ in data.weights
        ]
        # A layer has a cache of its own, so one table of slots serves all: here a layer
        # is a copy's part of the cache, and its slots count from there.
        step = int(data.tables[0].numel())
        layers = [
            SimpleNamespace(
                kv_cache=(data.window[copy * step :], data.state[copy * step :]),
                recoverssm_records=records[copy],
                A_log=w.a_log,
                dt_bias=w.dt_bias.view(-1),
                local_num_heads=heads,
                head_dim=DIM,
                gate_lower_bound=w.lower_bound,
            )
            for copy, w in enumerate(data.weights)
        ]
        # The context wants caches of one size.
        for layer in layers:
            layer.kv_cache = tuple(x[: 1 + step] for x in layer.kv_cache)
        ends = {}
        for first in range(0, data.copies, KDA_LAYERS):
            group = layers[first : first + KDA_LAYERS]
            ends[first + len(group) - 1] = (
                kernels.recover.KDARecoverSSMCommitContext.create(
                    group, spec_query_len=shape.width, max_num_reqs=shape.requests
                )
            )

        def run(copy: int) -> Tensor:
            w = data.weights[copy]
            raw_g = _decay_input(views, w, heads)
            with _launched(mode, kernels.convolution):
                mixed = kernels.convolve(
                    data, copy, views.qkv, **_spec(data) | {"num_accepted_tokens": ones}
                )
            q, k, v = _split(mixed, heads)
            kernels.recover.kda_recoverssm_verify(
                q=q,
                k=k,
                v=v,
                raw_g=raw_g,
                raw_beta=views.beta,
                A_log=w.a_log,
                dt_bias=w.dt_bias.view(-1),
                lower_bound=w.lower_bound,
                checkpoint_state=data.state,
                records=records[copy],
                query_start_loc=data.row_start,
                state_indices=slots[copy],
                spec_query_len=shape.width,
                out=out,
            )
            found = kernels.finish(out, views, w, norm)
            if copy in ends:
                ends[copy].commit(accepted, slots[0], data.row_start)
            return found

        return run

    return make


def _fla(kernels: _Kernels, mode: Mode) -> Callable[[KdaData], Run]:
    def make(data: KdaData) -> Run:
        heads = data.shape.heads
        views = _Views.of(data.packed, heads)
        norm = data.weights[0].norm.bfloat16()
        out = new_out(data.shape, data.packed.device).unsqueeze(0)
        parts = [slice(i * heads * DIM, (i + 1) * heads * DIM) for i in range(3)]

        def run(copy: int) -> Tensor:
            w = data.weights[copy]
            raw_g = _decay_input(views, w, heads)
            with _launched(mode, kernels.convolution):
                mixed = [
                    kernels.convolve(
                        data,
                        copy,
                        views.qkv[:, part],
                        window=data.window[:, :, part],
                        weight=w.conv[part],
                        **_spec(data),
                    )
                    for part in parts
                ]
            q, k, v = (x.unflatten(1, (heads, DIM)).unsqueeze(0) for x in mixed)
            kernels.fla.fused_recurrent_kda_fwd(
                q=q,
                k=k,
                v=v,
                g=raw_g,
                beta=views.beta.contiguous(),
                A_log=w.a_log,
                dt_bias=w.dt_bias.view(-1),
                initial_state=data.state,
                inplace_final_state=True,
                state_v_first=True,
                cu_seqlens=data.row_start,
                ssm_state_indices=data.tables[copy],
                num_accepted_tokens=data.told,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=w.lower_bound,
                out=out,
            )
            return kernels.finish(out, views, w, norm)

        return run

    return make


def native_problem(shape: KdaShape, ops: Any) -> str:
    """Why vLLM's fused decode kernel cannot run a step, "" if it can."""
    if shape.width > 1:
        return "it decodes one row a request and is off where vLLM speculates"
    if shape.heads not in NATIVE_HEADS:
        return f"it is built for {NATIVE_HEADS} heads"
    if isinstance(ops, str):
        return ops
    if not hasattr(torch.ops._C, "fused_kda_decode"):
        return "torch.ops._C.fused_kda_decode is not in this build"
    return ""


def peers(shape: KdaShape, modes: Sequence[Mode]) -> Ways[KdaData]:
    """Every peer of one step, and why one cannot run it.

    Programmatic launch is vLLM's own choice for its convolution and recurrence; its
    other kernels have none.
    """
    modules = [vllm_peers.load(name) for name in _MODULES]
    kernels = _Kernels(*modules)
    missing: dict[str, str] = {}
    chain = (kernels.convolution, kernels.norm)

    def absent(name: str, *needed: Any) -> bool:
        for module in needed:
            if isinstance(module, str):
                missing[name] = module
                return True
        return False

    ways: list[Way[KdaData]] = []
    if not absent(STOCK, *chain, kernels.recurrence):
        note = "f_b's GEMM, convolution, recurrence, gated norm"
        ways += [Way(STOCK, mode, _stock(kernels, mode), note) for mode in modes]
    if problem := native_problem(shape, kernels.ops):
        missing[NATIVE] = problem
    else:
        ways.append(
            Way(NATIVE, "plain", _native(kernels), "f_b's GEMM and its one kernel")
        )
    if shape.width == 1:
        missing[RECOVER] = "it is for steps with drafts"
    elif not absent(RECOVER, *chain, kernels.recover):
        note = (
            "Triton, as its CuTe kernels need sm_100; commits up to 69 layers at once"
        )
        ways += [Way(RECOVER, mode, _recover(kernels, mode), note) for mode in modes]
    if not absent(FLA, *chain, kernels.fla):
        note = "f_b's GEMM; three convolutions and a copy of beta for dense inputs"
        ways += [Way(FLA, mode, _fla(kernels, mode), note) for mode in modes]
    return Ways(ways, missing)
