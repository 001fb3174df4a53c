# SPDX-License-Identifier: Apache-2.0
"""Folded slots beside vLLM's: an engine that runs every step in both, by reference, and
holds both against requests decoded alone, row by row.

vLLM plans; its prompt kernels are stood in for by the reference in its own slots.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.dspark_k3 import kda_layers
from tests.dspark_k3.kda_layers import HIDDEN, ReferenceLaunch, bind_pages, layer
from tests.dspark_k3.test_kda_slots import Engine, K, State
from verify_kernels import VerifyBatch
from verify_kernels.kda import KdaFoldState, KdaVerifyWeights, rolling
from verify_kernels.kda.host import DIM
from verify_kernels.kda.reference import KdaRows, step

HEADS = 2
PAST = 3


class ReferenceSlots:
    """What `verify_kernels.kda.bind_slots` gives, by the reference."""

    def __init__(
        self,
        weights: KdaVerifyWeights,
        cache: KdaFoldState,
        rows: int,
        *,
        pdl: bool = True,
    ) -> None:
        self.plain = ReferenceLaunch(weights, cache.state, cache.window)
        self.rows, self.steps = rows, 0

    def __call__(
        self,
        packed: Tensor,
        cache: KdaFoldState,
        slots: Tensor,
        row_start: Tensor,
        accepted: Tensor,
        out: Tensor,
    ) -> None:
        plain = self.plain
        rows = KdaRows.unpack(
            packed.float(), plain._w_fb, out.shape[1], DIM, bf16_decay=True
        )
        assert int(row_start.diff().max()) <= self.rows
        batch = VerifyBatch(
            row_start, torch.zeros_like(accepted), slots[:, 0], accepted
        )
        found = rolling.verify(batch, rows, plain._weights, cache)
        written = int(row_start[-1])
        out[:written] = found[:written]
        self.steps += 1

    def commit(self, cache: KdaFoldState, slots: Tensor, accepted: Tensor) -> None:
        assert slots.is_contiguous() and slots.dtype == accepted.dtype == torch.int32
        for slot, told in zip(slots.tolist(), accepted.tolist(), strict=True):
            if slot > 0:
                rolling.commit(cache, slot, told)


class RowLinear:
    """One of vLLM's linear layers, a row at a time, so that no bit depends on M."""

    def __init__(self, like: Any) -> None:
        self.weight = like.weight

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        w = self.weight.float()
        return torch.stack([(w @ row.float()).bfloat16() for row in x]), None


def folded(drafts: int = K) -> Any:
    """A `FoldAttention` over vLLM's layer, all its linear layers by row."""
    from dspark_k3.target import fold

    module = layer(HEADS)
    for name in ("in_proj_qkvgfab", "f_b_proj", "o_proj"):
        vars(module)[name] = RowLinear(getattr(module, name))
    vars(module).update(num_spec=drafts, tp_size=1)
    holder = torch.nn.Module()
    holder.add_module("kda", module)
    assert fold.use_fold(holder) == ["kda"]
    vars(module).update(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto",
            use_kda_recoverssm=False,
        ),
    )
    return module


def bind_folded(module: Any, blocks: int, page: int | None = None) -> None:
    """Its pages, as vLLM binds them, full of what was there before."""
    shapes, dtypes = module.get_state_shape(), module.get_state_dtype()
    needed = sum(prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
    page = page or needed + 1152
    raw = torch.full((blocks * page,), -1, dtype=torch.int8)
    module.bind_kv_cache(raw.as_strided((blocks, 1, 1, needed), (page, page, page, 1)))


def prompt_rows(
    module: Any, weights: Any, mixed_qkv: Tensor, rows: KdaRows, plan: Any
) -> Tensor:
    """vLLM's prompt kernels by the reference: results [M, H, 128] fp32; window and
    state of the layer's slots as vLLM leaves them."""
    window, state = module.kv_cache[:2]
    out = torch.zeros_like(rows.v)
    starts = plan.non_spec_query_start_loc.tolist()
    for j, begin in enumerate(starts[:-1]):
        end, slot = starts[j + 1], int(plan.non_spec_state_indices_tensor[j])
        now = state[slot].clone()
        past = window[slot, :PAST].clone()
        if not plan.has_initial_state[j]:
            now.zero_()
            past.zero_()
        line = torch.cat((past, mixed_qkv[begin:end])).float()
        line = line.unflatten(-1, (3, HEADS, DIM))
        for t in range(end - begin):
            taps = line[t : t + PAST + 1].unbind(1)
            result = step(now, taps, rows, begin + t, weights)
            out[begin + t], now = result.out, result.state
        state[slot] = now
        window[slot, :PAST] = line[-PAST:].flatten(1).bfloat16()
    return out


class Reference:
    """Rows of one layer by the reference, from hidden rows."""

    def __init__(self, module: Any, launch: ReferenceLaunch) -> None:
        self.module, self.launch = module, launch

    def rows(self, hidden: Tensor) -> tuple[Tensor, KdaRows]:
        packed, _ = self.module.in_proj_qkvgfab(hidden)
        w_fb = self.launch._w_fb
        rows = KdaRows.unpack(packed.float(), w_fb, HEADS, DIM, bf16_decay=True)
        return packed, rows

    def result(self, out: Tensor) -> Tensor:
        return torch.Tensor(self.module.o_proj(out.bfloat16().flatten(1))[0])


@dataclass
class Alone:
    """A request decoded alone: its tokens, taps and state after them."""

    tokens: State
    past: Tensor
    state: Tensor


class BothEngine(Engine):
    """Runs what it plans: verify rows and prompts in vLLM's slots and in folded ones,
    and every request alone. All results must be the same bits."""

    def __init__(self, requests: int, rng: random.Random, plans: dict[str, Any]):
        from dspark_k3.target import fold, kda

        super().__init__(requests)
        self.rng, self.plans = rng, plans
        self.module = folded()
        bind_folded(self.module, 1 + requests * (1 + K))
        self.ours = fold.KdaFold(self.module, pdl=True)
        self.ours.prepare_kv()
        self.vllms = layer(HEADS)
        vars(self.vllms).update(
            {k: v for k, v in vars(self.module).items() if k != "fold"}
        )
        bind_pages(self.vllms, 1 + requests * (1 + K), K)
        self.snapshots = kda.KdaVerify(self.vllms, pdl=True)
        self.snapshots.prepare_kv()
        launch: Any = self.snapshots._launch
        self.launch: ReferenceLaunch = launch
        self.reference = Reference(self.vllms, launch)
        self.alone: dict[int, Alone] = {}
        #: Steps by what ran them.
        self.seen = dict.fromkeys(("executor", "model", "prompts", "mixed"), 0)
        self.commits = 0

    def plan(self, batch: Any, *arguments: Any, **keywords: Any) -> Any:
        """vLLM's plan in its slots; `FoldBuilder`'s is kept."""
        self.batch, self.widths = batch, arguments[2]
        self.builder.spec_state_slots = 1
        self.folded = super().plan(batch, *arguments, **keywords)
        self.builder.spec_state_slots = 1 + K
        return super().plan(batch, *arguments, **keywords)

    def run(self, metadata: Any, rows: list[int]) -> list[State]:
        hidden = torch.stack([embedded(token) for token in rows])
        wanted = self.by_themselves(rows, hidden)
        assert torch.equal(self.in_vllms_slots(metadata, hidden), wanted)
        assert torch.equal(self.in_folded_slots(hidden), wanted)
        counts = self.module.kv_cache[-1]
        live = [r.slots[0] for r in self.batch]
        assert not counts[live, :, 1].any(), "more was accepted than recorded"
        return super().run(metadata, rows)

    def in_folded_slots(self, hidden: Tensor) -> Tensor:
        m = self.plans["kda"] = self.folded
        positions = torch.arange(len(hidden))
        if not m.num_prefills and len(hidden) <= 64 and self.rng.random() < 0.7:
            self.seen["executor"] += 1
            return self.ours(hidden, positions)
        kind = "model"
        if m.num_prefills:
            kind = "mixed" if m.num_spec_decodes else "prompts"
        self.seen[kind] += 1
        # A graph of pieces pads its rows.
        padded = torch.cat((hidden, torch.full((2, HIDDEN), 7.0).bfloat16()))
        found = self.module.forward(padded, positions)
        assert self.plans["kda"] is m
        return torch.Tensor(found[: len(hidden)])

    def in_vllms_slots(self, m: Any, hidden: Tensor) -> Tensor:
        """The snapshots, and prompts from them."""
        packed, rows = self.reference.rows(hidden)
        out = torch.zeros_like(rows.v)
        order = torch.arange(len(hidden))
        spec, others = order, order[:0]
        if not m.num_spec_decodes:
            spec, others = order[:0], order
        elif m.num_prefills:
            spec, others = m.spec_token_indx, m.non_spec_token_indx
        if len(spec):
            part = torch.zeros(len(spec), HEADS, DIM)
            window, state = self.vllms.kv_cache[:2]
            slots = m.spec_state_indices_tensor
            self.launch(
                packed[spec],
                state,
                window,
                slots,
                m.spec_query_start_loc,
                m.num_accepted_tokens,
                part,
            )
            out[spec] = part
        if len(others):
            assert m.num_prefills
            own = KdaRows(**{k: v[others] for k, v in vars(rows).items()})
            qkv = packed[others][:, : 3 * HEADS * DIM]
            weights = self.launch._weights
            out[others] = prompt_rows(self.vllms, weights, qkv, own, m)
            for slot in m.non_spec_state_indices_tensor.tolist():
                self.launch.last[slot] = 1
        return self.reference.result(out)

    def by_themselves(self, tokens: list[int], hidden: Tensor) -> Tensor:
        packed, rows = self.reference.rows(hidden)
        lines = packed[:, : 3 * HEADS * DIM].float().unflatten(-1, (3, HEADS, DIM))
        out, begin = torch.zeros_like(rows.v), 0
        for request, width in zip(self.batch, self.widths, strict=True):
            done = tuple(request.tokens[: request.computed])
            now = self.caught_up(request.index, done)
            past, state = now.past, now.state
            for t in range(begin, begin + width):
                line = torch.cat((past, lines[t : t + 1]))
                weights = self.launch._weights
                result = step(state, line.unbind(1), rows, t, weights)
                out[t], state, past = result.out, result.state, line[1:]
            begin += width
        return self.reference.result(out)

    def caught_up(self, index: int, done: State) -> Alone:
        held = self.alone.get(index)
        if held is None or done[: len(held.tokens)] != held.tokens:
            zero = torch.zeros(PAST, 3, HEADS, DIM)
            held = Alone((), zero, torch.zeros(HEADS, DIM, DIM))
        missing = done[len(held.tokens) :]
        if missing:
            hidden = torch.stack([embedded(token) for token in missing])
            packed, rows = self.reference.rows(hidden)
            lines = packed[:, : 3 * HEADS * DIM].float().unflatten(-1, (3, HEADS, DIM))
            past, state = held.past, held.state
            for t in range(len(missing)):
                line = torch.cat((past, lines[t : t + 1]))
                state = step(state, line.unbind(1), rows, t, self.launch._weights).state
                past = line[1:]
            held = Alone(done, past, state)
        self.alone[index] = held
        return held


def embedded(token: int) -> Tensor:
    """A hidden row of a token."""
    generator = torch.Generator().manual_seed(token)
    return torch.randn(HIDDEN, generator=generator).bfloat16()


def stand_in(patch: Callable[[Any, str, Any], None]) -> dict[str, Any]:
    """`kda_layers.stand_in`, and for folded layers."""
    from vllm.models.kimi_k3.nvidia import kda as stock

    from dspark_k3.target import fold

    plans = kda_layers.stand_in(patch)
    patch(fold, "bind_slots", ReferenceSlots)
    patch(fold, "get_forward_context", lambda: SimpleNamespace(attn_metadata=plans))

    def prompts(
        self: Any,
        mixed_qkv: Tensor,
        g1: Tensor,
        g2: Tensor,
        beta: Tensor,
        core_attn_out: Tensor,
    ) -> None:
        plan = plans[self.prefix]
        assert plan.num_prefills and not plan.num_spec_decodes
        assert len(mixed_qkv) == plan.num_actual_tokens == core_attn_out.shape[1]
        q, k, v = mixed_qkv.float().unflatten(-1, (3, HEADS, DIM)).unbind(1)
        rows = KdaRows(q, k, v, g1[0].float(), beta[0].float(), g2.float())
        weights = self.fold._slots.plain._weights
        core_attn_out[0] = prompt_rows(self, weights, mixed_qkv, rows, plan)

    patch(stock.KimiK3DeltaAttention, "_forward", prompts)
    return plans


def column(metadata: Any) -> Any:
    """A plan for folded slots of one for vLLM's."""
    return replace(
        metadata, spec_state_indices_tensor=metadata.spec_state_indices_tensor[:, :1]
    )
