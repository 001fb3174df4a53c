# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with tiny-k3 and its drafter on a GPU, our target asked for."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("openai")

from experiments.gpu_engine.fleet import ENVIRONMENT
from tests.dspark_k3.suite import cases, run, verdict
from tests.dspark_k3.suite.client import ClientSuite, Server, serve

pytestmark = [pytest.mark.engine, pytest.mark.gpu]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (cases.TARGET / "config.json").is_file():
        pytest.skip(f"{cases.TARGET} is not there: make train-tiny-k3 writes it")
    speculative = {
        "method": "dspark",
        "model": str(cases.DRAFTER),
        "num_speculative_tokens": ClientSuite.drafts,
        "draft_sample_method": "probabilistic",
    }
    arguments = [
        *("--additional-config", json.dumps({"dspark_k3": {"target": True}})),
        *("--dtype", "bfloat16", "--max-num-seqs", "4", "--max-model-len", "1024"),
        *("--no-enable-prefix-caching", "--gpu-memory-utilization", "0.05"),
        *("--kv-cache-memory-bytes", str(1 << 30)),
    ]
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(cases.TARGET, speculative, arguments, ENVIRONMENT, log) as running:
        yield running


@pytest.fixture(scope="module")
def full(server: Server) -> str:
    return str(server.complete().choices[0].text)


@pytest.fixture(scope="module")
def reference() -> Callable[[list[int]], Any]:
    return run.engine_free()


class TestServer(ClientSuite):
    """bf16 on the GPU, held to the engine-free model as `verdict.logits` does."""

    streams = 8
    tolerance = verdict.MAX_TOP_DIFFERENCE
    tie = verdict.TIE
