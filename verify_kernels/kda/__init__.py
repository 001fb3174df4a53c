# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention for the rows of a verify step.

`kda_verify` is the kernel in the fold layout, `kda_verify_snapshots` in that of vLLM's
slots (`bind_snapshots`, once a layer, for less Python a launch); `reference` and
`snapshot` are the truth in plain torch. Read top to bottom: reference.py (equations) ->
kernel.py (device code) -> host.py (buffers, compiled forms, checks, launch).
"""

from verify_kernels.kda.host import (
    BoundSnapshots,
    KdaFoldState,
    KdaVerifyWeights,
    bind_snapshots,
    kda_verify,
    kda_verify_snapshots,
)

__all__ = [
    "BoundSnapshots",
    "KdaFoldState",
    "KdaVerifyWeights",
    "bind_snapshots",
    "kda_verify",
    "kda_verify_snapshots",
]
