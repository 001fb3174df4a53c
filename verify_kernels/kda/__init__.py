# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention for the rows of a verify step.

`kda_verify` is the kernel in the fold layout, `kda_verify_snapshots` in that of vLLM's
slots; `reference` and `snapshot` are the truth in plain torch. Read top to bottom:
reference.py (equations) -> kernel.py (device code) -> host.py (buffers, compiled forms,
checks, launch).
"""

from verify_kernels.kda.host import (
    KdaFoldState,
    KdaVerifyWeights,
    kda_verify,
    kda_verify_snapshots,
)

__all__ = ["KdaFoldState", "KdaVerifyWeights", "kda_verify", "kda_verify_snapshots"]
