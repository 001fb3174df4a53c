# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33's routed experts as peers: its own layer, built outside an engine.

The layer is the one that ``vllm.models.kimi_k3`` builds, from the same arguments, in a
process that is its own only rank; the rank's share is the whole layer's width. It loads
the bank's numbers, repacks them as after a checkpoint, and is called as a model does:
``humming`` and ``marlin`` align the pairs, multiply, apply SiTU, multiply and add up;
after routing by vLLM's router in the other part. Nothing of vLLM's is patched; it
chooses its launches itself, so there is one mode.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.bench import peers as vllm_peers
from experiments.bench.candidate import MODES, reason
from experiments.bench.experts_data import ExpertsShape, Step, Weights
from experiments.bench.experts_ways import EXPERTS, ROUTED, ways_of
from experiments.bench.ways import Run, Way, Ways
from experiments.byte_model import MIN_EXPERT_SHARD
from verify_kernels.dense.reference import SITU_BETA, SITU_LINEAR_BETA
from verify_kernels.moe import ExpertBank
from verify_kernels.moe.mxfp4 import Mxfp4

HUMMING, MARLIN = "humming", "marlin"
#: vLLM's ``--moe-backend``; Humming is what it chooses itself on Hopper.
BACKENDS = (HUMMING, MARLIN)
#: Our kernels over the weights that the Humming layer holds.
THERE = "ours_on_humming"
THERE_NOTE = "our kernels, the weights where vLLM's Humming layer holds them"
_MODULES = (
    "vllm.config",
    "vllm.distributed.parallel_state",
    "vllm.forward_context",
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.layers.quantization.mxfp4",
    "vllm.v1.worker.workspace",
)


class Layer(Protocol):
    """vLLM's layer of one backend.

    Attributes:
        note: what ran.
    """

    note: str

    def route(self, latent: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Shares fp32 and ids [M, K] of logits [M, E]."""

    def experts(self, latent: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
        """The weighted sum, bf16 [M, L]."""

    def bank(self) -> ExpertBank:
        """Its weights for our kernels, if it is Humming's."""


def preload() -> None:
    """Import the modules; before a ``CudaTimer`` is made."""
    for name in _MODULES:
        vllm_peers.load(name)


def padded_width(shape: ExpertsShape) -> int:
    """Inner width that vLLM gives a rank: K3's shares below 256 are filled up."""
    return max(shape.inner, MIN_EXPERT_SHARD) if shape.tp > 1 else shape.inner


def fill(layer: Any, weights: Weights, width: int) -> None:
    """Copy a bank's numbers into vLLM's parameters, gate above up; what is padded is
    zero.

    Args:
        layer: has w13_weight uint8 [E, 2 W, L / 2], w2_weight [E, L, W / 2] and their
            w13_weight_scale [E, 2 W, L / 32] and w2_weight_scale [E, L, W / 32].
        weights: of inner width I <= W.
        width: W as the layer has it.
    """
    inner = weights.bank.inner
    for name in ("w13_weight", "w2_weight"):
        for suffix in ("", "_scale"):
            getattr(layer, name + suffix).data.zero_()

    def copy(name: str, place: tuple[slice, ...], one: Mxfp4) -> None:
        for suffix, source in (("", one.packed), ("_scale", one.scales)):
            target = getattr(layer, name + suffix).data[place]
            target[..., : source.shape[-1]].copy_(source)

    every = slice(None)
    copy("w13_weight", (every, slice(0, inner)), weights.gate)
    copy("w13_weight", (every, slice(width, width + inner)), weights.up)
    copy("w2_weight", (every, every), weights.down)


@contextmanager
def _single_rank(modules: dict[str, Any], config: Any) -> Iterator[None]:
    """vLLM's groups with this process alone, made once, and ``config`` the current
    one."""
    state = modules["vllm.distributed.parallel_state"]
    with modules["vllm.config"].set_current_vllm_config(config):
        if not state.model_parallel_is_initialized():
            store = Path(tempfile.mkdtemp(prefix="bench_experts_")) / "store"
            state.init_distributed_environment(
                world_size=1,
                rank=0,
                distributed_init_method=f"file://{store}",
                local_rank=0,
                backend="gloo",
            )
            state.initialize_model_parallel(1)
        yield


class VllmLayer:
    """See `Layer`.

    Args:
        backend: of `BACKENDS`.
        shape: the rank's share.
        weights: copied, and repacked by vLLM.
        bias: fp32 [E], the router's.
        device: where the layer lives.

    Raises:
        RuntimeError: a module of vLLM's cannot be imported.
        Exception: whatever vLLM raises, the backend not being supported here among it.
    """

    def __init__(
        self,
        backend: str,
        shape: ExpertsShape,
        weights: Weights,
        bias: Tensor,
        device: torch.device,
    ) -> None:
        modules: dict[str, Any] = {name: vllm_peers.load(name) for name in _MODULES}
        for name, module in modules.items():
            if isinstance(module, str):
                raise RuntimeError(f"{name}: {module}")
        self._context = modules["vllm.forward_context"]
        workspace = modules["vllm.v1.worker.workspace"]
        if not workspace.is_workspace_manager_initialized():
            workspace.init_workspace_manager(device)
        config = modules["vllm.config"].VllmConfig()
        config.kernel_config.moe_backend = backend
        self._config = config
        width = padded_width(shape)
        # Normal tensors, as where vLLM loads a model.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            _single_rank(modules, config),
            torch.device(device),
        ):
            # What the experts' choice and conversion ask of a model.
            config.model_config = SimpleNamespace(
                dtype=torch.bfloat16, quantization_config=None, enforce_eager=False
            )
            runner = modules["vllm.model_executor.layers.fused_moe"].FusedMoEFactory(
                num_experts=shape.experts,
                top_k=shape.top_k,
                hidden_size=shape.latent,
                intermediate_size=width,
                params_dtype=torch.bfloat16,
                activation="situ",
                activation_situ_beta=SITU_BETA,
                activation_situ_linear_beta=SITU_LINEAR_BETA,
                renormalize=True,
                quant_config=modules[
                    "vllm.model_executor.layers.quantization.mxfp4"
                ].Mxfp4Config(),
                use_grouped_topk=True,
                num_expert_group=1,
                topk_group=1,
                prefix=f"bench.{backend}.experts",
                scoring_func="sigmoid",
                e_score_correction_bias=torch.nn.Parameter(
                    bias.clone(), requires_grad=False
                ),
                routed_scaling_factor=1.0,
                skip_padding=True,
            )
            layer = runner.routed_experts
            runner.moe_config.intermediate_size_per_partition_unpadded = shape.inner
            method = layer.quant_method
            built = layer.w13_weight.shape[1] // 2
            fill(layer, weights, built)
            method.process_weights_after_loading(layer)
            layer._ensure_moe_quant_config_init()
        if method.is_monolithic:
            raise RuntimeError(f"{backend} routes by itself; it takes no ids")
        self._runner, self._layer = runner, layer
        self._ids = method.topk_indices_dtype
        padded = f" of {built} rows for {shape.inner}" if built != shape.inner else ""
        self._inner, self._width = shape.inner, built
        named = getattr(method.experts_cls, "__name__", str(method.experts_cls))
        self.note = f"vLLM's {named}{padded}, with its alignment, SiTU and sum"

    @contextmanager
    def _forward(self) -> Iterator[None]:
        with self._context.set_forward_context(None, self._config):
            yield

    def route(self, latent: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `Layer`."""
        with self._forward():
            shares, ids = self._runner.router.select_experts(
                hidden_states=latent,
                router_logits=logits,
                topk_indices_dtype=self._ids,
            )
        return shares, ids

    def experts(self, latent: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
        """See `Layer`."""
        if self._ids is not None and ids.dtype != self._ids:
            raise RuntimeError(f"ids are {ids.dtype}; the layer takes {self._ids}")
        with self._forward():
            out = self._layer.forward_modular(
                x=latent, topk_weights=shares, topk_ids=ids
            )
        return out[..., : latent.shape[1]]

    def bank(self) -> ExpertBank:
        """See `Layer`; ValueError if they are not as Humming holds them."""
        layer = self._layer
        return ExpertBank.of_layer(
            layer.w13_weight.data,
            layer.w13_weight_scale.data,
            layer.w2_weight.data,
            layer.w2_weight_scale.data,
            layer.hidden_size,
            self._inner,
            self._width,
        )


def alone(layer: Layer, step: Step) -> Run:
    """The experts, given ids and shares."""
    return lambda copy: layer.experts(step.latent, step.shares[copy], step.ids[copy])


def routed(layer: Layer, step: Step) -> Run:
    """Routing and then the experts."""

    def run(copy: int) -> Tensor:
        shares, ids = layer.route(step.latent, step.logits[copy])
        return layer.experts(step.latent, shares, ids)

    return run


def peers(
    shape: ExpertsShape,
    weights: Weights,
    warm: Step,
    build: Callable[..., Layer] = VllmLayer,
    backends: Sequence[str] = BACKENDS,
) -> Ways[Step]:
    """Every peer, and ours over Humming's weights; and why one cannot be built.

    Args:
        shape: the rank's share.
        weights: what they load.
        warm: a step of as many rows as will be timed, that each runs once: vLLM's
            workspace is shared and moves when it grows, which no graph survives.
        build: makes a layer.
        backends: of `BACKENDS`.
    """
    found: Ways[Step] = Ways()
    for backend in backends:
        try:
            layer = build(backend, shape, weights, warm.bias, warm.latent.device)
            alone(layer, warm)(0)
        except Exception as error:
            found.missing[backend] = reason(error)
        else:
            for part, make in ((EXPERTS, alone), (ROUTED, routed)):
                way = partial(make, layer)
                found.ways.append(Way(backend, "plain", way, layer.note, part))
            if backend == HUMMING:
                try:
                    found.ways.extend(ways_of(layer.bank(), THERE, MODES, THERE_NOTE))
                except Exception as error:
                    found.missing[THERE] = reason(error)
        # What was built in vain or repacked is gone before the next is built.
        gc.collect()
        torch.cuda.empty_cache()
    return found
