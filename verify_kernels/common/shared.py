# SPDX-License-Identifier: Apache-2.0
"""Numbers in shared memory, by 32-bit address."""

import cutlass.cute as cute
from cutlass import Int32


def place(address, kind):
    """Of a number in shared memory."""
    align = kind.width // 8
    pointer = cute.make_ptr(kind, address, cute.AddressSpace.smem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(1))


def word(address, kind=Int32):
    """A number in shared memory."""
    return place(address, kind)[0]


def put(address, value, kind=Int32):
    """Writes a number to shared memory."""
    place(address, kind)[0] = value
