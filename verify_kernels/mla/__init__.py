# SPDX-License-Identifier: Apache-2.0
"""Absorbed multi-head latent attention over a paged cache, for ragged rows.

In the order of a layer: `mla_front` (norms, cache lines), `mla_absorb` (queries as wide
as a line), `mla_attend`, `mla_value` (values and gate). `reference` is the truth in
plain torch. Read top to bottom: reference.py (equations) -> front.py, heads.py, plan.py
(who takes which keys), products.py, attend.py, merge.py (device code) -> parts.py
(compiled forms), host.py (checks, launches).
"""

from verify_kernels.mla.host import (
    MlaSpace,
    mla_absorb,
    mla_attend,
    mla_front,
    mla_value,
)

__all__ = ["MlaSpace", "mla_absorb", "mla_attend", "mla_front", "mla_value"]
