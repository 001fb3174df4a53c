# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 through the ragged backend's metadata, against fp64 on a GPU.

Graphs are captured as vLLM's runner captures them, on a dummy batch of one or a few
rows a request, and replayed with other widths on the device, while the host is told an
even split.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from tests.dspark_k3 import ragged_mla as fakes
from verify_kernels.batch import VerifyBatch
from verify_kernels.mla import reference

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
#: Tokens that the first and every other request can hold.
LONG, SHORT = 5200, 400


@pytest.fixture(scope="module")
def attention() -> Iterator[ModuleType]:
    from vllm.platforms import current_platform

    if not current_platform.is_device_capability(90):
        pytest.skip("FlashAttention MLA runs on Hopper")
    with fakes.attention_module() as module:
        yield module


@dataclass
class Bench:
    """Builder, implementation and persistent inputs of one MLA layer.

    query [rows, heads, 576] and cache [pages, page, 576] are bf16; a page is NaN until
    a request's tokens reach it.
    """

    builder: Any
    implementation: Any
    query: Tensor
    cache: Tensor
    row_start: Tensor
    seq_lens: Tensor
    table: Tensor
    page: int

    @property
    def requests(self) -> int:
        return len(self.seq_lens)

    def first(self, rows: int, requests: int) -> Bench:
        """The same layer with the first rows and requests of the inputs."""
        return replace(
            self,
            query=self.query[:rows],
            row_start=self.row_start[: requests + 1],
            seq_lens=self.seq_lens[:requests],
            table=self.table[:requests],
        )

    def run(self, metadata: Any) -> Tensor:
        """Latent output [rows, heads, 512]."""
        out, _ = self.implementation.forward_mqa(self.query, self.cache, metadata, None)
        return out

    def metadata(
        self, host: Sequence[int], longest: int, *, capture: bool = False
    ) -> Any:
        batch = fakes.common(
            self.row_start,
            host,
            self.seq_lens,
            self.table,
            rows=len(self.query),
            longest=longest,
            seq_lens_bound=[8192 if capture else n for n in self.seq_lens.tolist()],
        )
        if capture:
            return self.builder.build_for_cudagraph_capture(batch)
        return self.builder.build(0, batch)

    def fill(self, widths: Sequence[int], history: Sequence[int], seed: int) -> Tensor:
        """New tokens, offsets and queries for a step; the queries in fp64.

        Each row looks hard at its own line and at the line of the row behind it, which
        it must not see. Other lines of a page in use are large, other pages NaN, and so
        are the queries of padding rows.
        """
        generator = torch.Generator(DEVICE).manual_seed(seed)
        live = len(widths)
        lengths = [h + w for h, w in zip(history, widths, strict=True)]
        padded = [*widths, *[0] * (self.requests - live)]
        self.row_start.copy_(fakes.offsets(padded))
        self.seq_lens.zero_()
        self.seq_lens[:live] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.query.fill_(torch.nan)
        row = 0
        for b, (width, length) in enumerate(zip(widths, lengths, strict=True)):
            pages = self.table[b, : -(-length // self.page)].long()
            at = torch.arange(length, device=DEVICE)
            self.cache[pages] = 1e3
            shape = (length, fakes.LINE)
            lines = torch.randn(shape, device=DEVICE, generator=generator)
            self.cache[pages[at // self.page], at % self.page] = lines.bfloat16()
            shape = (width, self.query.shape[1], fakes.LINE)
            query = torch.randn(shape, device=DEVICE, generator=generator)
            own = lines[length - width :]
            query += 0.25 * own[:, None]
            query[:-1] += 0.25 * own[1:, None]
            self.query[row : row + width] = query.bfloat16()
            row += width
        return self.query[:row].double()

    def expected(self, query: Tensor, widths: Sequence[int]) -> Tensor:
        """The same in fp64, live rows only."""
        live, heads = len(widths), query.shape[1]
        row_start = self.row_start[: live + 1]
        ones = torch.ones(live, dtype=torch.int32, device=DEVICE)
        batch = VerifyBatch(
            row_start=row_start,
            history=self.seq_lens[:live] - row_start.diff(),
            state_slots=ones,
            accepted=ones,
            block_table=self.table[:live],
        )
        empty = torch.empty
        weights = reference.MlaWeights(
            q_a_norm=empty(8),
            kv_norm=empty(fakes.KV_LORA),
            w_qb=empty(heads * (fakes.NOPE + fakes.ROPE), 8),
            w_uk=empty(heads, fakes.NOPE, fakes.KV_LORA),
            w_uv=empty(heads, fakes.V_HEAD, fakes.KV_LORA),
        )
        return reference.partial(batch, query, weights, self.cache)[0]


def bench(
    attention: ModuleType,
    rows: int,
    requests: int,
    *,
    heads: int = 6,
    page: int = 64,
    max_num_seqs: int | None = None,
    graphs: bool = True,
) -> Bench:
    from vllm.config import set_current_vllm_config

    vllm_config = fakes.config(
        max_num_seqs=max_num_seqs or requests, heads=heads, page=page, graphs=graphs
    )
    with set_current_vllm_config(vllm_config):
        implementation = attention.RaggedFlashAttnMLABackend.get_impl_cls()(
            num_heads=heads,
            head_size=fakes.LINE,
            scale=(fakes.NOPE + fakes.ROPE) ** -0.5,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype="auto",
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=256,
            kv_lora_rank=fakes.KV_LORA,
            qk_nope_head_dim=fakes.NOPE,
            qk_rope_head_dim=fakes.ROPE,
            qk_head_dim=fakes.NOPE + fakes.ROPE,
            v_head_dim=fakes.V_HEAD,
            kv_b_proj=None,
            indexer=None,
        )
    # As K3's layer leaves them without context parallelism.
    implementation.dcp_world_size, implementation.dcp_rank = 1, 0
    counts = [-(-(SHORT if b else LONG) // page) for b in range(requests)]
    table = torch.zeros(requests, max(counts), dtype=torch.int32)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    for b, pages in enumerate(order.split(counts)):
        table[b, : len(pages)] = pages + 1
    shape = (1 + sum(counts), page, fakes.LINE)
    return Bench(
        builder=fakes.build(attention.RaggedFlashAttnMLABuilder, vllm_config, DEVICE),
        implementation=implementation,
        query=torch.zeros(rows, heads, fakes.LINE, dtype=torch.bfloat16, device=DEVICE),
        cache=torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE),
        row_start=torch.zeros(requests + 1, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.zeros(requests, dtype=torch.int32, device=DEVICE),
        table=table.to(DEVICE),
        page=page,
    )


def capture(made: Bench) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of one layer's decode attention, and the output it writes."""
    rows, requests = len(made.query), made.requests
    dummy = [rows // requests] * requests
    for b in range(rows % requests):
        dummy[-1 - b] += 1
    made.row_start.copy_(fakes.offsets(dummy))
    made.seq_lens.copy_(torch.tensor(dummy, dtype=torch.int32))
    table = made.table.clone()
    made.table.zero_()
    made.cache[0] = 0.0
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made.run(made.metadata(dummy, 8, capture=True))
    torch.cuda.current_stream().wait_stream(stream)
    metadata = made.metadata(dummy, 8, capture=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.run(metadata)
    made.table.copy_(table)
    made.cache[0] = torch.nan
    return graph, out


def step(
    rng: random.Random, rows: int, requests: int
) -> tuple[list[int], list[int], list[int]]:
    """Device widths, history lengths and host widths of a step of at most ``rows``."""
    widths: list[int] = []
    for _ in range(rng.randint(1, requests)):
        width = rng.choice([0, 1, 1, 8, rng.randint(1, 8)])
        widths.append(min(width, rows - sum(widths)))
    if not sum(widths):
        widths[0] = 1
    history = [
        rng.choice([0, 1, 63, 64, rng.randint(0, (SHORT if b else LONG) - 8)])
        for b in range(len(widths))
    ]
    total, live = sum(widths), len(widths)
    host = [total // live + (b < total % live) for b in range(live)]
    return widths, history, host + [0] * (requests - live)


def check(got: Tensor, want: Tensor) -> None:
    # bf16 probabilities and outputs: 2**-9 of values up to about 5.
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=3e-2)
    assert (got.double() - want).pow(2).mean().sqrt() < 5e-3


@pytest.mark.parametrize(
    ("rows", "requests", "heads", "page"),
    [
        (1, 1, 6, 64),
        (8, 1, 96, 64),
        (8, 8, 6, 64),
        (24, 8, 2, 80),
        (64, 8, 96, 64),
        (64, 64, 6, 16),
        (64, 48, 12, 176),
    ],
)
def test_replays_with_other_widths_match_fp64(
    attention: ModuleType, rows: int, requests: int, heads: int, page: int
) -> None:
    rng = random.Random(rows * requests + heads)
    made = bench(attention, rows, requests, heads=heads, page=page)
    graph, out = capture(made)
    for seed in range(12):
        widths, history, host = step(rng, rows, requests)
        query = made.fill(widths, history, seed)
        want = made.expected(query, widths)
        bits = []
        for _ in range(2):
            made.metadata(host, 8)
            out.fill_(torch.nan)
            graph.replay()
            bits.append(out[: len(query)].clone())
        assert torch.equal(*bits)
        check(bits[0], want)


def test_padding_rows_are_not_written(attention: ModuleType) -> None:
    made = bench(attention, 24, 8)
    graph, out = capture(made)
    query = made.fill([3, 1, 8], [70, 0, 300], 0)
    made.metadata([4, 4, 4, 0, 0, 0, 0, 0], 8)
    out.fill_(torch.nan)
    graph.replay()
    assert out[: len(query)].isfinite().all()
    assert out[len(query) :].isnan().all()


def test_graphs_of_several_sizes_share_one_builder(attention: ModuleType) -> None:
    # vLLM captures all sizes with one builder and one scheduler-metadata buffer.
    rng = random.Random(1)
    whole = bench(attention, 64, 8)
    graphs = {}
    for rows in (64, 24, 8, 2):
        part = whole.first(rows, min(rows, 8))
        graphs[rows] = (part, *capture(part))
    for seed in range(16):
        rows = rng.choice(sorted(graphs))
        part, graph, out = graphs[rows]
        widths, history, host = step(rng, rows, part.requests)
        query = part.fill(widths, history, seed)
        part.metadata(host, 8)
        out.fill_(torch.nan)
        graph.replay()
        check(out[: len(query)], part.expected(query, widths))


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("chunk", [9, 300])
def test_prompt_chunks_on_the_decode_path_without_a_graph(
    attention: ModuleType, graphs: bool, chunk: int
) -> None:
    widths, history = [8, 1, 3, chunk], [5000, 64, 0, 40]
    made = bench(attention, sum(widths), len(widths), graphs=graphs)
    query = made.fill(widths, history, 0)
    metadata = made.metadata([4, 4, 4, chunk], chunk)
    assert metadata.num_prefills == 0
    out = made.run(metadata)
    check(out, made.expected(query, widths))
