# SPDX-License-Identifier: Apache-2.0
"""Weights brought into L2 ahead of their use, from a side stream.

A `PrefetchPlan` names the ranges once; `prefetch` launches it. It computes nothing, so
there is no reference: what it promises is that memory is unchanged and later reads hit.
"""

from verify_kernels.prefetch.host import PrefetchPlan, prefetch

__all__ = ["PrefetchPlan", "prefetch"]
