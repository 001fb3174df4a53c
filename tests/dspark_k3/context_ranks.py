# SPDX-License-Identifier: Apache-2.0
"""One rank of a group on this host (gloo) that projects a drafter's context.

``python -m tests.dspark_k3.context_ranks RANK WORLD STORE`` prints the rows of the
weight that it holds, and how far its result is from that of the whole weight, or why it
was refused.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from tests.dspark_k3 import gloo_ranks

IN, OUT, ROWS = 48, 32, 5


def project(outputs: int) -> dict[str, Any]:
    """As vLLM makes the projection, our class cuts it, and vLLM loads it."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    from dspark_k3.draft.k3 import shard_context

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, IN, generator=generator)
    rows = torch.randn(ROWS, IN, generator=generator)
    model = nn.Module()
    model.quant_config = None
    model.context_proj = ReplicatedLinear(
        IN, outputs, bias=False, return_bias=False, prefix="model.context_proj"
    )
    try:
        shard_context(model)
    except ValueError as error:
        return {"refused": str(error)}
    made = model.context_proj
    made.weight.weight_loader(made.weight, weight)
    held = made.weight.shape[0]
    made.quant_method.process_weights_after_loading(made)
    found = made(rows)
    gap = (found - rows @ weight.T).abs().max()
    return {
        "held": held,
        "gap": float(gap),
        "prefix": made.prefix,
        "names": [name for name, _ in model.named_parameters()],
    }


def main(rank: int, world: int, store: str) -> list[dict[str, Any]]:
    """A projection that the ranks divide, and one that they do not."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    gloo_ranks.join(rank, world, store)
    with set_current_vllm_config(VllmConfig()):
        found = [project(outputs) for outputs in (OUT, OUT + 1)]
    # Threads of gloo that still run when Python ends abort the process.
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
