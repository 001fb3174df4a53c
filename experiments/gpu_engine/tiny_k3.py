# SPDX-License-Identifier: Apache-2.0
"""Engines of the tiny models that are shipped, several of which share a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TINY = Path(__file__).resolve().parents[1] / "tiny"
TARGET, DRAFTER = TINY / "k3-target", TINY / "k3-dspark"
MAX_LEN, MAX_BATCH = 1024, 8


def engine(target: Path = TARGET) -> dict[str, Any]:
    """Arguments of vLLM's LLM, of an engine with little of the GPU's memory."""
    return {
        "model": str(target),
        "dtype": "bfloat16",
        "max_model_len": MAX_LEN,
        "max_num_seqs": MAX_BATCH,
        "gpu_memory_utilization": 0.03,
        "kv_cache_memory_bytes": 1 << 30,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }


def speculation(
    drafts: int, adaptive: bool = False, drafter: Path = DRAFTER
) -> dict[str, Any]:
    """vLLM's speculative configuration."""
    return {
        "method": "dspark",
        "model": str(drafter),
        "num_speculative_tokens": drafts,
        "draft_sample_method": "probabilistic",
        **({"enable_adaptive_verification": True} if adaptive else {}),
    }
