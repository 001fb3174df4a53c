# SPDX-License-Identifier: Apache-2.0
"""Verify kernels: decode ops for 1 to 8 rows a request, every request its own number.

So far the row contract (`VerifyBatch`) and the reference of KDA; no kernel yet.
"""

from verify_kernels.batch import MAX_ROWS, MAX_WIDTH, VerifyBatch

__all__ = ["MAX_ROWS", "MAX_WIDTH", "VerifyBatch"]
