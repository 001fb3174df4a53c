# SPDX-License-Identifier: Apache-2.0
"""Ranks of a tensor-parallel group of vLLM's on this host: gloo, no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def join(rank: int, world: int, store: str) -> None:
    """Make this process one rank of the group that meets at the file ``store``."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=world,
            rank=rank,
            distributed_init_method=f"file://{store}",
            local_rank=rank,
            backend="gloo",
        )
        parallel_state.initialize_model_parallel(world)


def run(module: str, store: Path, *arguments: str, world: int = 2) -> list[Any]:
    """What each rank prints last, as JSON, of ``python -m module RANK WORLD STORE``."""
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", module, str(rank), str(world), str(store)),
                *arguments,
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                # vLLM's CPU group shares memory where these are equal; gloo here.
                "VLLM_DIST_IDENT": f"{store.parent.name}-{rank}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    found = []
    for process in started:
        said, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
        found.append(json.loads(said.splitlines()[-1]))
    return found
