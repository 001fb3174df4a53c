# SPDX-License-Identifier: Apache-2.0
"""One rank of a group on this host (gloo) that decides draft lengths as vLLM does.

``python -m tests.dspark_k3.agreeing_ranks RANK WORLD STORE AGREE`` prints what the rank
decided, as `tests.dspark_k3.tensor_parallel.watch` records it: vLLM's own manager and
group, over confidences that drift apart on the last rank.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.dspark_k3 import gloo_ranks
from tests.dspark_k3.tensor_parallel.watch import Drift

REQUESTS, DRAFTS, STEPS, SIZE = 8, 7, 60, 1e-2


class Nothing:
    """A CUDA event or stream that is always done."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


def without_cuda(module: Any) -> None:
    """Let vLLM's manager run on the CPU."""
    torch.cuda.Stream = torch.cuda.Event = Nothing  # type: ignore[misc,assignment]
    torch.cuda.current_stream = Nothing  # type: ignore[assignment]
    module.stream = lambda *streams: contextlib.nullcontext()
    module._assign_draft_token_budget_compiled = module._assign_draft_token_budget

    def copy(values: Any, out: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return out.copy_(torch.from_numpy(values))

    module.async_tensor_h2d = copy


def request_states() -> Any:
    """Of requests that decode."""
    return SimpleNamespace(
        num_speculative_steps=DRAFTS,
        device=torch.device("cpu"),
        max_num_reqs=REQUESTS,
        max_num_batched_tokens=256,
        req_id_to_index={f"r{i}": i for i in range(REQUESTS)},
        num_computed_tokens_np=np.full(REQUESTS, 100, dtype=np.int32),
        prefill_len=SimpleNamespace(np=np.full(REQUESTS, 10, dtype=np.int32)),
    )


def decide(manager: Any, rank: int) -> list[Any]:
    """Rows and lengths of each step; confidences are the same draws on every rank."""
    rng = random.Random(0)
    draws = torch.Generator().manual_seed(0)
    torch.manual_seed(rank)
    steps = []
    for _ in range(STEPS):
        count = rng.randint(2, REQUESTS)
        names = [f"r{i}" for i in range(count)]
        slots = torch.arange(count)
        batch = SimpleNamespace(num_reqs=count, idx_mapping=slots)
        confidences = torch.rand(REQUESTS, DRAFTS, generator=draws).sqrt()
        manager.record_confidences(confidences, batch)
        rows = manager.get_num_tokens(
            dict.fromkeys(names, 1 + DRAFTS), {name: [0] * DRAFTS for name in names}
        )
        manager.compact_batch(
            np.full(count, DRAFTS), np.full(count, 1 + DRAFTS), np.arange(count + 1)
        )
        starts = manager.reallocate_drafts(names, slots)[1][: count + 1]
        steps.append((count, count * (1 + DRAFTS), str(rows), starts.diff().tolist()))
    return steps


def main(rank: int, world: int, store: str, agree: bool) -> list[Any]:
    """What this rank decided."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    from dspark_k3.target import agreement

    without_cuda(adaptive_verification)
    gloo_ranks.join(rank, world, store)
    agreement.agree_on_lengths()
    manager = adaptive_verification.AdaptiveVerificationManager(
        request_states(),
        torch.zeros(REQUESTS + 1, dtype=torch.int32),
        num_bonus_tokens=1,
        max_total_logits=512,
    )
    manager.agree = agree
    # Each rank measured other times; vLLM sends rank 0's.
    sizes = [1, 8, 16, 24, 32, 48, 64]
    manager.set_cost_curves(
        [(1, 0.5 + rank), (8, 1.0 + rank)],
        [(size, 1.0 + size / (16 + rank)) for size in sizes],
    )
    if rank == world - 1:
        Drift(manager, SIZE)
    return decide(manager, rank)


if __name__ == "__main__":
    found = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1")
    print(json.dumps(found))
