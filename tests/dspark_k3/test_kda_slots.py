# SPDX-License-Identifier: Apache-2.0
"""Which KDA state slot vLLM reads and writes, for every order of drafts and acceptance.

vLLM's model state and KDA builder plan each step; states are played as the tuples of
tokens that they have seen. A request must always start from exactly what it committed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

K = 7
State = tuple[int, ...]


@dataclass
class Request:
    """index: its row of the runner's tables; slots: its 1 + K state slots."""

    index: int
    prompt: int
    slots: list[int]
    tokens: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt


class Engine:
    """vLLM's planning around played states, for up to ``drafts`` drafts."""

    def __init__(self, requests: int, drafts: int = K) -> None:
        from vllm.models.kimi_k3.nvidia import kda_metadata
        from vllm.v1.kv_cache_interface import MambaSpec
        from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
        from vllm.v1.worker.utils import AttentionGroup

        spec = object.__new__(MambaSpec)
        builder = object.__new__(kda_metadata.KimiK3KDAMetadataBuilder)
        vars(builder).update(
            vllm_config=SimpleNamespace(
                cache_config=SimpleNamespace(mamba_cache_mode="none")
            ),
            kv_cache_spec=spec,
            use_spec_decode=drafts > 0,
            num_spec=drafts,
            use_recoverssm=False,
            spec_state_slots=drafts + 1,
            use_full_cuda_graph=False,
            use_flashinfer_prefill=False,
            supports_update_block_table=False,
            checkpoint_builder=SimpleNamespace(build=lambda common, rows: None),
        )
        backend = kda_metadata.KimiK3KDAAttentionBackend
        group = AttentionGroup(backend, ["kda"], spec, 0)
        group.metadata_builders = [builder]
        self.groups = [[group]]
        self.builder = builder
        self.state = object.__new__(MambaHybridModelState)
        vars(self.state).update(
            vllm_config=SimpleNamespace(num_speculative_tokens=drafts),
            num_accepted_tokens_gpu=torch.ones(requests, dtype=torch.int32),
            max_model_len=1 << 20,
            recoverssm=None,
            _align_mode=False,
        )
        self.slots: dict[int, State] = {}

    def plan(
        self,
        batch: Sequence[Request],
        scheduled: list[int],
        host: list[int],
        device: list[int],
        drafts: list[int],
        before: Callable[[Any], None] = lambda step: None,
        padding: int = 0,
    ) -> Any:
        """vLLM's KDA metadata of a step; all lists in batch order. ``before`` gets the
        input batch first. With ``padding`` the step is one for a whole graph with so
        many more requests, which have no rows."""
        computed = [r.computed for r in batch]
        prefilling = np.array([r.prefilling for r in batch])
        new = np.array(scheduled) - np.array(drafts)
        as_decode = prefilling & (new == 1) & (np.array(computed) > 0)
        none = [0] * padding
        start = torch.tensor([0, *device, *none], dtype=torch.int32).cumsum(0)
        lines = [r.slots for r in batch] + [[0] * len(batch[0].slots)] * padding
        blocks = torch.tensor(lines, dtype=torch.int32)
        count = len(batch)
        step = SimpleNamespace(
            num_reqs=count,
            num_reqs_after_padding=count + padding,
            num_tokens=sum(device),
            num_tokens_after_padding=sum(device),
            query_start_loc=start.to(torch.int32),
            query_start_loc_np=np.cumsum([0, *host, *none]).astype(np.int32),
            max_query_len=max(scheduled),
            num_scheduled_tokens=np.array(scheduled, np.int32),
            num_draft_tokens_per_req=np.array(drafts, np.int32),
            seq_lens=torch.tensor(computed + none) + torch.tensor(device + none),
            seq_lens_cpu_upper_bound=torch.tensor(computed + none)
            + torch.tensor(scheduled + none),
            is_prefilling_np=prefilling,
            num_computed_prefill_tokens_np=np.array(computed) * prefilling,
            prefill_runs_as_decode_np=as_decode if prefilling.any() else None,
            idx_mapping=torch.tensor([r.index for r in batch]),
            dcp_local_seq_lens=None,
            positions=None,
            prompt_lens=None,
        )
        from vllm.config import CUDAGraphMode

        before(step)
        return self.state.prepare_attn(
            step,
            CUDAGraphMode.FULL if padding else CUDAGraphMode.NONE,
            (blocks,),
            torch.zeros(1, sum(device), dtype=torch.int64),
            self.groups,
            SimpleNamespace(kv_cache_groups=[None]),
        )["kda"]

    def run(self, metadata: Any, rows: list[int]) -> list[State]:
        """Play the recurrence as `KimiK3DeltaAttention` runs it on ``rows``; the states
        that the step started from, requests in the order vLLM took them."""
        m, started = metadata, []
        order = torch.arange(len(rows))
        spec, other = order, order[:0]
        if not m.num_spec_decodes:
            spec, other = order[:0], order
        elif m.num_prefills or m.num_decodes:
            spec, other = m.spec_token_indx, m.non_spec_token_indx
        if m.num_spec_decodes:
            bounds = m.spec_query_start_loc.tolist()
            for i in range(m.num_spec_decodes):
                slots = m.spec_state_indices_tensor[i].tolist()
                seen = self.slots[slots[int(m.num_accepted_tokens[i]) - 1]]
                started.append(seen)
                for t, row in enumerate(spec[bounds[i] : bounds[i + 1]].tolist()):
                    seen = (*seen, rows[row])
                    self.slots[slots[t]] = seen
        if len(other):
            count = m.num_prefills + m.num_decodes
            bounds = list(range(count + 1))
            if m.num_prefills:
                bounds = m.non_spec_query_start_loc.tolist()
            for j in range(count):
                slot = int(m.non_spec_state_indices_tensor[j])
                kept = not m.num_prefills or bool(m.has_initial_state[j])
                seen = self.slots[slot] if kept else ()
                started.append(seen)
                chunk = other[bounds[j] : bounds[j + 1]].tolist()
                self.slots[slot] = (*seen, *(rows[row] for row in chunk))
        return started


def order(
    batch: list[Request], scheduled: dict[int, int], drafts: dict[int, int]
) -> list[Request]:
    """The runner's order of a batch."""
    from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

    by_name = {str(r.index): r for r in batch}
    names = sort_batch_req_ids(
        {str(i): n for i, n in scheduled.items()},
        {str(i): [0] * n for i, n in drafts.items() if n},
        K + 1,
    )
    return [by_name[name] for name in names]


def step(engine: Engine, batch: list[Request], rng: random.Random, trim: bool) -> None:
    """One step of the requests with random chunks, drafts and acceptance."""
    from tests.dspark_k3.ragged_mla import even_split

    scheduled, drafts = {}, {}
    for r in batch:
        if r.prefilling:
            left = r.prompt - r.computed
            scheduled[r.index] = min(left, rng.choice([1, 2, 5, 8, 30]))
            drafts[r.index] = 0
        else:
            drafts[r.index] = rng.choice([0, 0, 1, K, rng.randint(0, K)])
            scheduled[r.index] = 1 + drafts[r.index]
    batch = order(batch, scheduled, drafts)
    plan = [scheduled[r.index] for r in batch]
    drafted = [drafts[r.index] for r in batch]
    kept = [rng.choice([0, d, rng.randint(0, d)]) if trim else d for d in drafted]
    device = [n - d + a for n, d, a in zip(plan, drafted, kept, strict=True)]
    host = even_split(plan, drafted, sum(kept)) if sum(drafted) else plan
    metadata = engine.plan(batch, plan, host, device, drafted)
    # What `dspark_k3.target.kda.serves` guards against.
    assert metadata.num_prefills or not (
        metadata.num_spec_decodes and metadata.num_decodes
    )

    rows: list[int] = []
    for r, width in zip(batch, device, strict=True):
        known = r.tokens[r.computed : r.computed + width]
        made = [rng.randrange(1 << 30) for _ in range(width - len(known))]
        rows += known + made
        r.tokens = r.tokens[: r.computed] + known + made
    started = engine.run(metadata, rows)
    assert sorted(started) == sorted(tuple(r.tokens[: r.computed]) for r in batch)

    for r, width, draft in zip(batch, device, drafted, strict=True):
        if r.computed + width < r.prompt:
            sampled, advanced = 0, width
        elif draft or r.computed >= r.prompt:
            sampled = advanced = rng.randint(1, width)
        else:
            sampled, advanced = 1, width
        r.computed += advanced
        accepted = engine.state.num_accepted_tokens_gpu
        accepted[r.index] = max(sampled, 1)
        if r.computed >= r.prompt:
            # Rejected rows are forgotten; the token sampled last is not computed yet.
            r.tokens = [*r.tokens[: r.computed], rng.randrange(1 << 30)]


def fresh(engine: Engine, index: int, prompt: int, rng: random.Random) -> Request:
    """As `add_request` takes one in: recycled slots, accepted count 1."""
    slots = list(range(1 + index * (K + 1), 1 + (index + 1) * (K + 1)))
    for slot in slots:
        engine.slots[slot] = (-1, slot)
    engine.state.num_accepted_tokens_gpu[index] = 1
    tokens = [rng.randrange(1 << 30) for _ in range(prompt)]
    return Request(index, prompt, slots, tokens)


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_requests_start_from_what_they_committed(seed: int, trim: bool) -> None:
    rng = random.Random(seed)
    engine = Engine(6)
    live = [fresh(engine, i, rng.choice([2, 3, 9, 40]), rng) for i in range(6)]
    for _ in range(150):
        batch = rng.sample(live, rng.randint(1, 6))
        step(engine, batch, rng, trim)
        if rng.random() < 0.1:
            # Preempted and resumed, or aborted and its place taken.
            gone = rng.choice(live)
            prompt = rng.choice([len(gone.tokens), 2, 9]) or 2
            live[live.index(gone)] = fresh(engine, gone.index, prompt, rng)


def test_a_row_without_drafts_goes_where_its_state_is() -> None:
    rng = random.Random(0)
    engine = Engine(1)
    request = fresh(engine, 0, 4, rng)
    request.computed, engine.slots[request.slots[4]] = 4, tuple(request.tokens)
    engine.state.num_accepted_tokens_gpu[0] = 5
    metadata = engine.plan([request], [1], [1], [1], [0])
    assert (metadata.num_spec_decodes, metadata.num_decodes) == (1, 0)
    assert metadata.num_accepted_tokens.tolist() == [5]
    assert engine.run(metadata, [77]) == [tuple(request.tokens)]
    assert engine.slots[request.slots[0]] == (*request.tokens, 77)


def test_one_token_prompt_beside_decodes_keeps_placeholders_in_its_state() -> None:
    # A fault of vLLM's (0.32, 0.33): the scheduler pads such a prompt with placeholder
    # drafts and the row runs as a prefill, which cannot roll them back. If this fails,
    # it was mended: take it out of docs/notes/vllm_033.md.
    rng = random.Random(0)
    engine = Engine(1)
    request = fresh(engine, 0, 1, rng)
    metadata = engine.plan([request], [1 + K], [1 + K], [1 + K], [K])
    assert (metadata.num_spec_decodes, metadata.num_prefills) == (0, 1)
    assert engine.run(metadata, [5, *[0] * K]) == [()]
    assert engine.slots[request.slots[0]] == (5, *[0] * K)


def test_ours_runs_a_padded_one_token_prompt_as_a_verify_row() -> None:
    """From a cleared slot, so that its placeholders are rolled back like drafts."""
    from dspark_k3.target import fresh as padded

    rng = random.Random(0)
    engine = Engine(2)
    decoding = fresh(engine, 0, 4, rng)
    decoding.computed, engine.slots[decoding.slots[0]] = 4, tuple(decoding.tokens)
    arriving = fresh(engine, 1, 1, rng)
    found: list[list[int]] = []

    def before(step: Any) -> None:
        found.append(padded.one_token_prompts(step))
        padded.run_as_decodes(step, found[-1])

    engine.slots[arriving.slots[0]] = ()  # What `clear_states` does to the tensors.
    widths, drafts = [1 + K, 1 + K], [K, K]
    batch = [decoding, arriving]
    metadata = engine.plan(batch, widths, widths, widths, drafts, before)
    assert found == [[1]]
    assert (metadata.num_spec_decodes, metadata.num_prefills) == (2, 0)
    rows = [*range(100, 101 + K), 5, *[0] * K]
    assert engine.run(metadata, rows) == [tuple(decoding.tokens), ()]
    # One token was sampled, so the next step starts from column 0.
    assert engine.slots[arriving.slots[0]] == (5,)


@pytest.mark.parametrize(
    ("prefilling", "computed", "drafts", "rows"),
    [
        ([True, False], [0, 0], [K, K], [0]),
        ([True, True], [0, 3], [0, K], []),
        ([True, False], [0, 0], None, []),
    ],
)
def test_only_untouched_requests_with_drafts_are_padded_prompts(
    prefilling: list[bool], computed: list[int], drafts: list[int] | None, rows: Any
) -> None:
    from dspark_k3.target import fresh as padded

    batch = SimpleNamespace(
        is_prefilling_np=np.array(prefilling),
        num_computed_prefill_tokens_np=np.array(computed),
        num_draft_tokens_per_req=None if drafts is None else np.array(drafts),
    )
    assert padded.one_token_prompts(batch) == rows


def test_the_slots_of_those_rows_are_cleared_and_no_others() -> None:
    from dspark_k3.target import fresh as padded

    tables = [torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([[7], [8], [9]])]
    groups = [
        SimpleNamespace(layer_names=["kda.0", "kda.1"]),
        SimpleNamespace(layer_names=["mla.0"]),
    ]
    caches = {
        f"kda.{i}": [torch.full((10, 3), torch.nan), torch.full((10, 2, 2), 7.0)]
        for i in range(2)
    }
    padded.clear_states([0, 2], tables, groups, caches)
    for windows, states in caches.values():
        cleared = [not w.isnan().any() and not w.any() for w in windows]
        assert [i for i, c in enumerate(cleared) if c] == [1, 5]
        assert [i for i in range(10) if not states[i].any()] == [1, 5]
