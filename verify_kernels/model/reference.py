# SPDX-License-Identifier: Apache-2.0
"""A complete Kimi K3 decoder in plain torch, built from the ops' references.

One `K3Model.step` is one decode step over a ragged `VerifyBatch`. For layer l, with n
blocks saved before it and "start" for layers that begin a block:

    hidden = attn_res(p + mlp of l - 1; n blocks), saving p as block n at a start
    hidden = attn_res(p + mixer(hidden), or the mixer's output alone at a start;
                      n blocks, n + 1 at a start)
    mlp(hidden)

and after the last layer a mix over all blocks, the model norm and the LM head. Every
live row is computed on its own, so its bits depend on its request's tokens only, not on
the verify width, the batch or the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.attn_res.reference import attn_res
from verify_kernels.batch import VerifyBatch
from verify_kernels.dense.reference import mlp, project
from verify_kernels.head.reference import lm_head
from verify_kernels.kda import reference as kda
from verify_kernels.mla import reference as mla
from verify_kernels.model.weights import (
    K3Config,
    K3Weights,
    KdaLayer,
    MlaLayer,
    ResidualWeights,
)
from verify_kernels.moe.reference import MoeWeights, dense_experts, moe

_KDA_COMMITTED = ("state", "window_q", "window_k", "window_v")


@dataclass
class K3State:
    """What a model keeps between steps, by layer number.

    kda: slots of recurrent state and records. mla: caches [blocks, page, kv_lora +
    rope], addressed through the batch's block table.
    """

    kda: dict[int, kda.KdaState]
    mla: dict[int, Tensor]

    def commit(self, slot: int, accepted: int) -> None:
        """Fold the first ``accepted`` rows of the slot's last step into every layer."""
        for cache in self.kda.values():
            kda.commit(cache, slot, accepted)

    def reset(self, slot: int) -> None:
        """Make the slot that of a request without a token; pages need nothing."""
        for cache in self.kda.values():
            for name in _KDA_COMMITTED:
                getattr(cache, name)[slot] = 0
            cache.width[slot] = 0

    def committed(
        self, slot: int, pages: Sequence[int], length: int
    ) -> dict[str, Tensor]:
        """Copies of one request's committed state and first ``length`` cache lines.

        Whatever the slot and the pages are, the same tokens give the same copies.
        """
        parts = {}
        for layer, cache in self.kda.items():
            for name in _KDA_COMMITTED:
                parts[f"{layer}.{name}"] = getattr(cache, name)[slot].clone()
        for layer, lines in self.mla.items():
            parts[f"{layer}.lines"] = lines[list(pages)].flatten(0, 1)[:length].clone()
        return parts


class K3Model:
    """The model of ``weights``, whose dtype (fp32 or fp64) all arithmetic has."""

    def __init__(self, config: K3Config, weights: K3Weights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self._banks = {
            i: dense_experts(
                m.w1, m.w3, m.w2, range(config.experts), compute=self.dtype
            )
            for i, m in enumerate(layer.mlp for layer in weights.layers)
            if isinstance(m, MoeWeights)
        }

    def new_state(self, slots: int, blocks: int, page: int) -> K3State:
        """State for slots 1 .. slots - 1 and ``blocks`` cache pages of ``page`` lines.

        The cache starts as NaN, so that a line read before it is written shows.
        """
        c, device = self.config, self.weights.embedding.device
        recurrent, caches = {}, {}
        for i, layer in enumerate(self.weights.layers):
            if isinstance(layer.mixer, KdaLayer):
                recurrent[i] = kda.KdaState.allocate(
                    slots, c.heads, c.kda_k, c.kda_v, self.dtype, device
                )
            else:
                size = (blocks, page, c.kv_lora + c.rope)
                caches[i] = torch.full(size, torch.nan, dtype=self.dtype, device=device)
        return K3State(recurrent, caches)

    @torch.no_grad()
    def step(
        self,
        batch: VerifyBatch,
        tokens: Tensor,
        state: K3State,
        *,
        fold: bool = False,
    ) -> Tensor:
        """Logits [M, vocab] of integer tokens [M]; 0 in padding rows.

        Row t of a request holds its token at position history + t. The step writes the
        rows' cache lines and their KDA records; the caller commits with
        `K3State.commit`, or with ``fold`` the next step does, by ``batch.accepted``.

        Raises:
            ValueError: if the batch breaks its contract, there are fewer tokens than
                rows, or a live row's token is outside the vocabulary.
        """
        batch.check()
        live = _live_rows(batch)
        c, w, count = self.config, self.weights, tokens.shape[0]
        if count < int(batch.row_start[-1]):
            raise ValueError(
                f"tokens has {count} rows and row_start ends at "
                f"{int(batch.row_start[-1])}; give one token for every row"
            )
        ids = tokens[live].long()
        if bool(((ids < 0) | (ids >= c.vocab_size)).any()):
            raise ValueError(
                f"tokens holds {ids.tolist()} in live rows; each must be 0 to "
                f"{c.vocab_size - 1}"
            )
        logits = w.embedding.new_zeros(count, c.vocab_size)
        if not live:
            return logits

        prefix = w.embedding[ids]
        delta: Tensor | None = None
        capacity = c.saved_blocks(c.layers)
        blocks = prefix.new_full((len(live), capacity, c.hidden), torch.nan)

        for i, layer in enumerate(w.layers):
            start, saved = c.starts_block(i), c.saved_blocks(i)
            write = saved if start else None
            hidden, prefix = self._residual(
                prefix, delta, blocks, layer.before_mixer, saved, write=write
            )
            delta = self._mix(i, layer.mixer, hidden, live, batch, state, fold)
            hidden, prefix = self._residual(
                prefix, delta, blocks, layer.before_mlp, saved + start, restart=start
            )
            if isinstance(layer.mlp, MoeWeights):
                bank = self._banks[i]
                delta = moe(hidden, layer.mlp, compute=self.dtype, bank=bank)
            else:
                delta = mlp(hidden, layer.mlp, compute=self.dtype)
        hidden, _ = self._residual(prefix, delta, blocks, w.output, capacity)
        logits[live] = lm_head(hidden, w.head, compute=self.dtype)
        return logits

    def _residual(
        self,
        prefix: Tensor,
        delta: Tensor | None,
        blocks: Tensor,
        weights: ResidualWeights,
        saved: int,
        *,
        write: int | None = None,
        restart: bool = False,
    ) -> tuple[Tensor, Tensor]:
        c = self.config
        return attn_res(
            prefix,
            delta,
            blocks,
            weights.norm,
            weights.query,
            weights.output_norm,
            num_blocks=saved,
            write_block=write,
            restart=restart,
            eps=c.norm_eps,
            output_norm_eps=c.norm_eps,
            round_prefix=c.round_prefix,
            compute=self.dtype,
        )

    def _mix(
        self,
        index: int,
        layer: KdaLayer | MlaLayer,
        hidden: Tensor,
        live: list[int],
        batch: VerifyBatch,
        state: K3State,
        fold: bool,
    ) -> Tensor:
        """The layer's attention of the live rows, [live, H] -> [live, H]."""
        c = self.config
        narrow = project(hidden, layer.in_proj, compute=self.dtype)
        # NaN in padding rows: an op that reads one cannot go unnoticed.
        rows = int(batch.row_start[-1])
        packed = narrow.new_full((rows, narrow.shape[1]), torch.nan)
        packed[live] = narrow
        if isinstance(layer, KdaLayer):
            out = kda.verify(
                batch,
                kda.KdaRows.unpack(packed, layer.w_fb, c.heads, c.kda_v),
                layer.core,
                state.kda[index],
                fold=fold,
            )
        else:
            own = mla.MlaRows.unpack(packed, layer.core)
            out = mla.verify(batch, own, layer.core, state.mla[index])
        return project(out.flatten(1)[live], layer.out, compute=self.dtype)


def _live_rows(batch: VerifyBatch) -> list[int]:
    """Rows of requests that have a slot."""
    starts, slots = batch.row_start.tolist(), batch.state_slots.tolist()
    return [
        row
        for b, slot in enumerate(slots)
        if slot > 0
        for row in range(starts[b], starts[b + 1])
    ]
