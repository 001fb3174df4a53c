# SPDX-License-Identifier: Apache-2.0
"""Latent mixture of experts with MXFP4 weights: routing and the chosen experts.

`moe_route` chooses and weighs the experts of all rows and plans who computes them;
`moe_experts` computes them from the weights of a Humming layer of vLLM's, where they
are (`ExpertBank`). `reference` is the truth in plain torch. Read top to bottom:
reference.py (equations) -> route.py, layout.py, up.py, down.py, combine.py (device
code, and where it finds a weight) -> host.py, experts.py (plan, compiled forms, checks,
launch).
"""

from verify_kernels.moe.experts import ExpertBank, ExpertWorkspace, moe_experts
from verify_kernels.moe.host import ExpertPlan, moe_route

__all__ = ["ExpertBank", "ExpertPlan", "ExpertWorkspace", "moe_experts", "moe_route"]
