# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of the KDA kernel: plain functions that are traced where they are called.

A product is added only in an fma, so that no compiler chooses what to contract.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
#: Above it the sum 1 + 2^x would be infinite.
MAX_EXPONENT = 126.0


def dot(a, b, total=None):
    """Sum of products, one after the other, after ``total`` if there is one."""
    for x, y in zip(a, b, strict=True):
        total = x * y if total is None else cute.math.fma(x, y, total)
    return total


def over_lanes(values, offsets=(16, 8, 4, 2, 1)):
    """Sums over the warp, or over 16 lanes from offset 8 on, the same in all lanes."""
    for offset in offsets:
        values = [v + cute.arch.shuffle_sync_bfly(v, offset=offset) for v in values]
    return values


def sums_of_channels(values, part):
    """Sums over 16 lanes of 1, 2, 4, 8 or 16 values; a lane gets one of them.

    part is the lane's number in the 16. At a step a lane passes half of its values to
    a partner and takes the partner's part of the other half, so n values cost fewer
    shuffles than n butterflies. Value r of n comes to the 16 / n lanes from 16 r / n
    on. A sum has the same bits whatever n is: it adds the same lanes in the same tree.
    """
    offset = 8
    while len(values) > 1:
        half = len(values) // 2
        upper = (part & offset) != 0
        kept = [
            cutlass.select_(upper, values[half + j], values[j]) for j in range(half)
        ]
        passed = [
            cutlass.select_(upper, values[j], values[half + j]) for j in range(half)
        ]
        values = [
            a + cute.arch.shuffle_sync_bfly(b, offset=offset)
            for a, b in zip(kept, passed, strict=True)
        ]
        offset //= 2
    (value,) = values
    while offset:
        value = value + cute.arch.shuffle_sync_bfly(value, offset=offset)
        offset //= 2
    return value


def exp_of(x):
    """e^x for x up to 87; the product by log2(e) is corrected for its rounding."""
    high = x * LOG2_E
    low = cute.math.fma(x, Float32(LOG2_E), -high)
    power = cute.math.exp2(high, fastmath=True)
    return cute.math.fma(power, low * LN_2, power)


def sigmoid(x):
    """1 / (1 + e^-x); NaN stays NaN."""
    limit = Float32(MAX_EXPONENT * LN_2)
    power = exp_of(cutlass.select_(-x > limit, limit, -x))
    return cute.arch.rcp_approx(1.0 + power)
