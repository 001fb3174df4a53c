# SPDX-License-Identifier: Apache-2.0
"""A KDA sublayer with its core in one launch: decay projection, convolution, recurrence
and gated norm between the packed projection and the output projection.

The kernel works in vLLM's own caches and leaves them as vLLM's kernels do
(`verify_kernels.kda.snapshot`), so a step of either kind can follow one of the other:
prompts, and steps that have a prompt among their rows, are vLLM's.

A launch reads what a step is from device tensors that vLLM keeps (`step_of`). At a
graph's capture they are the builder's own buffers, which vLLM fills before each replay;
what the host decides, the extents and the cluster size, is fixed then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context

from dspark_k3.target.scope import STOCK_CORE
from dspark_k3.target.sublayers import Gemm, checked, over_ranks
from verify_kernels.batch import MAX_ROWS
from verify_kernels.kda import BoundSnapshots, KdaVerifyWeights, bind_snapshots
from verify_kernels.kda.host import DIM, TAPS


class KdaVerify:
    """Our projections around our KDA kernel.

    Args:
        module: vLLM's ``KimiK3DeltaAttention`` with its weights loaded.
        pdl: launch as a programmatic dependent.

    Raises:
        ValueError: the module is not the layer that the kernel computes.
    """

    def __init__(self, module: nn.Module, *, pdl: bool) -> None:
        self._module = module
        self._pdl = pdl
        self._in_proj = Gemm(module.in_proj_qkvgfab, pdl=pdl)
        self._o_proj = Gemm(module.o_proj, pdl=pdl)
        self._weights = weights_of(module)
        like = module.o_proj.weight
        self._out = like.new_zeros(MAX_ROWS, module.local_num_heads, DIM)
        # Of a step whose requests have one row each and start from their only slot.
        self._ones = like.new_ones(MAX_ROWS, dtype=torch.int32)
        self._counting = torch.arange(
            MAX_ROWS + 1, dtype=torch.int32, device=like.device
        )
        self._launch: BoundSnapshots | None = None

    def prepare_kv(self) -> None:
        """Check the KV cache that vLLM has bound to the module, and bind the launch.

        vLLM frees the first cache, with which it profiles, before it allocates its own,
        so the cache is not held here.

        Raises:
            ValueError: the kernel cannot run in that cache.
        """
        try:
            window, state = self._module.kv_cache[:2]
            self._launch = bind_snapshots(self._weights, state, window, pdl=self._pdl)
        except ValueError as error:
            raise ValueError(
                f"{self._module.prefix}: our KDA kernel does not serve vLLM's "
                f"convolution windows and states here: {error}; {STOCK_CORE}"
            ) from error

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        rows = hidden.shape[0]
        metadata = get_forward_context().attn_metadata[self._module.prefix]
        out = self._out[:rows]
        self.run(self._in_proj(hidden), metadata, out)
        return over_ranks(self._o_proj(out.view(rows, -1)))

    def run(self, packed: Tensor, metadata: Any, out: Tensor) -> None:
        """The core: from packed rows bf16 [M, P] to ``out`` bf16 [M, H, 128]."""
        assert self._launch is not None, "a step with metadata before prepare_kv"
        window, state = self._module.kv_cache[:2]
        step = self.step_of(metadata, packed.shape[0])
        self._launch(packed, state, window, *step, out)

    def step_of(self, metadata: Any, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """A step of ``rows`` rows as the kernel takes it.

        Args:
            metadata: vLLM's ``KimiK3KDAMetadata`` of a step that `serves` takes.

        Returns:
            slots int32 [B, S], row_start int32 [B + 1] and accepted int32 [B] on the
            device: vLLM's tensors of the verify rows, S = 1 + drafts, or its column of
            slots, S = 1, where no row is one. Requests that pad a graph have the null
            slot, which the kernel leaves alone.
        """
        if metadata.num_spec_decodes:
            return (
                metadata.spec_state_indices_tensor,
                metadata.spec_query_start_loc,
                metadata.num_accepted_tokens,
            )
        # Row b is request b's, as vLLM's own decode kernels take it.
        slots = metadata.non_spec_state_indices_tensor[:rows]
        count = slots.shape[0]
        return slots[:, None], self._counting[: count + 1], self._ones[:count]


def serves(metadata: Any) -> bool:
    """Whether a step without prompt rows is one for `KdaVerify`: verify rows or plain
    decodes, not both.

    vLLM 0.33's model runner V2 plans no such mixture (`MambaHybridModelState` takes
    every decode for a verify row where there is speculation), so this is a guard. It
    reads counts that are on the host, the same at capture and replay.
    """
    return not (metadata.num_spec_decodes and metadata.num_decodes)


def weights_of(module: nn.Module) -> KdaVerifyWeights:
    """The weights of vLLM's module, where they lie; its norm's in fp32.

    Raises:
        ValueError: the module is not the layer that the kernel computes.
    """
    wanted = (
        ("head_dim", module.head_dim, DIM),
        ("short_conv_kernel_size", module.conv_size, TAPS),
        ("convolution bias", getattr(module.conv1d, "bias", None) is not None, False),
        ("gate activation", module.o_norm.activation, "sigmoid"),
    )
    found = [f"{name} {got}, not {want}" for name, got, want in wanted if got != want]
    if module.gate_lower_bound is None:
        found.append("no gate_lower_bound")
    if found:
        raise ValueError(
            f"{module.prefix}: our KDA kernel does not compute this layer, which has "
            f"{', '.join(found)}; {STOCK_CORE}"
        )
    heads = module.local_num_heads
    return KdaVerifyWeights(
        w_fb=checked(module.f_b_proj),
        conv=module.conv1d.weight.data.squeeze(1).float(),
        a_log=module.A_log.data,
        dt_bias=module.dt_bias.data.view(heads, DIM),
        norm=module.o_norm.weight.data.float(),
        lower_bound=module.gate_lower_bound,
        norm_eps=module.o_norm.eps,
    )
