# SPDX-License-Identifier: Apache-2.0
"""Verify kernels: decode ops for 1 to 8 rows a request, every request its own number.

The row contract (`VerifyBatch`), references of the whole K3 layer, and the kernels of
`skinny_gemm`, `attn_res` and `prefetch`. Each op is imported by its own name.
"""

from verify_kernels.batch import MAX_ROWS, MAX_WIDTH, VerifyBatch

__all__ = ["MAX_ROWS", "MAX_WIDTH", "VerifyBatch"]
