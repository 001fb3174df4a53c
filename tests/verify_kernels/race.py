# SPDX-License-Identifier: Apache-2.0
"""One of several processes that want the same kernels at the same time."""

from __future__ import annotations

import os
from typing import Any

# Imported before the fork, so that the processes do nothing but compile.
import quack.cache

from verify_kernels.attn_res import kernel
from verify_kernels.common import variant

__all__ = ["kernel", "quack", "race"]


def race(directory: str, names: list[str], barrier: Any, results: Any) -> None:
    """Fetch ``names`` of attn_res; put the number compiled in ``results``."""
    os.environ["DSPARK_K3_CACHE"] = directory
    # Sources may be edited while the test runs.
    variant._sources = lambda: "race"
    wanted = [v for v in variant.variants(["attn_res"]) if v.name in names]
    barrier.wait(60)
    try:
        assert all(callable(variant.cached(v, "sm_90a")) for v in wanted)
        results.put(variant.compilations())
    except BaseException as error:
        results.put(repr(error))
        raise
