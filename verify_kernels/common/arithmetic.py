# SPDX-License-Identifier: Apache-2.0
"""Arithmetic that kernels share: plain functions that are traced where they are
called."""

from verify_kernels.common import ptx


def halves(word):
    """The two bf16 of an Int32 as Float32, low half first."""
    low = ptx.float_from_bits(word << 16)
    return low, ptx.float_from_bits(word & -65536)


def add_tree(values):
    """Sum of a power of two of values, in a balanced tree."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [a + b for a, b in pairs]
    return values[0]
