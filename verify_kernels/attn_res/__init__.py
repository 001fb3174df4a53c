# SPDX-License-Identifier: Apache-2.0
"""Attention residuals: the mix over the saved blocks and the RMSNorm after it.

`attn_res` is the kernel, `reference.attn_res` the truth in plain torch. One op, read
top to bottom: reference.py (equations) -> kernel.py (device code) -> host.py (compiled
forms, checks, launch).
"""

from verify_kernels.attn_res.host import attn_res

__all__ = ["attn_res"]
