# SPDX-License-Identifier: Apache-2.0
"""A K3 decode step through our sublayers, over vLLM's loaded model.

For layer l, with n blocks saved before it and "start" for layers that begin a block:

    hidden = mix(p + mlp of l - 1; n blocks), saving p as block n at a start
    hidden = mix(p + attention(hidden), or the attention's output alone at a start;
                 n blocks, n + 1 at a start)
    mlp(hidden)

and after the last layer a mix over all blocks; the model norm and the LM head follow in
vLLM's `compute_logits`.

`plan` decides who runs a step, `run` runs it. A step has 1 to 64 rows and no prompt
row; whether it is plain decoding, uniform or ragged verification is nothing to the
loop: rows are rows, and only attention knows to whom they belong. Whatever else comes
is vLLM's and is counted. In FULL graphs the decision is made at capture, so steps are
counted where their metadata is built (`dspark_k3.target.state`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

from dspark_k3.settings import SIDES, Settings
from dspark_k3.target import graphs
from dspark_k3.target.counters import Reason, StepCounters
from dspark_k3.target.fold import FoldAttention, KdaFold
from dspark_k3.target.kda import KdaVerify, serves
from dspark_k3.target.mla import MlaVerify, narrow
from dspark_k3.target.sublayers import (
    Delta,
    Dense,
    Head,
    Kda,
    Mix,
    Mla,
    Moe,
    Stock,
    StockMix,
    Sublayer,
    whole,
)
from verify_kernels.batch import MAX_ROWS


class Layer:
    """One decoder layer: two mixes, attention, MLP."""

    def __init__(self, layer: nn.Module, settings: Settings) -> None:
        kda = hasattr(layer.self_attn, "in_proj_qkvgfab")
        mix = mixes(settings)
        saved, start = layer.prev_valid_blocks, layer.is_block_write_layer
        self.name = _name(layer.self_attn)
        self.index = layer.layer_idx
        self.before_attention = mix(
            layer.self_attention_res_norm,
            layer.self_attention_res_proj,
            layer.input_layernorm,
            num_blocks=saved,
            write=start,
        )
        self.before_mlp = mix(
            layer.mlp_res_norm,
            layer.mlp_res_proj,
            layer.post_attention_layernorm,
            num_blocks=saved + start,
            restart=start,
        )
        ours: Callable[..., Sublayer] = MlaVerify if settings.ours("mla_core") else Mla
        if kda:
            ours = KdaVerify if settings.ours("kda_core") else Kda
            if isinstance(layer.self_attn, FoldAttention):
                ours = KdaFold
        self.attention = _sublayer(
            "kda" if kda else "mla", ours, layer.self_attn, settings
        )
        moe = layer.is_moe_layer
        routed = functools.partial(
            Moe,
            route=settings.ours("moe_route"),
            experts=settings.ours("moe_experts"),
        )
        self.mlp = _sublayer(
            "moe" if moe else "dense", routed if moe else Dense, layer.mlp, settings
        )


class Executor:
    """Runs K3 decode steps; built once the weights are loaded, changes no module but
    the LM head's product.

    Args:
        model: vLLM's ``KimiLinearForCausalLM``.
        settings: what is ours.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        backbone = model.model
        self._backbone = backbone
        self._layers = [Layer(layer, settings) for layer in backbone.layers]
        self._last = mixes(settings)(
            backbone.output_attn_res_norm,
            backbone.output_attn_res_proj,
            None,
            num_blocks=backbone.num_attn_res_blocks,
        )
        self._blocks = backbone.num_attn_res_blocks
        if settings.ours("lm_head"):
            model.lm_head.quant_method = Head(model.lm_head, pdl=settings.pdl)
        self.counters = StepCounters()

    def embed_input_ids(self, ids: Tensor) -> Tensor:
        """Rows of the embedding, by vLLM."""
        return self._backbone.embed_input_ids(ids)

    def prepare_kv(self) -> None:
        """Called for every KV cache that vLLM binds: one to profile with, then its own.

        Raises:
            ValueError: our KDA or MLA kernels cannot run in it.
        """
        for layer in self._layers:
            if isinstance(layer.attention, KdaVerify | MlaVerify):
                layer.attention.prepare_kv()

    def plan(self, positions: Tensor, intermediate_tensors: Any) -> Tensor | None:
        """The step, which is its ``positions``, if it is ours; None if it is vLLM's."""
        if not is_forward_context_available():
            return None
        context = get_forward_context()
        reason = self.judge(
            positions.shape[0], context.attn_metadata, context.cudagraph_runtime_mode
        )
        if reason != "ours":
            return None
        if graphs.capture_under_way() and not torch.cuda.is_current_stream_capturing():
            # The run before a capture: of a whole graph, which is ours, or of pieces,
            # which are vLLM's. Both must have loaded their kernels by then.
            shape = (positions.shape[0], self._backbone.config.hidden_size)
            rows = torch.zeros(shape, dtype=torch.bfloat16, device=positions.device)
            self.run(positions, None, rows)
            return None
        return positions

    def judge(self, rows: int, metadata: Any, mode: CUDAGraphMode) -> Reason:
        """Who runs a step of ``rows`` rows with this attention metadata by layer."""
        if rows > MAX_ROWS:
            return "stock_rows"
        if not isinstance(metadata, dict):
            return "stock_other"
        if mode == CUDAGraphMode.PIECEWISE:
            return "stock_piecewise"
        for layer in self._layers:
            own = metadata.get(layer.name)
            if own is None:
                return "stock_other"
            if own.num_prefills:
                return "stock_prefill"
            if isinstance(layer.attention, KdaVerify) and not serves(own):
                return "stock_other"
            if isinstance(layer.attention, MlaVerify) and not narrow(own):
                return "stock_other"
        return "ours"

    def run(
        self, step: Tensor, input_ids: Tensor | None, inputs_embeds: Tensor | None
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Hidden rows [M, hidden] before the model norm; with drafter taps also those,
        the AttnRes prefix after each tapped layer."""
        if inputs_embeds is None:
            assert input_ids is not None
            prefix = self.embed_input_ids(input_ids)
        else:
            prefix = inputs_embeds.clone()
        taps = self._backbone.aux_hidden_state_layers
        tapped = [prefix.clone()] if 0 in taps else []
        blocks = prefix.new_empty(prefix.shape[0], self._blocks, prefix.shape[1])
        delta: Delta | None = None
        for layer in self._layers:
            hidden = layer.before_attention(prefix, delta, blocks)
            delta = layer.attention(hidden, step)
            hidden = layer.before_mlp(prefix, delta, blocks)
            delta = layer.mlp(hidden, step)
            if layer.index + 1 in taps:
                tapped.append(prefix + whole(delta))
        hidden = self._last(prefix, delta, blocks)
        return (hidden, tapped) if tapped else hidden


def mixes(settings: Settings) -> Callable[..., Any]:
    """What makes an AttnRes mix: ours or vLLM's."""
    if not settings.ours("attn_res"):
        return StockMix

    def make(*modules: nn.Module | None, **keywords: Any) -> Mix:
        return Mix(*modules, pdl=settings.pdl, **keywords)

    return make


def active(settings: Settings) -> str:
    """The ops by side, for the log; with the reason where one is left to vLLM."""
    listed: Sequence[str] = [
        f"{side}: {', '.join(ops)}" for side in SIDES if (ops := _of(side, settings))
    ]
    return "; ".join(listed)


def _of(side: str, settings: Settings) -> list[str]:
    return [
        f"{op} ({settings.left[op]})" if op in settings.left else op
        for op in settings.ops
        if settings.ops[op] == side
    ]


def _sublayer(
    op: str, ours: Callable[..., Sublayer], module: nn.Module, settings: Settings
) -> Sublayer:
    if settings.ours(op):
        return ours(module, pdl=settings.pdl)
    return Stock(module, attention=op in ("kda", "mla"))


def _name(attention: nn.Module) -> str:
    """The key of its metadata in the forward context."""
    return getattr(attention, "prefix", None) or attention.layer_name
