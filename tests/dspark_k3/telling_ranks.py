# SPDX-License-Identifier: Apache-2.0
"""One rank of a group on this host (gloo) that tells the others what it found.

``python -m tests.dspark_k3.telling_ranks RANK WORLD STORE`` prints what it was told.
The last rank has found a scale, the others nothing.
"""

from __future__ import annotations

import json
import sys

from dspark_k3.target.left import Found
from tests.dspark_k3 import gloo_ranks


def main(rank: int, world: int, store: str) -> list[Found]:
    """What every rank found, as this one knows it."""
    from vllm.distributed import parallel_state

    from dspark_k3.target import agreement

    gloo_ranks.join(rank, world, store)
    own: Found = {}
    if rank == world - 1:
        own = {"moe_experts": {"a scale byte is 129": 3}}
    told = agreement.of_all_ranks(own)
    # Threads of gloo that still run when Python ends abort the process.
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    return told


if __name__ == "__main__":
    found = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    print(json.dumps(found))
