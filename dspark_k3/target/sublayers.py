# SPDX-License-Identifier: Apache-2.0
"""The sublayers of a K3 layer that our executor runs, over vLLM's own modules.

Every one takes bf16 rows [M, hidden], M = 1 .. 64, and returns new rows of that shape.
They read vLLM's modules and change none, so vLLM's forward stays what it is for the
steps that are left to it. The new rows may come in two, whose sum they are (`Delta`).
Attention writes the rows of live requests only, so it gets rows that begin as zeros:
what pads a graph is finite.

A sublayer that is not ours, by the settings' ``ops``, is the module's own forward
(`Stock`). A sharded sublayer ends in vLLM's all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
)
from vllm.models.common.ops import fused_q_kv_rmsnorm
from vllm.models.kimi_k3.nvidia.mla import _gate_sigmoid_mul

from dspark_k3.target.experts import Experts, normed_by_us
from dspark_k3.target.route import Route
from verify_kernels.attn_res import attn_res
from verify_kernels.batch import MAX_ROWS
from verify_kernels.layer import LatentMoe, MoeWeights, Product, Side

#: What a sublayer adds to the prefix: rows, or two whose sum in bf16 that is.
Delta: TypeAlias = Tensor | tuple[Tensor, Tensor]


def whole(delta: Delta) -> Tensor:
    """Its rows."""
    return delta if isinstance(delta, Tensor) else delta[0] + delta[1]


class Sublayer(Protocol):
    """Attention or MLP of one layer."""

    def __call__(self, hidden: Tensor, positions: Tensor) -> Delta: ...


class Gemm(Product):
    """`Product` with the weight of one of vLLM's linear layers.

    Raises:
        ValueError: the layer has a bias or no bf16 [N, K] weight, or no kernel is
            compiled for this K and dtype.
    """

    def __init__(
        self, layer: nn.Module, dtype: torch.dtype = torch.bfloat16, *, pdl: bool
    ) -> None:
        super().__init__(checked(layer), dtype, pdl=pdl)


class Mix:
    """An AttnRes mix and the RMSNorm after it, one launch.

    Args:
        norm, query: the mix's norm module and its [1, hidden] projection.
        output_norm: the RMSNorm that follows, or None.
        num_blocks: saved blocks that are mixed.
        write: save the new prefix as block ``num_blocks``.
        restart: the new prefix is the delta alone.
    """

    def __init__(
        self,
        norm: nn.Module,
        query: nn.Module,
        output_norm: nn.Module | None,
        *,
        num_blocks: int,
        write: bool = False,
        restart: bool = False,
        pdl: bool,
    ) -> None:
        self._weights, shared = _mix_arguments(norm, query, output_norm, num_blocks)
        self._keywords: dict[str, Any] = shared | {
            "write_block": num_blocks if write else None,
            "restart": restart,
            "pdl": pdl,
        }

    def __call__(self, prefix: Tensor, delta: Delta | None, blocks: Tensor) -> Tensor:
        """Hidden rows; ``prefix`` and ``blocks`` are updated in place."""
        extra = None
        if isinstance(delta, tuple):
            delta, extra = delta
        return attn_res(
            prefix, delta, blocks, *self._weights, extra=extra, **self._keywords
        )


class StockMix:
    """vLLM's AttnRes kernel with the arguments of `Mix`."""

    def __init__(
        self,
        norm: nn.Module,
        query: nn.Module,
        output_norm: nn.Module | None,
        *,
        num_blocks: int,
        write: bool = False,
        restart: bool = False,
    ) -> None:
        from vllm.models.kimi_k3.nvidia.ops import attn_res

        self._launch = attn_res
        self._weights, shared = _mix_arguments(norm, query, output_norm, num_blocks)
        self._keywords = shared | {"block_write_idx": num_blocks if write else -1}
        self._restart = restart

    def __call__(self, prefix: Tensor, delta: Delta | None, blocks: Tensor) -> Tensor:
        rows = None if delta is None else whole(delta)
        if self._restart:
            assert rows is not None
            prefix.copy_(rows)
            rows = None
        return self._launch(prefix, rows, blocks, *self._weights, **self._keywords)


class Stock:
    """vLLM's own attention or MLP."""

    def __init__(self, module: nn.Module, *, attention: bool) -> None:
        self._module = module
        self._attention = attention

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        if self._attention:
            return self._module(hidden_states=hidden, positions=positions)
        return self._module(hidden)


class Kda:
    """Our projections around vLLM's convolution, recurrence and gated norm; with the
    core ours too it is `dspark_k3.target.kda.KdaVerify`."""

    def __init__(self, module: nn.Module, *, pdl: bool) -> None:
        self._module = module
        self._in_proj = Gemm(module.in_proj_qkvgfab, pdl=pdl)
        self._f_b = Gemm(module.f_b_proj, pdl=pdl)
        self._o_proj = Gemm(module.o_proj, pdl=pdl)
        width = module.local_projection_size
        self._splits = [3 * width, width, module.head_dim, module.local_num_heads]
        if module.in_proj_padding:
            self._splits.append(module.in_proj_padding)
        like = module.o_proj.weight
        self._out = like.new_zeros(MAX_ROWS, module.local_num_heads, module.head_dim)

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        module, rows = self._module, hidden.shape[0]
        heads = (module.local_num_heads, module.head_dim)
        packed = self._in_proj(hidden).split(self._splits, dim=-1)
        mixed_qkv, gate, decay, beta = packed[:4]
        # Strides as of a new tensor: vLLM's norm, in place, copies the rows onto
        # themselves, which torch refuses where the strides differ.
        out = self._out[:rows].unsqueeze(0)
        module._forward(
            mixed_qkv=mixed_qkv,
            g1=self._f_b(decay).view(1, rows, *heads),
            g2=gate.unflatten(-1, heads),
            beta=beta.unsqueeze(0),
            core_attn_out=out,
        )
        return over_ranks(self._o_proj(out.view(rows, -1)))


class Mla:
    """Our projections around vLLM's norms, absorption and attention; with the core ours
    too it is `dspark_k3.target.mla.MlaVerify`."""

    def __init__(self, module: nn.Module, *, pdl: bool) -> None:
        self._module = module
        self._qkv_a_g = Gemm(module.fused_qkv_a_g_proj, pdl=pdl)
        self._q_b = Gemm(module.q_b_proj, pdl=pdl)
        self._o_proj = Gemm(module.o_proj, pdl=pdl)
        self._value_width = module.num_local_heads * module.v_head_dim
        self._splits = [
            module.q_lora_rank,
            module.kv_lora_rank,
            module.qk_rope_head_dim,
            self._value_width,
        ]
        self._out = module.o_proj.weight.new_zeros(MAX_ROWS, self._value_width)

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        module = self._module
        packed = self._qkv_a_g(hidden).split(self._splits, dim=-1)
        query_latent, key_latent, key_rope, gate = packed
        query_latent, key_latent = fused_q_kv_rmsnorm(
            query_latent,
            key_latent,
            module.q_a_layernorm.weight.data,
            module.kv_a_layernorm.weight.data,
            module.rms_norm_eps,
        )
        query = self._q_b(query_latent)
        out = self._out[: hidden.shape[0]]
        module._attention(
            positions,
            query.view(-1, module.num_local_heads, module.qk_head_dim),
            key_latent,
            key_rope.unsqueeze(1),
            out,
        )
        return over_ranks(self._o_proj(_gate_sigmoid_mul(out, gate)))


class Dense:
    """SiTU MLP."""

    def __init__(self, module: nn.Module, *, pdl: bool) -> None:
        self._gate_up = Gemm(module.gate_up_proj, pdl=pdl)
        self._activation = module.act_fn
        self._down = Gemm(module.down_proj, pdl=pdl)

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return over_ranks(self._down(self._activation(self._gate_up(hidden))))


class Moe:
    """Latent MoE: our projections in the order of `LatentMoe`, and around vLLM's or our
    routed experts our routing. The mix that follows adds the routed and the shared
    experts' rows.

    Args:
        route: the routing is ours, not vLLM's.
        experts: with ``route``, the routed experts are ours too.
    """

    def __init__(
        self, module: nn.Module, *, pdl: bool, route: bool, experts: bool = False
    ) -> None:
        runner, shared = module.experts, module.shared_experts
        if (
            runner.do_naive_dispatch_combine
            or runner._fused_output_is_reduced
            or runner.routed_scaling_factor != 1.0
        ):
            raise ValueError(
                f"the routed experts' {type(runner._quant_method).__name__} reduces or "
                "scales its own output, which the executor does not run; set "
                '"ops": {"moe": "stock"}'
            )
        self._runner = runner
        self._norm = module.routed_expert_norm
        self._route: Route | None = None
        if route:
            index_dtype = runner.routed_experts.quant_method.topk_indices_dtype
            self._route = Route(runner.router, index_dtype, pdl=pdl)
        self._experts: Experts | None = None
        if experts:
            # Over several ranks the sum is a part, and the norm comes after theirs.
            norm = None
            if get_tensor_model_parallel_world_size() == 1 and normed_by_us(self._norm):
                norm, self._norm = self._norm, None
            self._experts = Experts(runner.routed_experts, norm, pdl=pdl)
        self._layer = LatentMoe(
            MoeWeights(
                router=checked(module.gate),
                down=checked(module.routed_expert_down_proj),
                gate_up=checked(shared.gate_up_proj),
                shared_down=checked(shared.down_proj),
                up=checked(module.routed_expert_up_proj),
            ),
            activation=shared.act_fn,
            routed=self._routed,
            summed=self._summed,
            # As in vLLM's `maybe_execute_in_parallel`.
            side=Side(
                module._down_proj_stream,
                lambda: not BreakableCUDAGraphCapture.is_active(),
            ),
            pdl=pdl,
        )

    def __call__(self, hidden: Tensor, positions: Tensor) -> Delta:
        routed, shared = self._layer(hidden)
        return routed, over_ranks(shared)

    def _routed(
        self, latent: Tensor, logits: Tensor, ready: Callable[[], None]
    ) -> Tensor:
        """The weighted sum of this rank's shares of the chosen experts, [M, latent].

        ``latent`` may still be under way: ``ready`` is called before anything reads it.
        """
        if self._experts is not None:
            assert self._route is not None
            weights, _ = self._route(logits)
            ready()
            return self._experts(latent, weights, self._route.plan)
        runner = self._runner
        experts = runner.routed_experts
        experts._ensure_moe_quant_config_init()
        width = latent.shape[1]
        if experts.quant_method.is_monolithic:
            assert self._route is None
            ready()
            padded, _, _ = runner._maybe_pad_hidden_states(None, latent)
            out = experts.forward_monolithic(
                x=padded, router_logits=runner.router.prepare_monolithic_logits(logits)
            )
        else:
            if self._route is not None:
                weights, ids = self._route(logits)
            else:
                # vLLM's routing reads no more than the number of these rows.
                weights, ids = runner.router.select_experts(
                    hidden_states=latent,
                    router_logits=logits,
                    topk_indices_dtype=experts.quant_method.topk_indices_dtype,
                )
            ready()
            padded, _, _ = runner._maybe_pad_hidden_states(None, latent)
            out = experts.forward_modular(x=padded, topk_weights=weights, topk_ids=ids)
        return out[..., :width]

    def _summed(self, routed: Tensor) -> Tensor:
        """Over all ranks, and normed."""
        routed = over_ranks(routed)
        return routed if self._norm is None else self._norm(routed)


class Head(UnquantizedEmbeddingMethod):
    """The LM head's product by our kernel up to 64 rows, by vLLM's above."""

    def __init__(self, head: nn.Module, *, pdl: bool) -> None:
        super().__init__()
        self._stock: Callable[..., Tensor] = head.quant_method.apply
        self._gemm = Gemm(head, pdl=pdl)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        fits = x.dim() == 2 and x.shape[0] <= MAX_ROWS and x.dtype == torch.bfloat16
        if bias is None and fits:
            return self._gemm(x)
        return self._stock(layer, x, bias)


def _mix_arguments(
    norm: nn.Module, query: nn.Module, output_norm: nn.Module | None, num_blocks: int
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Weights of an AttnRes mix in order, and the keywords that both kernels have."""
    output = None if output_norm is None else output_norm.weight.data
    return (norm.weight.data, query.weight.data.squeeze(0), output), {
        "num_blocks": num_blocks,
        "eps": norm.variance_epsilon,
        "output_norm_eps": getattr(output_norm, "variance_epsilon", 0.0),
    }


def over_ranks(rows: Tensor) -> Tensor:
    """The sum over the tensor-parallel ranks.

    vLLM hands a pointer and a count to NCCL, so what it sums must lie in one piece: a
    latent that was padded for the experts' kernel does not.
    """
    if get_tensor_model_parallel_world_size() == 1:
        return rows
    return tensor_model_parallel_all_reduce(rows.contiguous())


def checked(layer: nn.Module) -> Tensor:
    """The weight of a linear layer of vLLM's that our kernels run, bf16 [N, K].

    Raises:
        ValueError: it has no plain contiguous weight of that kind, or a bias.
    """
    weight = getattr(layer, "weight", None)
    name = getattr(layer, "prefix", type(layer).__name__)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ValueError(
            f"{name} has no plain weight matrix: the executor runs projections that "
            "are not quantised; set its sublayer to stock in ops"
        )
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        raise ValueError(
            f"{name} has a {weight.dtype} weight with strides {weight.stride()}; the "
            "executor runs contiguous torch.bfloat16 ones: load the model with "
            "--dtype bfloat16, or set its sublayer to stock in ops"
        )
    if getattr(layer, "bias", None) is not None:
        raise ValueError(
            f"{name} has a bias, which the executor does not add; set its sublayer to "
            "stock in ops"
        )
    return weight.data
