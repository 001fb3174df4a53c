# SPDX-License-Identifier: Apache-2.0
"""Where a factor of a wgmma lies in shared memory, as its descriptor says.

A descriptor has a start, a leading and a stride offset, and a swizzle, of which none
and that of 128 bytes are known. The addresses of 16 bytes each, within a CTA:

    K fastest, no swizzle     start + r / 8 stride + r mod 8 16 + k / 8 leading
    K fastest, 128 bytes      start + r / 8 stride + r mod 8 128 + k / 8 16
    rows fastest, 128 bytes   start + r / 64 leading + r mod 64 2 + k / 8 stride
                              + k mod 8 128

for row r (a token, if it is B's) and column k of 16. With the swizzle bits 7 to 9 of
that sum are XORed into bits 4 to 6: its pattern repeats every 1024 bytes of memory, not
from the start on, and a start may lie some columns into a row of 128 bytes.

What the machine does not take from a descriptor for granted, since no layout needs it,
is a fault: a base offset, a swizzled start beyond the first row of a pattern or too far
into that, and swizzled offsets that are not whole patterns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.verify_kernels.machine.memory import Array, Fault

#: Addresses and offsets, in units of 16 bytes, at bits 0, 16 and 32.
_FIELD = 0x3FFF
_SWIZZLE = 62
#: Bits that are neither those nor the swizzle: the base offset among them.
_UNUSED = (1 << _SWIZZLE) - 1 & ~(_FIELD | _FIELD << 16 | _FIELD << 32)
#: Bytes of a row of the swizzle and of the 8 rows of its pattern.
_ROW, _PATTERN = 128, 1024


def _fields(descriptor: int) -> tuple[int, int, int, bool]:
    """Start, leading and stride offset, and whether there is a swizzle.

    The start has 18 bits. Of an address with a rank above them the rank comes into the
    leading offset: CTA 0 of a cluster is right, the others read from other places.
    """
    swizzle = descriptor >> _SWIZZLE
    if descriptor & _UNUSED or swizzle > 1:
        raise Fault(
            f"descriptor {descriptor:#x}: the machine knows no such swizzle or base"
        )
    start, leading, stride = ((descriptor >> bit & _FIELD) << 4 for bit in (0, 16, 32))
    return start, leading, stride, swizzle == 1


def _swizzled(places: Array, start: int, width: int, steps: Sequence[int]) -> Array:
    """Addresses of 16 bytes of rows of ``width`` bytes, patterns ``steps`` apart."""
    if start % _PATTERN + width > _ROW or any(step % _PATTERN for step in steps):
        raise Fault(
            f"rows of {width} bytes from {start:#x} on, offsets {tuple(steps)}: "
            f"swizzled rows begin and end in the first {_ROW} of {_PATTERN} bytes, and "
            f"offsets are multiples of {_PATTERN}"
        )
    return places ^ (places >> 3 & 0x70)


def columns_fastest(descriptor: int, tiles: range) -> Array:
    """Addresses [tiles, 8, 2]: tile of 8 rows, row, half of k."""
    start, leading, stride, swizzled = _fields(descriptor)
    tile = np.array(tiles)[:, None, None]
    row, half = np.ogrid[:8, :2]
    places: Array = start + tile * stride
    if not swizzled:
        return places + 16 * row + leading * half
    places = places + _ROW * row + 16 * half
    return _swizzled(places, start, 32, (stride,) if tiles[-1] else ())


def rows_fastest(descriptor: int, tiles: range) -> Array:
    """Addresses [tiles, 16]: tile of 8 rows, column."""
    start, leading, stride, swizzled = _fields(descriptor)
    if not swizzled:
        raise Fault("the machine takes rows that are fastest with a swizzle only")
    tile = np.array(tiles)[:, None]
    k = np.arange(16)
    places = start + tile // 8 * leading + tile % 8 * 16 + k // 8 * stride
    far = tiles[-1] >= 8
    width = _ROW if far else 16 * len(tiles)
    steps = (stride, leading) if far else (stride,)
    return _swizzled(places + _ROW * (k % 8), start, width, steps)


def wide(words: Array) -> Array:
    """The bf16 numbers of [places, 4] words, low halves first, in fp64."""
    numbers = words.reshape(-1).view(np.uint16).astype(np.uint32) << 16
    return numbers.view(np.float32).astype(np.float64)
