# SPDX-License-Identifier: Apache-2.0
"""Latent mixture of experts with MXFP4 weights: the reference, and the routing kernel.

`moe_route` chooses and weighs the experts of all rows and plans who computes them;
`reference` is the truth in plain torch. Read top to bottom: reference.py (equations) ->
route.py (device code) -> host.py (plan, compiled forms, checks, launch).
"""

from verify_kernels.moe.experts import ExpertBank, moe_experts
from verify_kernels.moe.host import ExpertPlan, moe_route

__all__ = ["ExpertBank", "ExpertPlan", "moe_experts", "moe_route"]
