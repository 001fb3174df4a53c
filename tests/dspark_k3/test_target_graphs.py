# SPDX-License-Identifier: Apache-2.0
"""Which graph a decode step gets, by vLLM's own graph manager and dispatch."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from dspark_k3 import seams

ASKED = {"dspark_k3": {"target": True}}
SIZES = [1, 2, 4, *range(8, 257, 8)]


def manager(
    patch: pytest.MonkeyPatch,
    *,
    ours: bool = True,
    asked: Any = ASKED,
    max_num_seqs: int = 8,
    width: int = 8,
    adaptive: bool = False,
    mode: str = "FULL_DECODE_ONLY",
    sizes: list[int] = SIZES,
) -> Any:
    """A manager whose graphs count as captured."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    from dspark_k3.target.graphs import RaggedGraphManager

    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    patch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    patch.setattr(
        cudagraph_utils,
        "current_platform",
        SimpleNamespace(get_global_graph_pool=lambda: None),
    )
    vllm_config = SimpleNamespace(
        additional_config=asked,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
        num_speculative_tokens=width - 1,
    )
    cls = RaggedGraphManager if ours else cudagraph_utils.ModelCudaGraphManager
    made = cls(
        vllm_config,
        torch.device("cpu"),
        CUDAGraphMode[mode],
        width,
        varlen_decode=adaptive,
    )
    made._graphs_captured = True
    return made


def dispatch(made: Any, widths: list[int], *, prompt: bool = False) -> Any:
    """As the runner asks for a step of these widths, with a prompt row or without."""
    uniform = len(set(widths)) == 1 and not prompt
    return made.dispatch(
        len(widths),
        sum(widths),
        widths[0] if uniform else None,
        0,
        max_query_len=None if prompt else max(widths),
    )


def serves(graph: Any, widths: list[int]) -> bool:
    return bool(
        graph.cg_mode.name == "FULL"
        and graph.num_tokens >= sum(widths)
        and graph.num_reqs >= len(widths)
    )


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 48, 64, 256])
@pytest.mark.parametrize("width", [2, 5, 8])
def test_every_decode_step_of_up_to_64_rows_has_a_full_graph(
    monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, width: int
) -> None:
    rng = random.Random(max_num_seqs * width)
    made = manager(monkeypatch, max_num_seqs=max_num_seqs, width=width)
    stock = manager(monkeypatch, ours=False, max_num_seqs=max_num_seqs, width=width)
    lacking = 0
    for _ in range(400):
        requests = rng.randint(1, min(max_num_seqs, 64))
        widths = [rng.randint(1, width) for _ in range(requests)]
        if sum(widths) > 64:
            widths = widths[: 64 // width]
        graph = dispatch(made, widths)
        assert serves(graph, widths), widths
        lacking += not serves(dispatch(stock, widths), widths)
        even = [width] * len(widths)
        if serves(before := dispatch(stock, even), even):
            assert dispatch(made, even) == before
        plain = [1] * len(widths)
        assert serves(dispatch(made, plain), plain)
    assert lacking > 100


def test_rows_are_padded_to_the_next_captured_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = manager(monkeypatch, max_num_seqs=64)
    for rows in range(2, 65):
        widths = [2] + [1] * (rows - 2)
        graph = dispatch(made, widths)
        assert graph.num_tokens == min(size for size in SIZES if size >= rows)
        assert graph.num_reqs == graph.num_tokens
        assert graph.max_query_len == 8


def test_prompts_and_larger_steps_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = manager(monkeypatch, max_num_seqs=64)
    stock = manager(monkeypatch, ours=False, max_num_seqs=64)
    for widths in ([3, 1], [1, 5, 2]):
        assert dispatch(made, widths, prompt=True).cg_mode.name == "NONE"
    for widths in ([8] * 9, [7] * 10, [1, 2] * 32):
        assert sum(widths) > 64
        assert dispatch(made, widths) == dispatch(stock, widths)
    assert dispatch(made, [9, 1]).cg_mode.name == "NONE"


@pytest.mark.parametrize(
    "keywords",
    [
        {"asked": {}},
        {"asked": None},
        {"asked": {"dspark_k3": {"target": False}}},
        {"adaptive": True},
        {"width": 1},
        {"mode": "PIECEWISE"},
        {"mode": "NONE"},
        {"mode": "FULL"},
    ],
)
def test_nothing_is_added_unless_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, keywords: dict[str, Any]
) -> None:
    made = manager(monkeypatch, **keywords)
    stock = manager(monkeypatch, ours=False, **keywords)
    assert made._candidates == stock._candidates
    assert made._capture_descs == stock._capture_descs


def test_piecewise_graphs_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    made = manager(monkeypatch, mode="FULL_AND_PIECEWISE")
    assert dispatch(made, [8, 8]).uniform_token_count == 8
    assert dispatch(made, [8, 3]).max_query_len == 8
    assert dispatch(made, [8, 3], prompt=True).cg_mode.name == "PIECEWISE"


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 48, 64])
def test_captures_are_what_vllm_can_capture(
    monkeypatch: pytest.MonkeyPatch, max_num_seqs: int
) -> None:
    made = manager(monkeypatch, max_num_seqs=max_num_seqs)
    (mode,) = made._capture_descs
    graphs = made._capture_descs[mode]
    assert len(set(graphs)) == len(graphs)
    sizes = [graph.num_tokens for graph in graphs]
    assert sizes == sorted(sizes, reverse=True)
    ragged = [graph for graph in graphs if graph.max_query_len is not None]
    assert ragged
    for graph in ragged:
        # vLLM's dummy batch spreads the rows evenly and asserts both.
        assert 0 < graph.num_reqs <= graph.num_tokens <= 64
        assert -(-graph.num_tokens // graph.num_reqs) <= graph.max_query_len
        # KDA's builder asserts that rows fit its decode buffers.
        assert graph.num_tokens <= max_num_seqs * 8


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    ("sizes", "max_num_seqs", "width"),
    [
        (SIZES, 64, 8),
        (SIZES, 1, 8),
        (SIZES, 3, 5),
        ([1, 2, 4, 8], 8, 8),
        ([1, 2, 4, 8], 2, 4),
        ([24, 60, 72], 9, 8),
        ([512], 2, 8),
    ],
)
def test_uncovered_rows_are_those_without_a_graph(
    monkeypatch: pytest.MonkeyPatch,
    adaptive: bool,
    sizes: list[int],
    max_num_seqs: int,
    width: int,
) -> None:
    from dspark_k3.target.graphs import uncovered_rows

    made = manager(
        monkeypatch,
        adaptive=adaptive,
        max_num_seqs=max_num_seqs,
        width=width,
        sizes=sizes,
    )
    missing = []
    for rows in range(1, min(64, max_num_seqs * width) + 1):
        requests = -(-rows // width)
        graph = made.dispatch(requests, rows, None, 0, max_query_len=width)
        if graph.cg_mode.name == "NONE":
            missing.append(rows)
    found = uncovered_rows(sizes, max_num_seqs, width, adaptive=adaptive)
    assert list(found) == missing


def test_uncovered_rows_of_known_cases() -> None:
    from dspark_k3.target.graphs import uncovered_rows

    assert not uncovered_rows(SIZES, 64, 8, adaptive=True)
    assert uncovered_rows([1, 2, 4, 8], 8, 8, adaptive=False) == range(9, 65)
    # vLLM drops size 16, the batch having 15 rows at most; ours captures 15.
    assert uncovered_rows(SIZES, 3, 5, adaptive=True) == range(9, 16)
    assert not uncovered_rows(SIZES, 3, 5, adaptive=False)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's runner module, given its own manager back afterwards."""
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner

    stock = cudagraph_utils.ModelCudaGraphManager
    monkeypatch.setattr(model_runner, "ModelCudaGraphManager", stock)
    return model_runner


def test_the_runner_is_given_our_manager_once(runner: Any) -> None:
    from dspark_k3.target import graphs

    for _ in range(2):
        graphs.capture_ragged_decode()
        assert runner.ModelCudaGraphManager is graphs.RaggedGraphManager


def test_another_managers_place_is_not_taken(runner: Any) -> None:
    from dspark_k3.target import graphs

    other = type("Other", (), {})
    runner.ModelCudaGraphManager = other
    with pytest.raises(seams.UnsupportedEngine, match=r"the model runner uses .*Other"):
        graphs.capture_ragged_decode()
    assert runner.ModelCudaGraphManager is other


def test_a_manager_of_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu import cudagraph_utils

    from dspark_k3.target import graphs

    stock = cudagraph_utils.ModelCudaGraphManager
    graphs.check_manager(stock)
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "_ARGUMENTS", graphs._ARGUMENTS[:-1])
        with pytest.raises(seams.UnsupportedEngine, match=r"takes self, vllm_config"):
            graphs.check_manager(stock)
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "_FIELDS", graphs._FIELDS[:-1])
        with pytest.raises(seams.UnsupportedEngine, match=r"has the fields cg_mode"):
            graphs.check_manager(stock)


@pytest.mark.parametrize(
    ("blocks", "longest", "expected"),
    [
        (4000, 1024, 500),
        (4000, 400, 400 - 2 * 8),
        (4000, 12, 0),
        (1 + 4 * 6 * 3, 1024, 3 * 128 - 8),
        (1 + 4 * 6 * 2 - 1, 1024, 128 - 8),
        (1 + 4 * 5, 1024, 0),
    ],
)
def test_profiling_steps_share_no_block(
    blocks: int, longest: int, expected: int
) -> None:
    """With vLLM's own, KDA states were read as MLA lines on an H200 (NaN)."""
    import numpy as np
    import torch

    from dspark_k3.target import graphs

    requests, width, asked = 6, 8, 500
    sizes = [2048, 2048, 128, 128]
    tables = [torch.zeros(8, 16, dtype=torch.int32) for _ in sizes]
    batch = SimpleNamespace(
        num_reqs=requests,
        max_query_len=width,
        num_tokens=requests * width,
        num_scheduled_tokens=np.full(requests, width, np.int32),
        query_start_loc_np=np.arange(0, width * requests + 1, width, dtype=np.int32),
        seq_lens=torch.full((requests,), width, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((requests,), width, dtype=torch.int32),
        num_computed_tokens_np=np.zeros(requests, np.int32),
        num_computed_prefill_tokens_np=np.zeros(requests, np.int32),
        positions=torch.zeros(requests * width, dtype=torch.int64),
    )
    held = SimpleNamespace(input_block_tables=tables, block_sizes=sizes)
    graphs.separate_dummy_context(batch, held, asked, blocks, longest)
    assert batch.seq_lens.tolist() == [width + expected] * requests
    assert not expected or expected + 2 * width <= longest
    seen: list[int] = []
    for table, size in zip(tables, sizes, strict=True):
        used = -(-(expected + width) // size)
        found = table[:requests, :used].flatten().tolist()
        if not expected:
            found = list(set(found))
        seen += found
        assert not table[requests:].any()
        assert not table[:, used:].any()
    assert len(set(seen)) == len(seen)
    assert all(1 <= block < blocks for block in seen)


def test_caches_are_cleared_once_each_before_prices_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States that warm-ups leave were NaN as attention lines on an H200."""
    import torch
    from vllm.v1.worker.gpu import cudagraph_utils

    shared = torch.full((4, 64), torch.nan)
    states = [shared[:, :16], shared[:, 16:]]
    lines = shared.view(torch.bfloat16)
    other = torch.full((8,), torch.nan)

    def layers() -> dict[str, Any]:
        return {
            "kda": SimpleNamespace(kv_cache=states),
            "mla": SimpleNamespace(kv_cache=lines),
            "draft": SimpleNamespace(kv_cache=other),
            "moe": SimpleNamespace(),
            "unbound": SimpleNamespace(kv_cache=torch.tensor([])),
        }

    monkeypatch.setattr(
        cudagraph_utils.ModelCudaGraphManager, "capture", lambda self: "captured"
    )
    for keywords in ({"adaptive": False}, {"adaptive": True, "asked": {}}):
        made = manager(monkeypatch, **keywords)
        made.compilation_config.static_forward_context = layers()
        assert made.capture() == "captured"
        assert shared.isnan().all() and other.isnan().all()
    made = manager(monkeypatch, adaptive=True)
    made.compilation_config.static_forward_context = layers()
    assert made.capture() == "captured"
    assert not shared.any() and not other.any()


def test_no_context_leaves_the_tables_alone() -> None:
    import numpy as np
    import torch

    from dspark_k3.target import graphs

    table = torch.zeros(2, 4, dtype=torch.int32)
    batch = SimpleNamespace(
        num_reqs=2,
        max_query_len=8,
        num_scheduled_tokens=np.full(2, 8, np.int32),
        num_computed_tokens_np=np.zeros(2, np.int32),
    )
    held = SimpleNamespace(input_block_tables=[table], block_sizes=[16])
    graphs.separate_dummy_context(batch, held, 0, 100, 1024)
    assert not table.any()


def test_another_dummy_context_is_refused() -> None:
    from dspark_k3.target import graphs

    graphs.check_dummy_context(graphs._stock_dummy_context)
    with pytest.raises(seams.UnsupportedEngine, match=r"not vLLM 0\.33"):
        graphs.check_dummy_context(lambda batch: None)


def test_capture_is_under_way_only_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.worker.gpu import cudagraph_utils

    from dspark_k3.target import graphs

    seen: list[bool] = []

    def capture(self: Any, *arguments: Any) -> None:
        seen.append(graphs.capture_under_way())
        raise RuntimeError("no memory")

    monkeypatch.setattr(cudagraph_utils.ModelCudaGraphManager, "capture", capture)
    made = manager(monkeypatch)
    with pytest.raises(RuntimeError, match="no memory"):
        made.capture("model")
    assert seen == [True]
    assert not graphs.capture_under_way()


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"sizes": [1, 2, 4, 8]}, "of 9 to 64 rows"),
        ({"max_num_seqs": 3, "width": 5, "adaptive": True}, "of 9 to 15 rows"),
        ({}, ""),
        ({"sizes": [1, 2, 4, 8], "asked": {}}, ""),
        ({"sizes": [1, 2, 4, 8], "mode": "NONE"}, ""),
    ],
)
def test_decode_steps_without_a_graph_are_said_at_start(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keywords: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    manager(monkeypatch, **keywords)
    warned = [x.getMessage() for x in caplog.records if "no CUDA graph" in x.msg]
    assert len(warned) == bool(said)
    assert all(said in text and "cudagraph_capture_sizes" in text for text in warned)
