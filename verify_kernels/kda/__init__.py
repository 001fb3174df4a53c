# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention for the rows of a verify step.

`kda_verify` is the kernel in the fold layout, `kda_verify_snapshots` in that of vLLM's
slots (`bind_snapshots`, once a layer, for less Python a launch), `bind_slots` the fold
in vLLM's slots, one a request; `kda_commit` makes the fold layout eager. `reference`,
`snapshot` and `rolling` are the truth in plain torch.
Read top to bottom: reference.py (equations) -> kernel.py, commit.py (device code) ->
host.py, eager.py, slots.py (buffers, compiled forms, checks, launch).
"""

from verify_kernels.kda.eager import kda_commit
from verify_kernels.kda.host import (
    BoundSnapshots,
    KdaFoldState,
    KdaVerifyWeights,
    bind_snapshots,
    kda_verify,
    kda_verify_snapshots,
)
from verify_kernels.kda.slots import BoundSlots, bind_slots

__all__ = [
    "BoundSlots",
    "BoundSnapshots",
    "KdaFoldState",
    "KdaVerifyWeights",
    "bind_slots",
    "bind_snapshots",
    "kda_commit",
    "kda_verify",
    "kda_verify_snapshots",
]
