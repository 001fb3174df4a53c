# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with the drafter on a CPU, asked by an OpenAI client."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.engine import ENVIRONMENT
from tests.dspark_k3.suite.client import ClientSuite, Server, serve

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(
    tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    speculative = {
        "method": "dspark",
        "model": str(tiny_draft),
        "num_speculative_tokens": ClientSuite.drafts,
        "draft_sample_method": "probabilistic",
    }
    arguments = [
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4"),
        *("--max-model-len", "1024"),
    ]
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(tiny_target, speculative, arguments, ENVIRONMENT, log) as running:
        yield running


@pytest.fixture(scope="module")
def full(server: Server) -> str:
    return str(server.complete().choices[0].text)


@pytest.fixture(scope="module")
def reference(tiny_target: Path) -> Callable[[list[int]], Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)

    def logits(ids: list[int]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0]

    return logits


class TestServer(ClientSuite):
    """A greedy token is the reference's best, exactly."""
