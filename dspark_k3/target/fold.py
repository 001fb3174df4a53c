# SPDX-License-Identifier: Apache-2.0
"""KDA with one slot a request: the fold layout in vLLM's cache.

A page holds window and state as vLLM has them, and behind them the records of the last
step's rows (`dspark_k3.target.slots`). The next step of the request folds what was
accepted of them while it loads; until then the state lacks them. So every verify row
is run by our kernel, in whatever step: those that the executor does not take, with
prompts among the rows or more than 64 of them, run through vLLM's model and
`FoldAttention`. Its prompts run through vLLM's kernels, from a slot that
was committed before and counts no rows after, whatever it held.

vLLM's own one-slot mode (RecoverSSM) keeps the records apart from the slots, by row of
the batch, and so must commit after each step's sampling: a launch a layer more, a state
read and written twice. Only its plan is used here, one column of slots.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.models.kimi_k3 import KimiLinearForCausalLM
from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
from vllm.models.kimi_k3.nvidia.kda_metadata import (
    KimiK3KDAAttentionBackend,
    KimiK3KDAMetadataBuilder,
)
from vllm.v1.kv_cache_interface import MambaSpec

from dspark_k3 import settings
from dspark_k3.target.kda import KdaVerify, serves
from dspark_k3.target.scope import SNAPSHOT_LAYOUT
from dspark_k3.target.slots import RECORD_DTYPES, record_shapes
from verify_kernels.batch import MAX_ROWS
from verify_kernels.kda import BoundSlots, KdaFoldState, bind_slots
from verify_kernels.kda.host import DIM

#: Rows of a step: neighbours, or an index tensor.
Part: TypeAlias = slice | Tensor


class FoldBuilder(KimiK3KDAMetadataBuilder):
    """Plans steps with one column of slots, in graphs too."""

    def __init__(
        self,
        kv_cache_spec: MambaSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.spec_state_slots = 1
        self.spec_state_indices_tensor: Tensor = torch.zeros(
            (self.decode_cudagraph_max_bs, 1), dtype=torch.int32, device=device
        )


class FoldBackend(KimiK3KDAAttentionBackend):
    """vLLM's backend of K3's KDA with that builder."""

    @staticmethod
    def get_builder_cls() -> type[FoldBuilder]:
        return FoldBuilder


class FoldAttention(KimiK3DeltaAttention):
    """vLLM's layer with one slot a request; made of one by `use_fold`.

    Attributes:
        fold: our launches, once the executor is built.
    """

    fold: KdaFold | None = None

    def get_attn_backend(self) -> type[FoldBackend]:
        """Of the layer's cache group."""
        return FoldBackend

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Of a page: window, state, u, key, decay, counts."""
        return (*super().get_state_shape(), *record_shapes(self.local_num_heads))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Likewise."""
        return (*super().get_state_dtype(), *RECORD_DTYPES)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        """One block a request, whatever the drafts."""
        spec = super().get_kv_cache_spec(vllm_config)
        return replace(spec, num_speculative_blocks=0)

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """A step that is vLLM's, rows bf16 [M, hidden] to the same, any M."""
        packed = self.in_proj_qkvgfab(hidden_states)[0]
        out = packed.new_zeros(len(packed), self.local_num_heads, DIM)
        self._core(packed, out)
        projected: Tensor = self.o_proj(out.flatten(1))[0]
        return projected

    @eager_break_during_capture
    def _core(self, packed: Tensor, out: Tensor) -> None:
        """``packed`` bf16 [M, P] to ``out`` bf16 [M, H, 128]; rows of nobody stay."""
        plans = get_forward_context().attn_metadata
        own = plans.get(self.prefix) if isinstance(plans, dict) else None
        if own is None:
            return
        assert self.fold is not None, "a step with metadata before the executor"
        if not own.num_prefills and serves(own):
            rows = own.num_actual_tokens
            self.fold.run(packed[:rows], own, out[:rows])
            return
        others: Part = slice(own.num_actual_tokens)
        if own.num_spec_decodes:
            verify, others = parts_of(own)
            rows_out = taken(out, verify)
            self.fold.run(taken(packed, verify), own, rows_out)
            put(out, verify, rows_out)
        rows_out = taken(out, others)
        if own.num_prefills:
            self._prompts(taken(packed, others), own, rows_out, plans)
        else:
            self.fold.run(taken(packed, others), without_verify(own), rows_out)
        put(out, others, rows_out)

    def _prompts(self, packed: Tensor, own: Any, out: Tensor, plans: Any) -> None:
        """The rows that are no verify rows, by vLLM, from committed slots."""
        assert self.fold is not None
        count = len(own.has_initial_state)
        slots = own.non_spec_state_indices_tensor[:count]
        # A chunk of one token may have run as a verify row, whose one row is accepted;
        # where nothing was computed the slot holds what a former request left.
        self.fold.commit(slots.contiguous(), own.has_initial_state.int())
        heads = (self.local_num_heads, DIM)
        width = self.local_projection_size
        sizes = [3 * width, width, DIM, heads[0]]
        mixed_qkv, gate, decay, beta = packed[:, : sum(sizes)].split(sizes, dim=-1)
        plans[self.prefix] = without_verify(own)
        try:
            self._forward(
                mixed_qkv=mixed_qkv,
                g1=self.f_b_proj(decay)[0].view(1, -1, *heads),
                g2=gate.unflatten(-1, heads),
                beta=beta.unsqueeze(0),
                core_attn_out=out.unsqueeze(0),
            )
        finally:
            plans[self.prefix] = own


class KdaFold(KdaVerify):
    """`KdaVerify` in one slot a request; also what its module's own steps run.

    Args:
        module: a `FoldAttention` with its weights loaded.
        pdl: launch as a programmatic dependent.

    Raises:
        ValueError: the module is not the layer that the kernel computes.
    """

    def __init__(self, module: FoldAttention, *, pdl: bool) -> None:
        super().__init__(module, pdl=pdl)
        self._slots: BoundSlots | None = None
        module.fold = self

    def prepare_kv(self) -> None:
        """Check the KV cache that vLLM has bound to the module, and bind the launches.

        Raises:
            ValueError: the kernels cannot run in that cache.
        """
        try:
            rows = 1 + self._module.num_spec
            cache = self._cache()
            self._slots = bind_slots(self._weights, cache, rows, pdl=self._pdl)
        except ValueError as error:
            raise ValueError(
                f"{self._module.prefix}: our KDA kernel does not serve one slot a "
                f"request here: {error}; {SNAPSHOT_LAYOUT}"
            ) from error

    def run(self, packed: Tensor, metadata: Any, out: Tensor) -> None:
        """The core: from packed rows bf16 [M, P] to ``out`` bf16 [M, H, 128]."""
        assert self._slots is not None, "a step with metadata before prepare_kv"
        step = self.step_of(metadata, packed.shape[0])
        self._slots(packed, self._cache(), *step, out)

    def commit(self, slots: Tensor, accepted: Tensor) -> None:
        """As of `verify_kernels.kda.BoundSlots`."""
        assert self._slots is not None, "a step with metadata before prepare_kv"
        self._slots.commit(self._cache(), slots, accepted)

    def step_of(self, metadata: Any, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """As of `KdaVerify`, for more than 64 rows too; slots [B, 1]."""
        if metadata.num_spec_decodes or rows <= MAX_ROWS:
            return super().step_of(metadata, rows)
        slots = metadata.non_spec_state_indices_tensor[:rows]
        starts = torch.arange(rows + 1, dtype=torch.int32, device=slots.device)
        return slots[:, None], starts, torch.ones_like(starts[1:])

    def _cache(self) -> KdaFoldState:
        """Views of the module's cache, which vLLM may free and bind anew."""
        window, state, u, key, decay, counts = self._module.kv_cache
        counts = counts[:, : state.shape[1]]
        return KdaFoldState(state, window, u, key, decay, counts)


def parts_of(metadata: Any) -> tuple[Part, Part]:
    """The verify rows of a step, and the others."""
    verify, rows = metadata.num_spec_decode_tokens, metadata.num_actual_tokens
    others = metadata.num_prefill_tokens + metadata.num_decode_tokens
    assert verify + others <= rows
    if metadata.spec_token_start is None:
        return metadata.spec_token_indx, metadata.non_spec_token_indx
    begin, end = metadata.spec_token_start, metadata.non_spec_token_start
    return slice(begin, begin + verify), slice(end, end + others)


def taken(rows: Tensor, part: Part) -> Tensor:
    """These rows: a view of neighbours, a copy of others."""
    return rows[part] if isinstance(part, slice) else rows.index_select(0, part)


def put(rows: Tensor, part: Part, found: Tensor) -> None:
    """What was `taken` back to its place, if it is a copy."""
    if not isinstance(part, slice):
        rows.index_copy_(0, part, found)


def without_verify(metadata: Any) -> Any:
    """A plan of the rows that are no verify rows, which are handed over alone."""
    if not metadata.num_spec_decodes:
        return metadata
    return replace(
        metadata,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=metadata.num_prefill_tokens + metadata.num_decode_tokens,
        num_accepted_tokens=None,
        spec_query_start_loc=None,
        spec_state_indices_tensor=None,
        spec_token_indx=None,
        non_spec_token_indx=None,
        spec_token_start=None,
        non_spec_token_start=None,
    )


def use_fold(model: nn.Module) -> list[str]:
    """Make every KDA layer in ``model`` a `FoldAttention`; their names, in order.

    Call it after construction and before the engine asks layers for their cache specs,
    which it does once the weights are loaded.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, KimiK3DeltaAttention)
    }
    for layer in layers.values():
        layer.__class__ = FoldAttention
    size_pages()
    return list(layers)


_sized: list[Any] = []


def size_pages() -> None:
    """Let this process's model classes count the records in a page.

    vLLM asks the class, of the multimodal wrapper too, when it makes attention blocks
    as long as a page. Models that did not ask for the fold get vLLM's answers; calling
    it again does nothing.
    """
    for name, more in (
        ("get_mamba_state_shape_from_config", _more_shapes),
        ("get_mamba_state_dtype_from_config", lambda config: RECORD_DTYPES),
    ):
        stock = getattr(KimiLinearForCausalLM, name).__func__
        if stock not in _sized:
            _sized.append(_longer(stock, more))
            setattr(KimiLinearForCausalLM, name, classmethod(_sized[-1]))


def folds(config: VllmConfig) -> bool:
    """Whether this deployment's states are folded."""
    asked = settings.read(config.additional_config)
    return asked.kda_layout == "fold" and config.num_speculative_tokens > 0


def _longer(stock: Any, more: Any) -> Any:
    @functools.wraps(stock)
    def found(cls: Any, vllm_config: VllmConfig) -> tuple[Any, ...]:
        own: tuple[Any, ...] = stock(cls, vllm_config)
        return (*own, *more(vllm_config)) if folds(vllm_config) else own

    return found


def _more_shapes(config: VllmConfig) -> tuple[tuple[int, ...], ...]:
    heads = config.model_config.hf_config.linear_attn_config["num_heads"]
    return record_shapes(heads // config.parallel_config.tensor_parallel_size)
